"""Opens the weights of a checkpoint, an export or a Hugging Face folder, one tensor at a time. Executes nothing in them.

What is opened is checked against its own configuration at once: every weight is there, in its shape, and nothing else.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lit_gpt_dist.checkpoint import find
from lit_gpt_dist.checkpoint import format as layout
from lit_gpt_dist.checkpoint.compatible import shape_text, some
from lit_gpt_dist.checkpoint.dcp import read_tensor
from lit_gpt_dist.checkpoint.hf_folder import open_hf_folder
from lit_gpt_dist.checkpoint.metadata import UnsafeFileError, read_metadata
from lit_gpt_dist.checkpoint.tensors import MODEL
from lit_gpt_dist.checkpoint.weights import METADATA_KEY, Weights, config_from, expected_shapes
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import GPTConfig

WEIGHTS_FILE = "model.safetensors"  # in an export folder
RUN_WEIGHTS_FILE = "weights.safetensors"  # in a run's folder, at its end
_SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def open_weights(path: str | Path) -> tuple[GPTConfig, str | None, Iterable[tuple[str, Tensor]]]:
    """Configuration, vocabulary (a JSON document, or None) and the (name, tensor) pairs of what lies at ``path``.

    Args:
        path: a checkpoint, a run's folder (its newest whole checkpoint), an export, or a GPT-2 or Llama folder.

    Raises:
        UserError: it is none of these, is damaged, or does not hold what its configuration says.
    """
    weights = open_source(path)
    return weights.config, weights.vocabulary, weights


def open_source(path: str | Path) -> Weights:
    """As ``open_weights``, with dtypes, shapes and origin."""
    weights = _open(Path(path))
    _check(weights, Path(path))
    return weights


def _open(path: Path) -> Weights:
    if path.is_file():
        return open_export(path)
    if (path / "config.json").is_file():
        return open_hf_folder(path)
    for name in (WEIGHTS_FILE, RUN_WEIGHTS_FILE):
        if (path / name).is_file():
            return open_export(path / name)
    if (path / layout.MANIFEST_FILE).is_file() or path.name == layout.LAST:
        return open_checkpoint(find.choose(path)[0])
    if path.is_dir() and find.list_checkpoints(path):
        return open_checkpoint(find.newest_good(path)[0])
    what = "holds neither a checkpoint nor weights" if path.exists() else "does not exist"
    raise UserError(f"{path} {what}; give a checkpoint, a run's folder, a .safetensors export or a Hugging Face folder")


def open_checkpoint(folder: Path) -> Weights:
    """The weights of a verified checkpoint folder, whoever wrote it with however many ranks."""
    try:
        document = layout.read_json(folder / layout.STATE_FILE)
        metadata = read_metadata(folder)
    except (layout.DamagedError, UnsafeFileError) as error:
        raise UserError(f"checkpoint {folder} cannot be used: {error}") from error
    stored: dict[str, Any] = {
        name.removeprefix(MODEL): kept for name, kept in metadata.state_dict_metadata.items() if name.startswith(MODEL)
    }
    places: dict[str, list] = {name: [] for name in stored}
    for index, place in metadata.storage_data.items():
        if index.fqn.startswith(MODEL):
            places[index.fqn.removeprefix(MODEL)].append((index.offset, place))

    def read(name: str) -> Tensor:
        try:
            return _assemble(folder, stored[name], places[name])
        except (UnsafeFileError, OSError, RuntimeError) as error:
            raise UserError(f"checkpoint {folder} cannot be used: {name}: {error}") from error

    vocabulary = (document.get("vocabulary") or {}).get("document")
    return Weights(
        config=config_from(document.get("model"), folder),
        vocabulary=vocabulary if isinstance(vocabulary, str) else None,
        tensors={name: (kept.properties.dtype, tuple(kept.size)) for name, kept in stored.items()},
        read=read,
        origin={
            "checkpoint": folder.name,
            "run_id": document.get("run_id"),
            "step": document.get("lightning", {}).get("global_step"),
            "corpus": document.get("corpus"),
            "versions": document.get("versions"),
        },
    )


def _assemble(folder: Path, stored: Any, places: list) -> Tensor:
    """The whole tensor from its parts; one that lies in one part is read straight, without a second copy."""
    whole: Tensor | None = None
    for offsets, place in places:
        with (folder / place.relative_path).open("rb") as file:
            part = read_tensor(file, place)
        if part.shape == stored.size:
            return part
        if whole is None:
            whole = torch.empty(stored.size, dtype=stored.properties.dtype)
        target = whole
        for dim, (start, length) in enumerate(zip(offsets, part.shape, strict=True)):
            target = target.narrow(dim, start, length)
        target.copy_(part)
    if whole is None:
        raise UnsafeFileError("no part of it is there")
    return whole


def open_export(path: Path) -> Weights:
    """A safetensors file that ``export`` or ``import`` wrote."""
    try:
        file = safe_open(path, "pt")
        metadata = file.metadata() or {}
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a safetensors file ({error}); give a checkpoint or an export") from error
    if METADATA_KEY not in metadata:
        raise UserError(f"{path} does not say what model it holds; give a file that export or import wrote")
    try:
        facts = json.loads(metadata[METADATA_KEY])
        tensors = {
            name: (_SAFETENSORS_DTYPES[part.get_dtype()], tuple(part.get_shape())) for name, part in slices.items()
        }
        config, vocabulary, origin = facts["config"], facts["vocabulary"], facts["origin"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} has an unreadable description ({error!r}); export it again") from error
    if vocabulary is not None and not isinstance(vocabulary, str):
        raise UserError(f"{path} has an unreadable vocabulary; export it again")
    return Weights(config_from(config, path), vocabulary, tensors, file.get_tensor, origin)


def _check(weights: Weights, path: Path) -> None:
    if weights.config.layers > len(weights.tensors):  # before a model of that many is thought of
        raise UserError(f"{path} says it has {weights.config.layers} layers, but holds {len(weights.tensors)} tensors")
    expected = expected_shapes(weights.config)
    missing = [name for name in expected if name not in weights.tensors]
    extra = [name for name in weights.tensors if name not in expected]
    if missing or extra:
        raise UserError(
            f"{path} does not match its own configuration: it lacks {some(missing)}, has {some(extra)} besides"
        )
    for name, (_, shape) in weights.tensors.items():
        if shape != expected[name]:
            raise UserError(
                f"{path} does not match its own configuration: {name} is {shape_text(shape)}, not {shape_text(expected[name])}"
            )
