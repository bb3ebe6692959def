"""Loss curves, and how far apart two of them may be. Knows the bands and the joining of resumed parts; compares nothing.

Tolerances. The promise is 1e-6 in fp32 and 1e-12 in fp64 on CPU. Beyond it, rounding grows with the steps, while a
fault shows in the first ones, so the rounding band is narrow at the start and widens:

* bf16 has 7 bits of mantissa; 1e-2 in the first steps is normal and 0.1 is a bug (facts, "Running for weeks");
* fp16, and fp32 on a GPU where matrix products may use TF32, have 10 bits: an eighth of that;
* fp32 and fp64 on CPU: the promise itself, which was measured over 30 steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from lit_gpt_dist.report.results import OK, Run


class Verdict(StrEnum):
    REFERENCE = "reference"
    SAME = "same curve"
    ROUNDING = "rounding of this precision"
    DIFFERENT = "different run"
    ALONE = "no reference"


@dataclass(frozen=True)
class Band:
    """Largest |Δloss| that counts as the same curve, and as rounding at a step."""

    same: float
    rounding: float
    steady_steps: int  # steps for which the rounding band holds before it widens
    power: float  # it widens with (step / steady_steps) ** power

    def rounding_at(self, steps: np.ndarray) -> np.ndarray:
        widened = self.rounding * np.maximum(1.0, steps / self.steady_steps) ** self.power
        return np.minimum(widened, 0.1) if self.rounding >= 1e-3 else widened  # 0.1 is never rounding


_FP64 = Band(same=1e-12, rounding=1e-12, steady_steps=30, power=1.0)
_FP32 = Band(same=1e-6, rounding=1e-6, steady_steps=30, power=1.0)
# a GPU's kernels add in an order that depends on shapes and timing: not promised, allowed ten times the CPU's
_FP32_GPU = Band(same=1e-6, rounding=1e-5, steady_steps=30, power=1.0)
# 10 bits; rounding errors of many steps add up like a random walk, hence the square root
_TEN_BITS = Band(same=1e-6, rounding=1e-2 / 8, steady_steps=100, power=0.5)
_BF16 = Band(same=1e-6, rounding=1e-2, steady_steps=100, power=0.5)


def band(run: Run, reference: Run) -> Band:
    """The band of the coarser of the two precisions."""
    return max((_own_band(run), _own_band(reference)), key=lambda b: (b.rounding, b.same))


def _own_band(run: Run) -> Band:
    if run.precision.startswith("64"):
        return _FP64
    if run.precision.startswith("32"):
        if run.on_cpu:
            return _FP32
        return _FP32_GPU if run.matmul_precision == "highest" else _TEN_BITS
    return _TEN_BITS if run.precision.startswith("16") else _BF16


@dataclass(frozen=True)
class Curve:
    """The losses of a run by step, resumed parts joined. ``seams`` are the steps after which a later part took over."""

    run: Run  # the last part
    steps: np.ndarray  # (points,), ascending, 1 is the first optimizer step
    losses: np.ndarray  # (points,), fp64
    seams: tuple[int, ...] = ()

    @property
    def last_step(self) -> int:
        return int(self.steps[-1])


def join_curves(runs: Iterable[Run]) -> list[Curve]:
    """One curve a run. A line that starts later continues the newest earlier line of its tag; redone steps replace old ones."""
    curves: list[Curve] = []
    newest: dict[tuple, int] = {}
    for run in runs:
        if run.status != OK or not run.losses:
            continue
        part = Curve(run, np.arange(run.start + 1, run.last_step + 1), np.asarray(run.losses, dtype=np.float64))
        key = (run.tag, run.size, run.case, run.round)
        earlier = newest.get(key) if run.start > 0 else None
        if earlier is not None and int(curves[earlier].steps[0]) <= run.start:
            curves[earlier] = _continued(curves[earlier], part)
        else:
            newest[key] = len(curves)
            curves.append(part)
    return curves


def _continued(earlier: Curve, later: Curve) -> Curve:
    kept = earlier.steps <= later.run.start
    return Curve(
        run=replace(later.run, start=earlier.run.start),
        steps=np.concatenate([earlier.steps[kept], later.steps]),
        losses=np.concatenate([earlier.losses[kept], later.losses]),
        seams=(*(s for s in earlier.seams if s < later.run.start), later.run.start),
    )


@dataclass(frozen=True)
class Comparison:
    curve: Curve
    reference: Curve | None
    verdict: Verdict
    steps: np.ndarray  # the steps that both have
    difference: np.ndarray  # loss − reference's loss at those steps
    tolerance: float | None = None
    max_difference: float | None = None
    first_beyond: int | None = None  # the first step whose |Δloss| exceeds the tolerance
    cause: str = ""
