"""Files that are on the disk when they close, with a checksum of what went into them. Knows nothing of tensors."""

import contextlib
import io
import os
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint.filesystem import FileSystem

PIECE_BYTES = 4 << 20  # summed and written at once: the second reads what the first left in the processor's cache
BEHIND_BYTES = 64 << 20  # written before the disk is told to begin with it


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
