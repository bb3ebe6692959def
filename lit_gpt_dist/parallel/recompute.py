"""Activation recomputation (Chen et al. 2016): which parts of the model compute their activations twice."""

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import Recompute
from lit_gpt_dist.model.gpt import GPT


def check_recompute(mode: Recompute, precision: str) -> None:
    """
    Raises:
        UserError: a precision in which ``mode`` does not run.
    """
    if mode == "selective" and precision == "16-mixed":
        raise UserError(
            "recompute selective does not run under precision 16-mixed, whose cache of cast weights changes what is computed again; "
            "use bf16-mixed, or recompute full"
        )


def set_recompute(model: GPT, mode: Recompute) -> None:
    """``full``: every block keeps its input only and runs its forward again in backward; about +30% time. ``selective``: it keeps
    what its matrix products and attention left, too, and runs only what is cheap again (Korthikanti et al. 2022)."""
    for block in model.blocks:
        block.recompute = mode  # type: ignore[assignment]
