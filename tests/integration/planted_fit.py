"""`fit` with a planted fault, named by LIT_GPT_DIST_PLANTED, that the report must find. Only for tests."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def share_data_between_ranks() -> None:
    """Every rank takes rank 0's windows, and the check that would refuse this before the first step is gone."""
    from lit_gpt_dist.data import datamodule, loaders

    datamodule.compare_windows = lambda *args, **kwargs: None  # type: ignore[assignment]
    own_windows = loaders.rank_starts
    loaders.rank_starts = lambda starts, micro, data_rank, ranks: own_windows(starts, micro, 0, ranks)


def forget_to_divide() -> None:
    """The losses of micro-batches are added without dividing by their number, which LIT_GPT_DIST_PLANTED_FACTOR names."""
    from lit_gpt_dist.model.gpt import GPT

    factor = int(os.environ["LIT_GPT_DIST_PLANTED_FACTOR"])
    forward = GPT.forward

    def undivided(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        result = forward(self, *args, **kwargs)
        return result * factor if result.dim() == 0 else result

    GPT.forward = undivided  # type: ignore[method-assign]


if __name__ == "__main__":
    {"shared": share_data_between_ranks, "undivided": forget_to_divide}[os.environ["LIT_GPT_DIST_PLANTED"]]()
    from lit_gpt_dist.cli import main

    sys.exit(main())
