"""``lit-gpt-dist prepare``: text files to a folder of token shards. Knows nothing of training.

The text streams through in pieces (twice where the vocabulary is made from it), so memory does not grow with it. The
folder appears under its name only when it is whole.

Folder: ``tokens-00000.bin`` … (little-endian unsigned integers), ``vocabulary.json``, ``corpus.json`` (facts below).
"""

import hashlib
import json
import os
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lit_gpt_dist.arguments import ToolParser
from lit_gpt_dist.data.corpus import (
    CORPUS_FILE,
    FORMAT_VERSION,
    VOCABULARY_FILE,
    ContentDigest,
    char_vocabulary,
    encode_pieces,
    shard_dtype,
)
from lit_gpt_dist.data.sources import find_text, read_pieces
from lit_gpt_dist.data.stream import Tokens
from lit_gpt_dist.data.tokenizers import Vocabulary, fixed_vocabulary, train_bpe
from lit_gpt_dist.errors import EXIT_OK, UserError
from lit_gpt_dist.outputs import put_in_place, refuse_existing

SHARD_TOKENS = 500_000_000  # 1 GB of 16-bit tokens
SHOWN = 3  # names in a line


def main(argv: list[str]) -> int:
    """Runs the command; raises UserError for input that cannot be used, and then leaves nothing behind."""
    options = _parser().parse_args(argv)
    out = Path(options.out).expanduser()
    _check_out(out, options.overwrite)
    files, skipped = _input_files(options.input, out)
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"  # beside it: a rename works only within a file system
    try:
        _make_folder(partial)
        facts = _prepare(files, options.input, partial, options)
        put_in_place(partial, out)
    except OSError as error:
        raise UserError(
            f"{out} cannot be written ({error.strerror}); free space there or give another --out"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _report(facts, skipped, out)
    return EXIT_OK


def _parser() -> ToolParser:
    parser = ToolParser(prog="lit-gpt-dist prepare", description="Text files to token shards for --data.corpus.")
    parser.add_argument("input", nargs="+", help="UTF-8 files, folders or globs, read in the order given")
    parser.add_argument("--out", required=True, help="the folder to make")
    parser.add_argument(
        "--tokenizer", default="char", help="char, char:ru-en, byte, bpe (trained), or a tokenizer.json"
    )
    parser.add_argument("--vocab_size", type=int, default=None, help="tokens of a bpe vocabulary; 4096 where not given")
    parser.add_argument("--shard_tokens", type=int, default=SHARD_TOKENS, help="tokens of one shard file at most")
    parser.add_argument("--overwrite", action="store_true", help="replace a prepared corpus, once the new one is whole")
    return parser


def _check_out(out: Path, overwrite: bool) -> None:
    refuse_existing(out, overwrite)
    if os.path.lexists(out) and not (out / CORPUS_FILE).is_file():  # whatever it is, it is not ours to delete
        raise UserError(f"{out} exists and is not a prepared corpus; give another --out or remove it yourself")


def _input_files(inputs: list[str], out: Path) -> tuple[list[Path], dict[str, list[Path]]]:
    """The files to read, and those left out, by why."""
    files: list[Path] = []
    left_out: dict[Path, str] = {}
    seen: set[Path] = set()
    for path in inputs:
        if os.path.isfile(Path(path).expanduser() / CORPUS_FILE):
            raise UserError(f"{path} is a prepared corpus, not text; give the text it was made from")
        text = find_text(path)
        left_out |= text.skipped
        files += [file for file in text.files if file.resolve() not in seen]
        seen |= {file.resolve() for file in files}  # inputs may overlap; a text counted twice would be validated on too
    for file in files:
        if file.resolve().is_relative_to(out.resolve()):
            raise UserError(f"input {file} lies inside --out {out}, which would be replaced; give another --out")
    skipped: dict[str, list[Path]] = {}
    for file, why in left_out.items():
        if file.resolve() not in seen:  # else another input named it
            skipped.setdefault(why, []).append(file)
    return files, skipped


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"folder {folder.parent} cannot be written ({error.strerror}); give another --out") from error


