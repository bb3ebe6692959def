"""Lightning strategies: one device, DDP, FSDP2. They place the model and say who shares data; the rest is Lightning's.

All three agree on five things the rest of the application relies on: ``data_rank`` and ``data_ranks``; ``build_context``
and ``place`` for the model; ``compute_dtype``; ``block_backward_sync`` for all micro-batches of a step but the last; and the
checkpoint folder of ``FolderCheckpoints``.
"""

import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lit_gpt_dist.checkpoint.strategy import FolderCheckpoints
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.gpt import GPT
from lit_gpt_dist.model.init import initialize
from lit_gpt_dist.parallel import fsdp2
from lit_gpt_dist.parallel.graph import on_side_stream
from lit_gpt_dist.parallel.mesh import build_mesh, data_coordinate
from lit_gpt_dist.parallel.restart import join_after_restart, restarts

WATCHDOG_SECONDS = 0.25  # more than two looks of NCCL's watchdog
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

    def place(self, model: GPT, seed: int) -> None:
        """Gives the built ``model`` its place on the devices and its initial weights."""
        initialize(model, seed, self.assign)

    def assign(self, parameter: Tensor, value: Tensor) -> None:
        """Puts a full CPU ``value`` into a placed parameter."""
        parameter.copy_(value)

    def before_replay(self) -> None:
        """Called before a recorded step changes the weights."""


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


class MeshStrategy(FolderCheckpoints, DirectSteps, DDPStrategy):
    """One process a device over a mesh: what DDP and FSDP2 share.

    Launching, process groups and collectives are ``DDPStrategy``'s. Lightning's ``ModelParallelStrategy`` is not used: its
    mesh has two fixed axes, and it refuses ``64-true``, in which equality is proven.
    """

    name = "mesh"
    axis = "replicate"

    def __init__(self, no_sync: bool = True, timeout_seconds: float = 600, **ddp_options: Any) -> None:
        super().__init__(timeout=timedelta(seconds=timeout_seconds + GRACE_SECONDS), **ddp_options)
        self.timeout_seconds = timeout_seconds
        self.no_sync = no_sync

    def setup_distributed(self) -> None:
        if restarts():
            join_after_restart(self._get_process_group_backend(), self.root_device, self._timeout)
        super().setup_distributed()  # leaves a group that exists as it is

    def setup_environment(self) -> None:
        super().setup_environment()
        self.mesh = build_mesh(self.root_device.type, **{self.axis: self.world_size})

    @property
    def data_rank(self) -> int:
        return data_coordinate(self.mesh)[0]

    @property
    def data_ranks(self) -> int:
        return data_coordinate(self.mesh)[1]


