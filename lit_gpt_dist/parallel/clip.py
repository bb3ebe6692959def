"""Gradient norm over all ranks, and clipping by it: in place, or within a fused optimizer's update."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from lit_gpt_dist.optim.groups import is_fused

CPU_PIECE = 2**17  # numbers cast at a time: in fp64 a MiB, which stays in a core's cache


def clip_by_global_norm(parameters: Iterable[Tensor], limit: float | None) -> Tensor:
    """Scales the gradients so that their norm over the whole model is at most ``limit`` (None or 0: only measures).

    Call it after the reduction: then replicas hold equal gradients, shards add up, and the norm is the same everywhere.

    Returns:
        The norm before clipping, a scalar on the device; nothing waits for it.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    norm = global_norm([parameter.grad for parameter in with_gradient if parameter.grad is not None])
    if limit and with_gradient:
        with torch.no_grad():
            clip_grads_with_norm_(with_gradient, limit, norm.to(with_gradient[0].dtype))
    return norm


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm of all of them together, those of other ranks' shards included: a scalar in fp64 (fp32 on mps, which has no other).

    In fp32 a sum over shards would end in other bits than one over the whole, and with it every clipped update: in fp64 they
    agree to more digits than an update has. Where the squares leave the range of the gradients' own type it is infinite, for so
    would AdamW's second moments be.

    Args:
        gradients: plain tensors, or all of one mesh and in the same placements.
    """
    if not gradients:
        return torch.zeros(())
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    wide = torch.float32 if local[0].device.type == "mps" else torch.float64
    squares = (
        cpu_squares(local)
        if local[0].device.type == "cpu"
        else torch.stack(torch._foreach_norm(local, 2, wide)).square().sum()
    )
    if isinstance(gradients[0], DTensor):
        for dimension, placement in enumerate(gradients[0].placements):
            if placement.is_shard():
                dist.all_reduce(squares, group=gradients[0].device_mesh.get_group(dimension))
    largest = torch.finfo(local[0].dtype).max
    if squares.device.type == "cpu":  # where a look costs nothing, and an operation on a scalar some ten microseconds
        found = squares.item()
        return torch.tensor(math.inf if found > largest else math.sqrt(found), dtype=squares.dtype)
    return squares.masked_fill(squares > largest, torch.inf).sqrt()


def cpu_squares(gradients: Sequence[Tensor]) -> Tensor:
    """Sum of squares in fp64, of tensors on a CPU, where PyTorch's own norm takes fp64 one number at a time: large ones are cast a
    piece at a time, which takes a sixth as long."""
    large = [gradient.detach() for gradient in gradients if gradient.numel() >= CPU_PIECE]
    small = [gradient for gradient in gradients if gradient.numel() < CPU_PIECE]
    norms = torch.stack(torch._foreach_norm(small, 2, torch.float64)) if small else None
    found = [] if norms is None else [torch.dot(norms, norms)]
    wide = torch.empty(CPU_PIECE if large else 0, dtype=torch.float64)
    for gradient in large:
        for piece in gradient.reshape(-1).split(CPU_PIECE):
            cast = wide[: piece.numel()].copy_(piece)
            found.append(torch.dot(cast, cast))
    return found[0] if len(found) == 1 else torch.stack(found).sum()


def clips_in_update(optimizer: Optimizer) -> bool:
    """Whether the update can clip on its way, which saves reading and writing all gradients once more.

    A fused one divides gradients by a scale on the device, which is a number of fp32.
    """
    return is_fused(optimizer) and optimizer.param_groups[0]["params"][0].dtype == torch.float32


def clip_divisor(norm: Tensor, limit: float) -> Tensor:
    """What gradients of ``norm`` are divided by so that theirs is at most ``limit``; as torch's, which adds 1e-6. In fp32."""
    return ((norm + 1e-6) / limit).clamp(min=1.0).float()


def clip_in_update(
    optimizer: Optimizer, norm: Tensor, limit: float, divisor: Callable[[Tensor, float], Tensor] = clip_divisor
) -> None:
    """As ``clip_by_global_norm`` with ``limit``, at the next update; the gradients are clipped after it.

    Args:
        divisor: ``clip_divisor``, perhaps compiled.
    """
    if norm.device.type == "cpu" and norm.item() + 1e-6 <= limit:
        forget_scale(optimizer)  # dividing by 1 would be for nothing
        return
    optimizer.grad_scale = divisor(norm, limit)  # type: ignore[attr-defined]


def forget_scale(optimizer: Optimizer) -> None:
    """Later updates take gradients as they are."""
    if hasattr(optimizer, "grad_scale"):
        del optimizer.grad_scale
