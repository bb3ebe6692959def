"""AdamW and its parameter groups. Knows nothing of schedules or ranks."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from lit_gpt_dist.optim.config import OptimConfig


class LocalAdamW(AdamW):
    """AdamW whose update sees this rank's part of a sharded parameter; its state stays sharded like the parameter.

    The gap: given DTensors, torch finds the result's shape by a run on tensors without data, but the fused update with its
    rate in a tensor has no kernel for those. So it runs on zeros of the whole model's size, on the host, in the first step:
    16 bytes a parameter on every rank (torch 2.11, 2.13).
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        has_complex = super()._init_group(group, *lists)  # fills them: parameters, gradients, moments, step counts
        if isinstance(group["params"][0], DTensor):
            for tensors in lists:
                tensors[:] = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return bool(has_complex)


def parameter_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict]:
    """Two groups: matrices, which decay, and vectors (norms, biases), which do not."""
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    matrices = [parameter for _, parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for _, parameter in trained if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_adamw(model: nn.Module, lr: float, config: OptimConfig, fused: bool | None, device: torch.device) -> Optimizer:
    """AdamW over ``model``'s parameters; fused where the device has the kernel (``fused`` None: decide here)."""
    fused = fused if fused is not None else device.type in ("cuda", "cpu")
    return LocalAdamW(
        parameter_groups(model.named_parameters(), config.weight_decay),
        lr=lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
    )


def is_fused(optimizer: Optimizer) -> bool:
    """Whether the update of all parameters is one kernel, which heeds ``GradScaler``'s flag and scale on the device."""
    return bool(optimizer.defaults.get("fused"))
