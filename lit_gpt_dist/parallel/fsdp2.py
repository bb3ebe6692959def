"""FSDP2: parameters, gradients and optimizer state in shards, gathered a block at a time or at once (Zhao et al. 2023).

Functions on a GPT and a mesh; no Lightning here.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lit_gpt_dist.model.gpt import GPT

AT_ONCE_BYTES = 2**30  # a choice: models of up to that many bytes of weights are rarely sharded for their memory's sake


def precision_policy(precision: str) -> MixedPrecisionPolicy:
    """bf16 parameters and activations with fp32 reduction under ``bf16-mixed``; otherwise everything as stored.

    Forward inputs are left alone: tokens are integers, the embedding's output already has the parameters' dtype, and
    casting a block's inputs would round RoPE's phases to 16 bits.
    """
    if precision == "bf16-mixed":
        return MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return MixedPrecisionPolicy(cast_forward_inputs=False)


def gathers_at_once(weight_bytes: int, nvlink: bool) -> bool:
    """Whether to gather the whole model at once: over NVLink, where hiding a gather saves little, as long as it is small.

    A slow link's gathers are long enough to be worth hiding behind another block's computation.
    """
    return nvlink and weight_bytes <= AT_ONCE_BYTES


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
