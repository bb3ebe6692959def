"""Records losses and speed, and is the only callback that makes the CPU wait for the device in ordinary steps.

Every ``log_every_n_steps`` steps it averages the buffered losses over the ranks and collects what each rank measured (one
all-reduce), reads them (one wait), and logs. Between two readings nothing waits: losses stay on the device.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor

from lit_gpt_dist.callbacks.clock import clock_for
from lit_gpt_dist.callbacks.exchange import exchange
from lit_gpt_dist.callbacks.memory import PeakMemory
from lit_gpt_dist.callbacks.notices import Once
from lit_gpt_dist.callbacks.step_times import StepTimes, percentiles
from lit_gpt_dist.callbacks.utilization import no_mfu_reason, utilization
from lit_gpt_dist.errors import RunStopped

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
    peak_gib: float | None  # device memory allocated at most since the last reading, this rank; None on a CPU


class Pause(NamedTuple):
    """When it began, and how many seconds of pauses the run had had by then."""

    began: float
    paused_before: float


class Part(Protocol):
    """Something that takes part in readings without a collective of its own."""

    def measure(self, trainer: pl.Trainer, module: Any) -> Sequence[float | Tensor]:
        """This rank's numbers since the last reading; on every rank as many. Scalars may stay on the device."""
        ...

    def report(self, trainer: pl.Trainer, module: Any, rows: list[list[float]]) -> dict[str, float]:
        """What to log, from the numbers of all ranks."""
        ...


