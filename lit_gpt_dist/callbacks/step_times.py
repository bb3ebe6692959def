"""How long single steps take on the device, and percentiles over the last window. Never waits for the device itself."""

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

from lit_gpt_dist.callbacks.clock import Clock

PERCENTILES = (50, 95, 99)


class StepTimes:
    """Marks the end of every step, and reads the distances when somebody else has waited for the device.

    Args:
        clock: None: nothing is measured.
        window: steps the percentiles are taken over.
    """

    def __init__(self, clock: Clock | None, window: int) -> None:
        self.clock = clock
        self.seconds: deque[float] = deque(maxlen=window)
        self._last: Any = None
        self._pairs: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """The next step starts now: at the start of a run, or after a pause that is not the step's."""
        if self.clock is not None:
            self._last = self.clock.mark()

    def step_ended(self) -> None:
        if self.clock is None or self._last is None:
            return
        mark = self.clock.mark()
        self._pairs.append((self._last, mark))
        self._last = mark

    def take(self) -> list[tuple[Any, Any]]:
        """The marks of the steps since the last call."""
        pairs, self._pairs = self._pairs, []
        return pairs

    def collect(self, pairs: list[tuple[Any, Any]]) -> list[float]:
        """Once the device has passed ``pairs``: turns them into seconds, one for each step."""
        seconds = [self.clock.seconds(first, second) for first, second in pairs] if self.clock is not None else []
        self.seconds += seconds
        return seconds

    def forget(self) -> None:
        """Leaves out everything so far: warm-up."""
        self._pairs = []
        self.seconds.clear()


def percentiles(seconds: Sequence[float]) -> dict[int, float]:
    """p50, p95, p99 in the unit given, interpolated; empty without values."""
    if not seconds:
        return {}
    # on a CPU, where a reading comes on top of the steps, numpy takes twice as long for so few; a single value has no quantiles
    cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 99
    return {percent: cuts[percent - 1] for percent in PERCENTILES}
