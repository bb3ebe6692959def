"""A corpus: one stream of tokens with its vocabulary. Knows nothing of batches, devices or processes.

It comes from text (tokenised in memory at start) or from a folder made by ``lit-gpt-dist prepare`` (memory-mapped).
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_gpt_dist.data.sources import find_text, read_pieces
from lit_gpt_dist.data.stream import TokenStream, open_shard
from lit_gpt_dist.data.tokenizers import (
    VOCABULARY_FILE,
    CharVocabulary,
    Tokens,
    Vocabulary,
    fixed_vocabulary,
    vocabulary_from_json,
)
from lit_gpt_dist.errors import UserError

CORPUS_FILE = "corpus.json"
FORMAT_VERSION = 1
MAX_VALIDATION_TOKENS = (
    10_000_000  # a loss over so many tokens is known to about 0.001; more would only be lost to training
)


@dataclass(frozen=True)
class Corpus:
    """Tokens, what they mean, and a digest (SHA-256, hex) of both."""

    tokens: TokenStream
    vocabulary: Vocabulary
    digest: str
    name: str
    path: str | None = None
    dropped: dict[str, int] = field(default_factory=dict)  # characters outside the vocabulary, left out while reading
    skipped: int = 0  # entries of a folder that were not read: hidden, or not named like a text

    def __len__(self) -> int:
        return len(self.tokens)

    def gather(self, starts: npt.NDArray[np.int64], length: int) -> Tokens:
        """Windows of ``length`` tokens: shape (*starts.shape, length)."""
        return self.tokens.gather(starts, length)

    def split(self, val_fraction: float, context: int) -> tuple[TokenStream, TokenStream]:
        """The part to train on and the part to validate on, which is cut off the end (empty for a fraction of 0).

        Raises:
            UserError: a fraction outside [0, 1), or a corpus too short for one window in each part.
        """
        if not 0 <= val_fraction < 1:
            raise UserError(f"val_fraction {val_fraction} is outside 0 ≤ val_fraction < 1; use for example 0.1")
        window = context + 1
        validation = min(int(len(self) * val_fraction), MAX_VALIDATION_TOKENS)
        if val_fraction > 0:
            validation = max(validation, window)
        if len(self) - validation < window:
            needed = 2 * window if val_fraction > 0 else window
            raise UserError(
                f"corpus {self.name} has {len(self)} tokens, but context {context} needs at least {needed} to train and"
                " validate; give a longer text or a smaller --data.context"
            )
        border = len(self) - validation
        return self.tokens.view(0, border), self.tokens.view(border, len(self))


def load_corpus(path: str | None, tokenizer: str | None = None, usual: Vocabulary | None = None) -> Corpus:
    """The corpus at ``path`` (see ``find_text``), or a folder made by ``lit-gpt-dist prepare``.

    ``tokenizer`` of None: a prepared folder's own; else ``usual``, where given; else ``byte`` for the standard library, because
    the characters in it differ between Python versions and a model should fit all of them; ``char`` for any other text.

    Raises:
        UserError: nothing there, empty, not UTF-8, or a tokenizer that does not fit.
    """
    if path and os.path.isfile(Path(path).expanduser() / CORPUS_FILE):
        return _prepared(Path(path).expanduser(), tokenizer)
    source = find_text(path)
    beforehand = usual if tokenizer is None else None
    tokenizer = tokenizer or ("byte" if path is None else "char")
    if tokenizer == "bpe":
        raise UserError(
            "tokenizer bpe is trained beforehand; run `lit-gpt-dist prepare TEXT --tokenizer bpe --out FOLDER` and give"
            " FOLDER as the corpus, or give the path of a tokenizer.json"
        )
    pieces = list(read_pieces(source.files, skip_unreadable=path is None))
    if not any(pieces):
        raise UserError(f"corpus {path or source.name} is empty; give a text of some thousand characters")
    vocabulary = beforehand or fixed_vocabulary(tokenizer) or char_vocabulary(pieces)
    dropped: Counter[str] = Counter()
    tokens = np.concatenate(list(encode_pieces(pieces, vocabulary, dropped, allow_drops=tokenizer.startswith("char:"))))
    if not len(tokens):
        raise UserError(f"corpus {path} has no character of {tokenizer}; give another text or another --data.tokenizer")
    digest = ContentDigest(vocabulary)
    digest.update(tokens)
    return Corpus(
        TokenStream([tokens]), vocabulary, digest.hexdigest(), source.name, path, dict(dropped), len(source.skipped)
    )


def char_vocabulary(pieces: Iterable[str]) -> CharVocabulary:
    """The sorted characters of a text read once."""
    characters: set[str] = set()
    for piece in pieces:
        characters.update(piece)
    return CharVocabulary(characters)


def encode_pieces(
    pieces: Iterable[str], vocabulary: Vocabulary, dropped: Counter[str], allow_drops: bool
) -> Iterator[Tokens]:
    """Tokens piece by piece; characters outside an allowed set are left out and counted in ``dropped``."""
    for piece in pieces:
        if allow_drops and isinstance(vocabulary, CharVocabulary):
            tokens, missing = vocabulary.encode_known(piece)
            dropped.update(missing)
            yield tokens
        else:
            yield vocabulary.encode(piece)


class ContentDigest:
    """SHA-256 over a vocabulary's digest and all tokens as 16-bit (or 32-bit) little-endian numbers.

    The stored width is fixed by the vocabulary, so a text and the shards prepared from it have one digest.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._hash = hashlib.sha256(vocabulary.digest.encode())
        self._dtype = shard_dtype(vocabulary)

    def update(self, tokens: Tokens) -> None:
        for start in range(0, len(tokens), 1 << 22):  # a converted copy of 4 Mi tokens at a time
            self._hash.update(tokens[start : start + (1 << 22)].astype(self._dtype).tobytes())

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def shard_dtype(vocabulary: Vocabulary) -> np.dtype[Any]:
    """How shards store tokens: 16 bits, or 32 where the vocabulary needs them; little-endian on every machine."""
    return np.dtype("<u2" if vocabulary.size <= 1 << 16 else "<u4")


