"""Asks the planner what it would have predicted for each case. The only place in the report that knows the planner."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_gpt_dist.planner.calibration import Calibration, find, load
from lit_gpt_dist.planner.compare import compare_line
from lit_gpt_dist.planner.hardware import UNKNOWN_LINK, Link, device_by_name, link_by_name
from lit_gpt_dist.report.statistics import Case

Predicted = tuple[float | None, float | None]  # (tokens/s of all cards, GiB a card)


def predictions(
    cases: Sequence[Case], link: str | None = None, calibration: Path | None = None
) -> dict[int, Predicted]:
    """The planner's figures by the case's position; a case that it cannot plan is left out.

    Rates and links measured on this kind of card (by `doctor --measure`) are used where there are any, or those of the
    ``calibration`` file; ``link`` names the link otherwise. What is then still unknown is not predicted.

    Raises:
        UserError: a link or a calibration file that cannot be used.
    """
    given = load(calibration) if calibration else None
    found_for = functools.cache(find)  # one look into the cache folder a kind of card
    found: dict[int, Predicted] = {}
    for position, case in enumerate(cases):
        if case.measured:
            rates = given or found_for(case.first.device)
            predicted = _predict(case, rates, _link(case, rates, link))
            if predicted != (None, None):
                found[position] = predicted
    return found


def _link(case: Case, rates: Calibration | None, name: str | None) -> Link:
    if name:
        return link_by_name(name, device_by_name(case.first.device))
    return (rates.link(case.first.world) if rates else None) or UNKNOWN_LINK


def _predict(case: Case, rates: Calibration | None, link: Link) -> Predicted:
    run = case.measured[0]
    line: dict[str, Any] = run.record | {
        "mem_gib": case.median(lambda r: r.mem_gib),
        "step_ms": case.median(lambda r: r.step_ms),
    }
    both = compare_line(line, rates, link)
    tokens = run.tokens_per_step or (run.global_batch * run.context if run.context else None)
    rate = tokens / (both.step_ms[0] / 1000) if both.step_ms and tokens else None
    return rate, both.memory_gib[0] if both.memory_gib else None
