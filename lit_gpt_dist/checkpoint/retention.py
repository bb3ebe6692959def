"""Which checkpoints of a run to keep. A pure choice, and the deleting that follows it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lit_gpt_dist.checkpoint import find
from lit_gpt_dist.checkpoint import format as layout
from lit_gpt_dist.checkpoint.format import Manifest


@dataclass(frozen=True)
class Keep:
    """What to keep; everything that no rule names goes."""

    last: int = 2  # the newest so many
    every: int | None = None  # those whose step is a multiple of it, for good
    best: bool = True  # the one with the lowest validation loss


def superfluous(manifests: Iterable[Manifest], keep: Keep) -> list[Manifest]:
    """Those of one run's checkpoints that no rule keeps, oldest first."""
    ordered = sorted(manifests, key=lambda manifest: manifest.committed_at)
    kept = {id(manifest) for manifest in ordered[-max(1, keep.last) :]}
    if keep.every:
        kept |= {id(manifest) for manifest in ordered if manifest.step % keep.every == 0}
    measured = [manifest for manifest in ordered if manifest.val_loss is not None]
    if keep.best and measured:
        kept.add(id(min(measured, key=lambda manifest: manifest.val_loss)))  # type: ignore[arg-type, return-value]
    return [manifest for manifest in ordered if id(manifest) not in kept]


def enforce(folder: Path, run_id: str, keep: Keep, trusted: set[Path]) -> list[Path]:
    """Deletes what ``keep`` does not name of this run's checkpoints in ``folder``. Called after a commit, on rank 0.

    Only folders named like a checkpoint whose manifest is whole and names this run are counted or deleted: another run's stay, and
    so does one with a damaged manifest, which its owner may want to look at. One whose data are damaged is never what is kept.

    Args:
        trusted: checkpoints that this process has written or read to the last byte. Others are read once, before anything goes
            because they are there; the set grows by them.
    """
    own = {
        id(found.manifest): found
        for found in find.list_checkpoints(folder)
        if found.manifest is not None and found.manifest.run_id == run_id and not found.path.is_symlink()
    }
    while True:
        doomed = [
            own[id(manifest)].path for manifest in superfluous((f.manifest for f in own.values() if f.manifest), keep)
        ]
        damaged = [
            key for key, found in own.items() if doomed and found.path not in doomed and not _whole(found, trusted)
        ]
        if not damaged:
            break
        for key in damaged:
            del own[key]
    for path in doomed:
        layout.remove(path, run_id)
    return doomed


def _whole(found: find.Found, trusted: set[Path]) -> bool:
    if found.path not in trusted:
        try:
            find.verify(found.path)
        except layout.DamagedError:
            return False
        trusted.add(found.path)
    return True
