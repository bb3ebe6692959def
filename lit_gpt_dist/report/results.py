"""Reads result lines into ``Run`` records. Knows the line format and nothing of statistics or pictures.

A damaged line is named (file, line number, why) and skipped: a report is made of what can be read.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_gpt_dist.errors import UserError

OK, OUT_OF_MEMORY, FAILED = "ok", "oom", "failed"


@dataclass(frozen=True)
class Run:
    """One result line. A value the line does not have is None: unknown stays unknown."""

    source: str  # file:line, for messages
    tag: str
    mode: str  # single, ddp, fsdp2, ...
    size: str
    world: int
    micro: int
    accum: int
    global_batch: int
    status: str = OK
    context: int | None = None
    step_ms: float | None = None
    tok_s: float | None = None
    mem_gib: float | None = None  # peak of the device, the largest rank
    host_gib: float | None = None
    mfu: float | None = None
    mfu_half_attention: float | None = None
    communication_share: float | None = None  # of a step's time, 0 to 1
    val_loss: float | None = None
    tokens_per_step: int | None = None
    params: int | None = None
    vocab: int | None = None
    dropout: float | None = None
    seed: int | None = None
    precision: str = "32-true"
    recompute: str = "none"
    recompute_blocks: int | None = None  # None: all
    compile: str = "none"
    bucket_cap_mb: float | None = None
    device: str = "unknown"
    corpus: str | None = None
    corpus_hash: str | None = None
    git_revision: str | None = None
    versions: dict[str, Any] = field(default_factory=dict)
    time: str | None = None
    command: str | None = None
    config: str | None = None  # path of the run's saved config.yaml
    start: int = 0  # losses[i] is the loss of step start + i + 1
    losses: tuple[float, ...] = ()
    case: str | None = None  # these five are written by `bench`
    round: int | None = None
    variant: str = ""  # what an ablation switched, in words
    shape: dict[str, Any] = field(default_factory=dict)  # model fields: all, or those that differ from the preset
    error: str | None = None
    matmul_precision: str | None = None  # "highest": no TF32
    record: dict[str, Any] = field(
        default_factory=dict, repr=False
    )  # the whole line but for the losses, for the planner

    @property
    def last_step(self) -> int:
        return self.start + len(self.losses)

    @property
    def on_cpu(self) -> bool:
        return self.device.lower().startswith(("cpu", "x86", "arm")) or (
            self.mem_gib is None and self.host_gib is not None
        )


@dataclass(frozen=True)
class Damage:
    source: str
    why: str

    def __str__(self) -> str:
        return f"{self.source}: {self.why}; skipped"


_COUNTS = ("world", "micro", "accum")
_TEXTS = ("precision", "recompute", "compile", "device", "variant")
_POSITIVE = ("tok_s", "step_ms")


def read_results(paths: Sequence[str | Path]) -> tuple[list[Run], list[Damage]]:
    """All runs of all files in order, and the lines that could not be used.

    Raises:
        UserError: a file that cannot be read.
    """
    runs: list[Run] = []
    damaged: list[Damage] = []
    for path in paths:
        try:
            text = Path(path).read_bytes().decode("utf-8", errors="replace")
        except OSError as error:
            raise UserError(
                f"results file {str(path)!r} cannot be read ({error.strerror}); name a results.jsonl that `fit` or `bench` wrote"
            ) from error
        _read_lines(str(path), text.split("\n"), runs, damaged)
    return runs, damaged


def _read_lines(path: str, lines: Iterable[str], runs: list[Run], damaged: list[Damage]) -> None:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        source = f"{path}:{number}"
        try:
            run = parse_line(line, source)
        except ValueError as error:
            damaged.append(Damage(source, str(error)))
        else:
            runs.append(run)


def parse_line(line: str, source: str) -> Run:
    """One line as a ``Run``. Raises ``ValueError`` that says what is wrong with it."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not an object")
    status = record.get("status", OK)
    if status not in (OK, OUT_OF_MEMORY, FAILED):
        raise ValueError(f"status {status!r} is not one of {OK}, {OUT_OF_MEMORY}, {FAILED}")
    _check(record, status)
    known = {name: record[name] for name in Run.__dataclass_fields__ if record.get(name) is not None}
    for name in _TEXTS:
        if name in known:
            known[name] = _text(known[name])
    losses = tuple(math.nan if loss is None else float(loss) for loss in record.get("losses") or ())
    batch = record.get("global_batch") or record["micro"] * record["accum"] * record["world"]
    found = {"source": source, "losses": losses, "global_batch": int(batch), "status": status}
    return Run(**{**known, **found, "record": {k: v for k, v in record.items() if k != "losses"}})


