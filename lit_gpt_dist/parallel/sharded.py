"""FSDP2 and HSDP: every rank holds a part of the weights, gradients and optimizer state."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lit_gpt_dist.doctor.devices import joined_by_nvlink
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.gpt import GPT
from lit_gpt_dist.model.init import initialize
from lit_gpt_dist.parallel import fsdp2
from lit_gpt_dist.parallel.averaging import mean_of_ranks
from lit_gpt_dist.parallel.compile import one_kernel
from lit_gpt_dist.parallel.strategies import MeshStrategy

Units = Literal["auto", "blocks", "model"]


class FSDP2(MeshStrategy):
    """Weights, gradients and optimizer state in shards (``parallel/fsdp2.py``).

    Args:
        reshard_after_forward: with units of blocks, give a block's gathered weights back after its forward and gather them
            again for backward; False keeps them for all micro-batches of a step: one gather instead of two a micro-batch,
            and the whole model's weights in compute type on every rank.
        no_sync: reduce once per step; False reduces after every micro-batch (to measure what that costs).
        timeout_seconds: a collective that takes longer ends the run.
        units: what is gathered at a time: blocks, each beside the computation of another; or the model at once, before the
            step's first forward, which is then compiled as a whole. auto: the model where its weights take at most a 32nd of
            a card's memory and NVLink joins every two of the cards that this process sees.

    Attributes:
        units: what ``auto`` came to, once the model is built.

    Raises:
        UserError: no such units.
    """

    name = "fsdp2"
    shards_weights = True

    def __init__(
        self,
        reshard_after_forward: bool = True,
        no_sync: bool = True,
        timeout_seconds: float = 600,
        units: Units = "auto",
    ) -> None:
        super().__init__(no_sync, timeout_seconds)
        if units not in get_args(Units):
            raise UserError(f"units {units!r} is not one of {', '.join(get_args(Units))}")
        self.units_option: Units = units
        self.units = "model" if units == "model" else "blocks"
        self.reshard_after_forward = reshard_after_forward

    def degrees(self) -> dict[str, int]:
        return {"shard": self.world_size}

    def build_context(self) -> AbstractContextManager:
        return torch.device("meta")  # no rank ever holds the whole model

    def prepare(self, model: GPT) -> None:
        """Decides ``units`` where that is left open, for all ranks: those that shard differently would wait for each other.

        Raises:
            UserError: an option that means nothing with these units.
        """
        if self.units_option == "model" and not self.reshard_after_forward:
            raise UserError(
                "reshard_after_forward false means nothing with units model, which keeps weights for the step anyway; leave one out"
            )
        if self.units_option == "auto":
            element_bytes = (self.compute_dtype or torch.get_default_dtype()).itemsize
            size = element_bytes * sum(parameter.numel() for parameter in model.parameters())
            nvlink = self.root_device.type == "cuda" and self.shards_within_node and joined_by_nvlink()
            memory = torch.cuda.get_device_properties(self.root_device).total_memory if nvlink else 0
            self.units = self.broadcast("model" if fsdp2.gathers_at_once(size, nvlink, memory) else "blocks")

    @property
    def shards_within_node(self) -> bool:
        return self.num_processes % self.degrees()["shard"] == 0

    @property
    def gathers_blocks(self) -> bool:  # type: ignore[override]
        return self.units == "blocks"

    def sends_as_computed(self, accumulate: int) -> bool:
        """Whether gradients travel in the type they were computed in, which is narrower than the weights': within a machine, and
        where a reduction is of one micro-batch's."""
        return self.compute_dtype is not None and (accumulate == 1 or not self.no_sync) and self.shards_within_node

    def place(self, model: GPT, seed: int) -> None:
        if self.precision_plugin.precision == "16-mixed":
            raise UserError(f"precision 16-mixed does not run under {self.name}; use bf16-mixed, 32-true or 64-true")
        policy = fsdp2.precision_policy(str(self.precision_plugin.precision))
        fsdp2.shard(model, self.mesh, policy, self.reshard_after_forward, self.gathers_blocks)
        model.to_empty(device=self.root_device)
        initialize(model, seed, self.assign)

    def assign(self, parameter: Tensor, value: Tensor) -> None:
        fsdp2.assign_shard(parameter, value)

    def before_recorded_step(self) -> None:
        """A validation leaves weights gathered: a step recorded then would hold no gather, and a replay read old weights."""
        fsdp2.release(self.lightning_module.model)  # type: ignore[union-attr,arg-type]

    def setup(self, trainer: pl.Trainer) -> None:
        """As ``DDPStrategy.setup``, without wrapping: ``place`` has sharded the model already."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model_to_device()  # what is not the GPT's: metrics
        if trainer.state.fn == TrainerFn.FITTING:
            # each time: a module may be fitted again, by another Trainer
            module: Any = self.lightning_module
            narrow = self.sends_as_computed(trainer.datamodule.plan.accumulate)  # type: ignore[attr-defined]
            average = one_kernel(mean_of_ranks, module.compiled, self.root_device)
            fsdp2.send_gradients_in(module.model, self.compute_dtype if narrow else None, average)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Lightning's own version knows only DDP's wrapper and would let FSDP2 reduce every micro-batch."""
        gpt = self.lightning_module.model  # type: ignore[union-attr]
        fsdp2.set_gradient_sync(gpt, not self.no_sync)  # type: ignore[arg-type]
        # as one unit the whole stays gathered for backward, and what comes next is another forward
        fsdp2.set_reshard_after_backward(gpt, self.reshard_after_forward and self.gathers_blocks)  # type: ignore[arg-type]
        try:
            yield
        finally:
            fsdp2.set_gradient_sync(gpt, True)  # type: ignore[arg-type]
            fsdp2.set_reshard_after_backward(gpt, True)  # type: ignore[arg-type]

    def teardown(self) -> None:
        """As every strategy's, but shards stay on their device: they are not moved to the CPU at the end."""
        self.optimizers = []
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


class HSDP(FSDP2):
    """FSDP2 within groups of ranks, each of which holds a whole replica, and gradients averaged across the groups.

    Weights are gathered inside a group only: inside a node, where links are fast. Across groups goes one reduction of a shard.

    Args:
        shard_ranks: ranks of a group; by default those of a node.
        reshard_after_forward: as under FSDP2.
        no_sync: as under FSDP2.
        timeout_seconds: a collective that takes longer ends the run.
        units: as under FSDP2.
    """

    name = "hsdp"

    def __init__(
        self,
        shard_ranks: int | None = None,
        reshard_after_forward: bool = True,
        no_sync: bool = True,
        timeout_seconds: float = 600,
        units: Units = "auto",
    ) -> None:
        super().__init__(reshard_after_forward, no_sync, timeout_seconds, units)
        self.shard_ranks = shard_ranks

    def degrees(self) -> dict[str, int]:
        """
        Raises:
            UserError: the ranks do not divide into groups of ``shard_ranks``.
        """
        ranks, of_group = self.world_size, self.shard_ranks or self.num_processes
        if of_group < 1 or ranks % of_group:
            fitting = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
            raise UserError(
                f"strategy hsdp: {ranks} ranks do not divide into groups of shard_ranks {of_group}; use one of {fitting}"
            )
        return {"replicate": ranks // of_group, "shard": of_group}
