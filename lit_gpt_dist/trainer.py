"""Lightning's Trainer where it needs a little more: our strategies behind ``auto``, a run folder, no sync per step."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_gpt_dist.doctor.devices import joined_by_nvlink
from lit_gpt_dist.module import GPTModule
from lit_gpt_dist.parallel import FSDP2, SingleDevice

NOTHING = nullcontext()


PARTS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
# a module with one of its own is driven by Lightning's own loop
STEP_METHODS = (
    *PARTS, "training_step", "on_train_batch_start", "optimizer_step", "backward", "optimizer_zero_grad", "lr_scheduler_step",
    "configure_gradient_clipping", "configure_optimizers",
)  # fmt: skip
TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
Hooks = list[Callable[..., Any]]


class StepLoop(_TrainingEpochLoop):
    """The training loop with as little between two steps as can be.

    A step of a small model takes a GPU under two milliseconds, and Lightning 2.6 some one and a half of the host: it shares a
    SIGTERM flag by a broadcast and an ``item()`` before every batch, for which the CPU waits (``callbacks/signals.py`` agrees on
    signals in its own way); it asks every callback for every hook, overridden or not; and it goes through a step part by
    part. Here a step makes the calls of ``_TrainingEpochLoop.advance`` in its order, less those that do nothing, and is a
    single call unless somebody wants its parts: a callback that has one of ``PARTS``, and no ``wants_parts`` that is False.
    """

    watchers: tuple[Callable[[], None], ...] = ()  # called before a step's batch is asked for
    _can_validate: bool | None = None  # known while steps are taken

    def on_run_start(self, data_fetcher: Any) -> None:
        super().on_run_start(data_fetcher)
        module = self.trainer.lightning_module
        self._can_validate = self.val_loop._data_source.is_defined() and is_overridden("validation_step", module)
        self._on_start = overridden(self.trainer, "on_train_batch_start")
        self._on_end = overridden(self.trainer, "on_train_batch_end")
        self._leave_to_lightning = why_leave_to_lightning(self.trainer) is not None
        self._part_callbacks = part_callbacks(self.trainer)
        self._transfers = transfers(self.trainer)

    def why_in_parts(self) -> str | None:
        """Why no step of the run can be a single call, or None."""
        always = [callback for callback in part_callbacks(self.trainer) if not hasattr(callback, "wants_parts")]
        if always:
            return f"{type(always[0]).__name__} has hooks inside a step"
        return why_leave_to_lightning(self.trainer)

    def _parts_wanted(self, module: Any) -> bool:
        if module.graph_wanted:  # its first steps, before there is something to replay, are Lightning's
            return not module.in_graph
        return any(getattr(callback, "wants_parts", True) for callback in self._part_callbacks)

    def advance(self, data_fetcher: Any) -> None:
        for watcher in self.watchers:
            watcher()
        trainer: Any = self.trainer
        module, strategy = trainer.lightning_module, trainer.strategy
        # at a validation's step the first one after a resume has counters to put right
        if self._leave_to_lightning or (self.restarting and self._should_check_val_fx(data_fetcher)):
            super().advance(data_fetcher)
            return
        self.val_loop.restarting = False
        batch, index = self._next_batch(data_fetcher)
        trainer._logger_connector.on_batch_start(batch)
        call_hooks(self._on_start, module, "on_train_batch_start", batch, index)
        strategy.on_train_batch_start(batch, index)
        self.batch_progress.increment_started()
        if self._parts_wanted(module):
            kwargs = OrderedDict(batch=batch, batch_idx=index)
            self.automatic_optimization.run(trainer.optimizers[0], index, kwargs)
            outputs = {"loss": module.step_loss}  # the step's, as below: Lightning's is the last micro-batch's share
        else:
            outputs = self._take_step(strategy, batch)
        self.batch_progress.increment_processed()
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        call_hooks(self._on_end, module, "on_train_batch_end", outputs, batch, index)
        trainer._logger_connector.on_batch_end()
        self.batch_progress.increment_completed()
        trainer._logger_connector.update_train_step_metrics()

    def _next_batch(self, data_fetcher: Any) -> tuple[Any, int]:
        """On the device, and its number."""
        trainer: Any = self.trainer
        batch, _, _ = next(data_fetcher)
        index = self.batch_idx + 1
        self.batch_progress.is_last_batch = data_fetcher.done
        batch = trainer.precision_plugin.convert_input(batch)
        for transfer in self._transfers:
            batch = transfer(batch)
        self.batch_progress.increment_ready()
        return batch, index

    def _take_step(self, strategy: Any, batch: Any) -> dict[str, Any]:
        """A whole optimizer step in one call; the count of optimizer steps is the run's global step."""
        progress = self.automatic_optimization.optim_progress.optimizer.step
        progress.increment_ready()
        loss = strategy.take_step(batch)
        progress.increment_completed()
        return {"loss": loss}

    def _should_check_val_epoch(self) -> bool:
        """As Lightning's, which looks through the module's and the data's classes each time, several times a step."""
        if self._can_validate is None:
            return bool(super()._should_check_val_epoch())
        every = self.trainer.check_val_every_n_epoch
        now = every is None or (self.trainer.current_epoch + 1) % every == 0
        return self._can_validate and self.trainer.limit_val_batches > 0 and now  # which a callback may change

    def teardown(self) -> None:
        self._can_validate = None
        super().teardown()

    def _broadcast_sigterm_tensor(self) -> None:
        pass


