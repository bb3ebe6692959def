"""Saves checkpoints every so many optimizer steps and at the end, keeps the ones asked for, and measures what it costs.

Communicates at a save only. A synchronous save blocks training while it writes; one in the background only while the
tensors are copied into host memory.
"""

import functools
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, EarlyStopping, Timer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_gpt_dist.arguments import typed
from lit_gpt_dist.callbacks.notices import insist
from lit_gpt_dist.callbacks.recorder import not_training
from lit_gpt_dist.checkpoint import compatible, find, interval, retention
from lit_gpt_dist.checkpoint import format as layout
from lit_gpt_dist.checkpoint.retention import Keep
from lit_gpt_dist.checkpoint.strategy import FolderCheckpoints, SaveOptions
from lit_gpt_dist.errors import UserError


class CheckpointCallback(Callback):
    """Checkpoints of a run, in ``<default_root_dir>/checkpoints/step-XXXXXXXX``.

    Args:
        every_n_steps: optimizer steps between saves; None saves at the end and on signals only.
        keep_last: so many of the newest are kept.
        keep_every: checkpoints at multiples of this step are kept for good.
        keep_best: the one with the lowest validation loss is kept, of those saved right after a validation.
        save_at_end: save when training ends, unless that step was just saved.
        async_save: write in the background, while training goes on; None: on GPUs, but not on the CPU, whose cores the
            writing would take from training. Needs host memory for this rank's share of the checkpoint.
        failure_hours: mean time between failures, in hours; with it the best interval is worked out and shown.
        monitor: name of the logged validation loss.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        keep_last: int = 2,
        keep_every: int | None = None,
        keep_best: bool = True,
        save_at_end: bool = True,
        async_save: bool | None = None,
        failure_hours: float | None = None,
        monitor: str = "val/loss",
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise UserError(f"checkpoint.{name} is {value}, but must be at least 1; leave it out for none")
        if failure_hours is not None and failure_hours <= 0:
            raise UserError(f"checkpoint.failure_hours is {failure_hours}, but must be above 0; leave it out for none")
        self.every_n_steps = every_n_steps
        self.keep = Keep(keep_last, keep_every, keep_best)
        self._trusted: set[Path] = set()  # checkpoints written here, or read to the last byte
        self.save_at_end = save_at_end
        self.async_save = async_save
        self.failure_hours = failure_hours
        self.monitor = monitor
        self.saved_step: int | None = None
        self.last_path: Path | None = None  # rank 0: the folder that was committed last
        self.advice: str | None = None  # how often to save, once a save and some steps were measured
        self.blocked_seconds: list[float] = []  # for each save, how long training stood still
        self._val_loss: tuple[int, float] | None = None  # step and value of the last validation
        self._after_validation = False  # the save that is due waits for the validation of this step
        self._started = 0.0
        self._first_step = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, FolderCheckpoints):
            raise UserError(
                f"strategy {type(trainer.strategy).__name__} does not write checkpoint folders; use single, ddp, fsdp2 or hsdp"
            )

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.saved_step = checkpoint["global_step"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        run_id = _strategy(trainer).run_id
        folder = _folder(trainer)
        if trainer.is_global_zero and folder.is_dir():
            layout.sweep_temporary(folder, run_id)
            if not trainer.global_step and mixes_with_others(trainer, folder, run_id):
                print(
                    f"warning: {folder} holds checkpoints of another run too; with a --tag each, --ckpt_path last keeps to its own",
                    file=sys.stderr,
                )
        self._started, self._first_step = time.perf_counter(), trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._first_step + 1 and self._background_save_ahead(trainer):
            _strategy(trainer).prepare_background_saves()
        if self.every_n_steps is None or step == self.saved_step or step % self.every_n_steps:
            return
        if self.save_at_end and step == trainer.max_steps:
            return  # ``on_train_end`` saves it, after the last validation
        self._after_validation = _validation_follows(trainer)
        if not self._after_validation:
            self.save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if self.monitor in trainer.callback_metrics:
            self._val_loss = trainer.global_step, float(trainer.callback_metrics[self.monitor])
        if self._after_validation:
            self.save(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        steps = trainer.global_step - self._first_step
        seconds = time.perf_counter() - self._started - sum(self.blocked_seconds)
        if self.save_at_end and trainer.global_step not in (self.saved_step, 0):
            self.save(trainer, background=False)
        _strategy(trainer).saver.wait()
        if self.failure_hours is not None and self.blocked_seconds and steps > 0:
            mean = sum(self.blocked_seconds) / len(self.blocked_seconds)
            self.advice = interval.advice(mean, self.failure_hours, seconds / steps)
            rank_zero_info(self.advice)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step < trainer.max_steps:
            why, more = why_ended(trainer)
            insist(
                trainer,
                f"ended after step {trainer.global_step:,} of {trainer.max_steps:,}: {why}{go_on(trainer, self, more)}",
            )

    def save(self, trainer: pl.Trainer, background: bool | None = None) -> None:
        """Saves this step, unless it is saved already. Collective; waits for a save that is still being written.

        Raises:
            SaveError: it failed, or the one before it did.
        """
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # Lightning leaves nothing behind then
            return
        self._after_validation = False
        step = trainer.global_step
        strategy = _strategy(trainer)
        if step == self.saved_step:
            strategy.saver.wait()
            return
        if background is None:
            background = self._in_background(strategy)
        measured = self._val_loss is not None and self._val_loss[0] == step
        options = SaveOptions(
            background=background,
            val_loss=self._val_loss[1] if measured else None,  # type: ignore[index]
            after_commit=functools.partial(self._after_commit, run_id=strategy.run_id),
        )

        start = time.perf_counter()
        with not_training(trainer, "saving"):
            trainer.save_checkpoint(
                _folder(trainer) / layout.step_name(step), weights_only=False, storage_options=options
            )
        self.saved_step = step
        self.blocked_seconds.append(time.perf_counter() - start)
        self._log_cost(trainer, step)
        if self.failure_hours is not None and len(self.blocked_seconds) == 1 and step > self._first_step:
            step_seconds = (start - self._started) / (step - self._first_step)
            rank_zero_info(interval.advice(self.blocked_seconds[0], self.failure_hours, step_seconds))

    def _in_background(self, strategy: FolderCheckpoints) -> bool:
        return self.async_save if self.async_save is not None else strategy.root_device.type == "cuda"

    def _background_save_ahead(self, trainer: pl.Trainer) -> bool:
        """Whether one is due before training ends; the save at the end is never in the background."""
        if self.every_n_steps is None or not self._in_background(_strategy(trainer)):
            return False
        next_save = (trainer.global_step // self.every_n_steps + 1) * self.every_n_steps
        return trainer.max_steps < 0 or next_save < trainer.max_steps

    def _after_commit(self, path: Path, run_id: str) -> None:
        """On rank 0, in the writing thread, once the new one stands: ``last`` means it, and superfluous ones go."""
        self.last_path = path
        layout.point_last(path)
        self._trusted.add(path)
        retention.enforce(path.parent, run_id, self.keep, self._trusted)

    def _log_cost(self, trainer: pl.Trainer, step: int) -> None:
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics({"speed/checkpoint_blocked_seconds": self.blocked_seconds[-1]}, step=step)


def go_on(trainer: pl.Trainer, callback: CheckpointCallback, more: str = "") -> str:
    """The end of a message: where the run was saved last, and the command that goes on from there. On rank 0."""
    saved = callback.last_path or _strategy(trainer).loaded_from
    if saved is None:
        return "; nothing was saved"
    path, config = shlex.quote(str(saved)), Path(getattr(trainer, "run_dir", trainer.default_root_dir)) / "config.yaml"
    if trainer.num_nodes > 1 or started_by_a_launcher() or not config.exists():
        command = f"the same command with --ckpt_path {path}{more}"
    else:
        command = f"{typed('lit-gpt-dist')} fit --config {shlex.quote(str(config))} --ckpt_path {path}{more}"
    last = (
        "saved as" if callback.saved_step == trainer.global_step else f"last saved after step {callback.saved_step} as"
    )
    return f"; {last} {saved}; to go on:\n  {command}"


def mixes_with_others(trainer: pl.Trainer, folder: Path, run_id: str) -> bool:
    """Whether ``--ckpt_path last`` could take this run's checkpoints for another's: no tag, and the same model."""
    sieves = compatible.sieves_of(trainer)
    others = (one for one in find.list_checkpoints(folder) if one.manifest and one.manifest.run_id != run_id)
    return "another tag" not in sieves and any(all(keeps(one.document) for keeps in sieves.values()) for one in others)


def started_by_a_launcher() -> bool:
    """Whether torchrun or srun started this process: they are part of the command to type."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_PROCID" in os.environ


def why_ended(trainer: pl.Trainer) -> tuple[str, str]:
    """What ended training before its last step, and the options without which it would do so again at once."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        left = callback.time_remaining() if isinstance(callback, Timer) else None
        if left is not None and left <= 0:
            return "max_time is over", " --trainer.max_time null"
        if isinstance(callback, EarlyStopping) and callback.stopping_reason_message:
            return f"EarlyStopping: {callback.stopping_reason_message.partition(' Signaling')[0].rstrip('.')}", ""
    return "it was asked to stop", ""


def _folder(trainer: pl.Trainer) -> Path:
    return find.folder_of(Path(trainer.default_root_dir))


def _strategy(trainer: pl.Trainer) -> FolderCheckpoints:
    assert isinstance(trainer.strategy, FolderCheckpoints)
    return trainer.strategy


def _validation_follows(trainer: pl.Trainer) -> bool:
    """Whether Lightning validates right after this step; then the save waits for it and carries its loss."""
    loop = trainer.fit_loop
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))  # type: ignore[arg-type]
