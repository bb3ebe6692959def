"""Records losses and speed, and is the only callback that makes the CPU wait for the device in ordinary steps.

Every ``log_every_n_steps`` steps it averages the buffered losses over the ranks (one all-reduce of that many numbers),
reads them (one wait), and logs. Between two readings nothing waits: losses stay on the device.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lit_gpt_dist.callbacks.signals import RunStopped

GIB = 2**30


@dataclass(frozen=True)
class Reading:
    """What was known at one reading."""

    step: int
    loss: float  # of this step, mean over all ranks, nats
    lr: float
    gradient_norm: float | None
    tokens_per_second: float | None  # all ranks, since the last reading; None while warming up
    step_seconds: float | None
    peak_gib: float | None  # device memory allocated at most, this rank; None on a CPU


class StepRecorder(pl.Callback):
    """Keeps the loss of every step, and the time steps take without warm-up, validation and saving.

    Attributes:
        losses: mean over all ranks of each step since ``start``, up to the last reading.
        start: step at which this run began (0, or that of the checkpoint).
        latest: the last reading.
        timed_steps, timed_seconds: what the speed of the run is computed from.
        paused_seconds: time spent validating and saving, by kind.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.start = 0
        self.latest: Reading | None = None
        self.timed_steps = 0
        self.timed_seconds = 0.0
        self.paused_seconds: dict[str, float] = {}
        self.started_at = time.perf_counter()
        self._buffer: Tensor | None = None
        self._filled = 0
        self._mark = 0.0
        self._paused_since_mark = 0.0
        self._warmup_until = 0

    # ---- Lightning's hooks ----------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.start = trainer.global_step
        planned = trainer.max_steps - self.start
        self._warmup_until = self.start + max(1, min(10, planned // 5))
        if module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(module.device)
        self._restart_clock()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        self._keep(module.step_loss, trainer.log_every_n_steps)
        if step == self._warmup_until:
            self._read(trainer, module, timed=False)
        elif step % trainer.log_every_n_steps == 0 or step == trainer.max_steps:
            self._read(trainer, module, timed=step > self._warmup_until)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        if self._filled:  # stopped between two readings, at the same step on all ranks
            self._read(trainer, module, timed=False)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        if self._filled and isinstance(exception, RunStopped):
            self._read(trainer, module, timed=False)

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        log_metrics(trainer, values, trainer.global_step)
        self.exclude("validation", time.perf_counter() - self._validation_began)

    # ---- for other callbacks --------------------------------------------------------------------------------------

    def exclude(self, kind: str, seconds: float) -> None:
        """Takes ``seconds`` just spent on something that is not training out of the speed."""
        self.paused_seconds[kind] = self.paused_seconds.get(kind, 0.0) + seconds
        self._paused_since_mark += seconds

    @property
    def mean_step_seconds(self) -> float | None:
        return self.timed_seconds / self.timed_steps if self.timed_steps else None

    # ---- reading --------------------------------------------------------------------------------------------------

    def _keep(self, loss: Tensor, capacity: int) -> None:
        if self._buffer is None or self._filled == len(self._buffer):
            grown = torch.empty(max(capacity, 2 * self._filled), dtype=loss.dtype, device=loss.device)
            if self._buffer is not None:
                grown[: self._filled] = self._buffer
            self._buffer = grown
        self._buffer[self._filled] = loss
        self._filled += 1

    def _read(self, trainer: pl.Trainer, module: Any, timed: bool) -> None:
        assert self._buffer is not None
        means = trainer.strategy.reduce(self._buffer[: self._filled].clone(), reduce_op="mean")
        self.losses += means.tolist()  # waits for the device
        seconds = time.perf_counter() - self._mark - self._paused_since_mark
        steps = self._filled
        if timed:
            self.timed_steps += steps
            self.timed_seconds += seconds
        tokens = trainer.datamodule.plan.global_batch * module.config.context  # type: ignore[attr-defined]
        self.latest = Reading(
            step=trainer.global_step,
            loss=self.losses[-1],
            lr=last_learning_rate(trainer),
            gradient_norm=float(module.gradient_norm) if module.gradient_norm is not None else None,
            tokens_per_second=tokens * steps / seconds if timed and seconds > 0 else None,
            step_seconds=seconds / steps if timed else None,
            peak_gib=torch.cuda.max_memory_allocated(module.device) / GIB if module.device.type == "cuda" else None,
        )
        log_metrics(trainer, as_scalars(self.latest), trainer.global_step)
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._filled = 0
        self._paused_since_mark = 0.0
        self._mark = time.perf_counter()


def as_scalars(reading: Reading) -> dict[str, float]:
    """TensorBoard's names for a reading; what is not known is left out."""
    named = {
        "train/loss": reading.loss,
        "train/lr": reading.lr,
        "health/grad_norm": reading.gradient_norm,
        "speed/tokens_per_second": reading.tokens_per_second,
        "speed/step_ms": reading.step_seconds and 1000 * reading.step_seconds,
        "memory/peak_gib": reading.peak_gib,
    }
    return {name: value for name, value in named.items() if value is not None}


def last_learning_rate(trainer: pl.Trainer) -> float:
    """The rate the step just taken was taken with: the schedule has moved on to the next step's already."""
    scheduler: Any = trainer.lr_scheduler_configs[0].scheduler
    return scheduler.base_lrs[0] * scheduler.lr_lambdas[0](trainer.global_step - 1)


def log_metrics(trainer: pl.Trainer, values: dict[str, float], step: int) -> None:
    """To every logger (rank 0's write), at the optimizer step, which is what Lightning's own counter lags by one."""
    for logger in trainer.loggers:
        logger.log_metrics(values, step=step)


def find_recorder(trainer: pl.Trainer) -> StepRecorder | None:
    return next((callback for callback in trainer.callbacks if isinstance(callback, StepRecorder)), None)


@contextmanager
def not_training(trainer: pl.Trainer, kind: str) -> Generator[None, None, None]:
    """Around work inside ``fit`` that is not training (saving, sampling): its time leaves the speed alone."""
    began = time.perf_counter()
    try:
        yield
    finally:
        if recorder := find_recorder(trainer):
            recorder.exclude(kind, time.perf_counter() - began)
