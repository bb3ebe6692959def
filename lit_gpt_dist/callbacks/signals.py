"""Stops a run on a signal so that nothing is lost: all ranks finish the step, save, and end with a documented exit code.

SIGTERM and SIGUSR1 (Slurm's warning before its limit) end with ``EXIT_REQUEUE``: start the same command again with
``--ckpt_path last``. Ctrl+C (SIGINT) ends with ``EXIT_INTERRUPTED``. A second signal ends at once, without saving.

Communicates two numbers between the ranks' CPUs, in the background; never touches the device.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lit_gpt_dist.callbacks.checkpoint import CheckpointCallback, go_on
from lit_gpt_dist.callbacks.notices import insist
from lit_gpt_dist.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, RunStopped

CONTINUE, REQUEUE, INTERRUPT, SAVE_FAILED = 0, 1, 2, 3  # the largest that any rank wants is what all do
WANTED = {signal.SIGTERM: REQUEUE, signal.SIGUSR1: REQUEUE, signal.SIGINT: INTERRUPT}
EXIT_CODES = {REQUEUE: EXIT_REQUEUE, INTERRUPT: EXIT_INTERRUPTED}
FAST_SECONDS, STRIDE = 0.01, 16  # a signal is heeded at most 32 of such steps after it came
ECHO_SECONDS = 1.0  # launchers pass signals on: the same one again within this time is no second request


class SignalCallback(Callback):
    """Watches for signals from the set-up on; looks at what they ask for after optimizer steps
    and batches of validation."""

    def __init__(self) -> None:
        self.watch: SignalWatch | None = None
        self.agreement: Agreement | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or threading.current_thread() is not threading.main_thread():
            return
        self.watch = SignalWatch(lambda code: _end_at_once(trainer, code))
        self.watch.start()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.agreement = Agreement()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._look(trainer)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """A validation can outlast the time that a scheduler gives; it is left out then, and the step saved as it is."""
        if not trainer.sanity_checking and self.agreement is not None:
            self._look(trainer)

    def _look(self, trainer: pl.Trainer) -> None:
        assert self.agreement is not None
        wanted = self.watch.wanted if self.watch is not None else CONTINUE
        saver = trainer.strategy.saver if hasattr(trainer.strategy, "saver") else None
        if saver is not None and saver.failed:
            wanted = SAVE_FAILED
        decided = self.agreement.exchange(wanted)
        if decided == CONTINUE:
            return
        if decided == SAVE_FAILED and saver is not None:
            saver.wait()  # raises on every rank: a save fails on all or on none
        saved = _save(trainer)
        insist(trainer, f"stopped after step {trainer.global_step:,}{go_on(trainer, saved)}")
        raise RunStopped(EXIT_CODES[decided], trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        agreement, self.agreement = self.agreement, None
        if agreement is not None:
            agreement.finish()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop_watching()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop_watching()

    def _stop_watching(self) -> None:
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.stop()


def _save(trainer: pl.Trainer) -> CheckpointCallback:
    """The callback that saved, at once and whole."""
    found = (callback for callback in trainer.callbacks if isinstance(callback, CheckpointCallback))  # type: ignore[attr-defined]
    saver = next(found, None) or CheckpointCallback()
    saver.save(trainer, background=False)
    return saver


def _end_at_once(trainer: pl.Trainer, code: int) -> None:
    """From the watching thread: the main thread may be stuck where no Python runs."""
    for process in getattr(trainer.strategy.launcher, "procs", []):
        with contextlib.suppress(OSError):
            process.kill()
    os._exit(code)


class SignalWatch:
    """Remembers which signals came. A thread reads them from a pipe that the interpreter's C handler writes to, so that a
    second one takes effect even while the main thread waits for the device or for a rank that died."""

    def __init__(self, end_at_once: Callable[[int], None]) -> None:
        self.wanted = CONTINUE
        self.end_at_once = end_at_once
        self._seen_at: float | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_pipe = -1

    def start(self) -> None:
        """Only in the main thread."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous = {number: signal.signal(number, lambda *_: None) for number in WANTED}
        self._previous_pipe = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._leave_to_parent)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def stop(self) -> None:
        """Only in the main thread. The former handlers are back afterwards."""
        if threading.current_thread() is not threading.main_thread() or not self._previous:
            return
        signal.set_wakeup_fd(self._previous_pipe)
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous = {}
        os.close(self._write)  # ends the listening thread

    def _leave_to_parent(self) -> None:
        """In a forked worker of a loader: its signals are not the run's."""
        if self._previous:
            signal.set_wakeup_fd(-1)

    def _listen(self) -> None:
        with os.fdopen(self._read, "rb", buffering=0) as pipe:
            while received := pipe.read(1):
                if received[0] in list(WANTED):
                    self.receive(signal.Signals(received[0]))

    def receive(self, number: signal.Signals, now: float | None = None) -> None:
        """The first signal is noted; the next one, unless it is an echo of the first, ends at once."""
        now = time.monotonic() if now is None else now
        if self._seen_at is None:
            self._seen_at = now
            self.wanted = WANTED[number]
            if os.environ.get("LOCAL_RANK", "0") == "0":
                # stderr: also for whom --quiet leaves nothing else, as a second one would lose what the first one saves
                text = f"\n{number.name}: saving after this step, then ending; once more ends at once"
                print(text, file=sys.stderr, flush=True)
        elif now - self._seen_at > ECHO_SECONDS:
            self.end_at_once(EXIT_INTERRUPTED if number == signal.SIGINT else 128 + number)


class Agreement:
    """Every rank says a number; all get the largest that was said the time before.

    The reduction runs through gloo in the background while the next steps compute, and neither waits for a slower rank at
    once nor synchronises a device. It takes the host a tenth of a millisecond, so where steps take less than ``FAST_SECONDS``
    on all ranks only every ``STRIDE``-th call exchanges. Collective, from its creation on.
    """

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo") if together else None
        self.flag: Tensor | None = None  # what was said, and whether steps are slow
        self.work: Any = None
        self._calls_left = 0  # before the next exchange: the same on all ranks
        self._stride = 1
        self._exchanged_at = time.monotonic()

    def exchange(self, said: int) -> int:
        """What all ranks together said at the previous exchange; with one rank, at this one."""
        if self.group is None:
            return said
        if self._calls_left:
            self._calls_left -= 1
            return CONTINUE
        result = self.finish()
        now = time.monotonic()
        slow = (now - self._exchanged_at) / self._stride > FAST_SECONDS
        self.flag, self._exchanged_at = torch.tensor([said, slow], dtype=torch.int32), now
        self.work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._calls_left = self._stride - 1
        return result

    def finish(self) -> int:
        """Waits for the exchange that is under way and returns its result."""
        if self.work is None or self.flag is None:
            return CONTINUE
        self.work.wait()
        self.work = None
        said, slow = self.flag.tolist()
        self._stride = 1 if slow else STRIDE
        return int(said)
