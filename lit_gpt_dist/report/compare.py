"""Holds every loss curve against its reference and gives a verdict. Numbers in, verdicts out."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from lit_gpt_dist.report.causes import likely_cause
from lit_gpt_dist.report.controls import ALLOWED, Control, control_for, find_controls
from lit_gpt_dist.report.curves import Comparison, Curve, Verdict, band
from lit_gpt_dist.report.results import Run

_NOTHING = np.empty(0)
_NO_ONE: list[Curve] = []


def model_and_batch(run: Run) -> tuple:
    return run.size, run.global_batch


def same_data(run: Run) -> tuple:
    """What two runs must share to promise one curve."""
    return *model_and_batch(run), run.seed, run.corpus_hash, run.context, run.params


def _preference(curve: Curve) -> tuple:
    """No rest of a run begun otherwise; one device first, fp32 first, whole runs first, the longest first; then the order
    of the files."""
    run = curve.run
    precision = ("32", "64", "bf16", "16")
    rank = next((i for i, start in enumerate(precision) if run.precision.startswith(start)), len(precision))
    return (
        bool(curve.apart),
        run.world,
        run.mode != "single",
        rank,
        curve.steps[0] > 1,
        bool(curve.seams),
        bool(run.variant),
        -len(curve.steps),
    )


def choose_reference(curve: Curve, candidates: Sequence[Curve]) -> Curve | None:
    """The best reference for a curve; an fp64 run is held against fp64 where there is one, for its tighter promise."""
    if curve.run.precision.startswith("64"):
        fp64 = [c for c in candidates if c.run.precision.startswith("64")]
        if fp64 and min(fp64, key=_preference).run.world == 1:
            return min(fp64, key=_preference)
    return min(candidates, key=_preference, default=None)


def compare_all(curves: Sequence[Curve], reference_tag: str | None = None) -> list[Comparison]:
    """Every curve against its reference, or against the run named ``reference_tag``."""
    named = [c for c in curves if c.run.tag == reference_tag] if reference_tag is not None else []
    exact: dict[tuple, list[Curve]] = {}
    near: dict[tuple, list[Curve]] = {}
    sizes: dict[str, set[int]] = {}
    for curve in curves:
        exact.setdefault(same_data(curve.run), []).append(curve)
        near.setdefault(model_and_batch(curve.run), []).append(curve)
        sizes.setdefault(curve.run.size, set()).add(curve.run.global_batch)
    best: dict[tuple, Curve | None] = {}  # one search a group, not one a run
    controls = find_controls(curves)
    comparisons = []
    for curve in curves:
        if named:
            candidates = named if curve.run.size == named[0].run.size else _NO_ONE
        else:
            candidates = _candidates(curve, exact, near)
        group = id(candidates), curve.run.precision.startswith("64")
        if group not in best:
            best[group] = choose_reference(curve, candidates)
        # what runs on one device is its own reference, but for the rest of a run that was begun otherwise
        own = candidates[0] if len(candidates) == 1 else None
        alone = own is curve and (curve.run.world > 1 or bool(curve.apart)) and not named
        found = compare(curve, None if alone else best[group], sizes[curve.run.size], control_for(curve.run, controls))
        if named and found.reference is None and not candidates:
            found = replace(found, cause=f"{reference_tag}, the reference asked for, is a run of {named[0].run.size}")
        comparisons.append(replace(found, cause=curve.apart) if curve.apart else found)
    return comparisons


def _candidates(curve: Curve, exact: dict[tuple, list[Curve]], near: dict[tuple, list[Curve]]) -> list[Curve]:
    """Curves of the same data; where this curve has no partner, those of the same size and batch, so that the report
    can name what differs instead of staying silent."""
    same = exact[same_data(curve.run)]
    if len(same) > 1 or curve.run.world == 1:
        return same
    return near[model_and_batch(curve.run)]


def compare(
    curve: Curve, reference: Curve | None, batches: Iterable[int] = (), control: Control | None = None
) -> Comparison:
    """One curve against its reference. ``control``: what rounding does to runs like these, where that was measured."""
    if reference is None or (reference is not curve and not np.intersect1d(curve.steps, reference.steps).size):
        return Comparison(curve, None, Verdict.ALONE, _NOTHING, _NOTHING, cause=_why_alone(curve, reference, batches))
    steps, own, others = np.intersect1d(curve.steps, reference.steps, assume_unique=True, return_indices=True)
    difference = curve.losses[own] - reference.losses[others]
    if reference is curve:
        return Comparison(curve, reference, Verdict.REFERENCE, steps, difference)
    return _judge(curve, reference, steps, difference, control)


def _why_alone(curve: Curve, reference: Curve | None, batches: Iterable[int]) -> str:
    run = curve.run
    if reference is not None:
        return f"no step in common: this run has {curve.steps[0]}–{curve.last_step}, the reference {reference.steps[0]}–{reference.last_step}"
    others = sorted(set(batches) - {run.global_batch})
    hint = (
        f"; {run.size} was also run with {', '.join(map(str, others))}, which is another experiment" if others else ""
    )
    return f"no other run of {run.size} with global batch {run.global_batch}{hint}"


def _judge(
    curve: Curve, reference: Curve, steps: np.ndarray, difference: np.ndarray, control: Control | None
) -> Comparison:
    cause, limits = "", band(curve.run, reference.run)
    size = np.where(np.isfinite(difference), np.abs(difference), np.inf)
    beyond = steps[size > limits.same]
    if not beyond.size:
        verdict = Verdict.SAME
    elif bool(np.all(size <= limits.rounding_at(steps))):
        verdict = Verdict.ROUNDING
    elif control is not None and bool(np.all(size <= np.maximum(limits.rounding_at(steps), control.allowed(steps)))):
        verdict = Verdict.ROUNDING
        cause = f"within {ALLOWED:g} × what rounds of {control.case} differ by, {control.largest:.1e}"
    else:
        verdict = Verdict.DIFFERENT
    found = Comparison(
        curve,
        reference,
        verdict,
        steps,
        difference,
        tolerance=limits.same,
        max_difference=float(size.max()) if size.size else math.nan,
        first_beyond=int(beyond[0]) if beyond.size else None,
        cause=cause,
    )
    return replace(found, cause=likely_cause(found)) if verdict is Verdict.DIFFERENT else found