def why_leave_to_lightning(trainer: Any) -> str | None:
    """What is not this project's own way through a step, or None."""
    module, plugin, profiler = trainer.lightning_module, trainer.precision_plugin, trainer.profiler
    if not isinstance(module, GPTModule):
        return f"{type(module).__name__} is not a GPTModule"
    for name in STEP_METHODS:
        if getattr(type(module), name) is not getattr(GPTModule, name):
            return f"{type(module).__name__} has its own {name}"
    if not module.automatic_optimization:
        return "optimization is manual"
    if any(getattr(type(plugin), name) is not getattr(Precision, name) for name in ("optimizer_step", "backward")):
        return f"precision {plugin.precision} has its own way through a step"
    if not isinstance(profiler, NoProfiler):
        return f"{type(profiler).__name__} wants to see the parts of a step"
    return None


def part_callbacks(trainer: Any) -> list[pl.Callback]:
    """Those with hooks inside a step."""
    return [
        callback for callback in trainer.callbacks if any(is_overridden(name, callback, pl.Callback) for name in PARTS)
    ]


def transfers(trainer: Any) -> Hooks:
    """What brings a batch to the device: the hooks for it, of the module or the data module, that do something."""
    selector, device = trainer._data_connector._datahook_selector, trainer.strategy.root_device
    owners = {name: selector.get_instance(name) for name in TRANSFERS}
    before, move, after = (getattr(owner, name) for name, owner in owners.items())
    does = [is_overridden(name, owner, parent=DataHooks) for name, owner in owners.items()]
    # by position, as Lightning does: a hook may call its arguments as it likes
    found: Hooks = [lambda batch: before(batch, 0)] if does[0] else []
    found.append(lambda batch: move(batch, device, 0))
    return found + ([lambda batch: after(batch, 0)] if does[2] else [])


def overridden(trainer: Any, name: str) -> Hooks:
    """The hook ``name`` of those callbacks that have it, in their order, and then the module's."""
    module = trainer.lightning_module
    hooks: Hooks = [
        partial(getattr(callback, name), trainer, module)
        for callback in trainer.callbacks
        if is_overridden(name, callback, pl.Callback)
    ]
    return hooks + ([getattr(module, name)] if is_overridden(name, module, pl.LightningModule) else [])


def call_hooks(hooks: Hooks, module: Any, name: str, *arguments: Any) -> None:
    """As Lightning does: ``module.log`` asks which hook it is in."""
    before, module._current_fx_name = module._current_fx_name, name
    for hook in hooks:
        hook(*arguments)
    module._current_fx_name = before


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
        if strategy == "auto":
            options = (kwargs.get(name) for name in ("accelerator", "devices", "num_nodes", "precision"))
            strategy = default_strategy(*options)
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


def default_strategy(accelerator: Any, devices: Any, num_nodes: int | None, precision: Any) -> Strategy | str:
    """What ``auto`` means: no distribution for a single device; FSDP2 for GPUs that NVLink joins, in bf16, where it is
    faster than DDP at every size that was measured (docs/performance.md) and takes less memory; else Lightning's choice, DDP.

    Every process of a machine comes to the same, since all see the same cards.
    """
    accelerator, devices, num_nodes = accelerator or "auto", "auto" if devices is None else devices, num_nodes or 1
    if wants_one_device(accelerator, devices, num_nodes):
        return SingleDevice()
    if num_nodes == 1 and on_gpu(accelerator) and precision in ("bf16-mixed", "bf16") and joined_by_nvlink():
        return FSDP2()
    return "auto"


def on_gpu(accelerator: Any) -> bool:
    return accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())


def wants_one_device(accelerator: Any, devices: Any, num_nodes: int) -> bool:
    """Whether these Trainer options come to a single device, for which ``auto`` means no distribution at all."""
    if num_nodes > 1:
        return False
    if devices in ("auto", -1, "-1"):
        return not on_gpu(accelerator) or torch.cuda.device_count() <= 1
    if isinstance(devices, str):
        return devices.strip() == "1" or ("," in devices and len([d for d in devices.split(",") if d.strip()]) == 1)
    if isinstance(devices, int):
        return devices == 1
    return len(devices) == 1
