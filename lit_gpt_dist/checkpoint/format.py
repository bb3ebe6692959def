"""What a checkpoint folder is: its name, its files, and how it comes into being at one instant. Knows no tensors.

    checkpoints/
      last -> step-00000020     the newest committed one
      step-00000010/
        manifest.json           run, step, validation loss, and size and CRC-32 of every other file
        state.json              everything that is not a tensor
        .metadata, __R_N.distcp the tensors, written by torch.distributed.checkpoint, a part a rank
      .tmp-…-step-00000030-…/    being written, or left behind by a kill: never read

Everything is written under a temporary name and made durable; then one rename commits it. A folder without ``.tmp-`` is
therefore complete, and what happens to it afterwards (a flipped bit, a lost file) shows against its manifest.
"""

import contextlib
import json
import os
import re
import shutil
import time
import uuid
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_gpt_dist.checkpoint.metadata import METADATA_FILE, PART_FILE

FORMAT = 1
MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
LAST = "last"
FOLDER = "checkpoints"  # under a run's root
TEMPORARY = ".tmp-"
ABANDONED_SECONDS = 86_400
STEP_FOLDER = re.compile(r"step-(\d{8,})(-[0-9a-f]{8})?")


class DamagedError(ValueError):
    """A folder that is not a complete checkpoint; the message says what is wrong with it."""


@dataclass(frozen=True)
class Manifest:
    """What can be known of a checkpoint without reading it."""

    run_id: str
    step: int
    committed_at: float  # seconds since 1970
    val_loss: float | None
    files: dict[str, dict[str, int]]  # name -> {"bytes", "crc32"}
    format: int = FORMAT

    def to_json(self) -> str:
        body = asdict(self)
        return json.dumps({**body, "crc32": _document_crc(body)}, indent=1) + "\n"


def _document_crc(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def read_manifest(folder: Path) -> Manifest:
    """Raises DamagedError where there is none, or not a whole one."""
    document = read_json(folder / MANIFEST_FILE)
    crc = document.pop("crc32", None)
    if document.get("format") != FORMAT:
        raise DamagedError(f"{MANIFEST_FILE} has format {document.get('format')!r}; this version reads {FORMAT}")
    if crc != _document_crc(document):
        raise DamagedError(f"{MANIFEST_FILE} does not match its own checksum")
    try:
        manifest = Manifest(**document)
    except TypeError as error:
        raise DamagedError(f"{MANIFEST_FILE} has wrong fields") from error
    known = {STATE_FILE, METADATA_FILE}
    strange = [name for name in manifest.files if name not in known and not PART_FILE.fullmatch(name)]
    missing = known - set(manifest.files)
    if strange or missing:
        raise DamagedError(f"{MANIFEST_FILE} lists {strange} and lacks {sorted(missing)}")
    return manifest


def read_json(path: Path) -> dict[str, Any]:
    """Raises DamagedError where the file is missing or is not a JSON object."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise DamagedError(f"{path.name} is not a JSON object")
    return document


def write_durably(path: Path, text: str) -> dict[str, int]:
    """Writes a new file, waits until the disk has it, and returns its size and checksum."""
    data = text.encode("utf-8")
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "crc32": zlib.crc32(data)}


def sync_folder(folder: Path) -> None:
    """Makes the names in ``folder`` durable; file systems that cannot do that for folders are left as they are."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def temporary_folder(final: Path, run_id: str) -> Path:
    """A name beside ``final`` that nobody else uses and no reader looks at."""
    return final.parent / f"{TEMPORARY}{run_id[:8]}-{final.name}-{uuid.uuid4().hex[:8]}"


def commit(temporary: Path, final: Path, manifest: Manifest) -> Path:
    """Writes the manifest and gives the folder its name: the instant at which the checkpoint exists.

    A checkpoint of the same run and name makes way (the run went back and came again, or that one was damaged). A
    ``step-`` folder of another run stays, and the new one's name gets the run's beginning.

    Raises:
        FileExistsError: something else than a checkpoint has the name.
    """
    write_durably(temporary / MANIFEST_FILE, manifest.to_json())
    sync_folder(temporary)
    if STEP_FOLDER.fullmatch(final.name) and final.exists() and not owned_by(final, manifest.run_id):
        final = final.with_name(f"{final.name}-{manifest.run_id[:8]}")
    if final.exists() and not (final / MANIFEST_FILE).is_file():
        raise FileExistsError(f"{final} exists and is no checkpoint")
    displaced = temporary_folder(final, manifest.run_id) if final.exists() else None
    if displaced is not None:
        final.rename(displaced)
    temporary.rename(final)
    sync_folder(final.parent)
    if displaced is not None:
        shutil.rmtree(displaced, ignore_errors=True)
    return final


def owned_by(folder: Path, run_id: str) -> bool:
    """Whether ``folder`` is a checkpoint of this run; a damaged manifest is nobody's."""
    try:
        return read_manifest(folder).run_id == run_id
    except DamagedError:
        return False


def point_last(folder: Path) -> None:
    """Lets ``last`` beside ``folder`` mean it, in one instant. Where links are not allowed, a text file holds the name."""
    link = folder.parent / LAST
    fresh = folder.parent / f"{TEMPORARY}{LAST}-{uuid.uuid4().hex[:8]}"
    try:
        fresh.symlink_to(folder.name, target_is_directory=True)
    except OSError:
        write_durably(fresh, folder.name + "\n")
    os.replace(fresh, link)
    sync_folder(folder.parent)


def remove(folder: Path, run_id: str) -> None:
    """Deletes a checkpoint so that a kill in between leaves no half of it under its name."""
    doomed = temporary_folder(folder, run_id)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep_temporary(folder: Path, run_id: str) -> None:
    """Deletes what killed saves left behind: this run's, and anybody's that nothing has touched for a day.

    Only before the run's first save: what another run is writing there at this moment is young and not this run's.
    """
    for path in folder.glob(f"{TEMPORARY}*"):
        own = path.name.startswith(f"{TEMPORARY}{run_id[:8]}-")
        with contextlib.suppress(OSError):
            if own or time.time() - path.lstat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
