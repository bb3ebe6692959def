"""The terminal while training: one bar on a terminal, plain lines in a log file. Rank 0 alone prints.

Does not synchronise or communicate: it shows the recorder's last reading.
"""

import os
import sys
import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from lit_gpt_dist.callbacks.reading import Reading
from lit_gpt_dist.callbacks.recorder import find_recorder
from lit_gpt_dist.summary import start_lines

SECONDS_BETWEEN = 0.1  # two updates of the bar; a fast model takes dozens of steps in that


class StepBar(ProgressBar):
    """Counts optimizer steps, with loss, validation loss, tokens/s and the time left.

    Args:
        quiet: show nothing while training.
    """

    def __init__(self, quiet: bool = False) -> None:
        super().__init__()
        self.console = Console(highlight=False)
        self.quiet = quiet
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._printed_step = -1
        self._drawn_at = 0.0
        self._validated_at: int | None = None  # the step of the validation loss that is known

    def disable(self) -> None:
        self.quiet = True

    def enable(self) -> None:
        self.quiet = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.quiet:
            return
        try:
            (self._progress.console if self._progress else self.console).print(*args, **kwargs)
        except (BrokenPipeError, SystemExit):  # rich ends the process when whoever read along has gone; the run goes on
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.quiet or not trainer.is_global_zero:
            return
        for line in start_lines(trainer, module):
            self.print(line, soft_wrap=True)
        if not self.console.is_terminal:
            return
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[reading]}"),
            TimeRemainingColumn(),
            console=self.console,
            refresh_per_second=4,
            transient=True,
        )
        self._task = self._progress.add_task("fit", total=trainer.max_steps, completed=trainer.global_step, reading="")
        self._progress.start()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.quiet or not trainer.is_global_zero:
            return
        now = time.monotonic()
        if (
            self._progress is not None
            and now - self._drawn_at < SECONDS_BETWEEN
            and trainer.global_step < trainer.max_steps
        ):
            return
        self._drawn_at = now
        recorder = find_recorder(trainer)
        reading = recorder.latest if recorder else None
        if self._progress is not None and self._task is not None:
            text = describe(reading, *self._validation(trainer)) if reading else "warming up"
            self._progress.update(self._task, completed=trainer.global_step, reading=text)
        elif reading is not None and reading.step != self._printed_step:
            self._printed_step = reading.step
            left = time_left(reading, trainer.max_steps)
            text = describe(reading, *self._validation(trainer))
            self.print(f"step {reading.step}/{trainer.max_steps}  {text}{left}", soft_wrap=True)

    def _validation(self, trainer: pl.Trainer) -> tuple[float | None, int | None]:
        """The last validation loss and its step."""
        loss = trainer.callback_metrics.get("val/loss")
        return None if loss is None else float(loss), self._validated_at

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self._validated_at = trainer.global_step

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._close()

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def describe(reading: Reading, val_loss: float | None, val_step: int | None) -> str:
    parts = [f"loss {reading.loss:.4f}"]
    if val_loss is not None:
        parts.append(f"val {val_loss:.4f}" + (f" (step {val_step})" if val_step not in (None, reading.step) else ""))
    if reading.tokens_per_second is not None:
        parts.append(f"{reading.tokens_per_second:,.0f} tok/s")
    return "  ".join(parts)


def time_left(reading: Reading, max_steps: int) -> str:
    if reading.step_seconds is None:
        return ""
    return f"  left {timedelta(seconds=round((max_steps - reading.step) * reading.step_seconds))}"
