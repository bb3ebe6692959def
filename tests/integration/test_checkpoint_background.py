"""Saves that are written while training goes on, in one process."""

import threading

import pytest
import torch
from helpers.checkpointing import changed, fit, saver
from lightning.pytorch.callbacks import Callback

from lit_gpt_dist.callbacks.checkpoint import CheckpointCallback
from lit_gpt_dist.checkpoint import find
from lit_gpt_dist.checkpoint.saver import SaveError
from lit_gpt_dist.checkpoint.strategy import FolderCheckpoints


def test_a_failed_save_in_the_background_fails_the_run(tmp_path, text, monkeypatch):
    from lit_gpt_dist.checkpoint import saver as module

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.layout, "commit", full)
    with pytest.raises(SaveError, match=r"step-00000004 was not saved: .*No space left on device"):
        fit(tmp_path, text, 40, saver(async_save=True))
    assert not find.list_checkpoints(tmp_path)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_save_in_the_background_is_not_touched_by_later_steps(tmp_path, text, monkeypatch):
    """The writing is held up until three more steps are through; what is written is still step 4."""
    from lit_gpt_dist.checkpoint import saver as module
    from lit_gpt_dist.checkpoint.sources import open_weights

    go_on = threading.Event()
    write = module.Saver._write

    def held_up(self, *arguments):
        go_on.wait(60)
        return write(self, *arguments)

    class Release(Callback):
        weights = {}

        def on_train_batch_end(self, trainer, lightning_module, outputs, batch, batch_idx):
            if trainer.global_step == 4:
                self.weights = changed(lightning_module)
            if trainer.global_step == 7:
                go_on.set()

    monkeypatch.setattr(module.Saver, "_write", held_up)
    release = Release()
    fit(tmp_path, text, 7, saver(async_save=True, save_at_end=False), release)
    stored = dict(open_weights(tmp_path)[2])
    assert all(torch.equal(stored[name], release.weights[name]) for name in stored)


@pytest.mark.parametrize(
    ("async_save", "every_n_steps", "prepared"), [(True, 4, [1]), (True, 8, []), (False, 4, []), (None, 4, [])]
)
def test_memory_is_made_after_the_first_step_where_a_save_in_the_background_is_ahead(
    tmp_path, text, monkeypatch, async_save, every_n_steps, prepared
):
    steps = []
    monkeypatch.setattr(
        FolderCheckpoints,
        "prepare_background_saves",
        lambda strategy: steps.append(strategy.lightning_module.trainer.global_step),
    )
    fit(tmp_path, text, 8, CheckpointCallback(every_n_steps=every_n_steps, async_save=async_save))
    assert steps == prepared


def test_a_save_in_the_background_uses_what_was_made_after_the_first_step(tmp_path, text):
    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.stager = trainer.strategy.saver.stager
            if trainer.global_step == 2:
                self.stager._preparing.join()
                self.made = dict(self.stager.buffers)

    watch = Watch()
    fit(tmp_path, text, 5, saver(async_save=True, save_at_end=False), watch)
    used = watch.stager.buffers
    assert {name.split(".")[0] for name in watch.made} == {"model", "optimizer"}
    assert all(used[name] is buffer for name, buffer in watch.made.items())
    assert {name.split(".")[0] for name in set(used) - set(watch.made)} <= {"rng", "state"}
