"""``lit-gpt-dist export``: any checkpoint to one file of full weights, or to a Hugging Face folder that transformers opens.

Needs neither the strategy nor the ranks that wrote the checkpoint, and holds one tensor in memory at a time.
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from lit_gpt_dist.arguments import ToolParser
from lit_gpt_dist.checkpoint import hf_layouts
from lit_gpt_dist.checkpoint.hf_layouts import DESCRIPTION_FILE
from lit_gpt_dist.checkpoint.sources import WEIGHTS_FILE, open_source
from lit_gpt_dist.checkpoint.stream import Entry, write_safetensors
from lit_gpt_dist.checkpoint.weights import Weights, expected_shapes
from lit_gpt_dist.errors import EXIT_OK, UserError
from lit_gpt_dist.outputs import put_in_place, refuse_existing

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OVERWRITE_HELP = "replace what an earlier command wrote there, once the new weights are whole"
MIB = 1 << 20


def export_checkpoint(
    source: Path, target: Path, form: str = "safetensors", dtype: str | None = None, overwrite: bool = False
) -> int:
    """Writes the weights at ``source`` to ``target``; returns the bytes of the tensors' file.

    Args:
        source: whatever ``open_weights`` opens.
        target: a ``.safetensors`` file or a folder; ``hf`` needs a folder.
        form: ``safetensors`` (this project's names) or ``hf``.
        dtype: float32, bfloat16 or float16; by default as stored.
        overwrite: replace an export at ``target``, once the new one is whole.

    Raises:
        UserError: nothing to open, a shape without a Hugging Face layout, or a target that cannot be written.
    """
    kind = DTYPES[dtype] if dtype else None
    if form == "hf":
        _check_folder(target, overwrite)
        return _write_hf_folder(open_source(source), target, kind)
    file = weights_file(target, overwrite)  # before a large checkpoint is read
    weights = open_source(source)
    return write_safetensors(file, plain_entries(weights, kind), weights.header())


def weights_file(target: Path, overwrite: bool) -> Path:
    """The file to write: ``target`` itself, or one in the folder ``target``.

    Raises:
        UserError: it is there already (unless it may be overwritten), or is a folder.
    """
    file = target if target.suffix == ".safetensors" else target / WEIGHTS_FILE
    if file.is_dir():
        raise UserError(f"{file} is a folder; give the name of a file as --out")
    refuse_existing(file, overwrite)
    return file


def _check_folder(folder: Path, overwrite: bool) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    refuse_existing(folder, overwrite)
    ours = (folder / DESCRIPTION_FILE).is_file()
    if os.path.lexists(folder) and not ours:  # whatever it is, it is not ours to delete
        raise UserError(f"{folder} exists and is no folder that export wrote; give another --out or remove it yourself")


def plain_entries(weights: Weights, dtype: torch.dtype | None) -> Iterator[Entry]:
    """The weights under this project's names."""
    for name, (stored, shape) in weights.tensors.items():
        yield Entry(name, dtype or stored, shape, lambda name=name: weights.read(name))  # type: ignore[misc]


def hf_entries(weights: Weights, dtype: torch.dtype | None) -> Iterator[Entry]:
    """The weights under the names, and in the orientation, of the Hugging Face layout."""
    shapes = expected_shapes(weights.config)
    for piece in hf_layouts.pieces(weights.config):
        weight = piece.ours if piece.ours in weights.tensors else piece.ours.replace(".bias", ".weight")
        shape = hf_layouts.piece_shape(piece, weights.config, shapes)
        yield Entry(
            piece.theirs,
            dtype or weights.tensors[weight][0],
            shape,
            lambda piece=piece, shape=shape: _cut(weights, piece, shape),  # type: ignore[misc]
        )


def _cut(weights: Weights, piece: hf_layouts.Piece, shape: tuple[int, ...]) -> Tensor:
    if piece.ours not in weights.tensors:
        return torch.zeros(shape)  # a bias that this model does without
    tensor = weights.read(piece.ours)
    if piece.rows is not None:
        tensor = tensor[piece.rows[0] : piece.rows[1]]
    return tensor.T if piece.transposed else tensor


def _write_hf_folder(weights: Weights, folder: Path, dtype: torch.dtype | None) -> int:
    """Everything goes into a temporary folder first, which then gets the name."""
    hf_layouts.layout_of(weights.config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".tmp-{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        size = write_safetensors(temporary / WEIGHTS_FILE, hf_entries(weights, dtype), {"format": "pt"})
        stored = dtype or next(iter(weights.tensors.values()))[0]
        name = str(stored).removeprefix("torch.")
        _write_json(temporary / "config.json", hf_layouts.to_hf_config(weights.config, name))
        _write_json(temporary / "generation_config.json", {"_from_model_config": True})
        _write_json(
            temporary / DESCRIPTION_FILE,
            {"config": weights.config.to_dict(), "vocabulary": weights.vocabulary, "origin": weights.origin},
        )
        vocabulary = json.loads(weights.vocabulary) if weights.vocabulary else {}
        if vocabulary.get("kind") == "bpe":
            _write_json(temporary / "tokenizer.json", vocabulary["tokenizer"])
        put_in_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return size


def _write_json(path: Path, document: dict) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


OTHER_FILES = (".pt", ".pth", ".bin", ".ckpt", ".txt", ".json")  # endings that nobody gives a folder


def parser() -> ToolParser:
    options = ToolParser(prog="lit-gpt-dist export", description=__doc__)
    options.add_argument("checkpoint", help="a checkpoint, or a run's folder for its newest whole one")
    options.add_argument("--out", required=True, help="a .safetensors file, or a folder")
    options.add_argument("--format", choices=("safetensors", "hf"), default="safetensors", help="what to write")
    options.add_argument("--dtype", choices=tuple(DTYPES), help="type of the weights; by default as they are stored")
    options.add_argument("--overwrite", action="store_true", help=OVERWRITE_HELP)
    return options


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    target = Path(options.out)
    if options.format == "hf" and target.suffix == ".safetensors":
        raise UserError(f"--format hf writes a folder, but --out {target} names a file; give a folder")
    if target.suffix in OTHER_FILES and not target.is_dir():
        raise UserError(
            f"--out {target} is neither a .safetensors file nor a folder; give for example {target.with_suffix('.safetensors')}"
        )
    try:
        size = export_checkpoint(Path(options.checkpoint), target, options.format, options.dtype, options.overwrite)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}; choose another --out") from error
    Console(stderr=True).print(f"wrote {target}: {size / MIB:,.1f} MiB of weights", highlight=False, soft_wrap=True)
    return EXIT_OK
