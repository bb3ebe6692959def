"""Finds text files and reads them piece by piece. Knows nothing of tokens."""

import codecs
import glob
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lit_gpt_dist.errors import UserError

# what a folder's text files are called; a single file or a glob may be called anything
_PROSE = (".txt", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".json", ".jsonl", ".yaml", ".yml", ".toml", ".sql")
_CODE = (".py", ".pyi", ".sh", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".css", ".go", ".rs")
TEXT_SUFFIXES = frozenset(_PROSE + _CODE)
# parts of the standard library left out: what is installed beside it, its tests, and tables without prose or code
_SKIPPED_LIBRARY = frozenset(
    ["site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"]
)
_READ_BYTES = 1 << 22
PIECE_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class TextFiles:
    """The files that make a corpus, in the order in which they are read, and what of a folder was left out and why."""

    name: str
    files: tuple[Path, ...]
    skipped: dict[Path, str] = field(default_factory=dict)


def find_text(path: str | None) -> TextFiles:
    """Files of a corpus: the standard library (None), a file, a folder with all below it, or a glob.

    Hidden files and folders are skipped. The order is that of the sorted paths, so it is the same on every rank.

    Raises:
        UserError: nothing there.
    """
    if path is None:
        return TextFiles("Python standard library", tuple(_library_sources()))
    if not path.strip():
        raise UserError(f"corpus {path!r} names nothing; give a text, a folder, a glob, or leave the option out")
    expanded = Path(path).expanduser()
    if os.path.isdir(expanded) and not os.access(expanded, os.R_OK | os.X_OK):
        raise UserError(f"folder {path} cannot be read (permission denied); check its permissions")
    if expanded.is_file():
        return TextFiles(expanded.name, (expanded,))
    if expanded.is_dir():
        found = dict(sorted(_below(expanded)))
        files = tuple(path for path, why in found.items() if not why)
        if not files:
            raise UserError(
                f"folder {path} holds no text files (*.txt, *.md, *.py, …); name the files by a glob such as '{path}/**/*'"
            )
        return TextFiles(expanded.resolve().name, files, {path: why for path, why in found.items() if why})
    matches = sorted(Path(m) for m in glob.glob(str(expanded), recursive=True) if os.path.isfile(m))
    if not matches:
        raise UserError(
            f"corpus {path} does not exist; give a UTF-8 text file, a folder, a glob, or a folder made by"
            " `lit-gpt-dist prepare`"
        )
    return TextFiles(path, tuple(matches))


def read_pieces(files: Iterable[Path], skip_unreadable: bool = False) -> Iterator[str]:
    """The text of all files, one line break between two of them, in pieces of about ``PIECE_CHARACTERS``.

    A piece ends with a line where it can: a tokenizer that looks at neighbouring characters then seldom notices the
    border, and the borders depend on nothing but the text.

    Raises:
        UserError: a file that cannot be read or is not UTF-8 (unless skipped).
    """
    held = ""
    for number, path in enumerate(files):
        parts: Iterable[str] = _decoded(path)
        if skip_unreadable:
            try:
                parts = list(parts)
            except UserError:
                continue
        if number:
            held += "\n"
        for part in parts:
            held += part
            while len(held) >= 2 * PIECE_CHARACTERS:
                cut = held.rfind("\n", 0, PIECE_CHARACTERS) + 1 or PIECE_CHARACTERS
                yield held[:cut]
                held = held[cut:]
    if held:
        yield held


def _decoded(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0  # bytes already decoded, those held back by the decoder not counted
    try:
        with path.open("rb") as file:
            while True:
                data = file.read(_READ_BYTES)
                held = len(decoder.getstate()[0])
                yield decoder.decode(data, final=not data)
                offset += len(data) + held - len(decoder.getstate()[0])
                if not data:
                    return
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8: byte {offset + error.start} is 0x{error.object[error.start]:02x};"
            " convert it (for example with iconv -t utf-8) or leave it out"
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check its permissions") from error


def _library_sources() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found = (f for f in root.rglob("*.py") if not _SKIPPED_LIBRARY.intersection(f.relative_to(root).parts))
    # _sysconfigdata… holds the paths of the machine it was built on
    return sorted((f for f in found if not f.name.startswith("_sysconfigdata")), key=lambda f: f.as_posix())


def _below(folder: Path) -> Iterator[tuple[Path, str]]:
    """All files below, each with why it is skipped, or nothing; a folder that is not entered stands for all in it."""
    for base, folders, names in os.walk(folder):
        shut = {name: why for name in folders if (why := _why_not_entered(Path(base, name)))}
        folders[:] = [name for name in folders if name not in shut]
        yield from ((Path(base, name), why) for name, why in shut.items())
        yield from ((path, _why_not_read(path)) for path in (Path(base, name) for name in names))


def _why_not_entered(folder: Path) -> str:
    if folder.name.startswith("."):
        return "hidden"
    return "linked to a folder" if folder.is_symlink() else ""


def _why_not_read(file: Path) -> str:
    if file.name.startswith("."):
        return "hidden"
    return "" if file.suffix.lower() in TEXT_SUFFIXES else "not named like text (*.txt, *.md, *.py, …)"
