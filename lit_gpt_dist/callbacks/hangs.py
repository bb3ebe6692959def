"""Ends a run in which nothing moves any more, and says which rank the others wait for.

A thread on every rank looks at the time since the last sign of life: a step, a part of one, a validation batch. After the
strategy's ``timeout_seconds`` every rank writes where it stands to the job's store (no collective, which would hang too),
prints it, leaves the flight recorder's dump beside the run for ``lit-gpt-dist trace``, and the run ends with an error.
Touches neither device nor process group.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lit_gpt_dist.callbacks.position import Position, flight_dump, take_position, who_is_missing
from lit_gpt_dist.errors import EXIT_FAILURE, RunStopped

LOOK_SECONDS = 1.0
ANSWER_SECONDS = 8.0  # all ranks notice within a second of each other, unless one is gone
UNTIMED = ("setup", "saving", "end")  # how long these take is not known: only the process group's own timeout ends them
ASKED = "lit_gpt_dist/position/asked"
FLIGHT_FOLDER = "flight"
RECORDED_COLLECTIVES = "2000"


def record_collectives(folder: Path) -> None:
    """Turns PyTorch's flight recorder on. Before the process group is made; what a user has set stays."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED_COLLECTIVES)
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / FLIGHT_FOLDER / "nccl-rank-"))


class HangWatch(pl.Callback):
    """Notes signs of life from Lightning's hooks; a thread acts when they stop.

    Args:
        timeout_seconds: None: the strategy's.
    """

    def __init__(self, timeout_seconds: float | None = None) -> None:
        self.timeout_seconds = timeout_seconds
        self.phase, self.step = "setup", 0
        self._alive_at = time.monotonic()
        self._stop = threading.Event()
        self._reported = False
        self._store: Any = None
        self._trainer: Any = None

    # ---- signs of life --------------------------------------------------------------------------------------------

    def _alive(self, phase: str) -> None:
        self.phase = phase
        self._alive_at = time.monotonic()

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._trainer = trainer
        self.step = trainer.global_step
        timeout = self.timeout_seconds or getattr(trainer.strategy, "timeout_seconds", None)
        self._alive("setup")
        if trainer.world_size < 2 or timeout is None or not dist.is_initialized():
            return
        self._store = own_connection()
        (Path(trainer.run_dir) / FLIGHT_FOLDER).mkdir(parents=True, exist_ok=True)  # type: ignore[attr-defined]
        trainer.fit_loop.epoch_loop.watchers += (lambda: self._alive("data"),)  # type: ignore[attr-defined]
        threading.Thread(target=self._watch, args=(timeout,), name="hang-watch", daemon=True).start()

    @property
    def wants_parts(self) -> bool:
        """Whether the next step's parts must be told: where there are other ranks to wait for."""
        return self._store is not None

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self._alive("forward")

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: Any) -> None:
        self._alive("backward")

    def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
        self._alive("optimizer")

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.step = trainer.global_step
        self._alive("between")

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self._alive("saving")

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._alive("validation")

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._alive("validation")

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._alive("between")  # here, unlike at a step's end, what follows may be a save

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._alive("end")

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        """A collective that failed by itself, as gloo's do: the others may still answer who was missing."""
        if self._reported:  # what broke now broke because the run is being ended
            os._exit(EXIT_FAILURE)
        self._stop.set()
        if self._store is not None and not isinstance(exception, RunStopped) and is_timeout(exception):
            self._report()

    def teardown(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        self._stop.set()

    # ---- the thread -----------------------------------------------------------------------------------------------

    def _watch(self, timeout: float) -> None:
        while not self._stop.wait(min(LOOK_SECONDS, timeout / 4)):
            silent = time.monotonic() - self._alive_at
            if silent > timeout and self.phase not in UNTIMED:
                print(
                    f"error: nothing has moved for {silent:.0f} s on rank {self._trainer.global_rank}", file=sys.stderr
                )
                self._end()
            elif was_asked(self._store):  # another rank is waiting, perhaps for this one
                self._end()

    def _end(self) -> None:
        self._report()
        os._exit(EXIT_FAILURE)

    def _report(self) -> None:
        """Prints this rank's position, waits for the others', and the first rank that answers says who is missing."""
        self._reported = True
        rank, ranks = self._trainer.global_rank, self._trainer.world_size
        position = take_position(rank, self.step, self.phase)
        say(str(position))
        keep_dump(Path(self._trainer.run_dir) / FLIGHT_FOLDER, position)
        positions = gather_positions(self._store, position, ranks)
        if rank == min(found.rank for found in positions):
            say(f"error: {who_is_missing(positions, ranks)}")
            time.sleep(1)  # the others read the answers from the store, which lives on rank 0
        else:
            time.sleep(4)  # a launcher that sees this rank end kills the one that is speaking


def say(text: str) -> None:
    """In one write, so that lines of several ranks do not mix."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def is_timeout(exception: BaseException) -> bool:
    """Whether a collective gave up waiting. A connection that broke is another matter: a rank died and has said why."""
    text = str(exception).lower()
    return "timed out" in text or "timeout" in text


def was_asked(store: Any) -> bool:
    try:
        return store.check([ASKED])
    except RuntimeError:  # the store went with rank 0
        return False


def own_connection() -> Any:
    """The job's store through a connection of its own: the shared one may be busy waiting."""
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store.clone() if hasattr(store, "clone") else store


def gather_positions(store: Any, own: Position, ranks: int) -> list[Position]:
    """The positions of all ranks that answer in time, this one's included."""
    found = {own.rank: own}
    deadline = time.monotonic() + ANSWER_SECONDS
    try:
        store.set(ASKED, "1")
        store.set(key(own.rank), own.to_json())
        while len(found) < ranks and time.monotonic() < deadline:
            for rank in set(range(ranks)) - set(found):
                if store.check([key(rank)]):
                    found[rank] = Position.from_json(store.get(key(rank)).decode())
            time.sleep(0.1)
    except RuntimeError:  # the store went with rank 0
        pass
    return [found[rank] for rank in sorted(found)]


def key(rank: int) -> str:
    return f"lit_gpt_dist/position/{rank}"


def keep_dump(folder: Path, position: Position) -> None:
    """The flight recorder's dump as JSON, one file a rank, with the step and the phase it was taken in."""
    dump = flight_dump()
    if not dump:
        return
    dump |= {"step": position.step, "phase": position.phase}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{position.rank}.json").write_text(json.dumps(dump))
    except OSError as error:
        say(f"the flight recorder's dump could not be kept: {error}")
