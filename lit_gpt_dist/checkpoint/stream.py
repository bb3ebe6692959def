"""Writes a safetensors file tensor by tensor: the header first, since shapes are known, then one tensor at a time in memory.

The format: 8 bytes with the header's length, the header as JSON, then the tensors' bytes, little-endian, in order
(https://github.com/huggingface/safetensors, "Format").
"""

import json
import os
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT_BYTES = 8


@dataclass(frozen=True)
class Entry:
    """A tensor to come: ``make`` is called when its turn comes and its result is dropped right after."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_safetensors(path: Path, entries: Iterable[Entry], metadata: dict[str, str]) -> int:
    """Writes ``path`` under a temporary name and renames it when it is whole and on the disk. Returns its bytes."""
    entries = list(entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("xb") as file:
            file.write(_header(entries, metadata))
            for entry in entries:
                file.write(_bytes_of(entry))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return size


def _header(entries: list[Entry], metadata: dict[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for entry in entries:
        ends = [offset, offset + entry.bytes]
        header[entry.name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": ends}
        offset += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(entry: Entry) -> memoryview:
    tensor = entry.make()
    if tuple(tensor.shape) != entry.shape:
        raise ValueError(f"{entry.name} has shape {tuple(tensor.shape)} where {entry.shape} was announced")
    flat = tensor.to(entry.dtype).contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")
