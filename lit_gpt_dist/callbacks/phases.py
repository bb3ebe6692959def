"""Takes a step apart every so many steps: data, forward, backward, communication not hidden, optimizer.

Marks the device's timeline (CUDA events, or the host's clock on a CPU) in sampled steps only, and never waits: the marks are
read at the next reading. Each rank's parts travel in the reading's one all-reduce and show which rank holds the others up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from lit_gpt_dist.callbacks.clock import Clock, clock_for
from lit_gpt_dist.callbacks.exposed import ExposedCommunication
from lit_gpt_dist.callbacks.stragglers import StragglerWatch, Work

PHASES = ("data", "forward", "backward", "communication", "optimizer")


@dataclass
class Sample:
    """One step: marks in order, each with the name of the phase that ends there; and the waits for communication."""

    begin: Any
    marks: list[tuple[str, Any]]
    waits: list[tuple[bool, Any, Any]]


def phase_seconds(sample: Sample, clock: Clock) -> dict[str, float]:
    """Seconds by phase. What forward and backward waited for communication is taken out of them."""
    seconds = dict.fromkeys(PHASES, 0.0)
    previous = sample.begin
    for name, mark in sample.marks:
        seconds[name] += clock.seconds(previous, mark)
        previous = mark
    for in_backward, begin, end in sample.waits:
        waited = clock.seconds(begin, end)
        seconds["backward" if in_backward else "forward"] -= waited
        seconds["communication"] += waited
    return {name: max(0.0, value) for name, value in seconds.items()}


class PhaseSampler(pl.Callback):
    """Samples every ``every``-th step, and takes part in readings. Must stand in front of the recorder."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.stragglers = StragglerWatch()
        self._clock: Clock | None = None
        self._exposed: ExposedCommunication | None = None
        self._current: Sample | None = None
        self._samples: list[Sample] = []
        self._trainer: pl.Trainer | None = None

    # ---- marking --------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._trainer, self._clock = trainer, clock_for(module.device)
        if self._clock is None:
            return
        self._exposed = ExposedCommunication(self._clock)
        several = trainer.world_size > 1
        sharded = trainer.strategy.shards_weights  # type: ignore[attr-defined]
        self._exposed.install(module, replicated=several and not sharded, sharded=several and sharded)
        trainer.fit_loop.epoch_loop.watchers += (self._on_step_begin,)  # type: ignore[attr-defined]
        self.stragglers.begin(trainer, module)

    def _on_step_begin(self) -> None:
        assert self._trainer is not None
        self._current = None
        if self._trainer.lightning_module.in_graph:  # type: ignore[attr-defined]  # a replay has no parts to mark
            return
        if (self._trainer.global_step + 1) % self.every == 0 and self._clock and self._exposed:
            self._current = Sample(self._clock.mark(), [], [])
            self._exposed.begin()

    @property
    def wants_parts(self) -> bool:
        """Whether the next step is a sampled one."""
        return self._current is not None

    def _mark(self, phase: str) -> Any:
        if self._current is None or self._clock is None:
            return None
        mark = self._clock.mark()
        self._current.marks.append((phase, mark))
        return mark

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._mark("data")

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: Any) -> None:
        if self._mark("forward") is not None and self._exposed is not None:
            self._exposed.in_backward = True

    def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
        mark = self._mark("backward")
        if mark is not None and self._exposed is not None:
            self._exposed.backward_ended(mark)
            self._exposed.in_backward = False

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._mark("optimizer") is None or self._current is None or self._exposed is None:
            return
        self._exposed.active = False
        self._current.waits = self._exposed.pairs
        self._samples.append(self._current)
        self._current = None

    def teardown(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        if self._exposed is not None:
            self._exposed.remove()

    # ---- part of a reading ----------------------------------------------------------------------------------------

    def measure(self, trainer: pl.Trainer, module: Any) -> Sequence[float]:
        """Number of samples, the mean seconds of each phase, and the least seconds of data and of compute.

        The least, since what makes a rank a straggler slows every one of its steps, and a busy machine some.
        """
        if self._samples and module.device.type == "cuda":
            self._samples[-1].marks[-1][1].synchronize()  # the reading waits for more than this at once
        samples, self._samples = self._samples, []
        assert self._clock is not None or not samples
        parts = [phase_seconds(sample, self._clock) for sample in samples if self._clock]
        means = [sum(part[name] for part in parts) / len(parts) if parts else 0.0 for name in PHASES]
        data = min((part["data"] for part in parts), default=0.0)
        compute = min((part["forward"] + part["backward"] for part in parts), default=0.0)
        return [len(parts), *means, data, compute]

    def report(self, trainer: pl.Trainer, module: Any, rows: list[list[float]]) -> dict[str, float]:
        """Shares of rank 0's step, and how far the slowest rank is behind the median."""
        if not all(row[0] for row in rows):
            return {}
        own = dict(zip(PHASES, rows[0][1 : 1 + len(PHASES)], strict=True))
        total = sum(own.values())
        values = {f"speed/step_share_{name}": seconds / total for name, seconds in own.items() if total > 0}
        waited = 1 + PHASES.index("communication")
        work = [Work(data=row[-2], compute=row[-1], waiting=row[waited]) for row in rows]
        return values | self.stragglers.judge(trainer, work)
