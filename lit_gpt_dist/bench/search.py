"""Searches by measuring: the fastest micro-batch and strategy, and the largest model that trains. Knows no processes."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lit_gpt_dist.bench.case import Case

Measure = Callable[[Case], dict[str, Any]]  # a case to its result line


@dataclass(frozen=True)
class Found:
    """The best trial of one line of search, and the first that did not go further."""

    case: Case | None
    line: dict[str, Any] | None
    limit: str  # why it went no further


def fastest(base: Case, measure: Measure, global_batch: int | None = None, most_micro: int = 4096) -> Found:
    """Doubles the micro-batch from ``base.micro`` until memory ends or twice in a row nothing is gained.

    With a global batch it stays fixed and accumulation follows; without one the accumulation stays.
    """
    best: Case | None = None
    best_line: dict[str, Any] | None = None
    case, without_gain = base, 0
    while True:
        line = measure(case)
        if line["status"] != "ok" or not line.get("tok_s"):
            return Found(best, best_line, f"micro-batch {case.micro}: {_why(line)}")
        if best_line is None or line["tok_s"] > 1.01 * best_line["tok_s"]:  # a hundredth is noise
            best, best_line, without_gain = case, line, 0
        else:
            without_gain += 1
        if without_gain == 2:
            return Found(best, best_line, f"micro-batch {case.micro}: no faster")
        micro = 2 * case.micro
        if micro > most_micro or (global_batch and global_batch % (micro * case.devices)):
            return Found(
                best, best_line, f"micro-batch {micro}: beyond the {'global batch' if global_batch else 'search'}"
            )
        accumulate = global_batch // (micro * case.devices) if global_batch else case.accumulate
        case = dataclasses.replace(case, micro=micro, accumulate=accumulate)


def largest(base: Case, layers: int, measure: Measure, resolution: float = 1 / 8, most_layers: int = 4096) -> Found:
    """The deepest model of ``base``'s width that trains: doubles ``layers`` until memory ends, then bisects.

    The answer is within ``resolution`` of the limit: of 40 layers, 5.
    """

    def attempt(depth: int) -> dict[str, Any]:
        return measure(with_layers(base, depth))

    fits, fits_line, limit = 0, None, ""
    fails, depth = None, layers
    while fails is None and depth <= most_layers:
        line = attempt(depth)
        if line["status"] == "failed":
            return Found(with_layers(base, fits) if fits else None, fits_line, f"{depth} layers: {_why(line)}")
        if line["status"] == "ok":
            fits, fits_line, depth = depth, line, 2 * depth
        else:
            fails, limit = depth, f"{depth} layers: {_why(line)}"
    while fails is not None and fails - fits > max(1, resolution * fails):
        depth = (fits + fails) // 2
        line = attempt(depth)
        if line["status"] == "ok":
            fits, fits_line = depth, line
        else:
            fails, limit = depth, f"{depth} layers: {_why(line)}"
    return Found(
        with_layers(base, fits) if fits else None, fits_line, limit or f"{most_layers} layers: end of the search"
    )


def with_layers(base: Case, layers: int) -> Case:
    shape = tuple(pair for pair in base.shape if pair[0] != "layers")
    return dataclasses.replace(base, shape=(*shape, ("layers", layers)))


def _why(line: dict[str, Any]) -> str:
    if line["status"] == "oom":
        return "out of memory"
    if line["status"] == "failed":
        return line.get("error", "").strip().splitlines()[-1] if line.get("error") else "failed"
    return "no time measured; use more steps"


def best_of(found: Sequence[Found]) -> Found | None:
    measured = [f for f in found if f.line and f.line.get("tok_s")]
    return max(measured, key=lambda f: f.line["tok_s"], default=None)  # type: ignore[index]
