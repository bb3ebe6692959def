"""One stream of tokens over arrays in memory or memory-mapped shards. Knows nothing of text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

Tokens = npt.NDArray[Any]


class TokenStream:
    """Parts of one dtype seen as one sequence, without copying; ``view`` cuts out a stretch, also without copying.

    Memory-mapped parts stay so across ``pickle``: a worker process opens the file itself and all processes share the
    pages of the system's file cache.
    """

    def __init__(self, parts: Sequence[Tokens], offset: int = 0, length: int | None = None) -> None:
        assert parts, "a stream has at least one part"
        assert len({part.dtype for part in parts}) == 1, "the parts have one dtype"
        self._parts = list(parts)
        self._ends = np.cumsum([len(part) for part in parts])
        self.offset = offset  # of this stretch in the whole
        self._length = int(self._ends[-1]) - offset if length is None else length
        self._windows: Tokens | None = None  # of the length last asked for

    def __len__(self) -> int:
        return self._length

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._parts[0].dtype

    @property
    def memory_mapped(self) -> bool:
        return all(isinstance(part, np.memmap) for part in self._parts)

    def view(self, start: int, stop: int) -> "TokenStream":
        assert 0 <= start <= stop <= len(self)
        return TokenStream(self._parts, self.offset + start, stop - start)

    def gather(self, starts: npt.NDArray[np.int64], length: int) -> Tokens:
        """The windows of ``length`` tokens at ``starts`` (any shape): shape (*starts.shape, length).

        Raises:
            IndexError: a window that reaches out of the stretch.
        """
        if len(self._parts) == 1 and starts.size:  # no call for each window
            self._check(int(starts.min()), length)
            self._check(int(starts.max()), length)
            return self._windows_of(length)[starts + self.offset]
        windows = np.empty((starts.size, length), self.dtype)
        for window, start in zip(windows, starts.flat, strict=True):
            self._read(int(start), window)
        return windows.reshape(*starts.shape, length)

    def to_numpy(self) -> Tokens:
        """A copy of the whole stretch in one array."""
        whole = np.empty(len(self), self.dtype)
        self._read(0, whole)
        return whole

    def _read(self, start: int, into: Tokens) -> None:
        """Copies ``len(into)`` tokens from ``start`` on, across the borders of parts."""
        self._check(start, len(into))
        position, done = self.offset + start, 0
        part = int(np.searchsorted(self._ends, position, side="right"))
        while done < len(into):
            inside = position + done - (int(self._ends[part - 1]) if part else 0)
            piece = self._parts[part][inside : inside + len(into) - done]
            into[done : done + len(piece)] = piece
            done += len(piece)
            part += 1

    def _windows_of(self, length: int) -> Tokens:
        """Every window of the only part, as a view."""
        if self._windows is None or self._windows.shape[1] != length:
            self._windows = sliding_window_view(self._parts[0], length)
        return self._windows

    def _check(self, start: int, length: int) -> None:
        if not 0 <= start <= len(self) - length:
            raise IndexError(f"tokens {start} … {start + length} are outside a stretch of {len(self)}")

    def __getstate__(self) -> dict[str, Any]:
        parts = [
            (str(part.filename), part.dtype.str, len(part)) if isinstance(part, np.memmap) else part
            for part in self._parts
        ]
        return {"parts": parts, "offset": self.offset, "length": self._length}

    def __setstate__(self, state: dict[str, Any]) -> None:
        parts = [open_shard(Path(p[0]), p[1], p[2]) if isinstance(p, tuple) else p for p in state["parts"]]
        self.__init__(parts, state["offset"], state["length"])  # type: ignore[misc]


def open_shard(path: Path, dtype: str, count: int) -> Tokens:
    """A shard file as a read-only memory map of ``count`` tokens."""
    return np.memmap(path, np.dtype(dtype), "r", shape=(count,))
