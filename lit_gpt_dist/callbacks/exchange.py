"""The one collective of a reading: mean losses, and a row of numbers of every rank, in a single all-reduce.

Begun at one step and read at a later one, so that the device need not stand still meanwhile. Every rank must begin it with as
many numbers.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """Begun where it is made; ``read`` waits for what the device had to do until then, and no longer.

    A rank puts its row into an empty table at its own place; the sum of the tables is the whole one.

    Args:
        losses: (steps,) on the device.
        row: numbers of this rank, or scalars on the device.
    """

    def __init__(self, strategy: Any, losses: Tensor, row: Sequence[float | Tensor]) -> None:
        self.ranks, rank = strategy_size(strategy)
        self.steps, self.width = len(losses), len(row)
        table = torch.zeros(self.ranks, self.width, dtype=losses.dtype, device=losses.device)
        table[rank] = as_vector(row, losses)
        together = torch.cat([losses / self.ranks, table.flatten()])
        if self.ranks > 1:
            dist.all_reduce(together)  # not the strategy's: Lightning's puts a barrier in front
        self._values, self._arrived = to_host(together)

    def read(self) -> tuple[list[float], list[list[float]]]:
        """Means of the losses over the ranks, and the rows of all ranks in the order of the ranks."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values = self._values.tolist()
        means, flat = values[: self.steps], values[self.steps :]
        return means, [flat[index * self.width : (index + 1) * self.width] for index in range(self.ranks)]


def to_host(values: Tensor) -> tuple[Tensor, Any]:
    """``values`` in host memory, and the event after which they are there (None: they are)."""
    if values.device.type != "cuda":
        return values.cpu(), None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return host, arrived


def as_vector(row: Sequence[float | Tensor], like: Tensor) -> Tensor:
    """The numbers as one vector beside ``like``; host numbers go over in one copy."""
    host = torch.tensor([0.0 if isinstance(value, Tensor) else value for value in row], dtype=like.dtype)
    if like.device.type == "cuda":
        host = host.pin_memory()  # copying pageable memory waits for the device
    vector = host.to(like.device, non_blocking=True)
    for index, value in enumerate(row):
        if isinstance(value, Tensor):
            vector[index] = value
    return vector


def strategy_size(strategy: Any) -> tuple[int, int]:
    """(number of processes, this one's rank); a strategy on one device has neither."""
    return getattr(strategy, "world_size", 1), getattr(strategy, "global_rank", 0)
