"""Weights of a whole model as they lie on a disk, and what must be among them. Opens nothing."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import GPTConfig

METADATA_KEY = "lit_gpt_dist"  # in a safetensors header: configuration, vocabulary and origin, as JSON


@dataclass(frozen=True)
class Weights:
    """Weights still on the disk. A tied head is not among them: it is the embedding."""

    config: GPTConfig
    vocabulary: str | None  # JSON document
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    read: Callable[[str], Tensor]
    origin: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.tensors:
            yield name, self.read(name)

    def header(self) -> dict[str, str]:
        """What goes into a safetensors header so that the file explains itself."""
        facts = {"config": self.config.to_dict(), "vocabulary": self.vocabulary, "origin": self.origin}
        return {"format": "pt", METADATA_KEY: json.dumps(facts)}


def config_from(document: Any, path: Path) -> GPTConfig:
    """The configuration in a file. Raises UserError where it is none, or impossible."""
    known = {entry.name: entry.type for entry in fields(GPTConfig)}
    if not isinstance(document, dict) or not set(document) <= set(known):
        raise UserError(f"{path} does not say what model it holds, or was written by another version")
    for name, value in document.items():
        default = getattr(GPTConfig, name)
        if not isinstance(value, (int, float) if isinstance(default, float) else type(default)):
            raise UserError(f"{path} says {name} is {value!r}, which is no {type(default).__name__}")
    return GPTConfig(**document)


def expected_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the GPT and its shape; nothing is allocated."""
    from lit_gpt_dist.model.gpt import GPT

    with torch.device("meta"):
        model = GPT(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
