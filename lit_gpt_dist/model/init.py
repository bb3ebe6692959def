"""Initial weights. Each parameter's values depend on the seed, its name and its shape alone.

So they are the same on every rank, for every world size, and whether or not the model was built on the meta device or
in shards: whoever holds a piece of a parameter makes the whole of it and keeps the piece.
"""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from lit_gpt_dist.model.config import GPTConfig
from lit_gpt_dist.model.gpt import GPT

STANDARD_DEVIATION = 0.02  # GPT-2 (Radford et al. 2019; openai/gpt-2, model.py: w_init_stdev)


def initialize(model: GPT, seed: int, assign: Callable[[Tensor, Tensor], object] | None = None) -> None:
    """Gives every parameter of ``model`` its initial value.

    Args:
        assign: how a full CPU value gets into a parameter; copies by default. A sharded model keeps its part.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a tied head is named once, as the embedding
            (assign or torch.Tensor.copy_)(parameter, initial_value(name, tuple(parameter.shape), model.config, seed))


def initial_value(name: str, shape: tuple[int, ...], config: GPTConfig, seed: int) -> Tensor:
    """Full fp32 value, on the CPU, of the parameter called ``name``: GPT-2's scheme.

    Normal with deviation 0.02, residual projections scaled by 1/√(2·layers), norms one, biases zero.
    """
    if name.endswith("bias"):
        return torch.zeros(shape, device="cpu")
    if "norm" in name:
        return torch.ones(shape, device="cpu")
    deviation = STANDARD_DEVIATION
    if name.endswith(("attention.output.weight", "feed_forward.down.weight")):
        deviation /= math.sqrt(2 * config.layers)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.empty(shape, device="cpu").normal_(0.0, deviation, generator=generator)
