"""`python -m benchmarks.compare`: the application against plain loops, a Fabric loop, and its own step without the Trainer.

All on one device, in one process, round by round in turn; medians, and ratios to the plain compiled loop. The Trainer is
the one that `fit` builds, with its callbacks, TensorBoard and progress bar.
"""

import contextlib
import json
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.fabric_loop import FabricLoop, make_fabric
from benchmarks.job import Job, job_of
from benchmarks.plain_loop import PlainLoop
from benchmarks.rounds import BARE, COMPILED, EAGER, FABRIC, TRAINER, BareStep, Contender, Rounds, Timing, first_extra
from lit_gpt_dist.arguments import ToolParser
from lit_gpt_dist.callbacks.device import device_name
from lit_gpt_dist.callbacks.progress import StepBar
from lit_gpt_dist.callbacks.results import git_revision, versions
from lit_gpt_dist.cli import guarded
from lit_gpt_dist.errors import EXIT_OK, UserError
from lit_gpt_dist.fit import quiet_libraries
from lit_gpt_dist.model.config import PRESETS
from lit_gpt_dist.model.flops import flops_per_token, model_flops_utilization
from lit_gpt_dist.planner.hardware import device_by_name
from lit_gpt_dist.runs import run_rank
from lit_gpt_dist.training_cli import TrainingCLI

OTHERS = (BARE, EAGER, COMPILED, FABRIC)
MEANING = {
    TRAINER: "fit: Lightning's Trainer, all callbacks",
    BARE: "its step without the Trainer",
    EAGER: "plain loop",
    COMPILED: "plain loop, whole model compiled",
    FABRIC: "Fabric loop",
}


class ComparingCLI(TrainingCLI):
    """``fit`` with the rounds behind its callbacks, and its bar drawn, as on a terminal, into a file."""

    def __init__(self, args: list[str], register: list[TrainingCLI], rounds: Rounds, screen: Any) -> None:
        self.rounds, self.screen = rounds, screen
        super().__init__(args, register)

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        trainer = super().instantiate_trainer(**kwargs)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, StepBar):
                callback.console = Console(file=self.screen, force_terminal=True, width=120)
        trainer.callbacks.append(self.rounds)  # type: ignore[attr-defined]
        return trainer


