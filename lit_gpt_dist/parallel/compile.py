"""torch.compile: what is compiled, and when not. Knows nothing of ranks.

The order is recompute, compile, shard: recomputation becomes part of the compiled graph, and the hooks that gather a
sharded block's weights stay outside of it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch

from lit_gpt_dist.model.gpt import GPT

Compile = Literal["auto", "none", "blocks", "model"]

# Kernels round to bf16 where the model does. By default they would keep fp32 between operations compiled together (the first
# option), rewriting would drop casts there and back, or let a product add on its way what another had rounded (the second), and
# the fastest of several orders of summing up would be found by timing them, each time anew (the third).
AS_WRITTEN: dict[str, Any] = {"emulate_precision_casts": True, "pattern_matcher": False, "deterministic": True}


def resolve_compile(mode: Compile, device: torch.device, by_block: bool) -> Literal["none", "blocks", "model"]:
    """What ``auto`` means.

    Nothing on a CPU, where starting costs more than a small model's run. On a GPU the whole model; blocks (``by_block``)
    where a block's weights are gathered while another computes.
    """
    if mode != "auto":
        return mode
    if device.type != "cuda":
        return "none"
    return "blocks" if by_block else "model"


def compile_model(model: GPT, mode: Literal["none", "blocks", "model"]) -> None:
    """Compiles in place: parameters keep their names. Shapes are static: a step's windows always have the same.

    Kernels round where the model does, so that a loss does not depend on what is compiled together, or gathered in bf16.
    """
    how: dict[str, Any] = dict(dynamic=False, options=AS_WRITTEN)
    if mode == "model":
        torch._dynamo.config.optimize_ddp = True  # cut where a bucket of DDP's is full, so that it can be sent by then
        model.compile(**how)
    elif mode == "blocks":
        # a block is short enough already; a cut would only take fusions away
        torch._dynamo.config.optimize_ddp = False
        for block in model.blocks:
            block.compile(**how)
        model.embed = torch.compile(model.embed, **how)  # type: ignore[method-assign]
        model.phases = torch.compile(model.phases, **how)  # type: ignore[method-assign]
        model.readout = torch.compile(model.readout, **how)  # type: ignore[method-assign]


def one_kernel(
    function: Callable[..., Any], mode: str, device: torch.device, dynamic: bool = False
) -> Callable[..., Any]:
    """``function`` of tensors on ``device``, compiled where the model is, on a GPU.

    There every operation is a kernel. For scalars it takes some two microseconds to start and nothing to run: a step of a small
    model has hundreds, and a dozen less are one percent of it.

    Args:
        dynamic: for more sizes than the compiler would make kernels for.
    """
    return torch.compile(function, dynamic=dynamic) if mode != "none" and device.type == "cuda" else function


def eagerly() -> AbstractContextManager:
    """Around validation: it has other shapes, and compiling for them costs more than it gives back."""
    return torch.compiler.set_stance("force_eager")
