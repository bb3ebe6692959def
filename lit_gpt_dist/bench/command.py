"""`lit-gpt-dist bench`: measures a matrix of configurations, or searches for the fastest or the largest."""

import argparse
import json
import shlex
import signal
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from lit_gpt_dist.arguments import ToolParser
from lit_gpt_dist.bench.case import Case, Setting, fit_arguments
from lit_gpt_dist.bench.machine import child_environment, cores, describe_environment, find_machine, fit_command
from lit_gpt_dist.bench.matrix import ABLATIONS, Expansion, Machine, Matrix, add_ablations, expand
from lit_gpt_dist.bench.options import merged_options
from lit_gpt_dist.bench.runner import Runner, interleaved
from lit_gpt_dist.bench.search import Found, best_of, fastest, largest
from lit_gpt_dist.bench.session import Session
from lit_gpt_dist.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, UserError
from lit_gpt_dist.model.config import PRESETS
from lit_gpt_dist.report.command import make_console


def _parser() -> ToolParser:
    parser = ToolParser(
        prog="lit-gpt-dist bench",
        description="Measures configurations, each in a fresh process. Lists are separated by commas; every combination is run.",
        epilog="What follows a lone -- is passed on to `fit`.",
        argument_default=argparse.SUPPRESS,  # so that the YAML's values are not overridden by defaults
        formatter_class=argparse.HelpFormatter,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="these options as YAML; the command line wins")
    matrix = parser.add_argument_group("the matrix (lists)")
    matrix.add_argument("--sizes", help="models (default: tiny)")
    matrix.add_argument("--strategies", help="default: single,ddp,fsdp2")
    matrix.add_argument("--devices", help="cards, or processes on a CPU (default: 1)")
    matrix.add_argument("--micro", help="windows a card forwards at once (default: 16)")
    matrix.add_argument("--accumulate", help="micro-batches a step (default: 1)")
    matrix.add_argument("--precision", help="e.g. bf16-mixed,32-true (default: what `fit` chooses)")
    matrix.add_argument("--recompute", help="none,selective,full; of some blocks only: selective:6 (default: none)")
    matrix.add_argument("--compile", help="values of fit's model.compile (default: what `fit` chooses)")
    matrix.add_argument("--bucket_cap_mb", help="bucket sizes for strategies that have buckets")
    matrix.add_argument("--context", help="tokens a window (default: the model's)")
    matrix.add_argument(
        "--scaling", help="weak: the same batch a card; strong: the same global batch; or both (default: weak)"
    )
    matrix.add_argument("--global_batch", type=int, help="windows a step under strong scaling; accumulation follows")
    matrix.add_argument("--ablation", help=f"switch these one at a time too: {','.join(ABLATIONS)}, or all")
    parser.add_argument("--find", choices=("fastest", "largest"), help="search instead of the matrix")
    how = parser.add_argument_group("how it is measured")
    how.add_argument("--steps", type=int, help="optimizer steps a run (default: 20)")
    how.add_argument("--rounds", type=int, help="how often each case is run (default: 3)")
    how.add_argument("--accelerator", help="auto, cpu or gpu (default: auto)")
    how.add_argument("--corpus", help="text to train on (default: `fit`'s own)")
    how.add_argument("--seed", type=int, help="seed of every run (default: `fit`'s own)")
    how.add_argument("--memory_fraction", type=float, help="use this share of each card's memory only")
    how.add_argument("--timeout", type=float, help="seconds after which a run counts as failed (default: 900)")
    how.add_argument("--time_limit", type=float, help="seconds after which no round is begun; the same command goes on")
    how.add_argument("--root", help="where runs and results.jsonl are written (default: logs/bench)")
    how.add_argument("--dry_run", action="store_true", help="list what would be run, and run nothing")
    return parser


def main(argv: list[str]) -> int:
    own, _, passed_on = _split(argv)
    options = merged_options(vars(_parser().parse_args(own)))
    console = make_console()
    machine = find_machine(options["accelerator"])
    if options["find"] == "largest" and machine.cards is None:
        raise UserError(
            "--find largest looks for the end of a card's memory, and a CPU has no such limit; use a machine with a GPU"
        )
    matrix = Matrix(**{name: options[name] for name in Matrix.__dataclass_fields__})
    expansion = expand(matrix, machine)
    if options["find"] is None:
        names = list(ABLATIONS) if options["ablation"] == ["all"] else options["ablation"]
        add_ablations(expansion, names, machine)
    _tell(console, expansion, machine)
    if not expansion.cases:
        raise UserError("nothing of this matrix can run here; see the reasons above")
    setting = _setting(options, machine, passed_on)
    if options["dry_run"]:
        return _list(console, expansion, setting, options)
    return _measure(console, argv, options, machine, expansion, setting)


def _split(argv: list[str]) -> tuple[list[str], str, list[str]]:
    if "--" in argv:
        place = argv.index("--")
        return argv[:place], "--", argv[place + 1 :]
    return argv, "", []


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _setting(options: dict[str, Any], machine: Machine, passed_on: list[str]) -> Setting:
    accelerator = "cpu" if machine.cards is None else "gpu"
    fraction = options["memory_fraction"]
    if fraction is not None and not 0 < fraction <= 1:
        raise UserError(f"memory_fraction {fraction} is not above 0 and at most 1; give the share of a card to use")
    if fraction is not None and machine.cards is None:
        raise UserError("memory_fraction limits a card's memory, and a CPU has none to limit; leave it out")
    return Setting(options["steps"], accelerator, options["corpus"], options["seed"], fraction, tuple(passed_on))


