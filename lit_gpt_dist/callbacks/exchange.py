"""The one collective of a reading: mean losses, and a row of numbers of every rank, in a single all-reduce.

Communicates and waits for the device, once per call. Every rank must call it with as many numbers.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(strategy: Any, losses: Tensor, row: Sequence[float | Tensor]) -> tuple[list[float], list[list[float]]]:
    """Means of ``losses`` over the ranks, and the rows of all ranks in the order of the ranks.

    A rank puts its row into an empty table at its own place; the sum of the tables is the whole one.

    Args:
        losses: (steps,) on the device.
        row: numbers of this rank, or scalars on the device.
    """
    ranks, rank = strategy_size(strategy)
    own = as_vector(row, losses)
    table = torch.zeros(ranks, len(own), dtype=losses.dtype, device=losses.device)
    table[rank] = own
    together = torch.cat([losses / ranks, table.flatten()])
    if ranks > 1:
        dist.all_reduce(together)  # not the strategy's: Lightning's puts a barrier in front
    values = together.tolist()  # waits for the device
    means, flat = values[: len(losses)], values[len(losses) :]
    return means, [flat[index * len(own) : (index + 1) * len(own)] for index in range(ranks)]


def as_vector(row: Sequence[float | Tensor], like: Tensor) -> Tensor:
    """The numbers as one vector beside ``like``; host numbers go over in one copy."""
    host = torch.tensor([0.0 if isinstance(value, Tensor) else value for value in row], dtype=like.dtype)
    vector = host.to(like.device, non_blocking=True)
    for index, value in enumerate(row):
        if isinstance(value, Tensor):
            vector[index] = value
    return vector


def strategy_size(strategy: Any) -> tuple[int, int]:
    """(number of processes, this one's rank); a strategy on one device has neither."""
    return getattr(strategy, "world_size", 1), getattr(strategy, "global_rank", 0)
