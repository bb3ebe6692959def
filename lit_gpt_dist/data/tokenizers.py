"""Text to token numbers and back. Knows nothing of corpora, files of tokens or training.

A vocabulary is one small JSON document, kept beside token shards, checkpoints and exports; its digest tells whether
two of them mean the same thing by the same numbers.
"""

import codecs
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_gpt_dist.errors import UserError

Tokens = npt.NDArray[Any]

_RUSSIAN = "".join(map(chr, range(ord("а"), ord("я") + 1))) + "ё"
_ENGLISH = "abcdefghijklmnopqrstuvwxyz"
PRESET_CHARACTERS = {
    "ru-en": "".join(sorted(_RUSSIAN + _RUSSIAN.upper() + _ENGLISH + _ENGLISH.upper() + "0123456789 \n.,:;!?-—«»()")),
}
TOKENIZER_NAMES = (
    "char, char:ru-en, byte, bpe (which prepare trains), or the path of a tokenizer.json or of a prepared folder"
)
VOCABULARY_FILE = "vocabulary.json"  # of a prepared folder


class Vocabulary(ABC):
    """Numbers 0 … ``size`` - 1 and the text each stands for."""

    kind: str
    size: int

    @abstractmethod
    def encode(self, text: str) -> Tokens:
        """Token numbers of ``text``. Raises UserError for a character that the vocabulary cannot express."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str: ...

    @abstractmethod
    def to_dict(self) -> dict[str, Any]: ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned integers that hold every token."""
        return np.dtype("u1" if self.size <= 1 << 8 else "<u2" if self.size <= 1 << 16 else "<u4")

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the JSON document, whose form is canonical: sorted keys, no spaces, ASCII."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


class CharVocabulary(Vocabulary):
    """One token per character, in the order of their code points."""

    kind = "char"

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(characters)))
        self.size = len(self.characters)
        if not self.characters:
            raise UserError("a char vocabulary needs at least one character, but the text is empty; give a text")
        points = _code_points(self.characters)
        self._number_of = np.full(int(points[-1]) + 2, -1, np.int32)  # its last entry stands for all beyond
        self._number_of[points] = np.arange(self.size, dtype=np.int32)

    def encode(self, text: str) -> Tokens:
        numbers = self._numbers(text)
        unknown = np.flatnonzero(numbers < 0)
        if len(unknown):
            position = int(unknown[0])
            raise UserError(
                f"character {text[position]!r} at position {position} is not among the {self.size} characters of the"
                " vocabulary; remove it, or train with a vocabulary that has it (for example --data.tokenizer byte)"
            )
        return numbers.astype(self.dtype)

    def encode_known(self, text: str) -> tuple[Tokens, dict[str, int]]:
        """Tokens of the characters that are known, and how often each of the others was dropped."""
        numbers = self._numbers(text)
        points, counts = np.unique(_code_points(text)[numbers < 0], return_counts=True)
        dropped = {chr(point): int(count) for point, count in zip(points, counts, strict=True)}
        return numbers[numbers >= 0].astype(self.dtype), dropped

    def _numbers(self, text: str) -> npt.NDArray[np.int32]:
        points = _code_points(text)
        return self._number_of[np.minimum(points, len(self._number_of) - 1)]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.characters[i] for i in ids)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "characters": self.characters}


class ByteVocabulary(Vocabulary):
    """The 256 bytes of UTF-8: any text fits."""

    kind = "byte"
    size = 256

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind}


class BpeVocabulary(Vocabulary):
    """A tokenizer of the ``tokenizers`` library, trained here or read from its ``tokenizer.json``."""

    kind = "bpe"

    def __init__(self, document: str) -> None:
        from tokenizers import Tokenizer  # here: the other kinds do without the library

        self._tokenizer = Tokenizer.from_str(document)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()  # a corpus is one long text
        # numbers may have gaps, so the largest counts
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> Tokens:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "tokenizer": json.loads(self._tokenizer.to_str())}

    def __getstate__(self) -> str:
        return self._tokenizer.to_str()

    def __setstate__(self, document: str) -> None:
        self.__init__(document)  # type: ignore[misc]


