from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lit_gpt_dist.data.datamodule import GPTDataModule
from lit_gpt_dist.data.loaders import StepBatch
from lit_gpt_dist.errors import UserError

CPU = torch.device("cpu")
TEXT = "".join(chr(97 + i * (i // 7) % 23) for i in range(3000))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def fake_trainer(accumulate=1, context=16, **strategy):
    gathers = SimpleNamespace(root_device=CPU, all_gather=lambda tensor: tensor, **strategy)
    return SimpleNamespace(
        strategy=gathers,
        lightning_module=SimpleNamespace(context=context),
        accumulate_grad_batches=accumulate,
        overfit_batches=0.0,
        state=SimpleNamespace(fn="fit"),
        global_rank=0,
        world_size=1,
        global_step=0,
    )


def set_up(corpus, trainer=None, **options):
    data = GPTDataModule(corpus, **{"micro_batch": 4, **options})
    data.trainer = trainer or fake_trainer()
    data.setup("fit")
    return data


def first_windows(data):
    return data.transfer_batch_to_device(next(iter(data.train_dataloader())), CPU, 0)


def decoded(data, window):
    return data.vocabulary.decode(window.tolist())


def test_a_step_is_a_block_of_windows_of_the_training_part(text):
    data = set_up(text, global_batch=8)
    windows = first_windows(data)
    assert windows.shape == (2, 4, 17)
    assert windows.dtype == torch.int64
    assert all(decoded(data, w) in TEXT[:2700] for w in windows.flatten(0, 1))
    assert data.tokens_per_step == 8 * 16


@pytest.mark.parametrize("options", [{"workers": 2}, {"on_device": False}, {"workers": 0}])
def test_where_windows_are_gathered_changes_nothing(text, options):
    assert torch.equal(first_windows(set_up(text, **options)), first_windows(set_up(text)))


def test_windows_gathered_from_a_device_copy_are_those_of_the_corpus(text):
    data, on_device = set_up(text), set_up(text)
    on_device.placement.on_device = True  # as on an accelerator: a copy of the whole corpus, indexed there
    assert torch.equal(first_windows(on_device), first_windows(data))
    assert on_device.placement.copy is not None
    assert on_device.placement.copy.dtype == torch.uint8
    for ours, theirs in zip(on_device.val_dataloader(), data.val_dataloader(), strict=True):
        got, expected = (d.transfer_batch_to_device(b, CPU, 0) for d, b in ((on_device, ours), (data, theirs)))
        assert torch.equal(got.windows, expected.windows)
    on_device.teardown("fit")
    assert on_device.placement.copy is None


def test_another_text_to_validate_on_leaves_all_of_the_corpus_to_train(text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(Path(text).read_text()[100:400])
    data = set_up(text, val_corpus=str(other))
    assert len(data.parts.train) == len(data.corpus)
    data.placement.on_device = True  # as on an accelerator, where only the corpus lies
    batches = [data.transfer_batch_to_device(starts, CPU, 0) for starts in data.val_dataloader()]
    shown = data.vocabulary.decode(batches[0].windows[0].tolist())
    assert other.read_text().startswith(shown)
    assert str(other) in data.describe()
    strange = tmp_path / "strange.txt"
    strange.write_text("ξ" * 100)
    with pytest.raises(UserError, match="character 'ξ'"):
        set_up(text, val_corpus=str(strange))


def test_the_trainers_accumulation_is_absorbed_once(text):
    trainer = fake_trainer(accumulate=4)
    data = set_up(text, trainer)
    assert trainer.accumulate_grad_batches == 1
    assert data.plan.accumulate == 4
    data.setup("validate")
    assert (data.plan.accumulate, data.plan.global_batch) == (4, 16)


def test_accumulation_that_disagrees_with_the_global_batch_is_refused(text):
    with pytest.raises(UserError, match="global batch 8 is not micro batch 4 × accumulate 4"):
        set_up(text, fake_trainer(accumulate=4), global_batch=8)


def test_the_strategy_says_which_ranks_share_data(text):
    data = GPTDataModule(text, micro_batch=4, global_batch=8)
    data.trainer = fake_trainer(data_rank=1, data_ranks=2)
    data.setup("fit")
    assert (data.plan.ranks, data.plan.accumulate) == (2, 1)
    whole = set_up(text, global_batch=8)
    assert torch.equal(torch.from_numpy(data._source.starts(0))[0], torch.from_numpy(whole._source.starts(0))[1])


def test_a_batch_read_before_the_checkpoint_told_the_step_is_replaced(text):
    data = set_up(text)
    stale = next(iter(data.train_dataloader()))
    data.trainer.global_step = 9
    fresh = StepBatch(9, torch.from_numpy(data._source.starts(9).copy()), None)
    got = data.transfer_batch_to_device(stale, CPU, 0)
    assert torch.equal(got, data.transfer_batch_to_device(fresh, CPU, 0))


def test_overfitting_takes_the_same_steps_again_wherever_a_run_starts(text):
    data = set_up(text, overfitted := fake_trainer())
    first = [data.global_windows(step)[0].tolist() for step in range(3)]
    overfitted.overfit_batches = 3
    data.setup("fit")
    again = [data.global_windows(step)[0].tolist() for step in range(9)]
    assert again == first * 3
    overfitted.global_step = 7
    assert next(iter(data.train_dataloader())).starts.flatten().tolist() == first[1]
    overfitted.overfit_batches = 0.5
    with pytest.raises(UserError, match=r"overfit_batches 0.5: .* whole number of optimizer steps"):
        data.setup("fit")


def test_validation_batches_are_windows_of_the_validation_part(text):
    data = set_up(text, val_micro_batch=5)
    batches = [data.transfer_batch_to_device(b, CPU, 0) for b in data.val_dataloader()]
    assert all(batch.windows.shape == (5, 17) for batch in batches)
    assert sum(int(batch.weights.sum()) for batch in batches) == (300 - 1) // 16
    kept = [w for b in batches for w, weight in zip(b.windows, b.weights, strict=True) if weight]
    assert "".join(decoded(data, w)[:-1] for w in kept) == TEXT[2700 : 2700 + 18 * 16]


def test_no_validation_part_means_no_validation(text):
    data = set_up(text, val_fraction=0.0)
    assert data.trainer.limit_val_batches == 0
    with pytest.raises(UserError, match="no windows to validate on"):
        data.setup("validate")


def test_a_context_beyond_the_models_is_refused(text):
    with pytest.raises(UserError, match="data context 32 is beyond the model's 16"):
        set_up(text, context=32)
    assert set_up(text, context=8).context == 8


def test_other_batches_pass_through(text):
    assert torch.equal(set_up(text).transfer_batch_to_device(torch.ones(2), CPU, 0), torch.ones(2))


def test_the_start_line_says_corpus_and_batch(text):
    line = set_up(text, global_batch=8).describe()
    assert "\n" not in line
    for words in (
        "text.txt",
        "char, vocabulary 23",
        "2,700 tokens to train",
        "global batch 8 = micro 4 × accumulate 2",
    ):
        assert words in line


def test_a_model_without_a_context_needs_the_option(text):
    with pytest.raises(UserError, match="does not say its context"):
        set_up(text, fake_trainer(context=None))
    assert set_up(text, fake_trainer(context=None), context=32).context == 32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 0}, "context 0"),
        ({"val_windows": 0}, "val_windows 0"),
        ({"draw": "shuffled"}, "'shuffled' is not one of random, epoch"),
        ({"on_device": True, "workers": 2}, "nothing to read"),
        ({"global_batch": 6}, "global batch 6 is not divisible"),
        ({"val_fraction": 0.999}, "3000 tokens, but context 16 needs at least 34"),
    ],
)
def test_options_that_cannot_be_are_refused(text, options, words):
    with pytest.raises(UserError, match=words):
        set_up(text, **options)


