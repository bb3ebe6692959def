"""Opens a GPT-2 or Llama folder of transformers under this project's names.

Reads safetensors (one file or several with an index) and ``.bin`` files, the latter as plain tensors only: no code in
them is run.
"""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lit_gpt_dist.checkpoint import hf_layouts
from lit_gpt_dist.checkpoint.compatible import some
from lit_gpt_dist.checkpoint.hf_layouts import DESCRIPTION_FILE, Piece
from lit_gpt_dist.checkpoint.weights import Weights, expected_shapes
from lit_gpt_dist.errors import UserError

IGNORED = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")  # masks and angles, which the GPT computes
Read = Callable[[], Tensor]


def open_hf_folder(folder: Path) -> Weights:
    """The folder's weights under this project's names, each put together when it is read."""
    config = hf_layouts.from_hf_config(_read_json(folder / "config.json"))
    theirs = _tensors_of(folder)
    if config.layers > len(theirs):  # before a table of that many is made
        raise UserError(f"config.json of {folder} says {config.layers} layers, but there are {len(theirs)} tensors")
    parts: dict[str, list[Piece]] = {}
    for piece in hf_layouts.pieces(config):
        parts.setdefault(piece.ours, []).append(piece)
    wanted = {piece.theirs for pieces in parts.values() for piece in pieces}
    missing = [name for name in wanted if name not in theirs and not name.endswith(".bias")]
    extra = [name for name in theirs if name not in wanted and not (config.tied and name == "lm_head.weight")]
    if missing or extra:
        raise UserError(
            f"{folder} is no folder this can import: it lacks {some(missing)} and has {some(extra)} besides"
        )
    shapes = expected_shapes(config)

    def read(name: str) -> Tensor:
        return torch.cat([_read_piece(piece, theirs, config, shapes) for piece in parts[name]])

    description = folder / DESCRIPTION_FILE
    facts = _read_json(description) if description.is_file() else {}
    vocabulary = facts.get("vocabulary") if facts else _vocabulary_of(folder)
    dtype = theirs[parts["embedding.weight"][0].theirs]().dtype
    return Weights(
        config=config,
        vocabulary=vocabulary if isinstance(vocabulary, str) else None,
        tensors={name: (dtype, shapes[name]) for name in parts},
        read=read,
        origin={"imported": folder.name},
    )


def _read_piece(piece: Piece, theirs: dict[str, Read], config: Any, shapes: dict[str, tuple[int, ...]]) -> Tensor:
    shape = hf_layouts.piece_shape(piece, config, shapes)
    tensor = theirs[piece.theirs]() if piece.theirs in theirs else torch.zeros(shape)
    if tuple(tensor.shape) != shape:
        raise UserError(f"{piece.theirs} is {tuple(tensor.shape)}, but config.json makes it {shape}")
    return tensor.T if piece.transposed else tensor


def _tensors_of(folder: Path) -> dict[str, Read]:
    """A reader for each tensor in the folder's files, by its full name in transformers."""
    for stem, suffix, open_file in (
        ("model", "safetensors", _open_safetensors),
        ("pytorch_model", "bin", _open_pickle),
    ):
        index = folder / f"{stem}.{suffix}.index.json"
        if index.is_file():
            names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        elif (folder / f"{stem}.{suffix}").is_file():
            names = [f"{stem}.{suffix}"]
        else:
            continue
        found: dict[str, Read] = {}
        for name in names:
            if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
                raise UserError(f"{index} names {name!r}, which is not a file of the folder; fetch it again")
            found |= open_file(folder / name)
        return {_full_name(name): read for name, read in found.items() if not name.endswith(IGNORED)}
    raise UserError(f"{folder} holds neither model.safetensors nor pytorch_model.bin; give a folder of save_pretrained")


def _full_name(name: str) -> str:
    """GPT-2 folders of the model without its head leave out the first part of the names."""
    return f"transformer.{name}" if name.startswith(("wte.", "wpe.", "h.", "ln_f.")) else name


def _open_safetensors(path: Path) -> dict[str, Read]:
    try:
        file = safe_open(path, "pt")
        return {name: lambda name=name: file.get_tensor(name) for name in file.keys()}  # type: ignore[misc]  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a safetensors file ({error}); fetch the folder again") from error


def _open_pickle(path: Path) -> dict[str, Read]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{path} holds more than tensors, or is damaged ({reason}); nothing in it was run") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path} is not a dictionary of tensors; give a folder of save_pretrained")
    return {str(name): lambda tensor=tensor: tensor for name, tensor in state.items()}  # type: ignore[misc]


def _vocabulary_of(folder: Path) -> str | None:
    """The folder's tokenizer as a vocabulary of this project; None where it has no ``tokenizer.json``."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    from lit_gpt_dist.data.tokenizers import read_tokenizer_file

    return read_tokenizer_file(path).to_json()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable as JSON ({error}); fetch the folder again") from error
    if not isinstance(document, dict):
        raise UserError(f"{path} is not a JSON object; fetch the folder again")
    return document
