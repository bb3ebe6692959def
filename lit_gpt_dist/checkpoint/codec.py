"""Python values as JSON and back, for everything in a checkpoint that is not a tensor. Knows nothing of files.

Reading never imports or calls anything that the document names: an enumeration comes back as its value, a dataclass as a
dictionary. Whoever wrote them knows which class to build again.
"""

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

MARK = "!"  # a dictionary with this key stands for a value that JSON lacks


class NotStorableError(TypeError):
    """A value that has no safe form; the message names where it stands."""


def encode(value: Any, tensors: dict[str, Tensor], where: str = "state") -> Any:
    """``value`` as JSON types; its tensors are put into ``tensors`` under the place where they stood.

    Raises:
        NotStorableError: a value of any other kind; the message names its place and class.
    """
    if isinstance(value, enum.Enum):
        return encode(value.value, tensors, where)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        tensors[where] = value.detach()
        return {MARK: "tensor", "name": where}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return encode(torch.from_numpy(np.ascontiguousarray(value)), tensors, where)
    if isinstance(value, PurePath):
        return {MARK: "path", "value": str(value)}
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return encode(fields, tensors, where)
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, where)
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        encoded = [encode(item, tensors, f"{where}.{index}") for index, item in enumerate(items)]
        if isinstance(value, list):
            return encoded
        return {MARK: "tuple" if isinstance(value, tuple) else "set", "value": encoded}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise NotStorableError(
        f"{where} holds a {kind}, which a checkpoint cannot store; "
        "keep numbers, text, lists, dictionaries, paths, enumerations, dataclasses or tensors there"
    )


def _encode_mapping(value: Mapping[Any, Any], tensors: dict[str, Tensor], where: str) -> Any:
    if all(isinstance(key, str) and not isinstance(key, enum.Enum) for key in value) and MARK not in value:
        return {key: encode(item, tensors, f"{where}.{key}") for key, item in value.items()}
    pairs = [
        [encode(key, tensors, f"{where}.key"), encode(item, tensors, f"{where}.{key}")] for key, item in value.items()
    ]
    return {MARK: "mapping", "value": pairs}


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What ``encode`` was given, up to classes: a dataclass is a dictionary now, an enumeration its value.

    Raises:
        ValueError: a document that ``encode`` cannot have written.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {key: decode(item, tensors) for key, item in value.items()}
    kind = value[MARK]
    if kind == "tensor" and value.get("name") in tensors:
        return tensors[value["name"]]
    if kind == "path" and isinstance(value.get("value"), str):
        return PurePath(value["value"])
    if kind in ("tuple", "set", "mapping") and isinstance(value.get("value"), list):
        items = [decode(item, tensors) for item in value["value"]]
        return {"tuple": tuple, "set": set, "mapping": dict}[kind](items)
    raise ValueError(f"unreadable value of kind {kind!r}")


def tensor_names(value: Any) -> list[str]:
    """The names under which the tensors of an encoded document were put aside."""
    if isinstance(value, list):
        return [name for item in value for name in tensor_names(item)]
    if not isinstance(value, dict):
        return []
    if value.get(MARK) == "tensor":
        return [str(value["name"])]
    return [name for item in value.values() for name in tensor_names(item)]
