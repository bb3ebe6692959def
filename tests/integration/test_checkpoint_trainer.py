"""Checkpoint folders through Lightning's own interfaces, in one process."""

import enum
import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lit_gpt_dist.callbacks.checkpoint import CheckpointCallback
from lit_gpt_dist.callbacks.signals import SignalCallback
from lit_gpt_dist.checkpoint import find
from lit_gpt_dist.checkpoint import format as layout
from lit_gpt_dist.checkpoint.codec import NotStorableError
from lit_gpt_dist.checkpoint.saver import SaveError
from lit_gpt_dist.checkpoint.strategy import FolderCheckpoints, SaveOptions
from lit_gpt_dist.data.datamodule import GPTDataModule
from lit_gpt_dist.errors import EXIT_REQUEUE, RunStopped, UserError
from lit_gpt_dist.module import GPTModule
from lit_gpt_dist.optim.config import OptimConfig
from lit_gpt_dist.trainer import Trainer


class Losses(Callback):
    def __init__(self):
        self.by_step = {}
        self.validated = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.by_step[trainer.global_step] = module.step_loss.item()

    def on_validation_end(self, trainer, module):
        self.validated.append(trainer.global_step)


def make(root, text, steps, *callbacks, fused=None, data=None, **shape):
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        default_root_dir=root,
        callbacks=[losses, *callbacks],
        logger=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        max_epochs=-1,
        val_check_interval=4,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
    )
    optim = OptimConfig(schedule_steps=50, fused=fused)
    module = GPTModule(size="tiny", optim=optim, **{"width": 32, "context": 16, **shape})
    options = {"tokenizer": "byte", "global_batch": 4, "micro_batch": 2, "val_windows": 4, **(data or {})}
    return trainer, module, GPTDataModule(str(text), **options), losses


def fit(root, text, steps, *callbacks, ckpt_path=None, **options):
    trainer, module, data, losses = make(root, text, steps, *callbacks, **options)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer, module, losses


def saver(**options):
    return CheckpointCallback(every_n_steps=4, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """A run of 12 steps, saved at 4, 8 and 12, validated there too."""
    root = tmp_path_factory.mktemp("whole")
    callback = saver(keep_last=9)
    _, module, losses = fit(root, text, 12, callback)
    return root, module, losses


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


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path, text):
    trainer, _, _ = fit(tmp_path, text, 2)
    (tmp_path / "thesis").mkdir()
    with pytest.raises(SaveError, match="exists and is no checkpoint"):
        trainer.save_checkpoint(tmp_path / "thesis")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]


def test_weights_alone_can_be_validated_but_not_trained_on(tmp_path, text):
    trainer, _, _ = fit(tmp_path, text, 2)
    trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
    again, module, data, _ = make(tmp_path, text, 4)
    again.validate(module, data, ckpt_path=tmp_path / "weights", verbose=False)
    with pytest.raises(UserError, match=r"holds weights only.*init_from"):
        fit(tmp_path, text, 4, ckpt_path=tmp_path / "weights")


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


class Unstorable(Callback):
    def state_dict(self):
        return {"hook": print}


def test_what_cannot_be_stored_is_named(tmp_path, text):
    with pytest.raises(NotStorableError, match=r"callbacks\.Unstorable.*\.hook holds a builtins"):
        fit(tmp_path, text, 2, saver(), Unstorable())
    assert not find.list_checkpoints(tmp_path)


def changed(module):
    return {name: parameter.clone() for name, parameter in module.model.named_parameters()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 64}, r"model\.embedding\.weight is 256×32 in checkpoint .*, but 256×64 in this model"),
        ({"layers": 3}, r"it lacks model\.blocks\.2"),
        ({"vocab_size": 300}, r"256×32 in checkpoint .* but 300×32"),
        ({"data": {"tokenizer": "char"}}, r"vocabulary of checkpoint .*byte, 256 tokens.*char, \d+ tokens"),
    ],
)
def test_another_model_or_vocabulary_is_refused_with_both_values_before_anything_changes(whole, text, options, message):
    root, _, _ = whole
    trainer, module, data, losses = make(root, text, 12, **options)
    before = {}
    load = trainer.strategy.load_checkpoint

    def watched(*args, **kwargs):
        before.update(changed(module))
        return load(*args, **kwargs)

    trainer.strategy.load_checkpoint = watched
    with pytest.raises(UserError, match=message):
        trainer.fit(module, data, ckpt_path=root / "checkpoints" / "step-00000008")
    assert before
    assert not losses.by_step
    for name, parameter in module.model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_damaged_checkpoint_is_passed_over_with_last_and_refused_by_name(tmp_path, text, capsys):
    fit(tmp_path, text, 8, saver())
    newest = tmp_path / "checkpoints" / "step-00000008"
    part = next(newest.glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{newest} is damaged: .*newest whole one is .*step-00000004"):
        fit(tmp_path, text, 9, ckpt_path=newest)
    capsys.readouterr()
    _, _, resumed = fit(tmp_path, text, 9, ckpt_path=find.resolve("last", tmp_path))
    assert sorted(resumed.by_step) == [5, 6, 7, 8, 9]
    assert f"{newest} is damaged" in capsys.readouterr().err


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
    import threading

    from lit_gpt_dist.checkpoint import saver as module
    from lit_gpt_dist.checkpoint.weights import open_weights

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


class AskDuring(Callback):
    """A signal that comes in the middle of a validation."""

    def __init__(self, signals, step):
        self.signals, self.step = signals, step

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        if trainer.global_step == self.step:
            self.signals.watch.receive(signal.SIGTERM)


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


def test_options_of_a_save_are_checked(tmp_path, text):
    trainer, _, _ = fit(tmp_path, text, 1)
    with pytest.raises(TypeError, match="must be SaveOptions"):
        trainer.save_checkpoint(tmp_path / "x", storage_options={"background": True})
    trainer.save_checkpoint(tmp_path / "x", storage_options=SaveOptions())


@pytest.mark.parametrize("option", [{"every_n_steps": 0}, {"keep_last": 0}, {"failure_hours": -1}])
def test_impossible_options_are_refused(option):
    with pytest.raises(UserError, match="but must be"):
        CheckpointCallback(**option)


def test_the_advice_is_shown_at_the_end(tmp_path, text):
    callback = saver(failure_hours=24)
    fit(tmp_path, text, 4, callback)
    assert "√(2cT)" in callback.advice
