"""How far rounding alone takes a run from itself: rounds of one case repeat one command, and differ by nothing else.

On a GPU some kernels add in an order that depends on timing. In 16 bits such differences grow with the steps, and where a loss
falls or jumps fast by more than any fixed band allows.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lit_gpt_dist.report.curves import BF16_ROUNDING, NEVER_ROUNDING, Curve
from lit_gpt_dist.report.results import Run
from lit_gpt_dist.report.settings import differing_settings

MOST_ROUNDS = 4  # of a case that are held against each other
GRADUAL = 8.0  # times the difference of the step before: rounding grows, a fault is there at once
ALLOWED = 2.0  # times the largest difference among rounds: a few pairs do not show the largest there is


@dataclass(frozen=True)
class Control:
    """Rounds of one case held against each other. ``apart``: the largest |Δloss| up to each step, from step 1 on."""

    case: str
    global_batch: int
    apart: np.ndarray  # (steps,)

    @property
    def largest(self) -> float:
        return float(self.apart[-1])

    def allowed(self, steps: np.ndarray) -> np.ndarray:
        """Largest |Δloss| that rounding explains at ``steps``; after the last one measured, what it explains there."""
        known = np.minimum(steps, len(self.apart)).astype(int)
        return np.minimum(ALLOWED * self.apart[known - 1], NEVER_ROUNDING)


def find_controls(curves: Iterable[Curve]) -> list[tuple[Run, Control]]:
    """One for each case of which several rounds ran on GPUs, with a run of it."""
    rounds: dict[tuple, list[Curve]] = {}
    for curve in curves:
        run = curve.run
        if run.case and not run.on_cpu and curve.steps[0] == 1 and not curve.apart:
            alike = (run.case, run.device, run.git_revision, run.global_batch, run.seed, run.corpus_hash)
            rounds.setdefault(alike, []).append(curve)
    found = []
    for several in rounds.values():
        pairs = [
            (one, other)
            for one, other in itertools.combinations(several[:MOST_ROUNDS], 2)
            if one.run.round != other.run.round and not differing_settings(one.run, other.run)
        ]
        apart = [_apart(*pair) for pair in pairs]
        if apart and all(map(_is_rounding, apart)):
            shortest = min(len(values) for values in apart)
            run = several[0].run
            most = np.max([values[:shortest] for values in apart], axis=0)
            found.append((run, Control(run.case or "", run.global_batch, most)))
    return found


def _apart(a: Curve, b: Curve) -> np.ndarray:
    """Largest difference up to each step; not finite where a loss is not."""
    shared = min(len(a.losses), len(b.losses))
    return np.maximum.accumulate(np.abs(a.losses[:shared] - b.losses[:shared]))


def _is_rounding(apart: np.ndarray) -> bool:
    """Whether a difference grows into what it becomes. One that is there at once is a fault of one of the rounds."""
    if not apart[-1] < NEVER_ROUNDING:
        return False
    large = np.flatnonzero(apart > BF16_ROUNDING)
    return not large.size or (large[0] > 0 and bool(apart[large[0]] <= GRADUAL * apart[large[0] - 1]))


def control_for(run: Run, controls: Sequence[tuple[Run, Control]]) -> Control | None:
    """Of the same model in the same precision on the same kind of card; of the same global batch where there is one, else the
    one whose rounds are furthest apart."""
    fitting = [control for other, control in controls if _alike(run, other)]
    same_batch = [control for control in fitting if control.global_batch == run.global_batch]
    return max(same_batch or fitting, key=lambda control: control.largest, default=None)


def _alike(run: Run, other: Run) -> bool:
    return all(
        getattr(run, name) == getattr(other, name)
        for name in ("size", "params", "context", "vocab", "precision", "device", "dropout")
    )
