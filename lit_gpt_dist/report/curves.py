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

BF16_ROUNDING = 1e-2  # what bf16 may do to a loss in the first steps
NEVER_ROUNDING = 0.1  # a difference that no precision explains


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
        return np.minimum(widened, NEVER_ROUNDING) if self.rounding >= 1e-3 else widened


FP64 = Band(same=1e-12, rounding=1e-12, steady_steps=30, power=1.0)
_FP32 = Band(same=1e-6, rounding=1e-6, steady_steps=30, power=1.0)
# a GPU's kernels add in an order that depends on shapes and timing: not promised, allowed ten times the CPU's
_FP32_GPU = Band(same=1e-6, rounding=1e-5, steady_steps=30, power=1.0)
# 10 bits; rounding errors of many steps add up like a random walk, hence the square root
_TEN_BITS = Band(same=1e-6, rounding=BF16_ROUNDING / 8, steady_steps=100, power=0.5)
_BF16 = Band(same=1e-6, rounding=BF16_ROUNDING, steady_steps=100, power=0.5)


def band(run: Run, reference: Run) -> Band:
    """The band of the coarser of the two precisions."""
    return max((_own_band(run), _own_band(reference)), key=lambda b: (b.rounding, b.same))


def _own_band(run: Run) -> Band:
    if run.precision.startswith("64"):
        return FP64
    if run.precision.startswith("32"):
        if run.on_cpu:
            return _FP32
        return _FP32_GPU if run.matmul_precision == "highest" else _TEN_BITS
    return _TEN_BITS if run.precision.startswith("16") else _BF16


@dataclass(frozen=True)
class Curve:
    """The losses of a run by step, resumed parts joined. ``seams`` are the steps after which a later part took over."""

    run: Run  # the last part; all parts agree in what makes a curve
    steps: np.ndarray  # (points,), ascending, 1 is the first optimizer step
    losses: np.ndarray  # (points,), fp64
    seams: tuple[int, ...] = ()
    apart: str = ""  # why a resumed run does not continue the one that it was resumed from, in words

    @property
    def last_step(self) -> int:
        return int(self.steps[-1])


_HELD = {"global_batch": "global batch", "seed": "seed", "corpus_hash": "corpus", "context": "context"}


def join_curves(runs: Iterable[Run]) -> list[Curve]:
    """One curve a run. A line that starts later continues the newest earlier line of its tag; redone steps replace old ones.

    A part that was run with another batch, seed, corpus or context is a curve of its own, which says so.
    """
    curves: list[Curve] = []
    of_key: dict[tuple, list[int]] = {}  # the places of a tag's curves since it last began, the newest last
    for run in runs:
        if run.status != OK or not run.losses:
            continue
        part = Curve(run, np.arange(run.start + 1, run.last_step + 1), np.asarray(run.losses, dtype=np.float64))
        key = (run.tag, run.size, run.case, run.round)
        earlier = [i for i in of_key.get(key, ()) if int(curves[i].steps[0]) <= run.start] if run.start > 0 else []
        continued = next((i for i in reversed(earlier) if _continues(part, curves[i], i == earlier[-1])), None)
        if continued is not None:
            curves[continued] = _continued(curves[continued], part)
            of_key[key] = [*(i for i in earlier if i != continued), continued]
            continue
        of_key[key] = [*earlier, len(curves)]
        curves.append(replace(part, apart=_apart(run, curves[earlier[-1]].run)) if earlier else part)
    return curves


def _continues(part: Curve, earlier: Curve, newest: bool) -> bool:
    """An older curve is gone back to only where it reaches the step: after a mistaken attempt in between."""
    return not _apart(part.run, earlier.run) and (newest or earlier.last_step >= part.run.start)


def _apart(later: Run, earlier: Run) -> str:
    """What a curve must hold and the two parts do not, in words; what a line does not tell counts as held."""
    differing = []
    for name, words in _HELD.items():
        mine, other = getattr(later, name), getattr(earlier, name)
        if mine is not None and other is not None and mine != other:
            differing.append(f"another {words} ({short(mine)} against {short(other)})")
    return f"the part from step {later.start} on was run with {', '.join(differing)}" if differing else ""


def short(value: object) -> str:
    """A value in words; of a hash its beginning."""
    return str(value)[:12]


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
