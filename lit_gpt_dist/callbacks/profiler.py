"""Traces chosen optimizer steps on every rank with ``torch.profiler``, for ``lit-gpt-dist trace``. Free outside those steps."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from lit_gpt_dist.callbacks.notices import tell
from lit_gpt_dist.callbacks.options import parse_profile
from lit_gpt_dist.callbacks.recorder import not_training

FOLDER = "trace"
WARMED_UP = 11  # first step traced where only a number of steps is asked for
DATA, STEP = "lit_gpt_dist.data", "lit_gpt_dist.step"  # ranges: fetching the batch; everything up to the update's end


class StepProfiler(pl.Callback):
    """Writes ``<run>/trace/rank-R.json.gz``.

    Args:
        steps: ``A-B``, steps counted from 1, or ``N`` for N steps once the run is warm.
    """

    def __init__(self, steps: str) -> None:
        self.steps = steps
        parse_profile(steps, 1)
        self._profile: Any = None
        self._range: Any = None
        self._first = self._last = 0

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._first, self._last = parse_profile(self.steps, trainer.global_step + WARMED_UP)
        if missed := beyond_the_run((self._first, self._last), trainer.global_step, trainer.max_steps):
            tell(trainer, f"warning: --profile {self.steps}: {missed}")
        trainer.fit_loop.epoch_loop.watchers += (lambda: self._begin(DATA),)  # type: ignore[attr-defined]
        self._start_if_due(trainer, module)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._begin(STEP)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._end()
        if self._profile is None:
            self._start_if_due(trainer, module)
            return
        with not_training(trainer, "profiling"):
            self._profile.step()  # after the last step it collects and writes
        if trainer.global_step >= self._last or trainer.global_step >= trainer.max_steps:
            self._finish(trainer)

    def teardown(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        self._end()
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _start_if_due(self, trainer: pl.Trainer, module: Any) -> None:
        """One step early: the first step under a profiler is not like the others, and is thrown away."""
        lead = 1 if self._first > trainer.global_step + 1 else 0
        if trainer.global_step + 1 + lead != self._first or self._profile is not None:
            return
        on_gpu = module.device.type == "cuda"
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            schedule=schedule(wait=0, warmup=lead, active=self._last - self._first + 1, repeat=1),
            on_trace_ready=lambda finished: self._write(trainer, finished),
        )
        with not_training(trainer, "profiling"):
            self._profile.start()

    def _begin(self, name: str) -> None:
        self._end()
        if self._profile is not None:
            self._range = record_function(name)
            self._range.__enter__()

    def _end(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _finish(self, trainer: pl.Trainer) -> None:
        with not_training(trainer, "profiling"):
            self._profile.stop()
        self._profile = None
        folder = trainer.run_dir / FOLDER  # type: ignore[attr-defined]
        last = min(self._last, trainer.global_step)
        tell(trainer, f"traced steps {self._first} to {last}: lit-gpt-dist trace {folder}")

    def _write(self, trainer: Any, finished: Any) -> None:
        folder = Path(trainer.run_dir) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(folder / f"rank-{trainer.global_rank}.json.gz"))


def beyond_the_run(span: tuple[int, int], start: int, max_steps: int) -> str | None:
    """What to say where a run from ``start`` on does not take all steps of ``span``; None: it does.

    Args:
        span: first and last step to trace, counted from 1.
        max_steps: the run's last step; -1: it has none.
    """
    first, last = span
    if first > start and (last <= max_steps or max_steps < 0):
        return None
    if start < first <= max_steps:
        return f"the run ends after step {max_steps}; steps {first} to {max_steps} are traced"
    example = f"{max(start + 1, max_steps - 2)}-{max_steps}"
    return (
        f"steps {first} to {last} are not all among this run's {start + 1} to {max_steps}, and nothing is traced; "
        f"use a span within them, for example --profile {example}"
    )
