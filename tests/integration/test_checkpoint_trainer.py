"""Checkpoint folders through Lightning's own interfaces, in one process."""

import enum
import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers.checkpointing import fit, make, saver
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lit_gpt_dist.callbacks.signals import SignalCallback
from lit_gpt_dist.checkpoint import find
from lit_gpt_dist.checkpoint import format as layout
from lit_gpt_dist.errors import EXIT_REQUEUE, RunStopped


def test_saves_fall_on_the_steps_asked_for_and_carry_the_validation_loss(whole):
    root, _, losses = whole
    assert losses.validated == [4, 8, 12]
    found = find.list_checkpoints(root)
    assert [f.manifest.step for f in found] == [4, 8, 12]
    assert all(f.manifest.val_loss is not None for f in found)
    assert os.readlink(root / "checkpoints" / "last") == "step-00000012"


def test_a_resumed_run_is_the_same_run_bit_for_bit(whole, text):
    root, module, losses = whole
    _, again, resumed = fit(root, text, 12, ckpt_path=root / "checkpoints" / "step-00000004")
    assert resumed.by_step == {step: losses.by_step[step] for step in range(5, 13)}
    assert resumed.validated == [8, 12]  # the one at 4 is neither repeated nor any later one left out
    for name, parameter in module.model.named_parameters():
        assert torch.equal(parameter, again.model.get_parameter(name))


def test_dropout_goes_on_where_it_was(tmp_path, text):
    _, _, straight = fit(tmp_path / "a", text, 8, saver(), dropout=0.2)
    fit(tmp_path / "b", text, 4, saver(), dropout=0.2)
    _, _, resumed = fit(tmp_path / "b", text, 8, dropout=0.2, ckpt_path=find.resolve("last", tmp_path / "b"))
    assert resumed.by_step == {step: straight.by_step[step] for step in range(5, 9)}


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_optimizer_continues_an_unfused_one_and_the_other_way_round(tmp_path, text, fused):
    _, _, straight = fit(tmp_path / "a", text, 8, fused=fused)
    fit(tmp_path / "b", text, 4, saver(), fused=fused)
    _, _, resumed = fit(tmp_path / "b", text, 8, fused=not fused, ckpt_path=find.resolve("last", tmp_path / "b"))
    difference = max(abs(resumed.by_step[step] - straight.by_step[step]) for step in range(5, 9))
    assert difference <= 1e-6  # the two implementations round differently


def test_compilation_and_recomputation_leave_no_trace(whole, text):
    """Names are plain whatever wraps a block; a checkpoint of a plain model fits a wrapped one."""
    root, _, losses = whole

    class Compile(Callback):
        def setup(self, trainer, module, stage):
            configure = module.configure_model

            def compiled():
                configure()
                module.model.blocks[0] = torch.compile(module.model.blocks[0], backend="eager")

            module.configure_model = compiled

    path = root / "checkpoints" / "step-00000004"
    _, module, resumed = fit(root, text, 8, Compile(), recompute="full", ckpt_path=path)
    assert any("_orig_mod" in name for name, _ in module.model.named_parameters())
    assert resumed.by_step == {step: losses.by_step[step] for step in range(5, 9)}


def test_validate_opens_a_checkpoint(whole, text):
    root, _, _ = whole
    trainer, module, data, _ = make(root, text, 1)
    (found,) = trainer.validate(module, data, ckpt_path=root / "checkpoints" / "step-00000008", verbose=False)
    loss = find.list_checkpoints(root)[1].manifest.val_loss
    assert trainer.callback_metrics["val/loss"] == found["val/loss"] == loss
    assert found["val/perplexity"] == pytest.approx(math.exp(loss))
    assert trainer.test(module, data, verbose=False) == [found]


def test_lightnings_model_checkpoint_works(tmp_path, text):
    keeper = ModelCheckpoint(dirpath=tmp_path / "kept", monitor="val/loss", save_top_k=1, save_last=True)
    fit(tmp_path, text, 12, keeper)
    best, last = Path(keeper.best_model_path), Path(keeper.last_model_path)
    assert best.is_dir()
    assert last.name == "last.ckpt"
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == sorted([best.name, last.name])
    _, _, resumed = fit(tmp_path, text, 14, ckpt_path=last)
    assert sorted(resumed.by_step) == [13, 14]


def test_trainer_save_checkpoint_writes_anywhere_and_again(tmp_path, text):
    trainer, _, _ = fit(tmp_path, text, 2)
    target = tmp_path / "elsewhere" / "mine"
    for _ in range(2):
        trainer.save_checkpoint(target, weights_only=False)
        find.verify(target)
    assert [path.name for path in target.parent.iterdir()] == ["mine"]


class Mode(enum.Enum):
    CAREFUL = "careful"


@dataclass
class Settings:
    mode: Mode
    folder: Path


class Remembers(Callback):
    """Holds what makes other checkpoints unreadable: a dataclass, an enumeration, a path, a tensor."""

    def __init__(self):
        self.loaded = None

    def state_dict(self):
        return {"settings": Settings(Mode.CAREFUL, Path("x/y")), "seen": torch.arange(3), 5: (1, 2)}

    def load_state_dict(self, state):
        self.loaded = state


def test_callbacks_may_keep_dataclasses_enumerations_paths_and_tensors(tmp_path, text):
    fit(tmp_path, text, 2, saver(), Remembers())
    callback = Remembers()
    fit(tmp_path, text, 3, callback, ckpt_path=find.resolve("last", tmp_path))
    assert callback.loaded["settings"] == {"mode": "careful", "folder": Path("x/y")}
    assert callback.loaded["seen"].tolist() == [0, 1, 2]
    assert callback.loaded[5] == (1, 2)


class AskDuring(Callback):
    """A signal that comes in the middle of a validation."""

    def __init__(self, signals, step):
        self.signals, self.step = signals, step

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        if trainer.global_step == self.step:
            self.signals.watch.receive(signal.SIGTERM)


def test_a_signal_during_validation_saves_the_step_and_the_run_goes_on_from_it(whole, tmp_path, text):
    _, _, straight = whole
    signals = SignalCallback()
    with pytest.raises(RunStopped) as stopped:
        fit(tmp_path, text, 12, AskDuring(signals, 8), signals, saver())
    assert stopped.value.exit_code == EXIT_REQUEUE
    assert [found.manifest.step for found in find.list_checkpoints(tmp_path)] == [4, 8]
    _, _, resumed = fit(tmp_path, text, 12, SignalCallback(), saver(), ckpt_path=find.resolve("last", tmp_path))
    assert resumed.by_step == {step: straight.by_step[step] for step in range(9, 13)}


def test_a_fresh_run_beside_an_old_one_leaves_it_alone(tmp_path, text, capsys):
    fit(tmp_path, text, 4, saver())
    old = find.list_checkpoints(tmp_path)[0]
    fit(tmp_path, text, 8, saver(keep_last=1))
    assert "holds checkpoints of another run" in capsys.readouterr().err
    found = find.list_checkpoints(tmp_path)
    assert old.path in [f.path for f in found]
    assert layout.read_manifest(old.path) == old.manifest
    assert [f.manifest.step for f in found] == [4, 8]


def test_the_advice_is_shown_at_the_end(tmp_path, text):
    callback = saver(failure_hours=24)
    fit(tmp_path, text, 4, callback)
    assert "√(2cT)" in callback.advice
