"""Faults to plant in a run: ``--trainer.callbacks+=helpers.faults.RaiseAt --trainer.callbacks.rank 1``."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl


class RaiseAt(pl.Callback):
    """Raises on one rank after one step."""

    def __init__(self, rank: int = 1, step: int = 3) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            raise RuntimeError("planted fault: the disk of this rank is on fire")


class Linger(pl.Callback):
    """Slows every step down, and writes down this rank's process id, so that a test can end the run half-way."""

    def __init__(self, folder: str, seconds: float = 0.2) -> None:
        self.folder, self.seconds = Path(folder), seconds

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        time.sleep(self.seconds)
        if trainer.global_step == 2:
            (self.folder / f"pid-{trainer.global_rank}").write_text(str(os.getpid()))


class DieOnce(pl.Callback):
    """SIGKILL for one rank after a step, unless the ranks were restarted already."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if first and trainer.global_rank == self.rank and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Hold(pl.Callback):
    """Keeps runs under ddp at their second step for as long as a file is there."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        while trainer.strategy.name == "ddp" and trainer.global_step == 2 and self.file.exists():
            time.sleep(0.05)
