"""Holds cases with one switched option against the same case without the switch. Pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass

from lit_gpt_dist.report.results import Run
from lit_gpt_dist.report.statistics import Bases, Case, arithmetic, has_usual_bucket, model, ratio, switched_off

NO_SYNC_OFF = "no_sync off"  # as `bench` names that variant


@dataclass(frozen=True)
class Ablation:
    """A switched option against the same case without the switch."""

    case: Case
    base: Case
    change: float | None  # tok/s with the switch over tok/s without, minus 1
    extra_ms: float | None  # what the switch adds to a step
    expected_factor: float | None  # bytes per step with the switch over without; only for no_sync
    measured_factor: float | None  # the same of the time beyond the one-card step


def ablations(cases: Sequence[Case], bases: Bases) -> list[Ablation]:
    # the default bucket size, and nothing switched off, last: what stays where several were run
    usual_last = sorted(cases, key=lambda c: (not switched_off(c.first), has_usual_bucket(c.first)))
    plain = {_without_switch(case.first): case for case in usual_last if not case.first.variant}
    found = []
    for case in cases:
        base = plain.get(_without_switch(case.first)) or _switched_field(case, plain)
        if case.first.variant and base:
            found.append(_ablation(case, base, bases.weak(base)))
    return found


def _without_switch(run: Run) -> tuple:
    return (*arithmetic(run), run.mode, run.world, run.micro, run.accum)


def _switched_field(case: Case, plain: dict[tuple, Case]) -> Case | None:
    """The base of a variant whose switch is itself a field (precision, recompute, compile): what it does not name must be equal."""
    run = case.first
    rest = (*model(run), run.device, run.mode, run.world, run.micro, run.accum)
    for base in plain.values():
        other = base.first
        if rest == (*model(other), other.device, other.mode, other.world, other.micro, other.accum):
            # one switch at a time, and the one that the variant names; units bring how the model is compiled with them
            named = run.variant.replace("units", "compile")
            fields = ("precision", "recompute", "recompute_blocks", "compile")
            differing = [f for f in fields if getattr(run, f) != getattr(other, f)]
            if len(differing) <= 1 and all(field in named for field in differing):
                return base
    return None


def _ablation(case: Case, base: Case, one_card: Case | None) -> Ablation:
    speed = ratio(case, base)
    with_ms, without_ms = (c.median(lambda run: run.step_ms) for c in (case, base))
    one_ms = one_card.median(lambda run: run.step_ms) if one_card else None
    extra = with_ms - without_ms if with_ms is not None and without_ms is not None else None
    expected = measured = None
    if case.first.variant == NO_SYNC_OFF:
        record = case.first.record
        once = record.get("units") == "model" or record.get("reshard_after_forward") is False
        expected = no_sync_factor(case.first.mode, case.first.accum, case.first.precision, once)
        if one_ms is not None and with_ms is not None and without_ms is not None and without_ms > one_ms:
            measured = (with_ms - one_ms) / (without_ms - one_ms)
    return Ablation(case, base, speed - 1 if speed is not None else None, extra, expected, measured)


def no_sync_factor(mode: str, accumulate: int, precision: str, gathers_once: bool = False) -> float | None:
    """Bytes per step when every micro-batch reduces, over the bytes when only the last one does.

    DDP: accumulate (facts: "DDP without no_sync: A times that"). FSDP2 gathers weights of p bytes G times in a step either way,
    twice in every micro-batch or once a step, and only reductions are saved: (G·p + A·g) / (G·p + 4), with gradients of g bytes
    where they have not been added up: those that they were computed in, as within a machine. Under HSDP it depends on the
    links: none.

    Args:
        gathers_once: the model at once, or weights are kept for the step.
    """
    if mode == "ddp":
        return float(accumulate)
    if mode == "fsdp2":
        computed_bytes = 2 if precision.startswith(("bf16", "16")) else 4
        gathered = (1 if gathers_once else 2 * accumulate) * computed_bytes
        return (gathered + accumulate * computed_bytes) / (
            gathered + (4 if accumulate > 1 and precision != "bf16-true" else computed_bytes)
        )
    return None