class StepRecorder(pl.Callback):
    """Keeps the loss of every step, and the time steps take without warm-up, validation and saving.

    Args:
        window: steps that percentiles of the step time are taken over.
        parts: what else takes part in a reading.

    Attributes:
        losses: mean over all ranks of each step since ``start``, up to the last reading.
        start: step at which this run began (0, or that of the checkpoint).
        latest: the last reading.
        timed_steps, timed_seconds: what the speed of the run is computed from.
        paused_seconds: time spent validating, saving and compiling, by kind.
        tokens: seen by the model, earlier parts of a resumed run included.
    """

    def __init__(self, window: int = 500, parts: Sequence[Part] = ()) -> None:
        self.window = window
        self.parts = list(parts)
        self.losses: list[float] = []
        self.start = 0
        self.latest: Reading | None = None
        self.timed_steps = 0
        self.timed_seconds = 0.0
        self.paused_seconds: dict[str, float] = {}
        self.tokens = 0
        self.started_at = time.perf_counter()
        self.memory = PeakMemory()
        self.times = StepTimes(None, window)
        self._once = Once()
        self._buffer: Tensor | None = None
        self._filled = 0  # losses not read yet
        self._steps = 0  # since the clock was started
        self._mark = 0.0
        self._paused_since_mark = 0.0
        self._warmup_until = 0

    # ---- Lightning's hooks ----------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.start = trainer.global_step
        planned = trainer.max_steps - self.start
        self._warmup_until = self.start + max(1, min(10, planned // 5))
        self.memory.begin(module.device)
        self.times = StepTimes(clock_for(module.device), self.window)
        self.started_at = time.perf_counter()
        self._start_clock()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        self._keep(module.step_loss, trainer.log_every_n_steps)
        self.times.step_ended()
        self.tokens += tokens_per_step(trainer, module)
        self._steps += 1
        if step % trainer.log_every_n_steps == 0 or step == trainer.max_steps:
            self._read(trainer, module, timed=step > self._warmup_until)
        if step == self._warmup_until:
            module.step_loss.item()  # waits for the device: what is warm-up ends here
            self.times.forget()
            self._start_clock()

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        if self._filled:  # stopped between two readings, at the same step on all ranks
            self._read(trainer, module, timed=False)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        if self._filled and isinstance(exception, RunStopped):
            self._read(trainer, module, timed=False)

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._validation_pause = self.pause_began()

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        log_metrics(trainer, values, trainer.global_step)
        self.pause_ended("validation", self._validation_pause)

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens = int(state_dict["tokens"])

    # ---- for other callbacks --------------------------------------------------------------------------------------

    def pause_began(self) -> "Pause":
        """Something that is not training begins. Pauses may lie within each other."""
        return Pause(time.perf_counter(), sum(self.paused_seconds.values()))

    def pause_ended(self, kind: str, pause: "Pause") -> None:
        """Takes the time since ``pause`` out of the speed, less what pauses within it have taken out already."""
        within = sum(self.paused_seconds.values()) - pause.paused_before
        seconds = time.perf_counter() - pause.began - within
        self.paused_seconds[kind] = self.paused_seconds.get(kind, 0.0) + seconds
        self._paused_since_mark += seconds
        self.times.begin()

    def rewind(self, trainer: pl.Trainer, module: Any, steps: int) -> None:
        """The run went back so many steps: their losses are not part of the curve."""
        unread = min(steps, self._filled)
        kept = len(self.losses) - (steps - unread)
        self.losses = self.losses[: max(0, kept)]
        self.tokens -= steps * tokens_per_step(trainer, module)
        self._filled -= unread
        self._start_clock()

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
        rows = [part.measure(trainer, module) for part in self.parts]
        means, table = exchange(trainer.strategy, self._buffer[: self._filled], [n for row in rows for n in row])
        self.losses += means
        seconds, steps = time.perf_counter() - self._mark - self._paused_since_mark, self._steps
        self.times.collect()
        self._filled = 0
        self._start_clock()  # what follows costs time and counts in the next reading
        if timed:
            self.timed_steps += steps
            self.timed_seconds += seconds
        self.latest = self._reading(trainer, module, seconds / steps if timed and steps else None)
        values = self._scalars(trainer, module)
        for part, row in zip(self.parts, rows, strict=True):
            mine = [line[: len(row)] for line in table]
            table = [line[len(row) :] for line in table]
            values |= part.report(trainer, module, mine)
        log_metrics(trainer, values, trainer.global_step)

    def _reading(self, trainer: pl.Trainer, module: Any, step_seconds: float | None) -> Reading:
        return Reading(
            step=trainer.global_step,
            loss=self.losses[-1],
            lr=last_learning_rate(trainer),
            gradient_norm=float(module.gradient_norm) if module.gradient_norm is not None else None,
            tokens_per_second=tokens_per_step(trainer, module) / step_seconds if step_seconds else None,
            step_seconds=step_seconds,
            peak_gib=self.memory.read_peak_gib(),
        )

    def _scalars(self, trainer: pl.Trainer, module: Any) -> dict[str, float]:
        assert self.latest is not None
        rate = self.latest.tokens_per_second
        used = utilization(trainer, module, rate)
        if rate and used["mfu"] is None:
            self._once.tell(trainer, f"no MFU: {no_mfu_reason(trainer, module)}", "mfu")
        optional = {
            **as_scalars(self.latest),
            "train/tokens": self.tokens,
            "speed/tokens_per_second_per_device": rate and rate / trainer.world_size,
            "speed/mfu_palm": used["mfu"],
            "speed/mfu_half_attention": used["mfu_half_attention"],
        }
        values = {name: float(value) for name, value in optional.items() if value is not None}
        for percent, seconds in percentiles(self.times.seconds).items():
            values[f"speed/step_ms_p{percent}"] = 1000 * seconds
        return values | self._goodput()

    def _goodput(self) -> dict[str, float]:
        """Which share of the time since the first step was training, and which was not, by kind."""
        wall = time.perf_counter() - self.started_at
        shares = {f"speed/run_share_{kind}": seconds / wall for kind, seconds in self.paused_seconds.items()}
        return {"speed/goodput": max(0.0, 1 - sum(shares.values())), **shares}

    def _start_clock(self) -> None:
        self._steps = 0
        self._paused_since_mark = 0.0
        self._mark = time.perf_counter()
        self.times.begin()


def tokens_per_step(trainer: Any, module: Any) -> int:
    return trainer.datamodule.tokens_per_step


def as_scalars(reading: Reading) -> dict[str, float | None]:
    """TensorBoard's names for a reading."""
    return {
        "train/loss": reading.loss,
        "train/lr": reading.lr,
        "health/grad_norm": reading.gradient_norm,
        "speed/tokens_per_second": reading.tokens_per_second,
        "speed/step_ms": reading.step_seconds and 1000 * reading.step_seconds,
        "memory/peak_gib": reading.peak_gib,
    }


def last_learning_rate(trainer: pl.Trainer) -> float:
    """The rate the step just taken was taken with: the schedule has moved on to the next step's already."""
    scheduler: Any = trainer.lr_scheduler_configs[0].scheduler
    return scheduler.base_lrs[0] * scheduler.lr_lambdas[0](trainer.global_step - 1)


def log_metrics(trainer: pl.Trainer, values: dict[str, float], step: int) -> None:
    """To every logger (rank 0's write), at the optimizer step, which is what Lightning's own counter lags by one."""
    for logger in trainer.loggers:
        logger.log_metrics(values, step=step)


def find_recorder(trainer: pl.Trainer) -> StepRecorder | None:
    return next((callback for callback in trainer.callbacks if isinstance(callback, StepRecorder)), None)  # type: ignore[attr-defined]


@contextmanager
def not_training(trainer: pl.Trainer, kind: str) -> Generator[None, None, None]:
    """Around work inside ``fit`` that is not training (saving, sampling): its time leaves the speed alone."""
    recorder = find_recorder(trainer)
    pause = recorder.pause_began() if recorder else None
    try:
        yield
    finally:
        if recorder and pause:
            recorder.pause_ended(kind, pause)
