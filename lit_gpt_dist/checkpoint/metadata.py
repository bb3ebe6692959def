"""Reads the metadata file of ``torch.distributed.checkpoint``, which is a pickle, without running anything that it names."""

import pickle
import re
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

METADATA_FILE = ".metadata"
PART_FILE = re.compile(r"__\d+_\d+\.distcp")


class UnsafeFileError(ValueError):
    """A file that holds something other than plain tensors and their layout; nothing of it was run."""


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