def _tell(console: Console, expansion: Expansion, machine: Machine) -> None:
    for skip in expansion.skipped:
        console.print(f"[yellow]skipped[/] {escape(skip.what)}: {escape(skip.why)}", soft_wrap=True)
    most = max((case.devices for case in expansion.cases), default=1)
    if machine.cards is None and most > cores():
        console.print(
            f"[yellow]note[/] {most} processes share {cores()} cores: beyond {cores()} their speed says nothing",
            soft_wrap=True,
        )


def _list(console: Console, expansion: Expansion, setting: Setting, options: dict[str, Any]) -> int:
    for case in expansion.cases:
        words = shlex.join(
            ["lit-gpt-dist", "fit", *fit_arguments(case, setting, f"{options['root']}/{case.name}/round-0", case.name)]
        )
        console.print(f"[bold]{escape(case.name)}[/]\n  {escape(words)}", soft_wrap=True)
    rounds = 1 if options["find"] else options["rounds"]
    console.print(f"{len(expansion.cases)} cases × {rounds} rounds of {setting.steps} steps")
    return EXIT_OK


def _measure(
    console: Console, argv: list[str], options: dict[str, Any], machine: Machine, expansion: Expansion, setting: Setting
) -> int:
    root = Path(options["root"])
    environment = child_environment(machine.cards is None, setting.memory_fraction)
    runner = Runner(root, fit_command(), setting, environment, options["timeout"])
    _write_environment(root / "environment.json", argv, environment)
    session = Session(runner, console, options["time_limit"])
    before = signal.signal(signal.SIGTERM, _interrupt)  # so that `kill` leaves no process either
    try:
        if options["find"] == "fastest":
            return _find_fastest(console, session, expansion, options, setting)
        if options["find"] == "largest":
            return _find_largest(console, session, expansion)
        session.run_all(expansion.cases, options["rounds"])
    except KeyboardInterrupt:
        total = len(interleaved(expansion.cases, options["rounds"]))
        console.print(
            f"stopped; {len(session.results)} of {total} rounds are in {root}/results.jsonl, the same command goes on",
            soft_wrap=True,
        )
        return EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    return _sum_up(console, session, root)


def _write_environment(path: Path, argv: list[str], environment: dict[str, str]) -> None:
    """What holds now, and the commands of all calls that wrote results here."""
    facts = describe_environment(argv)
    if "OMP_NUM_THREADS" in environment:
        facts["threads a process"] = environment["OMP_NUM_THREADS"]
    try:
        earlier = json.loads(path.read_text())["commands"]
    except (OSError, ValueError, KeyError, TypeError):
        earlier = []
    command = facts.pop("command")
    facts["commands"] = [*(words for words in earlier if words != command), command]
    path.write_text(json.dumps(facts, indent=2) + "\n")


def _sum_up(console: Console, session: Session, root: Path) -> int:
    counts = {status: sum(line["status"] == status for line in session.results) for status in ("ok", "oom", "failed")}
    words = f"{counts['ok']} measured, {counts['oom']} out of memory, {counts['failed']} failed"
    known = f" ({session.reused} of them from an earlier call)" if session.reused else ""
    console.print(f"{words}{known}; `lit-gpt-dist report {root}/results.jsonl` shows them", soft_wrap=True)
    if session.left_out:
        console.print(f"{session.left_out} rounds are left, for which there was no time; the same command goes on")
    return EXIT_FAILURE if counts["failed"] else EXIT_OK


def _find_fastest(
    console: Console, session: Session, expansion: Expansion, options: dict[str, Any], setting: Setting
) -> int:
    """One search for every case of the matrix with the smallest micro-batch; the most tokens/s of all wins."""
    smallest = min(case.micro for case in expansion.cases)
    strong = options["global_batch"] if "strong" in options["scaling"] else None
    found = [fastest(case, session.one, strong) for case in expansion.cases if case.micro == smallest]
    for one in found:
        _tell_found(console, one, "tokens/s", lambda line: f"{line['tok_s']:,.0f} tok/s")
    best = best_of(found)
    if best is None or best.case is None:
        console.print("[red]nothing could be measured[/]")
        return EXIT_FAILURE
    command = shlex.join(["lit-gpt-dist", "fit", *_for_users(best.case, setting)])
    console.print(f"[bold]fastest[/]: {escape(best.case.name)}\n  {escape(command)}", soft_wrap=True)
    return EXIT_OK


def _for_users(case: Case, setting: Setting) -> list[str]:
    """The options a person would type to train like this case."""
    words = fit_arguments(case, setting, "logs", case.name)
    pairs = list(zip(words[::2], words[1::2], strict=False))
    kept = (
        "--model.",
        "--data.",
        "--trainer.accelerator",
        "--trainer.devices",
        "--trainer.precision",
        "--trainer.strategy",
    )
    return [word for name, value in pairs if name.startswith(kept) for word in (name, value)]


def _find_largest(console: Console, session: Session, expansion: Expansion) -> int:
    """One search for every case of the matrix, from the preset's own depth on."""
    found = [largest(case, int(PRESETS[case.size]["layers"]), session.one) for case in expansion.cases]
    for one in found:
        _tell_found(
            console, one, "size", lambda line: f"{line['params']:,} parameters, {line['mem_gib']:.2f} GiB a card"
        )
    return EXIT_OK if any(one.case for one in found) else EXIT_FAILURE


def _tell_found(console: Console, found: Found, what: str, words: Any) -> None:
    if found.case is None or found.line is None:
        console.print(f"no {what}: {escape(found.limit)}", soft_wrap=True)
    else:
        console.print(f"{escape(found.case.name)}: {words(found.line)} (then {escape(found.limit)})", soft_wrap=True)
