"""Reading and writing the tensor files of ``torch.distributed.checkpoint``: checksummed, synced, and safe to read.

The files on disk are DCP's own, so that its tools open them too. Knows nothing of models or of what surrounds the tensors.
"""

import io
import os
import pickle
import warnings
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lit_gpt_dist.checkpoint.durable import DurableFileSystem
from lit_gpt_dist.checkpoint.metadata import UnsafeFileError, read_metadata

COPY_AHEAD_BYTES = 10_000_000  # DCP's default

# one process without a process group is a layout like any other here
warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")


class Writer(FileSystemWriter):
    """DCP's file writer; ``written`` tells size and checksum of the files this process wrote."""

    def __init__(self, folder: Path, threads: int = 1, on_host: bool = False) -> None:
        """``on_host``: all tensors are in host memory. Then no thread that writes calls the device, which trains."""
        super().__init__(
            folder,
            sync_files=False,  # that is the file system's: DCP's own comes before Python's buffer is flushed
            thread_count=threads,
            overwrite=False,
            # a single thread of DCP's copies ahead on the device's stream and waits for that: for training's steps
            per_thread_copy_ahead=0 if on_host else COPY_AHEAD_BYTES,
        )
        self.fs = DurableFileSystem()

    @property
    def written(self) -> dict[str, dict[str, int]]:
        return self.fs.written  # type: ignore[attr-defined]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """DCP loses an error of its writing threads: a part would be missing without a word. Here it is raised."""
        future = super().write_data(plan, planner)
        if len(future.value()) != len(plan.items):
            failures = self.fs.failures  # type: ignore[attr-defined]
            raise failures[0] if failures else OSError("some tensors were not written")
        return future

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # without the folder's path: it changes at the commit


class Reader(FileSystemReader):
    """Reads tensors and nothing else: DCP's metadata through ``read_metadata``, tensors with ``weights_only``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(self.folder)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with (self.folder / name).open("rb") as file:
                for item in sorted(items, key=lambda item: self.storage_data[item.storage_index].offset):
                    stored = read_tensor(file, self.storage_data[item.storage_index])
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_part(stored, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _part(tensor: Tensor, offsets: torch.Size, lengths: torch.Size) -> Tensor:
    for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def read_tensor(file: IO[bytes], place: _StorageInfo) -> Tensor:
    """The tensor stored at ``place``. Raises UnsafeFileError for anything else that might lie there."""
    try:
        part = cast(IO[bytes], FileSlice(file, place.offset, place.length))
        tensor = torch.load(part, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UnsafeFileError(f"{place.relative_path} does not hold a plain tensor: {reason}") from error
    if not isinstance(tensor, Tensor):
        raise UnsafeFileError(f"{place.relative_path} holds a {type(tensor).__name__} where a tensor was expected")
    return tensor


class FileSlice(io.RawIOBase):
    """``length`` bytes of an open file from ``start`` on, as a file of its own."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self.file, self.start, self.length, self.position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        self.position = max(0, base + offset)
        return self.position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.length - self.position))
        self.file.seek(self.start + self.position)
        read = self.file.readinto(view[:count])  # type: ignore[attr-defined]
        self.position += read
        return read
