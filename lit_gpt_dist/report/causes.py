"""Names the likely cause of a curve that is not its reference's. Reads fields and losses; judges nothing.

What the losses can tell: the loss of step 1 is taken before any update, so it depends on the weights' initial values,
on the data, and on how the loss itself is averaged. Where it already differs, the data (or the averaging) is at fault;
where it agrees, the data of that step was right and the update is at fault. One thing they cannot tell: AdamW divides a
constant factor of the gradient out, so an undivided gradient stays small, and in bf16 may hide below rounding.
"""

import numpy as np

from lit_gpt_dist.report.controls import GRADUAL
from lit_gpt_dist.report.curves import FP64, NEVER_ROUNDING, Comparison, band, short
from lit_gpt_dist.report.names import OWN_FIELDS
from lit_gpt_dist.report.results import Run
from lit_gpt_dist.report.settings import differing_settings, dropout_of

SPIKE = 1.1  # times the loss of the step before
FEW_BITS = 1e-3  # bands of at least that are those of 16-bit and TF32 precisions
AFTER_A_SPIKE = 3  # steps in which it shows in a difference
FIRST_STEPS = 10  # within which most faults of an update show in fp32


def likely_cause(comparison: Comparison) -> str:
    """The first explanation that the evidence supports, as one sentence."""
    assert comparison.reference is not None
    curve, reference = comparison.curve, comparison.reference
    cause = (
        _other_fields(curve.run, reference.run)
        or _not_finite(comparison)
        or _resume(comparison)
        or _scaled_loss(comparison)
        or _other_options(curve.run, reference.run)
        or _other_length(comparison)
        or _spike(comparison)
        or _passing(comparison)
        or _from_the_first_step(comparison)
    )
    mine, other = curve.run.git_revision, reference.run.git_revision
    return cause + (f"; the code differs too ({mine} against {other})" if mine and other and mine != other else "")


def _other_fields(run: Run, reference: Run) -> str:
    differing = []
    for name, words in (
        ("global_batch", "another global batch"),
        ("seed", "another seed"),
        ("corpus_hash", "another corpus"),
        ("context", "another context"),
        ("vocab", "another vocabulary"),
        ("dropout", "another dropout"),
        ("params", "another model"),
    ):
        mine, other = getattr(run, name), getattr(reference, name)
        if mine is not None and other is not None and mine != other:
            differing.append(f"{words} ({name} {short(mine)} against {short(other)})")
    both = [name for name in run.shape if name in reference.shape and name not in OWN_FIELDS]
    shapes = [
        f"{name} {run.shape[name]} against {reference.shape[name]}"
        for name in both
        if run.shape[name] != reference.shape[name]
    ]
    if shapes:
        differing.append(f"another shape ({', '.join(shapes)})")
    return "; ".join(differing)


def _not_finite(comparison: Comparison) -> str:
    broken = comparison.steps[~np.isfinite(comparison.difference)]
    return f"a loss that is not finite from step {broken[0]} on" if broken.size else ""


def _resume(comparison: Comparison) -> str:
    first = _first_large(comparison)
    for seam in comparison.curve.seams:
        if first == seam + 1:
            return f"the resume after step {seam}: data read again or skipped, or a state that was not restored"
    if comparison.curve.steps[0] > 1 and first == comparison.steps[0]:
        start = int(comparison.curve.steps[0]) - 1
        return f"the run starts at step {start} and is off from its first loss on: another checkpoint, or data read again or skipped"
    return ""


def _scaled_loss(comparison: Comparison) -> str:
    """Losses that are a multiple of the reference's: a sum where a mean belongs."""
    ratio = _early_ratio(comparison)
    run = comparison.curve.run
    if ratio is None or abs(ratio - 1) < 0.25:
        return ""
    for factor, words in (
        (run.accum, "the loss is not divided by accumulation"),
        (run.world, "the loss is summed over ranks, not averaged"),
        (run.accum * run.world, "the loss is neither divided by accumulation nor averaged over ranks"),
    ):
        if factor > 1 and abs(ratio / factor - 1) < 0.02:
            both = " (or summed over ranks: there are as many)" if factor == run.accum == run.world else ""
            return f"{words}{both}: the first loss is {ratio:.3g} × the reference's at accumulate {run.accum}, {run.world} ranks"
    return f"the loss is averaged otherwise: the first one is {ratio:.3g} × the reference's"


def _early_ratio(comparison: Comparison) -> float | None:
    if not comparison.steps.size or comparison.steps[0] != 1:
        return None
    reference = comparison.reference
    assert reference is not None
    first = reference.losses[0]
    return float((first + comparison.difference[0]) / first) if first else None


def _other_options(run: Run, reference: Run) -> str:
    """Settings that differ and can change a curve, and what dropout makes of the micro-batches."""
    differing = differing_settings(run, reference)
    causes = ["options differ: " + "; ".join(differing)] if differing else []
    if run.micro != reference.micro and max(dropout_of(run), dropout_of(reference)) > 0:
        causes.append(
            f"dropout masks belong to a micro-batch, and these differ ({run.micro} against {reference.micro})"
        )
    return "; ".join(causes)


def _other_length(comparison: Comparison) -> str:
    assert comparison.reference is not None
    mine, other = comparison.curve.last_step, comparison.reference.last_step
    if mine == other or _starts_apart(comparison) != "no":
        return ""
    return f"the runs end at steps {mine} and {other}: a learning-rate schedule that depends on the number of steps would do this"