def _check(record: dict[str, Any], status: str) -> None:
    needed = ["tag", "mode", "size", *_COUNTS] + (["losses"] if status == OK else [])
    missing = [name for name in needed if record.get(name) is None]
    if missing:
        raise ValueError(f"no {', '.join(missing)}")
    for name in ("tag", "mode", "size"):
        if not _is_text(record[name]):
            raise ValueError(f"{name} is {record[name]!r}, not text")
    for name in _COUNTS:
        if not _is_count(record[name]):
            raise ValueError(f"{name} is {record[name]!r}, not a whole number of at least 1")
    for names, holds, words in _OPTIONAL:
        for name in names:
            if record.get(name) is not None and not holds(record[name]):
                raise ValueError(f"{name} is {record[name]!r}, not {words}")
    if not isinstance(record.get("start") or 0, int) or (record.get("start") or 0) < 0:
        raise ValueError(f"start is {record['start']!r}, not a step")
    if status == OK:
        _check_measurement(record)


def _check_measurement(record: dict[str, Any]) -> None:
    for name in _POSITIVE:
        value = record.get(name)
        if value is not None and not (_is_finite(value) and value > 0):
            raise ValueError(f"{name} is {value!r}, not a positive number")
    losses = record["losses"]
    if not isinstance(losses, list) or not all(loss is None or _is_number(loss) for loss in losses):
        raise ValueError("losses is not a list of numbers")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and _is_number(value) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


# names, what holds for their values, and that in words
_OPTIONAL: tuple[tuple[tuple[str, ...], Callable[[object], bool], str], ...] = (
    (("global_batch", "context", "tokens_per_step", "params", "vocab"), _is_count, "a whole number of at least 1"),
    (("recompute_blocks",), _is_count, "a whole number of at least 1"),
    (("seed", "round"), _is_whole, "a whole number"),
    (("mem_gib", "host_gib", "mfu", "mfu_half_attention"), _is_finite, "a finite number"),
    (("communication_share", "bucket_cap_mb", "dropout"), _is_finite, "a finite number"),
    (("val_loss",), _is_number, "a number"),  # that of a run gone wrong may be infinite
    (("corpus", "corpus_hash", "git_revision", "time", "command", "config"), _is_text, "text"),
    (("case", "error", "matmul_precision"), _is_text, "text"),
    (("versions", "shape"), _is_object, "an object"),
)


def _text(value: object) -> str:
    """Options are written as JSON has them: ``false`` of a switch reads "none"."""
    if value is False:
        return "none"
    return "yes" if value is True else str(value)


def suspicious(run: Run, tolerance: float = 0.05) -> str | None:
    """Why the line's own numbers contradict each other, or None.

    Tokens per second that are off by the accumulation or by the number of ranks are a common fault; the line has what it
    takes to notice: tokens per step = global batch × context, and tok/s = tokens per step ÷ step time.
    """
    tokens = run.tokens_per_step or (run.global_batch * run.context if run.context else None)
    if run.tokens_per_step and run.context and run.tokens_per_step != run.global_batch * run.context:
        expected = run.global_batch * run.context
        return f"tokens_per_step {run.tokens_per_step} is not global batch {run.global_batch} × context {run.context} = {expected}"
    if not (run.tok_s and run.step_ms and tokens):
        return None
    expected_rate = tokens / (run.step_ms / 1000)
    if abs(run.tok_s / expected_rate - 1) > tolerance:
        ratio = run.tok_s / expected_rate
        return f"tok_s {run.tok_s:,.0f} is {ratio:.3g} × tokens per step ÷ step time = {expected_rate:,.0f}"
    return None


def without_superseded(runs: Sequence[Run]) -> list[Run]:
    """Drops a failure of `bench` whose round was run again since."""
    last = {(run.case, run.round): run for run in runs if run.case is not None}
    return [run for run in runs if run.status != FAILED or run.case is None or last[run.case, run.round] is run]
