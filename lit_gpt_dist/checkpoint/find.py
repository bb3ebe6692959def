"""Finds checkpoints, tells whole ones from damaged ones, and picks the newest whole one. Reads files; loads no tensors."""

import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lit_gpt_dist.checkpoint import format as layout
from lit_gpt_dist.checkpoint.format import DamagedError, Manifest
from lit_gpt_dist.errors import UserError

CHUNK_BYTES = 1 << 22
VERIFY_THREADS = 8  # checksums and reads release the interpreter's lock
Document = dict[str, Any]  # of ``state.json``; empty where it cannot be read
Sieves = Mapping[str, Callable[[Document], bool]]  # what is kept out: which documents are not


@dataclass(frozen=True)
class Found:
    """A folder that is named like a checkpoint; ``manifest`` is None where ``problem`` tells why it cannot be read."""

    path: Path
    manifest: Manifest | None
    problem: str = ""

    @property
    def order(self) -> tuple[float, str]:
        """Newest last: by the time of the commit; one whose manifest is unreadable by the folder's."""
        time = self.manifest.committed_at if self.manifest else self.path.stat().st_mtime
        return time, self.path.name

    @cached_property
    def document(self) -> Document:
        try:
            return layout.read_json(self.path / layout.STATE_FILE)
        except DamagedError:
            return {}


def folder_of(root: Path) -> Path:
    """The folder with the checkpoints of a run: ``root`` itself or ``root/checkpoints``."""
    return root if root.name == layout.FOLDER else root / layout.FOLDER


def list_checkpoints(root: Path) -> list[Found]:
    """All committed checkpoints of a run's folder, oldest first. Only their manifests are read."""
    folder = folder_of(root)
    paths = [path for path in folder.glob("step-*") if layout.STEP_FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted((_look(path) for path in paths), key=lambda found: found.order)


def _look(path: Path) -> Found:
    try:
        return Found(path, layout.read_manifest(path))
    except DamagedError as error:
        return Found(path, None, str(error))


def verify(path: Path) -> Manifest:
    """Reads every byte of a checkpoint against its manifest.

    Raises:
        DamagedError: what is wrong: a file missing, cut short, or changed.
    """
    manifest = layout.read_manifest(path)
    with ThreadPoolExecutor(VERIFY_THREADS) as pool:
        problems = pool.map(lambda item: _problem(path / item[0], **item[1]), manifest.files.items())
    for problem in problems:
        if problem:
            raise DamagedError(problem)
    return manifest


def _problem(path: Path, bytes: int, crc32: int) -> str | None:
    try:
        size = path.stat().st_size
        if size != bytes:
            return f"{path.name} has {size} bytes where {bytes} were written"
        crc = 0
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                crc = zlib.crc32(chunk, crc)
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    return None if crc == crc32 else f"{path.name} has changed since it was written (checksum)"


def of_tag(tag: str) -> Callable[[Document], bool]:
    """Which documents are of a run with this tag; one that says nothing of tags may be."""
    return lambda document: document.get("tag", tag) == tag


def of_run(found: list[Found], sieves: Sieves) -> tuple[list[Found], list[str]]:
    """What all sieves let through, and a line where the newest is not among it. A sieve that would leave nothing is not used:
    what is loaded then is refused with what differs."""
    newest = found[-1:]
    lines: list[str] = []
    for name, keeps in sieves.items():
        kept = [one for one in found if keeps(one.document)] or found
        if not lines and newest != kept[-1:]:
            path = newest[0].path
            lines.append(f"{path} is newer, but of {name} (--ckpt_path {path} takes it)")
        found = kept
    return found, lines


def newest_good(root: Path, sieves: Sieves | None = None) -> tuple[Path, list[str]]:
    """The newest checkpoint of a run that is whole, and a line for newer ones that are damaged or of another run.

    Raises:
        UserError: there is none.
    """
    candidates, others = of_run(list_checkpoints(root), sieves or {})
    damaged: list[str] = []
    for found in reversed(candidates):
        problem = found.problem
        if not problem:
            try:
                verify(found.path)
                return found.path, others + damaged
            except DamagedError as error:
                problem = str(error)
        damaged.append(f"{found.path} is damaged: {problem}")
    if damaged:
        raise UserError(f"{'; '.join(damaged)}; no checkpoint in {folder_of(root)} is whole, start without --ckpt_path")
    raise UserError(f"{folder_of(root)} holds no checkpoint; start without --ckpt_path, or give another path")


def resolve(value: str | Path, root: Path, tag: str | None = None) -> str | None:
    """What ``--ckpt_path VALUE`` means for a run whose root is ``root``: a path for ``Trainer.fit``, or None.

    ``last`` is None where no checkpoint (of the tag, where there is one) was committed yet, so that a job can always be
    started with it; otherwise it is ``root/checkpoints/last``, and which folder that means is decided, verified and told when
    it is loaded.

    Raises:
        UserError: a path that does not exist.
    """
    if str(value) == layout.LAST:
        own = [found for found in list_checkpoints(root) if tag is None or of_tag(tag)(found.document)]
        return str(folder_of(root) / layout.LAST) if own else None
    path = Path(value)
    if path.is_dir() and not (path / layout.MANIFEST_FILE).exists() and list_checkpoints(path):
        return str(folder_of(path) / layout.LAST)
    if not path.exists():
        raise UserError(f"checkpoint {path} does not exist; {offer(root)}")
    return str(path)


def peek(path: Path, tag: str | None = None) -> Document:
    """The document of the checkpoint that ``path`` most likely means, before a run knows enough to choose: of ``…/last`` the newest
    of the tag. Verifies nothing."""
    if path.name != layout.LAST:
        return Found(path, None).document
    own = [found for found in list_checkpoints(path.parent) if tag is None or of_tag(tag)(found.document)]
    return own[-1].document if own else {}


def none_yet(root: Path, tag: str | None) -> str:
    """Why ``last`` is nothing: a line's beginning, and the newest of other tags where there is one."""
    others = list_checkpoints(root)
    if not others:
        return f"no checkpoint in {root} yet"
    return f"no checkpoint of tag {tag} in {root} yet (--ckpt_path {others[-1].path} is the newest of another)"


def choose(path: Path, sieves: Sieves | None = None) -> tuple[Path, list[str]]:
    """The verified checkpoint that ``path`` means, and warnings. ``…/last`` is the newest whole one of its folder that the
    sieves let through.

    Raises:
        UserError: the path is no checkpoint, or a damaged one; the newest whole one is offered.
    """
    if path.name == layout.LAST:
        return newest_good(path.parent, sieves)
    if not path.exists():
        raise UserError(f"checkpoint {path} does not exist; {offer(path.parent)}")
    if path.is_file():
        raise UserError(
            f"{path} is a file, but a checkpoint is a folder; give the folder that holds {layout.MANIFEST_FILE}"
        )
    if not (path / layout.MANIFEST_FILE).exists() and not layout.STEP_FOLDER.fullmatch(path.name):
        raise UserError(f"{path} is no checkpoint (a folder step-XXXXXXXX); {offer(path.parent)}")
    try:
        verify(path)
    except DamagedError as error:
        raise UserError(f"checkpoint {path} is damaged: {error}; {offer(path.parent)}") from error
    return path, []


def offer(folder: Path) -> str:
    """The remedy of an error: the newest whole checkpoint near ``folder``, where there is one."""
    try:
        good, _ = newest_good(folder)
    except UserError:
        return f"there is no whole checkpoint in {folder_of(folder)}"
    return f"the newest whole one is {good} (--ckpt_path {good}, or --ckpt_path last)"