def test_the_same_data_resume_without_a_word(text, recwarn):
    data = set_up(text)
    data.load_state_dict(data.state_dict())
    assert not [w for w in recwarn if issubclass(w.category, UserWarning)]
    assert all(isinstance(value, str | int) for value in data.state_dict().values())  # loads with weights_only


def test_another_vocabulary_is_refused_with_both(text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(TEXT + "XYZ")
    saved = set_up(text).state_dict()
    with pytest.raises(UserError, match=r"char of 23 .* char of 26") as error:
        set_up(str(other)).load_state_dict(saved)
    assert "\n" not in str(error.value)


def test_a_checkpoint_read_before_setup_is_checked_at_setup(text):
    data = GPTDataModule(text, tokenizer="byte", micro_batch=4)
    data.load_state_dict(set_up(text).state_dict())
    data.trainer = fake_trainer()
    with pytest.raises(UserError, match="vocabulary"):
        data.setup("fit")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": 2}, "seed was 1337 in the checkpoint and is 2 now"),
        ({"global_batch": 8}, "global_batch was 4 .* learning rate"),
        ({"context": 8}, "context was 16"),
        ({"draw": "epoch"}, "draw was random"),
    ],
)
def test_other_windows_after_a_resume_are_warned_of(text, options, words):
    saved = set_up(text).state_dict()
    with pytest.warns(UserWarning, match=words):
        set_up(text, **options).load_state_dict(saved)


def test_another_text_of_the_same_characters_is_warned_of(text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(TEXT[::-1])
    with pytest.warns(UserWarning, match="corpus was .* other text"):
        set_up(str(other)).load_state_dict(set_up(text).state_dict())
