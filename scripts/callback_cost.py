"""What watching costs: step time with everything on against everything off, alternating, in fresh processes.

    python scripts/callback_cost.py --repeats 3 -- --model.size baby --trainer.max_steps 300

What follows ``--`` goes to ``fit``. Prints each pair and the median cost; ends with 1 when that is above ``--limit``.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SWITCHES = {"on": [], "off": ["--monitor.enabled", "false"]}


def step_ms(options: list[str], switch: str) -> float:
    """Mean step time of one run, as its results line has it: without warm-up, validation and saving."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "lit_gpt_dist", "fit", "--trainer.default_root_dir", folder, "--quiet", "true", "--export",
            "false", "--sample_tokens", "0", "--checkpoint.save_at_end", "false", *options, *SWITCHES[switch],
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"fit failed:\n{done.stderr}")
        line = json.loads((Path(folder) / "results.jsonl").read_text().splitlines()[-1])
        if line["step_ms"] is None:
            sys.exit("the runs were too short to be timed; give more --trainer.max_steps")
        return float(line["step_ms"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=0.01, help="largest cost allowed, as a share of the step")
    parser.add_argument("options", nargs="*", help="options of fit, after --")
    given = parser.parse_args()
    costs = []
    for repeat in range(given.repeats):
        order = ("on", "off") if repeat % 2 == 0 else ("off", "on")  # whoever comes second finds a warmer machine
        found = {switch: step_ms(given.options, switch) for switch in order}
        costs.append(found["on"] / found["off"] - 1)
        print(f"on {found['on']:.3f} ms, off {found['off']:.3f} ms: {costs[-1]:+.2%}", flush=True)
    median = statistics.median(costs)
    print(f"watching costs {median:+.2%} of a step (median of {given.repeats}); the limit is {given.limit:.0%}")
    return 0 if median <= given.limit else 1


if __name__ == "__main__":
    sys.exit(main())
