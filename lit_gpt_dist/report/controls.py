"""How far rounding alone takes a run from itself: rounds of one case repeat one command, and differ by nothing else.

On a GPU some kernels add in an order that depends on timing. In 16 bits such differences grow with the steps, and where a loss
falls or jumps fast by more than any fixed band allows.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lit_gpt_dist.report.curves import NEVER_ROUNDING, Curve
from lit_gpt_dist.report.results import Run

MOST_ROUNDS = 4  # of a case that are held against each other
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
            same_command = (run.case, run.git_revision, run.global_batch, run.seed, run.corpus_hash)
            rounds.setdefault(same_command, []).append(curve)
    found = []
    for several in rounds.values():
        pairs = [(a, b) for a, b in itertools.combinations(several[:MOST_ROUNDS], 2) if a.run.round != b.run.round]
        if apart := [_apart(a, b) for a, b in pairs]:
            shortest = min(len(values) for values in apart)
            most = np.max([values[:shortest] for values in apart], axis=0)
            if most[-1] < NEVER_ROUNDING:  # else the rounds themselves are different runs
                run = several[0].run
                found.append((run, Control(run.case or "", run.global_batch, most)))
    return found


def _apart(a: Curve, b: Curve) -> np.ndarray:
    """Largest difference up to each step; not finite where a loss is not."""
    shared = min(len(a.losses), len(b.losses))
    return np.maximum.accumulate(np.abs(a.losses[:shared] - b.losses[:shared]))


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