def _prepare(files: list[Path], names: list[str], folder: Path, options: Any) -> dict[str, Any]:
    if options.shard_tokens < 1:
        raise UserError(f"shard_tokens {options.shard_tokens} is below 1; leave it out for {SHARD_TOKENS:,}")
    if options.vocab_size is not None and options.tokenizer != "bpe":
        raise UserError(f"vocab_size {options.vocab_size} is for --tokenizer bpe; leave it out for {options.tokenizer}")
    with _progress() as progress:
        vocabulary = _vocabulary(options.tokenizer, options.vocab_size, files, progress)
        dropped: Counter[str] = Counter()
        pieces = _watched(files, progress, "tokens")
        allow_drops = options.tokenizer.startswith("char:")
        writer = ShardWriter(folder, vocabulary, options.shard_tokens)
        try:
            for tokens in encode_pieces(pieces, vocabulary, dropped, allow_drops):
                writer.write(tokens)
        finally:
            writer.close()
    if not writer.total:
        raise UserError(
            f"{' '.join(names)} give no tokens with {options.tokenizer}; give a text or another --tokenizer"
        )
    facts = {
        "version": FORMAT_VERSION,
        "dtype": writer.dtype.str,
        "tokens": writer.total,
        "digest": writer.digest.hexdigest(),
        "vocabulary_digest": vocabulary.digest,
        "vocabulary_kind": vocabulary.kind,
        "vocabulary_size": vocabulary.size,
        "shards": writer.shards,
        "sources": names,
        "files": len(files),
        "dropped_characters": dict(dropped.most_common()),
    }
    (folder / VOCABULARY_FILE).write_text(vocabulary.to_json(), "utf-8")
    (folder / CORPUS_FILE).write_text(json.dumps(facts, indent=1, ensure_ascii=False), "utf-8")
    return facts


class ShardWriter:
    """Appends tokens to shard files of at most ``shard_tokens`` each, hashing them on the way."""

    def __init__(self, folder: Path, vocabulary: Vocabulary, shard_tokens: int) -> None:
        self.dtype = shard_dtype(vocabulary)
        self.digest = ContentDigest(vocabulary)
        self.shards: list[dict[str, Any]] = []
        self.total = 0
        self._folder, self._room = folder, 0
        self._shard_tokens = shard_tokens
        self._file: Any = None
        self._hash = hashlib.sha256()

    def write(self, tokens: Tokens) -> None:
        self.digest.update(tokens)
        self.total += len(tokens)
        while len(tokens):
            if not self._room:
                self._next_file()
            part, tokens = tokens[: self._room], tokens[self._room :]
            data = part.astype(self.dtype).tobytes()
            self._file.write(data)
            self._hash.update(data)
            self.shards[-1]["tokens"] += len(part)
            self._room -= len(part)

    def _next_file(self) -> None:
        self.close()
        name = f"tokens-{len(self.shards):05d}.bin"
        self._file = (self._folder / name).open("wb")
        self._hash, self._room = hashlib.sha256(), self._shard_tokens
        self.shards.append({"file": name, "tokens": 0})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self.shards[-1]["sha256"] = self._hash.hexdigest()


def _vocabulary(tokenizer: str, size: int | None, files: list[Path], progress: Progress) -> Vocabulary:
    if tokenizer == "bpe":
        return train_bpe(_watched(files, progress, "vocabulary"), 4096 if size is None else size)
    return fixed_vocabulary(tokenizer) or char_vocabulary(_watched(files, progress, "vocabulary"))


def _watched(files: list[Path], progress: Progress, what: str) -> Iterator[str]:
    task = progress.add_task(what, total=sum(file.stat().st_size for file in files))
    for piece in read_pieces(files):
        yield piece
        progress.advance(task, len(piece.encode()))


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)


def _report(facts: dict[str, Any], skipped: dict[str, list[Path]], out: Path) -> None:
    console = Console(highlight=False, soft_wrap=True)
    kind = f"{facts['vocabulary_kind']} vocabulary of {facts['vocabulary_size']:,}"
    console.print(f"{facts['tokens']:,} tokens, {kind}, {len(facts['shards'])} shard(s) in {out}", markup=False)
    for why, paths in skipped.items():
        few = ", ".join(os.fsencode(path).decode(errors="replace") for path in paths[:SHOWN])
        more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
        console.print(f"skipped {len(paths)} {why}: {few}{more}", markup=False)
    if dropped := facts["dropped_characters"]:
        often = ", ".join(f"{character!r} × {count:,}" for character, count in list(dropped.items())[:5])
        total = f"{sum(dropped.values()):,} characters of {len(dropped)} kinds"
        console.print(f"dropped {total} outside the allowed set, most often {often}", markup=False)
    console.print(f"next: lit-gpt-dist fit --data.corpus {shlex.quote(str(out))}", markup=False)