class DDP(MeshStrategy):
    """Every rank holds the whole model; gradients are averaged in buckets while backward runs (Li et al. 2020).

    Args:
        bucket_cap_mb: size of a bucket in MiB; a bucket is sent as soon as its gradients are there.
        static_graph: the same parameters get gradients at every backward; by default where a step has one micro-batch
            (with more, DDP's reducer fails an assertion at the first backward that does not synchronise, torch 2.13).
        gradient_as_bucket_view: gradients live in the buckets, which saves a copy of them.
        no_sync: average once per step; False averages after every micro-batch (to measure what that costs).
        timeout_seconds: a collective that takes longer ends the run.
    """

    name = "ddp"

    def __init__(
        self,
        bucket_cap_mb: float = 25,
        static_graph: bool | None = None,
        gradient_as_bucket_view: bool = True,
        no_sync: bool = True,
        timeout_seconds: float = 600,
    ) -> None:
        super().__init__(
            no_sync,
            timeout_seconds,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            broadcast_buffers=False,  # the model has none
        )
        self.bucket_cap_mb = bucket_cap_mb
        self.static_graph = static_graph

    def setup(self, trainer: pl.Trainer) -> None:
        one_backward = trainer.datamodule.plan.accumulate == 1  # type: ignore[attr-defined]
        self._ddp_kwargs["static_graph"] = one_backward if self.static_graph is None else self.static_graph
        super().setup(trainer)

    def _setup_model(self, model: nn.Module) -> nn.parallel.DistributedDataParallel:
        """On the stream that its steps will run on: DDP keeps autograd nodes, and those keep the stream they were made on.

        Lightning builds it on a stream of its own, which makes every backward wait for that one.
        """
        device_ids = self.determine_ddp_device_ids()
        recorded = getattr(model, "graph_wanted", False)
        self._steps_to_rebuild = 2 if self._ddp_kwargs["static_graph"] else 1
        with on_side_stream(self.root_device) if recorded else nullcontext():
            return nn.parallel.DistributedDataParallel(model, device_ids=device_ids, **self._ddp_kwargs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before the step in which DDP rebuilds its buckets: lets go of the first one, which holds all gradients.

        NCCL's process group keeps what it reduced until its watchdog, which looks every 100 ms, finds the collective done
        and another one comes (torch 2.11). Both sets of buckets at once would be the peak of the whole run.
        """
        if self._steps_to_rebuild == 0 and self.root_device.type == "cuda":
            torch.cuda.synchronize(self.root_device)
            time.sleep(WATCHDOG_SECONDS)
            torch.distributed.all_reduce(torch.zeros(1, device=self.root_device))
        self._steps_to_rebuild -= 1

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        assert isinstance(self.model, nn.parallel.DistributedDataParallel)
        with self.model.no_sync() if self.no_sync else nullcontext():
            yield


class FSDP2(MeshStrategy):
    """Weights, gradients and optimizer state in shards, one unit per block (``parallel/fsdp2.py``).

    Args:
        reshard_after_forward: give a block's gathered weights back after its forward and gather them again for backward.
        no_sync: reduce once per step; False reduces after every micro-batch (to measure what that costs).
        timeout_seconds: a collective that takes longer ends the run.
    """

    name = "fsdp2"
    axis = "shard"

    def __init__(self, reshard_after_forward: bool = True, no_sync: bool = True, timeout_seconds: float = 600) -> None:
        super().__init__(no_sync, timeout_seconds)
        self.reshard_after_forward = reshard_after_forward

    def build_context(self) -> AbstractContextManager:
        return torch.device("meta")  # no rank ever holds the whole model

    def place(self, model: GPT, seed: int) -> None:
        if self.precision_plugin.precision == "16-mixed":
            raise UserError("precision 16-mixed does not run under fsdp2; use bf16-mixed, 32-true or 64-true")
        policy = fsdp2.precision_policy(str(self.precision_plugin.precision))
        fsdp2.shard(model, self.mesh, policy, self.reshard_after_forward)
        model.to_empty(device=self.root_device)
        initialize(model, seed, self.assign)

    def assign(self, parameter: Tensor, value: Tensor) -> None:
        fsdp2.assign_shard(parameter, value)

    def before_replay(self) -> None:
        fsdp2.release(self.lightning_module.model)  # type: ignore[union-attr,arg-type]

    def setup(self, trainer: pl.Trainer) -> None:
        """As ``DDPStrategy.setup``, without wrapping: ``place`` has sharded the model already."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model_to_device()  # what is not the GPT's: metrics
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Lightning's own version knows only DDP's wrapper and would let FSDP2 reduce every micro-batch."""
        gpt = self.lightning_module.model  # type: ignore[union-attr]
        fsdp2.set_gradient_sync(gpt, not self.no_sync)  # type: ignore[arg-type]
        try:
            yield
        finally:
            fsdp2.set_gradient_sync(gpt, True)  # type: ignore[arg-type]

    def teardown(self) -> None:
        """As every strategy's, but shards stay on their device: they are not moved to the CPU at the end."""
        self.optimizers = []
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


STRATEGIES: dict[str, type[Strategy]] = {cls.name: cls for cls in (SingleDevice, DDP, FSDP2)}

for _name, _class in STRATEGIES.items():  # so that Trainer(strategy="fsdp2") works in anybody's script
    StrategyRegistry.register(_name, _class, description=_class.__doc__ or "", override=True)
