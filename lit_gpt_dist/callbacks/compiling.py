"""Time that ``torch.compile`` takes inside training, which is not training. Does nothing where nothing is compiled."""

import sys
from typing import Any

import lightning.pytorch as pl

from lit_gpt_dist.callbacks.recorder import Pause, find_recorder
from lit_gpt_dist.parallel.graph import recording


class CompileTime(pl.Callback):
    """Tells the recorder how long each compilation took."""

    def __init__(self) -> None:
        self._pause: Pause | None = None
        self._handler: Any = None
        self._trainer: pl.Trainer | None = None

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        if "torch._dynamo" not in sys.modules:  # nothing was wrapped by torch.compile
            return
        from torch._dynamo.callback import callback_handler

        self._trainer, self._handler = trainer, callback_handler
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)

    def _start(self, *_: Any) -> None:
        if recording():  # to read the device's clock, or a reading, would spoil what is being recorded
            return
        recorder = find_recorder(self._trainer) if self._trainer is not None else None
        self._pause = recorder.pause_began() if recorder is not None else None

    def _end(self, *_: Any) -> None:
        recorder = find_recorder(self._trainer) if self._trainer is not None else None
        pause, self._pause = self._pause, None
        if recorder is not None and pause is not None:
            recorder.pause_ended("compile", pause)

    def teardown(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        if self._handler is not None:
            self._handler.remove_start_callback(self._start)
            self._handler.remove_end_callback(self._end)
            self._handler = None
