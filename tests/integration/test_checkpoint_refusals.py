"""What a checkpoint must not do: overwrite, be loaded into another model, or store what cannot be read again safely."""

import pytest
import torch
from helpers.checkpointing import changed, fit, make, saver
from lightning.pytorch.callbacks import Callback

from lit_gpt_dist.callbacks.checkpoint import CheckpointCallback
from lit_gpt_dist.checkpoint import find
from lit_gpt_dist.checkpoint.codec import NotStorableError
from lit_gpt_dist.checkpoint.saver import SaveError
from lit_gpt_dist.checkpoint.strategy import SaveOptions
from lit_gpt_dist.errors import UserError


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


class Unstorable(Callback):
    def state_dict(self):
        return {"hook": print}


def test_what_cannot_be_stored_is_named(tmp_path, text):
    with pytest.raises(NotStorableError, match=r"callbacks\.Unstorable.*\.hook holds a builtins"):
        fit(tmp_path, text, 2, saver(), Unstorable())
    assert not find.list_checkpoints(tmp_path)


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


def test_options_of_a_save_are_checked(tmp_path, text):
    trainer, _, _ = fit(tmp_path, text, 1)
    with pytest.raises(TypeError, match="must be SaveOptions"):
        trainer.save_checkpoint(tmp_path / "x", storage_options={"background": True})
    trainer.save_checkpoint(tmp_path / "x", storage_options=SaveOptions())


@pytest.mark.parametrize("option", [{"every_n_steps": 0}, {"keep_last": 0}, {"failure_hours": -1}])
def test_impossible_options_are_refused(option):
    with pytest.raises(UserError, match="but must be"):
        CheckpointCallback(**option)
