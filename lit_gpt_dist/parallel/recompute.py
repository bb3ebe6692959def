"""Activation recomputation (Chen et al. 2016): which parts of the model compute their activations twice."""

from typing import Literal

from lit_gpt_dist.model.gpt import GPT

Recompute = Literal["none", "full"]


def set_recompute(model: GPT, mode: Recompute) -> None:
    """``full``: every block keeps its input only and runs its forward again in backward; about +30% time."""
    for block in model.blocks:
        block.recompute = mode == "full"  # type: ignore[assignment]
