"""Lightning strategies: one device, and what the distributed ones share. They place the model and say who shares data; the rest
is Lightning's. ``replicated.py`` has DDP, ``sharded.py`` FSDP2 and HSDP.

All of them agree on five things the rest of the application relies on: ``data_rank`` and ``data_ranks``; ``build_context``,
``prepare``, ``gathers_blocks`` and ``place`` for the model; ``compute_dtype``; ``block_backward_sync`` for all micro-batches of
a step but the last, and ``after_backward``; and the checkpoint folder of ``FolderCheckpoints``.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.strategy import Strategy
from torch import Tensor

from lit_gpt_dist.checkpoint.strategy import FolderCheckpoints
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.gpt import GPT
from lit_gpt_dist.model.init import initialize
from lit_gpt_dist.parallel.graph import WARMUP_STEPS
from lit_gpt_dist.parallel.mesh import build_mesh, data_coordinate
from lit_gpt_dist.parallel.patience import patience
from lit_gpt_dist.parallel.restart import join_after_restart, restarts

GRACE_SECONDS = 20  # the process group's own timeout comes after callbacks/hangs.py, which says more


class ModelCasts(Precision):
    """Says that the model keeps fp32 weights and computes in bf16; casts nothing itself.

    Autocast instead would keep the activations between products in fp32, and FSDP2's policy does not: bf16 would then
    mean two things.
    """

    precision = "bf16-mixed"


class DirectSteps(Strategy):
    """Calls the module's steps themselves instead of routing them through the wrapped model's forward.

    Lightning sends ``training_step`` through DDP's forward, which allows one backward per step. Here a step holds all its
    micro-batches, and the module calls ``strategy.model`` once for each.
    """

    gradients_in_buckets = False  # between steps, as parts of larger tensors
    shards_weights = False  # each rank holds a part of each parameter
    warmup_steps = WARMUP_STEPS  # taken one by one before one is recorded
    gathers_blocks = False  # their weights come and go block by block, so that nothing larger can be compiled

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*args, **kwargs)

    def take_step(self, windows: Tensor) -> Tensor:
        assert self.lightning_module is not None
        with self.precision_plugin.train_step_context():
            return self.lightning_module.take_step(windows)  # type: ignore[operator]

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self.precision_plugin.test_step_context():
            return self.lightning_module.test_step(*args, **kwargs)

    @property
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        """Autocast gives way: under ``bf16-mixed`` the model itself casts, the same under every strategy."""
        if isinstance(plugin, MixedPrecision) and plugin.precision == "bf16-mixed":
            plugin = ModelCasts()
        self._precision_plugin = plugin

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Type of activations; None: that of the weights."""
        return torch.bfloat16 if isinstance(self.precision_plugin, ModelCasts) else None

    def build_context(self) -> AbstractContextManager:
        """Where the GPT is built: here, straight on this rank's device."""
        return self.root_device

    def prepare(self, model: GPT) -> None:
        """Decides what depends on the built ``model``, before it is compiled."""

    def place(self, model: GPT, seed: int) -> None:
        """Gives the built ``model`` its place on the devices and its initial weights."""
        initialize(model, seed, self.assign)

    def assign(self, parameter: Tensor, value: Tensor) -> None:
        """Puts a full CPU ``value`` into a placed parameter."""
        parameter.copy_(value)

    def after_backward(self) -> None:
        """Called when a micro-batch's backward is over: averages its gradients where that has not been done meanwhile."""

    def before_recorded_step(self) -> None:
        """Called before a step is recorded, and before each replay, which changes the weights."""


class SingleDevice(FolderCheckpoints, DirectSteps, SingleDeviceStrategy):
    """One device, one process."""

    name = "single"
    data_rank, data_ranks = 0, 1

    def __init__(self) -> None:
        super().__init__()

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Lightning tells a strategy its devices through this name; ``SingleDeviceStrategy`` wants them beforehand."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices and len(devices) > 1:
            raise UserError(f"strategy single uses one device, but {len(devices)} were asked for; use ddp or fsdp2")
        self._root_device = devices[0] if devices else torch.device("cpu")

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        yield  # nothing to synchronise


def check_timeout(seconds: float) -> None:
    """
    Raises:
        UserError: no time for a collective.
    """
    if not seconds > 0:
        raise UserError(f"timeout_seconds {seconds:g} must be above 0; give for example 600")


class MeshStrategy(FolderCheckpoints, DirectSteps, DDPStrategy):
    """One process a device over a mesh: what DDP and FSDP2 share.

    Launching, process groups and collectives are ``DDPStrategy``'s. Lightning's ``ModelParallelStrategy`` is not used: its
    mesh has two fixed axes, and it refuses ``64-true``, in which equality is proven.
    """

    name = "mesh"

    def __init__(self, no_sync: bool = True, timeout_seconds: float = 600, **ddp_options: Any) -> None:
        super().__init__(timeout=timedelta(seconds=timeout_seconds + GRACE_SECONDS), **ddp_options)
        self.timeout_seconds = timeout_seconds
        self.no_sync = no_sync

    def setup_distributed(self) -> None:
        with patience(self.global_rank, self.world_size, self.timeout_seconds + GRACE_SECONDS):
            if restarts():
                join_after_restart(self._get_process_group_backend(), self.root_device, self._timeout)
            super().setup_distributed()  # leaves a group that exists as it is

    def check(self) -> None:
        """Before there is a process group; not when the strategy is made: the command line would wrap the error in its own."""
        check_timeout(self.timeout_seconds)

    def setup_environment(self) -> None:
        self.check()
        super().setup_environment()
        self.mesh = build_mesh(self.root_device.type, **self.degrees())

    def degrees(self) -> dict[str, int]:
        """The mesh's axes and how many ranks each has."""
        raise NotImplementedError

    @property
    def data_rank(self) -> int:
        return data_coordinate(self.mesh)[0]

    @property
    def data_ranks(self) -> int:
        return data_coordinate(self.mesh)[1]
