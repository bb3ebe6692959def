"""Activation recomputation (Chen et al. 2016): which parts of the model compute their activations twice."""

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import Recompute, check_recompute_blocks
from lit_gpt_dist.model.gpt import GPT


def check_recompute(mode: Recompute, precision: str, blocks: int | None, layers: int) -> None:
    """
    Raises:
        UserError: a precision in which ``mode`` does not run, or a number of ``blocks`` that means nothing.
    """
    check_recompute_blocks(mode, blocks, layers)
    if mode == "selective" and precision == "16-mixed":
        raise UserError(
            "recompute selective does not run under precision 16-mixed, whose cache of cast weights changes what is computed again; "
            "use bf16-mixed, or recompute full"
        )


def set_recompute(model: GPT, mode: Recompute, blocks: int | None = None) -> None:
    """``full``: every block keeps its input only and runs its forward again in backward; about +30% time. ``selective``: it keeps
    what its matrix products and attention left, too, and runs only what is cheap again (Korthikanti et al. 2022).

    ``blocks``: only so many, the first: backward gives back what the others kept before it comes to these."""
    for index, block in enumerate(model.blocks):
        block.recompute = mode if blocks is None or index < blocks else "none"  # type: ignore[assignment]
