"""DDP: the whole model on every rank."""

import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lit_gpt_dist.doctor.devices import joined_by_nvlink
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.parallel.averaging import are_numbers_of, average_gradients, exchange_gradients, mean_of_ranks
from lit_gpt_dist.parallel.compile import one_kernel
from lit_gpt_dist.parallel.graph import DDP_WARMUP_STEPS, WARMUP_STEPS, on_side_stream
from lit_gpt_dist.parallel.strategies import MeshStrategy

MIB = 2**20
BUCKET_MB, COMPILED_BUCKET_MB = 25.0, 100.0  # the second: docs/performance.md, buckets
WATCHDOG_SECONDS = 0.25  # more than two looks of NCCL's watchdog


def check_buckets(overlap: bool | None, bucket_cap_mb: float | None) -> None:
    """
    Raises:
        UserError: a size of buckets that is none, or one but no overlap.
    """
    if bucket_cap_mb is not None and not bucket_cap_mb > 0:
        raise UserError(f"bucket_cap_mb {bucket_cap_mb:g} must be above 0; give for example 25")
    if overlap is False and bucket_cap_mb:
        raise UserError(
            f"bucket_cap_mb {bucket_cap_mb:g} means nothing with overlap false, which sends gradients when backward is over; leave one "
            "out"
        )


