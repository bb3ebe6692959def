"""Takes a running Trainer back to its last checkpoint, and the data past what was bad. Communicates; all ranks together."""

from pathlib import Path
from typing import Any

from lit_gpt_dist.callbacks.recorder import find_recorder, not_training
from lit_gpt_dist.checkpoint import find
from lit_gpt_dist.checkpoint.strategy import FolderCheckpoints
from lit_gpt_dist.errors import UserError


def rollback(trainer: Any, module: Any, bad_step: int, skip_steps: int) -> int:
    """Restores the newest whole checkpoint of this run from before ``bad_step`` (counted from 1).

    The next step takes the data ``skip_steps`` after those of the step before the bad one: 1 leaves out the bad batch and
    what came between the checkpoint and it, which has been seen already.

    Returns:
        The step gone back to.

    Raises:
        UserError: there is no such checkpoint.
    """
    with not_training(trainer, "rollback"):
        strategy = trainer.strategy
        if not isinstance(strategy, FolderCheckpoints):
            raise UserError("this strategy does not write checkpoint folders, so there is nothing to go back to")
        strategy.saver.wait()
        folder = strategy.saver.ranks.from_first(lambda: newest_before(trainer, strategy.run_id, bad_step))
        now = trainer.global_step
        offset = trainer.datamodule.data_offset
        checkpoint = strategy.load_checkpoint(folder)
        restore(trainer, checkpoint)
        module.arm_graph()
        step = int(checkpoint["global_step"])
        trainer.datamodule.data_offset = offset + (bad_step - 1 - step) + skip_steps
        recorder = find_recorder(trainer)
        if recorder is not None:
            recorder.rewind(trainer, module, now - step)
    return step


def newest_before(trainer: Any, run_id: str, bad_step: int) -> Path:
    """Raises UserError where this run has no whole checkpoint of an earlier step."""
    root = Path(trainer.default_root_dir)
    for found in reversed(find.list_checkpoints(root)):
        if found.manifest is None or found.manifest.run_id != run_id or found.manifest.step >= bad_step:
            continue
        try:
            return find.choose(found.path)[0]
        except UserError:  # damaged: the one before it
            continue
    raise UserError("there is no earlier checkpoint of this run to go back to; use --checkpoint.every_n_steps")


def restore(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Weights, optimizer, schedule and counters, in the middle of a run."""
    strategy = trainer.strategy
    steps_back = trainer.global_step - int(checkpoint["global_step"])
    strategy.load_model_state_dict(checkpoint)
    strategy.load_optimizer_state_dict(checkpoint)
    for config, state in zip(trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(state)
    plugin = trainer.precision_plugin
    if type(plugin).__qualname__ in checkpoint:
        plugin.load_state_dict(checkpoint[type(plugin).__qualname__])
    count_back(trainer.fit_loop.epoch_loop, steps_back)


def count_back(loop: Any, steps: int) -> None:
    """Lightning's counters as if the last ``steps`` batches had not been."""
    progress = loop.automatic_optimization.optim_progress.optimizer.step
    for counter in (progress.total, progress.current):
        counter.ready -= min(steps, counter.ready)
        counter.completed -= min(steps, counter.completed)
    for counter in (loop.batch_progress.total, loop.batch_progress.current):
        for name in ("ready", "started", "processed", "completed"):
            setattr(counter, name, max(0, getattr(counter, name) - steps))
    loop._batches_that_stepped = max(0, loop._batches_that_stepped - steps)
