"""Lightning's Trainer where it needs a little more: our strategies behind ``auto``, a run folder, no sync per step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import RunningStage

from lit_gpt_dist.parallel import SingleDevice

NOTHING = nullcontext()


class StepLoop(_TrainingEpochLoop):
    """The training loop without a broadcast before every batch.

    Lightning 2.6 shares a SIGTERM flag by a broadcast and an ``item()`` per batch, which makes the CPU wait for the GPU at
    each step. ``callbacks/signals.py`` agrees on signals in its own way.
    """

    watchers: tuple[Callable[[], None], ...] = ()  # called before a step's batch is asked for

    def advance(self, data_fetcher: Any) -> None:
        for watcher in self.watchers:
            watcher()
        super().advance(data_fetcher)

    def _broadcast_sigterm_tensor(self) -> None:
        pass


class NoProfiler(PassThroughProfiler):
    """Lightning's default enters a generator about a hundred times a step to do nothing; this one does not."""

    def profile(self, action_name: str) -> AbstractContextManager:  # type: ignore[override]
        return NOTHING


class NoSignals(_SignalConnector):
    """Leaves signals alone. Lightning's handlers talk on the device from within the handler, at no agreed point;
    ``callbacks/signals.py`` watches instead."""

    def register_signal_handlers(self) -> None:
        pass


class Trainer(pl.Trainer):
    """``lightning.Trainer`` with this project's strategies. All its options are Lightning's."""

    def __init__(self, *args: Any, strategy: Strategy | str = "auto", **kwargs: Any) -> None:
        # The class comes first: given text, the command line takes a class path for what it is, and the rest for a name
        if strategy == "auto" and wants_one_device(
            kwargs.get("accelerator", "auto"), kwargs.get("devices", "auto"), kwargs.get("num_nodes", 1)
        ):
            strategy = SingleDevice()
        super().__init__(*args, strategy=strategy, **kwargs)
        self._signal_connector = NoSignals(self)
        self.fit_loop.epoch_loop = StepLoop(self, self.min_steps, self.max_steps)
        if type(self.profiler) is PassThroughProfiler:  # type: ignore[has-type]
            self.profiler = NoProfiler()
        self.run_dir = Path(self.default_root_dir)  # one folder a run: configuration, events, checkpoints, weights

    @property
    def training(self) -> bool:
        """Asked for some fifteen times a step; Lightning compares the stages' texts, letter case aside."""
        return self.state.stage is RunningStage.TRAINING

    @training.setter
    def training(self, value: bool) -> None:
        pl.Trainer.training.fset(self, value)  # type: ignore[attr-defined]


def wants_one_device(accelerator: Any, devices: Any, num_nodes: int) -> bool:
    """Whether these Trainer options come to a single device, for which ``auto`` means no distribution at all."""
    if num_nodes > 1:
        return False
    on_gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())
    if devices in ("auto", -1, "-1"):
        return not on_gpu or torch.cuda.device_count() <= 1
    if isinstance(devices, str):
        return devices.strip() == "1" or ("," in devices and len([d for d in devices.split(",") if d.strip()]) == 1)
    if isinstance(devices, int):
        return devices == 1
    return len(devices) == 1
