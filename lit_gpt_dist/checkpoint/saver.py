"""Writes one checkpoint folder with all ranks, now or in the background, at most one at a time. Knows nothing of Lightning."""

import concurrent.futures
import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException

from lit_gpt_dist.checkpoint import format as layout
from lit_gpt_dist.checkpoint.dcp import Reader, Writer
from lit_gpt_dist.checkpoint.tensors import Stager, share_out

FULL_BYTES = 64 << 20  # less than this free explains any failed write
MAX_WRITE_THREADS = 4  # files a rank writes at once; more bring nothing to one disk
BACKGROUND_THREADS = 1  # nobody waits for those: the cores, Python and the disk are training's first
DCP_THREAD = "_write_files_from_queue"  # in the name of the threads that torch.distributed.checkpoint writes with
T = TypeVar("T")


class SaveError(RuntimeError):
    """A checkpoint could not be written. Nothing carries its name; the ones before it are untouched."""


@dataclass(frozen=True)
class Job:
    """One checkpoint to write. ``shared`` tensors are on every rank, whole or in shards; ``own`` ones are this rank's."""

    path: Path
    step: int
    run_id: str
    state_json: str  # rank 0's is written
    shared: dict[str, Tensor]
    own: dict[str, Tensor] = field(default_factory=dict)
    val_loss: float | None = None
    after_commit: Callable[[Path], None] | None = None  # on rank 0, once the folder has its name


class Ranks:
    """All ranks, talking through the CPU: never on the device's stream, and apart from what training sends.

    Collective: every rank must create it at the same point.
    """

    def __init__(self) -> None:
        self.together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo") if self.together else None
        self.rank = dist.get_rank() if self.together else 0
        self.size = dist.get_world_size() if self.together else 1

    def from_first(self, make: Callable[[], T]) -> T:
        """What ``make`` returns on rank 0, on every rank. Its error, where it raises one, is raised on every rank."""
        result: list[Any] = [None, None]
        if self.rank == 0:
            try:
                result[0] = make()
            except Exception as error:
                result[1] = error
        if self.together:
            dist.broadcast_object_list(result, src=0, group=self.group)
        if result[1] is not None:
            raise result[1]
        return result[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks, on every rank."""
        if not self.together:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


class Saver:
    """Saves through a process group of its own, so that a save in the background never meets training's collectives."""

    def __init__(self) -> None:
        self.ranks = Ranks()
        self.stager = Stager()
        self.pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: concurrent.futures.Future[Path] | None = None
        self.pending_path: Path | None = None
        self.blocked_seconds: list[float] = []  # for each save, how long training stood still
        self.write_seconds: list[float] = []  # for each save, until it was committed

    def save(self, job: Job, background: bool) -> None:
        """Writes and commits, or, in the background, copies into host memory and returns.

        Raises:
            SaveError: this save failed, or the one before it that ran in the background.
        """
        start = time.perf_counter()
        self.wait()
        tensors = share_out(job.shared, self.ranks.rank, self.ranks.size) | job.own
        if background:
            tensors = self.stager.stage(tensors)
            self.pending = self.pool.submit(self._write, job, tensors, start, background)
            self.pending_path = job.path
        else:
            self._write(job, tensors, start, background)
        self.blocked_seconds.append(time.perf_counter() - start)

    def prepare(self, shared: dict[str, Tensor]) -> None:
        """Begins to make the host memory that saves of ``shared`` in the background need, beside training."""
        self.stager.prepare(share_out(shared, self.ranks.rank, self.ranks.size))

    def wait(self) -> None:
        """Returns once nothing is being written any more. Raises SaveError if what was being written failed."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    @property
    def failed(self) -> bool:
        """Whether a save in the background has ended in an error that ``wait`` will raise."""
        return self.pending is not None and self.pending.done() and self.pending.exception() is not None

    def close(self) -> None:
        """Waits like ``wait``, then ends the writing thread."""
        try:
            self.wait()
        finally:
            self.pool.shutdown()
            self.stager.close()

    def _write(self, job: Job, tensors: dict[str, Tensor], start: float, background: bool) -> Path:
        """Every rank its part; then rank 0 commits. All ranks succeed or all raise SaveError."""
        temporary: Path | None = None
        committed: list[Path] = []  # on rank 0
        try:
            temporary = self.ranks.from_first(lambda: _make_temporary(job))
            writer = Writer(temporary, BACKGROUND_THREADS if background else _write_threads(), on_host=background)
            with silent_writers():
                dcp.save(
                    {name: tensor.detach() for name, tensor in tensors.items()},
                    storage_writer=writer,
                    planner=DefaultSavePlanner(flatten_state_dict=False),
                    process_group=self.ranks.group,
                    no_dist=not self.ranks.together,
                )
            written = self.ranks.gather(writer.written)
            path = self.ranks.from_first(lambda: _commit(job, temporary, written, committed))  # type: ignore[arg-type]
        except (CheckpointException, OSError, RuntimeError, ValueError) as error:
            if temporary is not None and self.ranks.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            outcome = "was saved, but another rank was lost" if committed else "was not saved"
            raise SaveError(f"checkpoint {job.path} {outcome}: {reason(error)}{disk_note(job.path)}") from error
        self.write_seconds.append(time.perf_counter() - start)
        return path


@contextlib.contextmanager
def silent_writers() -> Iterator[None]:
    """While DCP writes: its threads' errors reach the caller as one line, and need no traceback of their own."""
    shown = threading.excepthook

    def hook(args: Any) -> None:
        if args.thread is None or DCP_THREAD not in args.thread.name:
            shown(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = shown


def _make_temporary(job: Job) -> Path:
    temporary = layout.temporary_folder(job.path, job.run_id)
    temporary.mkdir(parents=True)
    return temporary


def _commit(job: Job, temporary: Path, written: list[dict[str, dict[str, int]]], committed: list[Path]) -> Path:
    files = {name: facts for part in written for name, facts in part.items()}
    files[layout.STATE_FILE] = layout.write_durably(temporary / layout.STATE_FILE, job.state_json)
    manifest = layout.Manifest(job.run_id, job.step, time.time(), job.val_loss, files)
    path = layout.commit(temporary, job.path, manifest)
    committed.append(path)
    if job.after_commit is not None:
        job.after_commit(path)
    return path


def _write_threads() -> int:
    """This rank's share of the machine's cores, up to what a disk can use."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or (dist.get_world_size() if dist.is_initialized() else 1)
    return max(1, min(MAX_WRITE_THREADS, (os.cpu_count() or 1) // ranks_here))


def disk_note(path: Path) -> str:
    """The likely cause where the disk is full: what a writer says then is seldom that."""
    with contextlib.suppress(OSError):
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        free = shutil.disk_usage(folder).free
        if free < FULL_BYTES:
            return f" (the disk is full: {free / 2**20:.1f} MiB free under {folder})"
    return ""


def reason(error: BaseException) -> str:
    """One line for an error, also for those that DCP collects from several ranks."""
    if isinstance(error, CheckpointException):
        causes = {f"rank {rank}: {reason(failure[0])}" for rank, failure in error.failures.items()}
        return "; ".join(sorted(causes))
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def load_into(tensors: dict[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Fills ``tensors`` by name from a checkpoint's parts; each rank reads what it holds, whoever wrote it."""
    dcp.load(
        {name: tensor.detach() for name, tensor in tensors.items()},
        storage_reader=Reader(folder),
        planner=DefaultLoadPlanner(flatten_state_dict=False),
        process_group=ranks.group,
        no_dist=not ranks.together,
    )
