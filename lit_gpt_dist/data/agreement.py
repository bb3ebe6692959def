"""Ranks compare what they are about to train on, before the first step. Knows nothing of models.

Every function here communicates, so all ranks must call it; every rank then comes to the same verdict.
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lit_gpt_dist.data.loaders import StepSource
from lit_gpt_dist.errors import UserError

COMPARED_STEPS = 8  # two ranks with other windows in so many steps are not alike by chance


class Gathers(Protocol):
    """The part of a Lightning strategy that is used here."""

    @property
    def root_device(self) -> torch.device: ...

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor: ...


def gather_rows(strategy: Gathers, row: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The rows of all ranks: shape (world, len(row)). All rows have one length."""
    gathered = strategy.all_gather(torch.from_numpy(row).to(strategy.root_device))
    return gathered.reshape(-1, len(row)).cpu().numpy()


def raise_together(strategy: Gathers, failure: Exception | None) -> None:
    """Raises on every rank if any rank failed, so that none waits for one that is gone."""
    failed = np.flatnonzero(gather_rows(strategy, np.array([failure is not None], np.int64))[:, 0])
    if failure is not None:
        raise failure
    if len(failed):
        raise UserError(
            f"rank {failed[0]} could not read its data; see its message, and give every node the same corpus"
        )


def compare_settings(strategy: Gathers, settings: dict[str, int | str]) -> None:
    """Raises UserError on every rank if a setting differs between two of them; strings are hexadecimal digests."""
    row = [int(value[:15], 16) if isinstance(value, str) else value for value in settings.values()]  # 60 bits
    rows = gather_rows(strategy, np.array(row, np.int64))
    for column, name in enumerate(settings):
        if len(others := np.flatnonzero(rows[:, column] != rows[0, column])):
            raise UserError(
                f"rank {others[0]} has another {name} than rank 0, but all ranks train on the same data; give every node"
                " the same files and options"
            )


def compare_windows(strategy: Gathers, source: StepSource, first_step: int) -> None:
    """Raises UserError on every rank unless the data ranks share out each global batch among them.

    Two data ranks must not have the same windows, ranks of one data rank must have the same, and together they must
    have those of the global batch, each as often as it occurs there.
    """
    steps = range(first_step, first_step + COMPARED_STEPS)
    mine = [source.starts(step).ravel() for step in steps]
    rows = gather_rows(strategy, np.concatenate([[source.data_rank], *mine]).astype(np.int64))
    windows_of: dict[int, tuple[int, bytes]] = {}  # by data rank: the first rank that has it, and its windows
    for rank, row in enumerate(rows):
        data_rank, windows = int(row[0]), row[1:].tobytes()
        first, same = windows_of.setdefault(data_rank, (rank, windows))
        if same != windows:
            raise UserError(
                f"ranks {first} and {rank} share data rank {data_rank}, but have different windows; {_REMEDY}"
            )
    _refuse_twins(windows_of, source.plan.ranks)
    together = np.stack([np.frombuffer(w, np.int64) for _, w in windows_of.values()])
    together = together.reshape(len(windows_of), COMPARED_STEPS, -1)  # (data rank, step, window)
    for number, step in enumerate(steps):
        if not np.array_equal(np.sort(together[:, number].ravel()), np.sort(source.global_starts(step))):
            raise UserError(f"the ranks' windows of step {step} are not its global batch; {_REMEDY}")


_REMEDY = "give every rank the same options, and let the strategy's data_rank and data_ranks say who shares data"


def _refuse_twins(windows_of: dict[int, tuple[int, bytes]], data_ranks: int) -> None:
    seen: dict[bytes, int] = {}
    for rank, windows in windows_of.values():
        if windows in seen:
            raise UserError(
                f"ranks {seen[windows]} and {rank} would train on the same windows; use a longer corpus or fewer devices"
            )
        seen[windows] = rank
    if len(windows_of) != data_ranks:
        raise UserError(f"{data_ranks} data ranks are planned, but only {len(windows_of)} are there; {_REMEDY}")