def train_bpe(texts: Iterable[str], size: int) -> BpeVocabulary:
    """A byte-level BPE of ``size`` tokens: all 256 bytes are tokens, so any text goes there and back unchanged."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if size < 256:
        raise UserError(f"a bpe vocabulary of {size} cannot hold the 256 bytes; use --vocab_size 257 or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return BpeVocabulary(tokenizer.to_str())


def fixed_vocabulary(name: str) -> Vocabulary | None:
    """The vocabulary that ``name`` fixes by itself, or None where it must be made from the corpus (char, bpe).

    Raises:
        UserError: a name that is none, or a file that is no tokenizer.
    """
    if name in ("char", "bpe"):
        return None
    if name == "byte":
        return ByteVocabulary()
    if name.startswith("char:"):
        preset = name.removeprefix("char:")
        if preset not in PRESET_CHARACTERS:
            raise UserError(f"character set {preset!r} is not one of {', '.join(PRESET_CHARACTERS)}; use char:ru-en")
        return CharVocabulary(PRESET_CHARACTERS[preset])
    path = Path(name).expanduser()
    if (path / VOCABULARY_FILE).is_file():
        path = path / VOCABULARY_FILE
    if not path.is_file():
        raise UserError(f"tokenizer {name!r} is neither a known name nor a file; use {TOKENIZER_NAMES}")
    return read_tokenizer_file(path)


def read_tokenizer_file(path: Path) -> Vocabulary:
    """The tokenizer of a ``tokenizer.json``, or the vocabulary of a ``vocabulary.json`` of this project."""
    try:
        text = path.read_text("utf-8")
        document = json.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable as JSON ({error}); give a tokenizer.json") from error
    if isinstance(document, dict) and "kind" in document:
        return vocabulary_from_json(text)
    try:
        return BpeVocabulary(text)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is not a tokenizer ({error}); give one of the tokenizers library") from error


def vocabulary_from_json(text: str) -> Vocabulary:
    """The inverse of ``Vocabulary.to_json``."""
    document = json.loads(text)
    kind = document.get("kind")
    if kind == "char":
        return CharVocabulary(document["characters"])
    if kind == "byte":
        return ByteVocabulary()
    if kind == "bpe":
        return BpeVocabulary(json.dumps(document["tokenizer"]))
    raise UserError(f"vocabulary kind {kind!r} is not one of char, byte, bpe; it comes from another version")


class StreamDecoder:
    """Text of tokens as they come, one at a time: a character made of several tokens appears when it is whole."""

    _LONGEST_WAIT = 8  # tokens; UTF-8 has at most 4 bytes a character, so beyond that the bytes are not UTF-8

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._shown: list[int] = []  # tokens before the pending ones: a decoder may look at its left neighbour
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """What can be printed after this token; may be empty."""
        if self._vocabulary.kind == "char":
            return self._vocabulary.decode([token])
        if self._vocabulary.kind == "byte":
            return self._utf8.decode(bytes([token]))
        self._pending.append(token)
        text = self._pending_text()
        if text.endswith("\ufffd") and len(self._pending) < self._LONGEST_WAIT:
            return ""
        self._shown, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """What is left: the replacement character where the last character is incomplete."""
        if self._vocabulary.kind == "byte":
            return self._utf8.decode(b"", final=True)
        text, self._pending = (self._pending_text() if self._pending else ""), []
        return text

    def _pending_text(self) -> str:
        before = self._vocabulary.decode(self._shown)
        return self._vocabulary.decode([*self._shown, *self._pending])[len(before) :]


def _code_points(text: str | Sequence[str]) -> npt.NDArray[np.uint32]:
    return np.frombuffer("".join(text).encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))
