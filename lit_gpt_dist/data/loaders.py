"""What a rank's Trainer iterates over: endless training steps, and fixed validation windows. Knows nothing of Lightning.

Neither is a torch ``DataLoader`` for the Trainer to see, so no sampler is ever put in or taken away: which rank takes
which windows is decided in ``windows.py`` alone.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lit_gpt_dist.data.stream import Tokens, TokenStream
from lit_gpt_dist.data.windows import BatchPlan, Starts, epoch_starts, random_starts_of_steps, rank_starts

Draw = Literal["random", "epoch"]
DRAWN_TOGETHER = 512  # windows: drawing that many for one step takes 14 µs, 16 of them 11


class StepBatch(NamedTuple):
    """One optimizer step of one rank, before it goes to the device."""

    step: int
    starts: Tensor  # (accumulate, micro) int64, positions in the training part
    windows: Tensor | None  # (accumulate, micro, context + 1), where they are read ahead on the host


class ValStarts(NamedTuple):
    """One validation batch of one rank, before it goes to the device."""

    starts: Tensor  # (micro,) int64, positions in the validation part
    weights: Tensor  # (micro,) float32: 1, or 0 for a window that only fills up the batch


class ValBatch(NamedTuple):
    """One validation batch: the loss of a data set is Σ weight · loss / Σ weight over all batches of all ranks."""

    windows: Tensor  # (micro, context + 1) int64
    weights: Tensor  # (micro,) float32


@dataclass(frozen=True)
class StepSource:
    """The windows of one data rank as a function of the step. Holds no position and no random state."""

    plan: BatchPlan
    draw: Draw
    seed: int
    context: int
    length: int  # tokens of the training part
    data_rank: int
    repeat: int = 0  # steps after which their windows come again, to overfit them; 0: never

    def global_starts(self, step: int) -> Starts:
        """The global batch: shape (global_batch,)."""
        return self._starts_of_steps((step,))[0]

    def _starts_of_steps(self, steps: Sequence[int]) -> Starts:
        """(steps, global_batch)."""
        count = self.plan.global_batch
        steps = [step % self.repeat for step in steps] if self.repeat else steps
        if self.draw == "epoch":
            windows = (self.length - 1) // self.context
            return np.stack([epoch_starts(self.seed, step, count, windows, self.context) for step in steps])
        return random_starts_of_steps(self.seed, steps, count, self.length - self.context)

    def starts(self, step: int) -> Starts:
        """This rank's part of it: shape (accumulate, micro)."""
        return rank_starts(self.global_starts(step), self.plan.micro_batch, self.data_rank, self.plan.ranks)

    def batch(self, step: int, tokens: TokenStream | None = None) -> StepBatch:
        """The step's batch, with the windows read from ``tokens`` where given."""
        return next(self.batches((step,), tokens))

    def batches(self, steps: Sequence[int], tokens: TokenStream | None = None) -> Iterator[StepBatch]:
        """Those of several steps, drawn together, which takes hardly longer than for one. So does reading from memory; files are
        read step by step, for else the first would wait for all."""
        drawn = [
            rank_starts(starts, self.plan.micro_batch, self.data_rank, self.plan.ranks)
            for starts in self._starts_of_steps(steps)
        ]
        together = np.stack(drawn)  # (steps, accumulate, micro)
        windows: Iterable[Tensor | None] = itertools.repeat(None)
        if tokens is not None:
            at_once = [together] if not tokens.memory_mapped else np.split(together, len(steps))
            parts = (torch_tokens(tokens.gather(starts, self.context + 1)) for starts in at_once)
            windows = itertools.chain.from_iterable(parts)
        for step, starts, read in zip(steps, torch.from_numpy(together), windows, strict=False):
            yield StepBatch(step, starts, read)


def torch_tokens(tokens: Tokens) -> Tensor:
    """As small a tensor as torch can index with: uint8, or int32 (which 16 and 32-bit token numbers fit)."""
    return torch.from_numpy(tokens if tokens.dtype == np.uint8 else tokens.astype(np.int32))


class StepLoader:
    """Endless steps from the one that ``current_step`` names when the first is asked for.

    Asking late matters: Lightning may create the iterator, and even read one batch, before a checkpoint has told it the
    step. When the run jumps to another step, so does the iterator.
    """

    def __init__(
        self,
        source: StepSource,
        current_step: Callable[[], int],
        tokens: TokenStream | None = None,
        workers: int = 0,
        pin: bool = False,
    ) -> None:
        self.source = source
        self.current_step = current_step
        self.tokens = tokens  # given: windows are read on the host, ahead of their steps
        self.workers = workers
        self.pin = pin

    def __iter__(self) -> Iterator[StepBatch]:
        seen = following = (
            self.current_step()
        )  # the run's step when last asked, and the step that ``steps`` yields next
        steps = self._from(following)
        while True:
            following += 1
            yield next(steps)
            current = self.current_step()
            if current - seen not in (0, 1):  # not the run's own progress: keep as far ahead of it as before
                following += current - seen
                steps = self._from(following)
            seen = current

    def _from(self, first: int) -> Iterator[StepBatch]:
        ahead = _StepsFrom(self.source, first, self.tokens)
        if not self.workers:
            return (_pinned(batch) if self.pin else batch for batch in ahead)
        return iter(DataLoader(ahead, batch_size=None, num_workers=self.workers, pin_memory=self.pin))


class _StepsFrom(IterableDataset[StepBatch]):
    """Steps ``first``, ``first`` + 1, …; worker w of W yields every W-th from ``first`` + w on.

    A ``DataLoader`` takes from its workers in turn, so the steps arrive in order.
    """

    def __init__(self, source: StepSource, first: int, tokens: TokenStream | None) -> None:
        self.source = source
        self.first = first
        self.tokens = tokens

    def __iter__(self) -> Iterator[StepBatch]:
        worker = get_worker_info()
        step, stride = (self.first, 1) if worker is None else (self.first + worker.id, worker.num_workers)
        ahead = stride * max(1, DRAWN_TOGETHER // self.source.plan.global_batch)
        while True:
            yield from self.source.batches(range(step, step + ahead, stride), self.tokens)
            step += ahead


def _pinned(batch: StepBatch) -> StepBatch:
    """Page-locked: copying pageable memory to a GPU waits for the GPU."""
    if batch.windows is not None:
        return batch._replace(windows=batch.windows.pin_memory())
    return batch._replace(starts=batch.starts.pin_memory())


class ValLoader:
    """Fixed, non-overlapping windows spread evenly over the validation part, split over the data ranks.

    Every rank has the same number of batches, for a sharded forward is a collective; where the windows do not divide,
    batches are filled up with windows of weight 0.
    """

    def __init__(self, length: int, context: int, limit: int, micro: int, rank: int, ranks: int) -> None:
        available = (length - 1) // context  # neighbours share one token: the last target is the next one's first input
        count = min(available, limit)
        places = np.arange(count, dtype=np.int64) * available // max(count, 1)
        self._count = -(-count // (micro * ranks))  # batches of each rank
        starts = np.zeros(self._count * micro * ranks, np.int64)
        weights = np.zeros(len(starts), np.float32)
        starts[:count], weights[:count] = places * context, 1
        self._starts = rank_starts(starts, micro, rank, ranks)  # (batch, micro)
        self._weights = weights.reshape(-1, ranks, micro)[:, rank]
        self.windows = count  # over all ranks

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[ValStarts]:
        for starts, weights in zip(self._starts, self._weights, strict=True):
            yield ValStarts(torch.tensor(starts), torch.tensor(weights))
