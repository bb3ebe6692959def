"""The one collective of a reading: mean losses, and a row of numbers of every rank, in a single all-reduce.

Begun at one step and read at a later one, so that the device need not stand still meanwhile. Every rank must begin it with as
many numbers, and the same of them on the device.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MOST_SINGLE = 1024  # scalars kept apart; a thousand steps between two readings are few


class Unread:
    """Scalars of the device, one a step, which nobody has asked for yet. Keeping one launches nothing."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._single: list[Tensor] = []

    def __len__(self) -> int:
        return sum(len(chunk) for chunk in self._chunks) + len(self._single)

    def append(self, value: Tensor) -> None:
        self._single.append(value)
        if len(self._single) == MOST_SINGLE:
            self._chunks, self._single = [self._all()], []

    def drop(self, count: int) -> None:
        """Forgets the last ``count``."""
        if count:
            self._chunks, self._single = [self._all()[: len(self) - count]], []

    def take(self) -> Tensor:
        """All of them, (steps,), which are then gone."""
        values = self._all()
        self._chunks, self._single = [], []
        return values

    def _all(self) -> Tensor:
        single = [torch.stack(self._single)] if self._single else []
        chunks = self._chunks + single
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


class Exchange:
    """Begun where it is made; ``read`` waits for what the device had to do until then, and no longer.

    A rank puts its row into an empty table at its own place; the sum of the tables is the whole one.

    Args:
        losses: (steps,) on the device.
        row: numbers of this rank, or scalars on the device.
    """

    def __init__(self, strategy: Any, losses: Tensor, row: Sequence[float | Tensor]) -> None:
        self.ranks, rank = strategy_size(strategy)
        self.steps = len(losses)
        # numbers of the host first, then those of the device: each kind goes over in one piece
        self._order = sorted(range(len(row)), key=lambda place: isinstance(row[place], Tensor))
        own = as_vector([row[place] for place in self._order], losses)
        if self.ranks > 1:
            table = torch.zeros(self.ranks, len(row), dtype=losses.dtype, device=losses.device)
            table[rank] = own
            together = torch.cat([losses / self.ranks, table.flatten()])
            dist.all_reduce(together)  # not the strategy's: Lightning's puts a barrier in front
        else:
            together = torch.cat([losses, own])
        self._values, self._arrived = to_host(together)

    def read(self) -> tuple[list[float], list[list[float]]]:
        """Means of the losses over the ranks, and the rows of all ranks in the order of the ranks."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values = self._values.tolist()
        means, flat, width = values[: self.steps], values[self.steps :], len(self._order)
        return means, [self._in_order(flat[index * width : (index + 1) * width]) for index in range(self.ranks)]

    def _in_order(self, sent: list[float]) -> list[float]:
        row = [0.0] * len(sent)
        for place, value in zip(self._order, sent, strict=True):
            row[place] = value
        return row


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
    """Numbers of the host, then scalars on the device, as one vector beside ``like``."""
    scalars = [value.to(like) for value in row if isinstance(value, Tensor)]
    host = torch.tensor([value for value in row if not isinstance(value, Tensor)], dtype=like.dtype)
    if like.device.type == "cuda":
        host = host.pin_memory()  # copying pageable memory waits for the device
    vector = host.to(like.device, non_blocking=True)
    return torch.cat([vector, torch.stack(scalars)]) if scalars else vector


def strategy_size(strategy: Any) -> tuple[int, int]:
    """(number of processes, this one's rank); a strategy on one device has neither."""
    return getattr(strategy, "world_size", 1), getattr(strategy, "global_rank", 0)