class DDP(MeshStrategy):
    """Every rank holds the whole model; gradients are averaged in buckets while backward runs (Li et al. 2020), or after it.

    Args:
        overlap: average while backward runs. By default not on two GPUs joined by NVLink: there hiding costs more than it saves,
            and each can send the other the gradients of one micro-batch as they were computed, in bf16. What is said of buckets
            holds for True.
        bucket_cap_mb: size of a bucket in MiB; a bucket is sent as soon as its gradients are there. By default PyTorch's 25, or
            100 where the whole model is compiled: there every bucket but an only one is a cut through what is compiled.
        static_graph: the same parameters get gradients at every backward; by default where a step has one micro-batch
            (with more, DDP's reducer fails an assertion at the first backward that does not synchronise, torch 2.13).
        gradient_as_bucket_view: gradients live in the buckets, which saves a copy of them.
        no_sync: average once per step; False averages after every micro-batch (to measure what that costs).
        timeout_seconds: a collective that takes longer ends the run.

    Attributes:
        overlap: what it came to by default, once the strategy is set up.
    """

    name = "ddp"

    def __init__(
        self,
        overlap: bool | None = None,
        bucket_cap_mb: float | None = None,
        static_graph: bool | None = None,
        gradient_as_bucket_view: bool = True,
        no_sync: bool = True,
        timeout_seconds: float = 600,
    ) -> None:
        super().__init__(
            no_sync,
            timeout_seconds,
            gradient_as_bucket_view=gradient_as_bucket_view,
            broadcast_buffers=False,  # the model has none
        )
        # who says how buckets should be gets them
        buckets = bool(bucket_cap_mb) or static_graph is not None
        self.overlap_option = True if overlap is None and buckets else overlap
        self.overlap = overlap is not False
        self.bucket_option = bucket_cap_mb
        self.static_graph = static_graph
        self._local_backward = self._averaged = False

    def check(self) -> None:
        """
        Raises:
            UserError: a size of buckets that is none, or one but no overlap.
        """
        super().check()
        check_buckets(self.overlap_option, self.bucket_option)

    def degrees(self) -> dict[str, int]:
        return {"replicate": self.world_size}

    def setup(self, trainer: pl.Trainer) -> None:
        compiled = getattr(self.lightning_module, "compiled", "none")
        one_backward = trainer.datamodule.plan.accumulate == 1  # type: ignore[attr-defined]
        might_exchange = one_backward and self.compute_dtype is not None and self.world_size == 2
        self._exchanges: bool | None = None if might_exchange else False  # None: the first gradients decide
        self._average = one_kernel(mean_of_ranks, compiled, self.root_device, dynamic=True)
        self.overlap = self._decide_overlap()
        if self.overlap:
            self._ddp_kwargs["bucket_cap_mb"] = self.bucket_cap_mb
            self._ddp_kwargs["static_graph"] = one_backward if self.static_graph is None else self.static_graph
            if compiled == "model":
                torch._dynamo.config.optimize_ddp = self._cuts_compiled_model()
        super().setup(trainer)

    @property
    def bucket_cap_mb(self) -> float | None:
        """MiB of gradients sent together; None where they are sent when backward is over."""
        if not self.overlap:
            return None
        whole = getattr(self.lightning_module, "compiled", "none") == "model"
        return self.bucket_option or (COMPILED_BUCKET_MB if whole else BUCKET_MB)

    def _decide_overlap(self) -> bool:
        """For all ranks: those that differ would wait for each other."""
        if self.overlap_option is not None:
            return self.overlap_option
        two_gpus = self.root_device.type == "cuda" and self.num_processes == self.world_size == 2
        return self.broadcast(not (two_gpus and joined_by_nvlink()))

    def configure_ddp(self) -> None:
        """Without overlap the module stays as it is: DDP's wrapper would hold buckets for nothing."""
        if self.overlap:
            super().configure_ddp()

    @property
    def warmup_steps(self) -> int:  # type: ignore[override]
        return DDP_WARMUP_STEPS if self.overlap else WARMUP_STEPS

    def _cuts_compiled_model(self) -> bool:
        """Whether what is compiled is cut where a bucket is full, so that it can be sent by then.

        One bucket needs no cut (torch makes one after the first MiB all the same).

        Raises:
            UserError: buckets so small that torch refuses to cut.
        """
        assert self.lightning_module is not None
        gradient_bytes = sum(parameter.nbytes for parameter in self.lightning_module.parameters())
        bucket = self._ddp_kwargs["bucket_cap_mb"]
        several = gradient_bytes > bucket * MIB
        if several and bucket < 1:
            raise UserError(
                f"bucket_cap_mb {bucket:g} is below 1, but a model compiled whole is cut at buckets of at least 1 MiB; "
                "use 1 or more, or --model.compile blocks"
            )
        return several

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
        """Before the first step with moments in which DDP would hold two sets of buckets: lets go of the first, which holds all
        gradients.

        DDP rebuilds its buckets in the step after it has seen one backward (two with a static graph), or, where micro-batches are
        sent one by one, already in the first step; then there are no moments yet, and the second step is the larger one.

        NCCL's process group keeps what it reduced until its watchdog, which looks every 100 ms, finds the collective done
        and another one comes (torch 2.11). Both sets of buckets at once would be the peak of the whole run.
        """
        if not self.overlap:
            return
        if self._steps_to_rebuild == 0 and self.root_device.type == "cuda":
            torch.cuda.synchronize(self.root_device)
            time.sleep(WATCHDOG_SECONDS)
            torch.distributed.all_reduce(torch.zeros(1, device=self.root_device))
        self._steps_to_rebuild -= 1

    @property
    def gradients_in_buckets(self) -> bool:  # type: ignore[override]
        """From the third step on: then DDP has its last buckets, and a backward that sent them has put the gradients there."""
        return self.overlap and bool(self._ddp_kwargs["gradient_as_bucket_view"]) and self._steps_to_rebuild < -1

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """The first steps send every micro-batch: what is added up before a backward that sends lies beside the buckets, as
        large as they are."""
        if not self.overlap:
            self._local_backward = self.no_sync
            try:
                yield
            finally:
                self._local_backward = False
            return
        assert isinstance(self.model, nn.parallel.DistributedDataParallel)
        beside = self._ddp_kwargs["gradient_as_bucket_view"] and not self.gradients_in_buckets
        with self.model.no_sync() if self.no_sync and not beside else nullcontext():
            yield

    def pre_backward(self, closure_loss: Tensor) -> None:
        self._averaged = False
        super().pre_backward(closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        """A module with a ``backward`` of its own may not have said that it is over."""
        super().post_backward(closure_loss)
        if not self._averaged:
            self.after_backward()

    def after_backward(self) -> None:
        """Averages where DDP's wrapper has not done so meanwhile."""
        self._averaged = True
        if self.overlap or self._local_backward:
            return
        parameters = [parameter for parameter in self.lightning_module.parameters() if parameter.requires_grad]  # type: ignore[union-attr]
        if self._exchanges is None:
            # a module of somebody's own, or a hook on its gradients, may compute some in fp32
            assert self.compute_dtype is not None
            self._exchanges = self.reduce_boolean_decision(are_numbers_of(self.compute_dtype, parameters), all=True)
        if self._exchanges:
            assert self.compute_dtype is not None
            exchange_gradients(parameters, self.compute_dtype, self._average)
        else:
            average_gradients(parameters)
