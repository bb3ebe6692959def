"""Records losses and speed, and is the only callback that makes the CPU wait for the device in ordinary steps.

Every ``log_every_n_steps`` steps it averages the buffered losses over the ranks and collects what each rank measured (one
all-reduce), and, on a GPU some steps later, reads them (one wait) and logs. In between the device has steps to take, so it
never stands still for a reading. Otherwise nothing waits: losses stay on the device.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch

from lit_gpt_dist.callbacks.clock import HostClock, clock_for, process_seconds
from lit_gpt_dist.callbacks.exchange import Exchange, Unread
from lit_gpt_dist.callbacks.memory import PeakMemory
from lit_gpt_dist.callbacks.notices import Once
from lit_gpt_dist.callbacks.reading import (
    Part,
    Reading,
    Request,
    as_scalars,
    last_learning_rate,
    log_metrics,
    split_columns,
    tokens_per_step,
)
from lit_gpt_dist.callbacks.step_times import StepTimes, percentiles
from lit_gpt_dist.callbacks.utilization import no_mfu_reason, utilization
from lit_gpt_dist.errors import RunStopped

GIB = 2**30


class Pause(NamedTuple):
    """When it began, and how many seconds of pauses the run had had by then."""

    began: float
    paused_before: float


class StepRecorder(pl.Callback):
    """Keeps the loss of every step, and the time steps take without warm-up, validation and saving.

    Args:
        window: steps that percentiles of the step time are taken over.
        parts: what else takes part in a reading.
        lag: steps between beginning a reading and reading; by default half of ``log_every_n_steps``, at most 10, on a GPU,
            and none elsewhere, where nothing runs beside the host.

    Attributes:
        losses: mean over all ranks of each step since ``start``, up to the last reading.
        start: step at which this run began (0, or that of the checkpoint).
        latest: the last reading.
        timed_steps, timed_seconds: what the speed of the run is computed from.
        start_seconds: how old the process was when training began, and when its first step was done.
        paused_seconds: time spent validating, saving and compiling, by kind.
        tokens: seen by the model, earlier parts of a resumed run included.
    """

    def __init__(self, window: int = 500, parts: Sequence[Part] = (), lag: int | None = None) -> None:
        self.window = window
        self.parts = list(parts)
        self.lag = lag
        self.losses: list[float] = []
        self.start = 0
        self.latest: Reading | None = None
        self.timed_steps = 0
        self.timed_seconds = 0.0
        self.start_seconds: dict[str, float] = {}
        self.paused_seconds: dict[str, float] = {}
        self.tokens = 0
        self.started_at = time.perf_counter()
        self.memory = PeakMemory()
        self.times = StepTimes(HostClock(), window)
        self._once = Once()
        self._unread = Unread()  # losses of steps since the last reading
        self._request: Request | None = None
        self._lag = 0
        self._warmed_up_at: int | None = None  # the last step of the warm-up; known after the first one

    # ---- Lightning's hooks ----------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.start = trainer.global_step
        self.losses, self._unread, self._request = [], Unread(), None  # of an earlier fit, perhaps one that failed
        self.start_seconds = {"training": process_seconds()}
        self._warmed_up_at = None
        self.memory.begin(module.device)
        usual = min(10, trainer.log_every_n_steps // 2) if module.device.type == "cuda" else 0  # type: ignore[attr-defined]
        self._lag = usual if self.lag is None else self.lag
        clock = clock_for(module.device)
        # the host's clock is right from reading to reading on any device, but not for a single step
        self.times = StepTimes(clock or HostClock(), self.window if clock else 0)
        self.started_at = time.perf_counter()
        self.times.begin()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        self._unread.append(module.step_loss)
        self.times.step_ended()
        self.tokens += tokens_per_step(trainer, module)
        if self._warmed_up_at is None:
            self._warmed_up_at = max(module.recorded_at or 0, self.start + warmup_steps(trainer.max_steps - self.start))
        if step == self.start + 1:
            module.step_loss.item()  # waits for the device
            self.start_seconds["first_step"] = process_seconds()
        if (trainer.log_every_n_steps and step % trainer.log_every_n_steps == 0) or step == trainer.max_steps:
            self._ask(trainer, module)
        if self._request is not None and (step >= self._request.step + self._lag or step == trainer.max_steps):
            self.finish_reading()
        if step == self._warmed_up_at:
            self.finish_reading()
            if self._lag:
                self._rehearse(trainer, module)
            module.step_loss.item()  # waits for the device: what is warm-up ends here
            self.times.forget()
            self.times.begin()

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._read_the_rest(trainer, module)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        if isinstance(exception, RunStopped):
            self._read_the_rest(trainer, module)

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
        self.finish_reading()
        return Pause(time.perf_counter(), sum(self.paused_seconds.values()))

    def pause_ended(self, kind: str, pause: "Pause") -> None:
        """Takes the time since ``pause`` out of the speed, less what pauses within it have taken out already."""
        within = sum(self.paused_seconds.values()) - pause.paused_before
        seconds = time.perf_counter() - pause.began - within
        self.paused_seconds[kind] = self.paused_seconds.get(kind, 0.0) + seconds
        self.times.begin()

    def rewind(self, trainer: pl.Trainer, module: Any, steps: int) -> None:
        """The run went back so many steps: their losses are not part of the curve."""
        unread = min(steps, len(self._unread))
        kept = len(self.losses) - (steps - unread)
        self.losses = self.losses[: max(0, kept)]
        self.tokens -= steps * tokens_per_step(trainer, module)
        self._unread.drop(unread)
        self.times.take()
        self.times.begin()

    @property
    def mean_step_seconds(self) -> float | None:
        return self.timed_seconds / self.timed_steps if self.timed_steps else None

    # ---- reading --------------------------------------------------------------------------------------------------

    def _ask(self, trainer: pl.Trainer, module: Any) -> None:
        """Begins a reading of everything up to the step just taken. Communicates; waits for nothing."""
        assert self._warmed_up_at is not None
        self.finish_reading()
        norm = 0.0 if module.gradient_norm is None else module.gradient_norm
        rows = [[norm], *(part.measure(trainer, module) for part in self.parts)]
        answer = Exchange(trainer.strategy, self._unread.take(), [number for row in rows for number in row])
        self._request = Request(
            trainer, module, trainer.global_step, self.tokens, last_learning_rate(trainer), self.memory.read_peak_gib(),
            [len(row) for row in rows], answer, self.times.take(), trainer.global_step > self._warmed_up_at,
        )  # fmt: skip

    def _rehearse(self, trainer: pl.Trainer, module: Any) -> None:
        """A reading that nobody sees. A GPU loads a kernel when it is first used and stands still meanwhile, and the readings
        of a short run would be most of its time."""
        for part in self.parts:
            if hasattr(part, "rehearse"):
                part.rehearse(trainer, module)
        loss = module.step_loss
        Exchange(trainer.strategy, torch.stack([loss, loss]), [0.0, loss]).read()

    def finish_reading(self) -> None:
        """Waits for the reading that has begun, if one has, and logs it. At the same step on all ranks."""
        request, self._request = self._request, None
        if request is None:
            return
        means, table = request.answer.read()
        self.losses += means
        seconds = self.times.collect(request.pairs)
        if request.timed:
            self.timed_steps += len(seconds)
            self.timed_seconds += sum(seconds)
        tables = split_columns(table, request.lengths)
        norm = None if request.module.gradient_norm is None else tables[0][0][0]  # the same on every rank
        self.latest = self._reading(request, norm, sum(seconds) / len(seconds) if request.timed and seconds else None)
        values = self._scalars(request)
        for part, rows in zip(self.parts, tables[1:], strict=True):
            values |= part.report(request.trainer, request.module, rows)
        log_metrics(request.trainer, values, request.step)

    def _read_the_rest(self, trainer: pl.Trainer, module: Any) -> None:
        """At the end, which all ranks have come to after the same step."""
        self.finish_reading()
        if len(self._unread):
            self._ask(trainer, module)
            self.finish_reading()

    def _reading(self, request: Request, norm: float | None, step_seconds: float | None) -> Reading:
        return Reading(
            step=request.step,
            loss=self.losses[-1],
            lr=request.lr,
            gradient_norm=norm,
            tokens_per_second=tokens_per_step(request.trainer, request.module) / step_seconds if step_seconds else None,
            step_seconds=step_seconds,
            peak_gib=request.peak_gib,
        )

    def _scalars(self, request: Request) -> dict[str, float]:
        assert self.latest is not None
        trainer, module = request.trainer, request.module
        rate = self.latest.tokens_per_second
        used = utilization(trainer, module, rate)
        if rate and used["mfu"] is None:
            self._once.tell(trainer, f"no MFU: {no_mfu_reason(trainer, module)}", "mfu")
        optional = {
            **as_scalars(self.latest),
            "train/tokens": request.tokens,
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


def warmup_steps(planned: int) -> int:
    """How many steps of a run's ``planned`` are not timed, at least."""
    return max(1, min(10, planned // 5))


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