def parse(argv: list[str]) -> Namespace:
    """Options; what follows ``--`` is for ``fit``."""
    own, extra = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = ToolParser(
        prog="python -m benchmarks.compare",
        description="Compare the Trainer with plain and Fabric loops. Options after -- go to fit, as -- --model.compile none.",
    )
    parser.add_argument("--size", default="baby", choices=sorted(PRESETS), help="preset of the model")
    parser.add_argument("--micro", type=int, default=16, help="windows forwarded at once")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--context", type=int, help="tokens of a window (default: the preset's)")
    parser.add_argument(
        "--vocab_size", type=int, help="rows of the embedding (default: the preset's, else the corpus's)"
    )
    parser.add_argument("--corpus", help="a text, or a prepared folder (default: this Python's library)")
    parser.add_argument("--accelerator", default="auto", help="cpu or gpu")
    parser.add_argument("--precision", help="as fit's (default: bf16-mixed on a GPU, else 32-true)")
    parser.add_argument("--steps", type=int, default=60, help="steps a round; a multiple of fit's 20 between readings")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds; one more warms up")
    parser.add_argument("--without", nargs="+", default=[], choices=OTHERS, help="contenders to leave out")
    parser.add_argument("--out", help="JSON file for all numbers")
    options = parser.parse_args(own)
    options.fit = extra
    for name, least in (("micro", 1), ("accumulate", 1), ("steps", 1), ("rounds", 1)):
        if getattr(options, name) < least:
            raise UserError(f"{name} {getattr(options, name)} is below {least}; give a positive number")
    return options


def fit_arguments(options: Namespace, root: str) -> list[str]:
    steps = options.steps * (options.rounds + 1) + first_extra(options.steps)
    arguments: dict[str, Any] = {
        "tag": "compare",
        "model.size": options.size,
        "model.context": options.context,
        "model.vocab_size": options.vocab_size,
        "data.corpus": options.corpus,
        "data.micro_batch": options.micro,
        "data.global_batch": options.micro * options.accumulate,
        "trainer.accelerator": options.accelerator,
        "trainer.devices": 1,
        "trainer.precision": options.precision,
        "trainer.max_steps": steps,
        "trainer.limit_val_batches": 0,
        "trainer.default_root_dir": root,
        "checkpoint.save_at_end": "false",
        "export": "false",
    }
    given = [text for name, value in arguments.items() if value is not None for text in (f"--{name}", str(value))]
    return ["fit", *given, *options.fit]


def make_contenders(options: Namespace, trainer: Any, module: Any) -> dict[str, Contender]:
    """All but the Trainer; the plain loops start from its weights."""
    job, device = job_of(trainer, module), module.device
    weights = module.model.state_dict()
    wanted = [name for name in OTHERS if name not in options.without]
    makers: dict[str, Callable[[], Contender]] = {
        BARE: lambda: BareStep(trainer, module, job),
        EAGER: lambda: PlainLoop(job, device, weights=weights),
        COMPILED: lambda: PlainLoop(job, device, compiled=True, weights=weights),
        FABRIC: lambda: FabricLoop(make_fabric(device.type, 1, "auto", job.precision), job),
    }
    return {name: makers[name]() for name in wanted}


def measure(options: Namespace) -> dict[str, Any]:
    """Runs everything; all numbers, as ``--out`` writes them."""
    quiet_libraries()
    found: dict[str, Any] = {}

    def make(trainer: Any, module: Any) -> dict[str, Contender]:
        found.update(facts(job_of(trainer, module), module.device))
        return make_contenders(options, trainer, module)

    rounds = Rounds(options.steps, make)
    with tempfile.TemporaryDirectory() as root, open(Path(root, "screen.txt"), "w") as screen:

        def body() -> int:
            with contextlib.redirect_stdout(screen):
                ComparingCLI(fit_arguments(options, root), [], rounds, screen)
            return EXIT_OK

        if run_rank(body, list) != EXIT_OK:
            raise UserError("fit was stopped before all rounds were done; run it again")
    found |= {"steps_per_round": options.steps, "fit_options": options.fit, **rounds.facts}
    found["contenders"] = summarise(rounds.timings, options.steps, found)
    for name, loss in rounds.losses.items():
        found["contenders"][name]["loss_after_first_round"] = loss if name != BARE else None
    return found


def facts(job: Job, device: torch.device) -> dict[str, Any]:
    peak = device_by_name(device_name(device)).peak_flops if job.precision != "32-true" else None
    return {
        "model": asdict(job.config),
        "micro": job.micro,
        "accumulate": job.accumulate,
        "tokens_per_step": job.tokens_per_step,
        "flops_per_token_palm": flops_per_token(job.config).palm,
        "peak_flops": peak,
        "precision": job.precision,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "git_revision": git_revision(),
        "versions": versions(),
    }


def summarise(timings: dict[str, Timing], steps: int, found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By contender: median and spread of a step, speed, and ratios of speeds in the same round."""
    rows: dict[str, dict[str, Any]] = {}
    for name, timing in timings.items():
        step = statistics.median(timing.seconds) / steps
        speed, peak = found["tokens_per_step"] / step, found["peak_flops"]
        rows[name] = {
            "step_ms": 1000 * step,
            "spread": (max(timing.seconds) - min(timing.seconds)) / steps / step,
            "cpu_ms": 1000 * statistics.median(timing.cpu_seconds) / steps,
            "tokens_per_second": speed,
            "mfu_palm": peak and model_flops_utilization(found["flops_per_token_palm"], speed, peak, 1),
            "times_compiled": speed_ratio(timings.get(COMPILED), timing),
            "times_eager": speed_ratio(timings.get(EAGER), timing),
            "times_bare": speed_ratio(timings.get(BARE), timing),
            "round_step_ms": [1000 * seconds / steps for seconds in timing.seconds],
            "round_cpu_ms": [1000 * seconds / steps for seconds in timing.cpu_seconds],
        }
    return rows


def speed_ratio(base: Timing | None, timing: Timing) -> float | None:
    """How many times as fast as ``base``: the median over the rounds, each compared within itself."""
    if base is None or not base.seconds:
        return None
    return statistics.median(other / own for other, own in zip(base.seconds, timing.seconds, strict=True))


def table(found: dict[str, Any]) -> Table:
    shape = f"micro {found['micro']} × accumulate {found['accumulate']} × {found['model']['context']} tokens"
    title = f"{shape}, vocabulary {found['model']['vocab_size']}, {found['precision']}, {found['device']}"
    shown = Table(title=title, title_justify="left")
    for heading in ("", "ms a step", "spread", "CPU ms", "tokens/s", "MFU", "× compiled", "× eager", "× bare", "loss"):
        shown.add_column(heading, justify="right" if heading else "left")
    for name, row in found["contenders"].items():
        ratios = [number(row[key], ".3f") for key in ("times_compiled", "times_eager", "times_bare")]
        shown.add_row(
            f"{name}: {MEANING[name]}",
            number(row["step_ms"], ".3f"),
            number(row["spread"], ".1%"),
            number(row["cpu_ms"], ".3f"),
            number(row["tokens_per_second"], ",.0f"),
            number(row["mfu_palm"], ".1%"),
            *ratios,
            number(row.get("loss_after_first_round"), ".4f"),
        )
    return shown


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def footer(found: dict[str, Any]) -> str:
    of = found["versions"]
    text = f"compile {found['compile']}, graph {found['cuda_graph']}, torch {of['torch']}, lightning {of['lightning']}"
    if "reserved_gib" in found:
        peak = f"{found['peak_allocated_gib']:.1f} GiB allocated at most, {found['reserved_gib']:.1f} GiB reserved"
        text += f"; all contenders together: {peak}"
    return text


def main(argv: list[str]) -> int:
    options = parse(argv)
    found = measure(options)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(table(found))
    console.print(footer(found), soft_wrap=True)
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:]))
