"""Reading and writing the tensor files of ``torch.distributed.checkpoint``: checksummed, synced, and safe to read.

The files on disk are DCP's own, so that its tools open them too. Knows nothing of models or of what surrounds the tensors.
"""

import contextlib
import io
import os
import pickle
import re
import warnings
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

PIECE_BYTES = 4 << 20  # summed and written at once: the second reads what the first left in the processor's cache
BEHIND_BYTES = 64 << 20  # written before the disk is told to begin with it
COPY_AHEAD_BYTES = 10_000_000  # DCP's default
METADATA_FILE = ".metadata"
PART_FILE = re.compile(r"__\d+_\d+\.distcp")

# one process without a process group is a layout like any other here
warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")


class UnsafeFileError(ValueError):
    """A file that holds something other than plain tensors and their layout; nothing of it was run."""


class ChecksummedFile(io.RawIOBase):
    """Forwards writes to a file and keeps the CRC-32 of what went through. (CRC-32: 4 GB/s here, SHA-256 1.8; the point
    is damage, not forgery, which no sum kept beside the data can show.)"""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.crc, self.size = file, 0, 0
        self.passed_on = 0  # bytes that the disk was told to begin with
        self.forgotten = 0  # and those of them that the system was told to forget once they were there

    def write(self, data: Any) -> int:
        """Copies nothing but into the operating system, and lets other threads run meanwhile."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            self.crc = zlib.crc32(piece, self.crc)
            self.file.write(piece)
            self.size += len(piece)
            if self.size - self.passed_on >= BEHIND_BYTES:
                self._pass_on()
        return len(view)

    def _pass_on(self) -> None:
        """Lets the disk begin with the newest bytes, and the operating system forget the ones before, now written.

        Otherwise a save fills memory with what nobody reads soon: training's data and code make way, and on a machine
        whose memory is handed out as it is used, the new pages take longer than the disk.
        """
        self.flush()
        forget_cached(self.fileno(), self.forgotten, self.size - self.forgotten)
        self.forgotten, self.passed_on = self.passed_on, self.size

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self.file.closed:
            self.file.flush()

    def fileno(self) -> int:
        return self.file.fileno()


def forget_cached(descriptor: int, start: int = 0, length: int = 0) -> None:
    """Asks for pages of a file to be written, or forgotten where they are; ``length`` 0: to its end. A hint, never a wait."""
    if hasattr(os, "posix_fadvise"):  # Linux; elsewhere the operating system decides alone
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)


class DurableFileSystem(FileSystem):
    """Every file that is written is on the disk when it closes; ``written`` has the size and CRC-32 of each."""

    def __init__(self) -> None:
        self.written: dict[str, dict[str, int]] = {}
        self.failures: list[BaseException] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[Any, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        try:
            with Path(path).open("wb") as file:
                stream = ChecksummedFile(file)
                yield stream
                file.flush()
                os.fsync(file.fileno())
                forget_cached(file.fileno())
        except BaseException as error:
            self.failures.append(error)
            raise
        self.written[Path(path).name] = {"bytes": stream.size, "crc32": stream.crc}

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


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


def read_metadata(folder: Path) -> Metadata:
    """DCP's metadata of ``folder``.

    The file is a pickle, so it is read into inert stand-ins made for this one call, from which the real objects are
    built after each value's type has been checked. No class or function that the file names is ever touched.

    Raises:
        UnsafeFileError: the file names anything but what DCP's metadata consists of, or has the wrong shape.
    """
    with (folder / METADATA_FILE).open("rb") as file:
        try:
            root = _InertUnpickler(file).load()
            return _metadata(root)
        except UnsafeFileError:
            raise
        except Exception as error:  # a broken pickle can raise nearly anything
            raise UnsafeFileError(f"{METADATA_FILE} is not DCP metadata: {error!r}") from error


_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_METADATA, name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


class _InertUnpickler(pickle.Unpickler):
    """Builds stand-ins that remember their name, arguments and state, and do nothing."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.stand_ins: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED:
            raise UnsafeFileError(f"{METADATA_FILE} names {module}.{name}, which DCP's metadata never does; refused")
        return self.stand_ins.setdefault((module, name), _stand_in(name))

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafeFileError(f"{METADATA_FILE} refers to something outside itself; refused")


def _stand_in(name: str) -> type:
    class StandIn:
        kind = name

        def __new__(cls, *arguments: Any) -> Any:
            made = super().__new__(cls)
            made.arguments, made.state = arguments, None  # type: ignore[attr-defined]
            return made

        def __setstate__(self, state: Any) -> None:
            self.state = state

        def __hash__(self) -> int:  # as a key of the storage map, before its state arrives
            return id(self)

    return StandIn


def _state(value: Any, kind: str) -> Any:
    if getattr(type(value), "kind", None) != kind:
        raise UnsafeFileError(f"{METADATA_FILE} has a {type(value).__name__} where {kind} belongs; refused")
    return value.state


def _size(value: Any) -> torch.Size:
    _state(value, "Size")
    (sizes,) = value.arguments
    if not isinstance(sizes, tuple) or not all(type(size) is int and size >= 0 for size in sizes):
        raise UnsafeFileError(f"{METADATA_FILE} has an impossible size; refused")
    return torch.Size(sizes)


def _metadata(root: Any) -> Metadata:
    fields = _state(root, "Metadata")
    tensors = {_text(name): _tensor(stored) for name, stored in fields["state_dict_metadata"].items()}
    places = {_index(index): _place(place) for index, place in fields["storage_data"].items()}
    return Metadata(state_dict_metadata=dict(tensors), storage_data=places, storage_meta=StorageMeta())


def _tensor(value: Any) -> TensorStorageMetadata:
    fields = _state(value, "TensorStorageMetadata")
    dtype = _state(fields["properties"], "TensorProperties")[0]
    if not isinstance(dtype, torch.dtype):
        raise UnsafeFileError(f"{METADATA_FILE} has a tensor of an unknown type; refused")
    chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=_size(fields["size"]),
        chunks=[ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _index(value: Any) -> MetadataIndex:
    fields = _state(value, "MetadataIndex")
    return MetadataIndex(_text(fields["fqn"]), _size(fields["offset"]), int(fields["index"]))


def _place(value: Any) -> _StorageInfo:
    fields = _state(value, "_StorageInfo")
    name = _text(fields["relative_path"])
    if not PART_FILE.fullmatch(name):
        raise UnsafeFileError(f"{METADATA_FILE} points to the file {name!r}, which is not a part; refused")
    if fields.get("transform_descriptors"):
        raise UnsafeFileError(f"{METADATA_FILE} asks for a transformation of {name}; refused")
    return _StorageInfo(name, int(fields["offset"]), int(fields["length"]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise UnsafeFileError(f"{METADATA_FILE} has a {type(value).__name__} where a name belongs; refused")
    return value
