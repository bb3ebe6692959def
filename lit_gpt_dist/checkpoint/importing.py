"""``lit-gpt-dist import``: a GPT-2 or Llama folder of transformers to an export that ``fit`` and ``generate`` open."""

from pathlib import Path

from rich.console import Console

from lit_gpt_dist.arguments import ToolParser
from lit_gpt_dist.checkpoint.export import DTYPES, MIB, OVERWRITE_HELP, plain_entries, weights_file
from lit_gpt_dist.checkpoint.sources import open_source
from lit_gpt_dist.checkpoint.stream import write_safetensors
from lit_gpt_dist.errors import EXIT_OK, UserError


def import_folder(source: Path, target: Path, dtype: str | None = None, overwrite: bool = False) -> int:
    """Writes the folder's weights, configuration and vocabulary as an export; returns its bytes."""
    file = weights_file(target, overwrite)
    weights = open_source(source)
    return write_safetensors(file, plain_entries(weights, DTYPES[dtype] if dtype else None), weights.header())


def parser() -> ToolParser:
    options = ToolParser(prog="lit-gpt-dist import", description=__doc__)
    options.add_argument("folder", help="a folder that save_pretrained wrote: config.json and the weights")
    options.add_argument("--out", required=True, help="a .safetensors file, or a folder to put one into")
    options.add_argument("--dtype", choices=tuple(DTYPES), help="type of the weights; by default as they are stored")
    options.add_argument("--overwrite", action="store_true", help=OVERWRITE_HELP)
    return options


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    folder = Path(options.folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json; give a folder that save_pretrained wrote")
    try:
        size = import_folder(folder, Path(options.out), options.dtype, options.overwrite)
    except OSError as error:
        raise UserError(f"cannot write {options.out}: {error.strerror or error}; choose another --out") from error
    Console(stderr=True).print(
        f"wrote {options.out}: {size / MIB:,.1f} MiB of weights", highlight=False, soft_wrap=True
    )
    return EXIT_OK
