"""Names a rank that holds the others up, and at what it is slow. Judges numbers that a reading has brought together.

All ranks of a step take equally long, for they wait for each other; so a rank is judged by its own work: its data and its
compute, without waiting. A rank over 1.15 × the median is a straggler (facts: "Running for weeks").
"""

import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lit_gpt_dist.callbacks.notices import Once

SLOW = 1.15
TIMES = 3  # in a row, before a rank is named


@dataclass(frozen=True)
class Work:
    """What one rank did in its sampled steps: the least seconds of data and of compute, the mean of waiting."""

    data: float
    compute: float
    waiting: float

    @property
    def own(self) -> float:
        return self.data + self.compute


def slowest(work: Sequence[Work]) -> tuple[int, float]:
    """The rank with most work of its own, and how many times the median that is."""
    own = [part.own for part in work]
    rank = max(range(len(own)), key=own.__getitem__)
    median = statistics.median(own)
    return rank, own[rank] / median if median > 0 else 1.0


def cause(work: Sequence[Work], rank: int) -> str:
    """data or compute: where this rank exceeds the median of the ranks by more."""
    excess = {
        name: getattr(work[rank], name) - statistics.median(getattr(part, name) for part in work)
        for name in ("data", "compute")
    }
    return max(excess, key=excess.__getitem__)


class StragglerWatch:
    """Counts how often in a row the same rank was slow."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.named: list[tuple[int, str]] = []  # (rank, what it was slow at), each once
        self._suspect: int | None = None
        self._times = 0
        self._once = Once()

    def begin(self, trainer: pl.Trainer, module: Any) -> None:
        """Learns every rank's host and device. Communicates once."""
        name = f"{socket.gethostname()} {module.device}"
        if trainer.world_size > 1 and dist.is_initialized():
            names: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(names, name)
            self.names = names
        else:
            self.names = [name]

    def judge(self, trainer: pl.Trainer, work: Sequence[Work]) -> dict[str, float]:
        """Takes one reading of all ranks; names a rank when it was slow ``TIMES`` in a row."""
        if len(work) < 2:
            return {}
        rank, ratio = slowest(work)
        if ratio <= SLOW:
            self._suspect, self._times = None, 0
        else:
            self._times = self._times + 1 if rank == self._suspect else 1
            self._suspect = rank
        if self._times >= TIMES:
            self._name(trainer, work, rank, ratio)
        return {"health/slowest_rank_ratio": ratio}

    def _name(self, trainer: pl.Trainer, work: Sequence[Work], rank: int, ratio: float) -> None:
        what = cause(work, rank)
        if (rank, what) in self.named:
            return
        self.named.append((rank, what))
        others = statistics.median(getattr(part, what) for index, part in enumerate(work) if index != rank)
        waiting = 1000 * max(part.waiting for part in work)
        self._once.tell(
            trainer,
            f"rank {rank} ({self.names[rank]}) is slow at {what}: {1000 * getattr(work[rank], what):.1f} ms a step where the "
            f"others take {1000 * others:.1f}; its own work is {ratio:.2f} × the median, and others wait up to "
            f"{waiting:.1f} ms for it",
        )