def _prepared(folder: Path, tokenizer: str | None) -> Corpus:
    try:
        facts = json.loads((folder / CORPUS_FILE).read_text("utf-8"))
        vocabulary = vocabulary_from_json((folder / VOCABULARY_FILE).read_text("utf-8"))
        version, digest, shards = facts["version"], facts["digest"], facts["shards"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder} is not a whole prepared corpus ({error}); run `lit-gpt-dist prepare` again"
        ) from error
    if version != FORMAT_VERSION:
        raise UserError(
            f"{folder} has format version {version}, but this program reads {FORMAT_VERSION}; prepare it again"
        )
    if vocabulary.digest != facts["vocabulary_digest"]:
        raise UserError(f"{folder / VOCABULARY_FILE} is not the vocabulary of these shards; prepare the corpus again")
    _check_tokenizer(folder, vocabulary, tokenizer)
    parts = [_checked_shard(folder / shard["file"], facts["dtype"], shard["tokens"]) for shard in shards]
    return Corpus(
        TokenStream(parts), vocabulary, digest, folder.resolve().name, str(folder), facts["dropped_characters"]
    )


def _checked_shard(path: Path, dtype: str, count: int) -> Tokens:
    """The size is checked at every start; the hash is not: reading terabytes before step 0 is no option."""
    expected = count * np.dtype(dtype).itemsize
    actual = path.stat().st_size if path.is_file() else 0
    if actual != expected:
        raise UserError(
            f"shard {path} has {actual} bytes, but {expected} were written; run `lit-gpt-dist prepare` again"
        )
    return open_shard(path, dtype, count)


def _check_tokenizer(folder: Path, vocabulary: Vocabulary, tokenizer: str | None) -> None:
    if tokenizer is None or tokenizer == vocabulary.kind:
        return
    if fixed_vocabulary(tokenizer) != vocabulary:
        raise UserError(
            f"{folder} was prepared with a {vocabulary.kind} vocabulary of {vocabulary.size}, which is not --data.tokenizer"
            f" {tokenizer}; leave that option out, or prepare the text again"
        )
