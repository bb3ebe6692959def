"""Gradient norm over all ranks, and clipping by it."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_by_global_norm(parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
    """Scales the gradients so that their norm over the whole model is at most ``limit`` (None or 0: only measures).

    Call it after the reduction: then replicas hold equal gradients, shards add up, and the norm is the same everywhere.

    Returns:
        The norm before clipping, a scalar on the device; nothing waits for it.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    norm = get_total_norm([parameter.grad for parameter in with_gradient if parameter.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if limit:
        with torch.no_grad():
            clip_grads_with_norm_(with_gradient, limit, norm)
    return norm
