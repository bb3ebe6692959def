"""FSDP2: parameters, gradients and optimizer state in shards, gathered a block at a time or at once (Zhao et al. 2023).

Functions on a GPT and a mesh; no Lightning here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

# what a unit has until it is given another; it has no public name
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor, distribute_tensor

from lit_gpt_dist.model.gpt import GPT
from lit_gpt_dist.parallel.averaging import mean_of_ranks

# Of a card's memory; a choice: what gathering at once takes more is hardly missed, and steps are up to 5% faster
AT_ONCE_SHARE = 1 / 32


def precision_policy(precision: str) -> MixedPrecisionPolicy:
    """bf16 parameters and activations with fp32 reduction under ``bf16-mixed``; otherwise everything as stored.

    Forward inputs are left alone: tokens are integers, the embedding's output already has the parameters' dtype, and
    casting a block's inputs would round RoPE's phases to 16 bits.
    """
    if precision == "bf16-mixed":
        return MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return MixedPrecisionPolicy(cast_forward_inputs=False)


def gathers_at_once(weight_bytes: int, nvlink: bool, memory_bytes: int) -> bool:
    """Whether to gather the whole model at once: over NVLink, where hiding a gather saves little, as long as it is small for the
    card's memory.

    A slow link's gathers are long enough to be worth hiding behind another block's computation.
    """
    return nvlink and weight_bytes <= AT_ONCE_SHARE * memory_bytes


def shard(
    model: GPT,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool = True,
    by_block: bool = True,
) -> None:
    """Shards ``model`` in place over ``mesh``: each block a unit, then the root with what is left; or the root with all.

    The root (embedding, final norm, head, or everything) stays gathered between forward and backward, which begins there.
    Call it after recomputation and compilation: hooks must sit outside what they gather for.
    """
    for block in model.blocks if by_block else ():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if not by_block:
        model.register_forward_pre_hook(_gather, prepend=True)


@torch.compiler.disable
def _gather(model: GPT, inputs: Any) -> None:
    """Before FSDP2 does, which keeps what a forward's gather came in until the next gather: for the only unit until the step is
    over, as large as all weights."""
    model.unshard()  # type: ignore[operator]


class NarrowReduceScatter:
    """Averages gradients over the ranks in fp32, but sends them in the type that backward left them in: half the bytes in bf16.

    Nothing is lost by that: a gradient that is a bf16 number stays the same when it is sent as one, and an all-to-all brings
    every rank's to where they are added up. (A reduction in bf16 would round sums on their way.) It is not for gradients of
    several micro-batches, which have been added up in fp32; nor for ranks on several machines, where a ring sends less across.

    What ``FSDPModule.set_custom_reduce_scatter`` takes. ``allocate`` is asked for a reduction's input, then for its output, both
    in the policy's ``reduce_dtype``; FSDP2 casts gradients to whatever type the input has.

    Args:
        dtype: of the gradients.
        average: ``mean_of_ranks``, perhaps compiled.
    """

    def __init__(self, dtype: torch.dtype, average: Callable[[Tensor, Tensor], None]) -> None:
        self.dtype = dtype
        self.average = average
        self._wants_input = True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        found = torch.empty(*size, dtype=self.dtype if self._wants_input else dtype, device=device)
        self._wants_input = not self._wants_input
        return found

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.AVG, "FSDP2 asks for another reduction than before; its sums would be wrong"
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        self.average(parts.view(group.size(), -1), output_tensor)


def send_gradients_in(
    model: GPT, dtype: torch.dtype | None, average: Callable[[Tensor, Tensor], None] = mean_of_ranks
) -> None:
    """Sends gradients in ``dtype``, the type that backward leaves them in; None: as FSDP2 does, in the policy's."""
    for unit in (model, *model.blocks):
        if isinstance(unit, FSDPModule):
            comm = DefaultReduceScatter() if dtype is None else NarrowReduceScatter(dtype, average)
            unit.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]


def assign_shard(parameter: Tensor, value: Tensor) -> None:
    """Keeps this rank's part of a full ``value`` that every rank holds alike; nothing is sent."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(value)
        return
    on_device = value.to(device=parameter.device, dtype=parameter.dtype)
    part = distribute_tensor(on_device, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(part)


def release(model: GPT) -> None:
    """Gives gathered weights back. The root's stay gathered after a forward that no backward follows, as in validation:
    whoever changes the shards behind FSDP2's back, as a CUDA graph does, would leave the next forward with old weights."""
    for unit in (model, *model.blocks):
        if isinstance(unit, FSDPModule):
            unit.reshard()


def set_gradient_sync(model: GPT, synchronise: bool) -> None:
    """Whether the next backward reduces gradients, or adds them up unsharded until one that does."""
    model.set_requires_gradient_sync(synchronise)  # type: ignore[operator]


def set_reshard_after_backward(model: GPT, reshard: bool) -> None:
    """Whether the next backward gives gathered weights back; else the next micro-batch need not gather them."""
    model.set_reshard_after_backward(reshard)  # type: ignore[operator]
