"""Finds checkpoints, tells whole ones from damaged ones, and picks the newest whole one. Reads files; loads no tensors."""

import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lit_gpt_dist.checkpoint import format as layout
from lit_gpt_dist.checkpoint.format import DamagedError, Manifest
from lit_gpt_dist.errors import UserError

CHUNK_BYTES = 1 << 22
VERIFY_THREADS = 8  # checksums and reads release the interpreter's lock


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


def newest_good(root: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint of a run that is whole, and a line for each newer one that is not.

    Raises:
        UserError: there is none.
    """
    damaged: list[str] = []
    for found in reversed(list_checkpoints(root)):
        problem = found.problem
        if not problem:
            try:
                verify(found.path)
                return found.path, damaged
            except DamagedError as error:
                problem = str(error)
        damaged.append(f"{found.path} is damaged: {problem}")
    if damaged:
        raise UserError(f"{'; '.join(damaged)}; no checkpoint in {folder_of(root)} is whole, start without --ckpt_path")
    raise UserError(f"{folder_of(root)} holds no checkpoint; start without --ckpt_path, or give another path")


def resolve(value: str | Path, root: Path) -> str | None:
    """What ``--ckpt_path VALUE`` means for a run whose root is ``root``: a path for ``Trainer.fit``, or None.

    ``last`` is None where no checkpoint was committed yet, so that a job can always be started with it; otherwise it is
    ``root/checkpoints/last``, and which folder that means is decided, verified and told when it is loaded.

    Raises:
        UserError: a path that does not exist.
    """
    if str(value) == layout.LAST:
        return str(folder_of(root) / layout.LAST) if list_checkpoints(root) else None
    path = Path(value)
    if path.is_dir() and not (path / layout.MANIFEST_FILE).exists() and list_checkpoints(path):
        return str(folder_of(path) / layout.LAST)
    if not path.exists():
        raise UserError(f"checkpoint {path} does not exist; {offer(root)}")
    return str(path)


def choose(path: Path) -> tuple[Path, list[str]]:
    """The verified checkpoint that ``path`` means, and warnings. ``…/last`` is the newest whole one of its folder.

    Raises:
        UserError: the path is no checkpoint, or a damaged one; the newest whole one is offered.
    """
    if path.name == layout.LAST:
        return newest_good(path.parent)
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