def _spike(comparison: Comparison) -> str:
    """A jump of the loss in both runs, up to which they agree: differences of rounding grow there faster than anywhere.

    In few bits only: with 24 or more, a jump does not make them large enough to be seen.
    """
    first, reference = _first_large(comparison), comparison.reference
    assert reference is not None
    if band(comparison.curve.run, reference.run).rounding < FEW_BITS:
        return ""
    shared = np.isin(reference.steps, comparison.steps)
    steps, theirs = reference.steps[shared], reference.losses[shared]
    jumps = steps[1:][
        (theirs[1:] > SPIKE * theirs[:-1]) & (theirs[1:] + comparison.difference[1:] > SPIKE * theirs[:-1])
    ]
    before = [int(step) for step in jumps if first is not None and first - AFTER_A_SPIKE <= step <= first]
    if not before:
        return ""
    height = float(theirs[steps == before[-1]][0])
    return (
        f"both runs' loss jumps at step {before[-1]}, to {height:.3g}, and up to there they agree: rounding grows in a jump, and "
        "this alone shows no fault; compare with a lower learning rate or a longer warm-up"
    )


def _passing(comparison: Comparison) -> str:
    """A few steps apart, and together again: an update that is wrong stays wrong."""
    large = _large(comparison)
    steps = comparison.steps
    last_third = steps[-(len(steps) // 3) :]
    if len(steps) < 9 or not large.size or len(large) > len(steps) / 4 or np.isin(last_third, large).any():
        return ""
    named = ", ".join(map(str, large[:3])) + (f" and {len(large) - 3} more" if len(large) > 3 else "")
    return (
        f"beyond rounding only at step {named}, and together again after that: rounding that grew where the loss turned, or other "
        "data at that step; an update at fault would keep the runs apart"
    )


def _from_the_first_step(comparison: Comparison) -> str:
    run, reference = comparison.curve.run, comparison.reference
    assert reference is not None
    data = _data_faults(run)
    update = _update_faults(run, reference.run)
    apart = _starts_apart(comparison)
    if apart == "yes":
        return f"the loss of step 1, before any update, is already off by {abs(comparison.difference[0]):.2g}: {data}"
    if apart == "no" and (growth := _growth(comparison)) <= GRADUAL:
        few_bits = band(run, reference.run).rounding >= FEW_BITS
        step = comparison.first_beyond
        agrees = f"step 1 agrees{_how_closely(comparison)}" if few_bits or not step else f"steps 1 to {step - 1} agree"
        rounding = "in few bits rounding" if few_bits else "rounding"
        return (
            f"{agrees}, and the difference grows from there, at most {growth:.1f} × a step once it is {_seen_from(comparison):.0e}: "
            f"{rounding} does so where a loss falls fast; compare in {'fp32' if few_bits else 'fp64'}. Or, in the update: {update}"
        )
    if apart == "no":
        return f"step 1 agrees{_how_closely(comparison)}, so its data and the initial weights do too, and the update differs: {update}"
    return f"{data}; or, in the update: {update}"


def _growth(comparison: Comparison) -> float:
    """The largest factor by which the difference grows from one step to the next, once it can be seen; not finite where rounding
    has no such part in it: in fp64, and in fp32 where the first steps differ already."""
    assert comparison.reference is not None
    limits = band(comparison.curve.run, comparison.reference.run)
    apart = np.maximum.accumulate(np.abs(comparison.difference))
    if limits.rounding < FEW_BITS and not (limits is not FP64 and apart[:FIRST_STEPS][-1] <= limits.same):
        return np.inf
    if not apart[-1] < NEVER_ROUNDING:
        return np.inf
    return float((apart[1:] / np.maximum(apart[:-1], _seen_from(comparison))).max(initial=1.0))


def _seen_from(comparison: Comparison) -> float:
    """A hundredth of what rounding may do, or the same curve's tolerance: what is below says nothing."""
    assert comparison.reference is not None
    limits = band(comparison.curve.run, comparison.reference.run)
    return max(limits.rounding / 100, limits.same)


def _data_faults(run: Run) -> str:
    if run.world > 1:
        return f"the {run.world} ranks share data (each must take its own part of the global batch), or initial weights differ between ranks"
    return "other data, or other initial weights"


def _update_faults(run: Run, reference: Run) -> str:
    faults = []
    if run.accum != reference.accum:
        faults.append(f"gradients not divided by accumulation ({run.accum}; the reference: {reference.accum})")
    if run.world > 1:
        faults.append(f"gradients not averaged over the {run.world} ranks")
    rest = "another learning rate, clipping or schedule"
    return f"{', '.join(faults)}, or {rest}" if faults else rest


def _starts_apart(comparison: Comparison) -> str:
    """Whether the loss of step 1 already differs: yes, no, or unclear (within rounding, or step 1 was not compared)."""
    assert comparison.reference is not None
    if not comparison.steps.size or comparison.steps[0] != 1:
        return "unclear"
    limits = band(comparison.curve.run, comparison.reference.run)
    size = abs(float(comparison.difference[0]))
    if size > limits.rounding:
        return "yes"
    # an average over a batch rounds far less than one number: a tenth of the band is still agreement
    return "no" if size <= max(limits.same, limits.rounding / 10) else "unclear"


def _how_closely(comparison: Comparison) -> str:
    """The tolerance of one curve is tighter than what rounding may do to a loss that has the same data and weights."""
    tolerance, size = comparison.tolerance, abs(float(comparison.difference[0]))
    return f" within rounding ({size:.1e})" if tolerance is not None and size > tolerance else ""


def _first_large(comparison: Comparison) -> int | None:
    large = _large(comparison)
    return int(large[0]) if large.size else None


def _large(comparison: Comparison) -> np.ndarray:
    """The steps beyond the rounding band."""
    assert comparison.reference is not None
    limits = band(comparison.curve.run, comparison.reference.run)
    return comparison.steps[~(np.abs(comparison.difference) <= limits.rounding_at(comparison.steps))]
