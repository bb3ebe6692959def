"""What the comparison makes of its rounds; and that its windows are the Trainer's. Knows nothing of speed."""

import inspect
from pathlib import Path

import pytest
import torch

from benchmarks.compare import fit_arguments, number, parse, speed_ratio, summarise
from benchmarks.fabric_loop import FabricLoop, make_fabric
from benchmarks.job import Batches, Job
from benchmarks.rounds import BARE, COMPILED, EAGER, TRAINER, Timing
from lit_gpt_dist.data.corpus import load_corpus
from lit_gpt_dist.data.loaders import StepSource
from lit_gpt_dist.data.windows import plan_batch
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import preset

FOUND = {"tokens_per_step": 1000, "peak_flops": 1e12, "flops_per_token_palm": 1e6}


def test_a_ratio_compares_within_rounds_so_that_drift_cancels():
    base, own = Timing([2.0, 4.0, 8.0]), Timing([1.0, 2.0, 4.0])  # the machine got four times as slow
    assert speed_ratio(base, own) == 2.0


def test_there_is_no_ratio_to_a_contender_left_out():
    assert speed_ratio(None, Timing([1.0])) is None
    rows = summarise({TRAINER: Timing([1.0], [1.0]), EAGER: Timing([2.0], [2.0])}, 10, FOUND)
    assert rows[TRAINER]["times_compiled"] is None
    assert rows[TRAINER]["times_bare"] is None
    assert rows[TRAINER]["times_eager"] == 2.0


def test_a_row_holds_medians_of_one_step():
    timings = {TRAINER: Timing([1.0, 1.2, 5.0], [1.0, 1.0, 1.0]), COMPILED: Timing([1.2, 1.2, 1.2], [1.0] * 3)}
    row = summarise(timings, 100, FOUND)[TRAINER]
    assert row["step_ms"] == pytest.approx(12.0)
    assert row["tokens_per_second"] == pytest.approx(1000 / 0.012)
    assert row["spread"] == pytest.approx(4.0 / 1.2)
    assert row["mfu_palm"] == pytest.approx(1e6 * (1000 / 0.012) / 1e12)
    assert row["times_compiled"] == pytest.approx(1.0)


def test_unknown_stays_unknown():
    rows = summarise({TRAINER: Timing([1.0], [1.0])}, 1, {**FOUND, "peak_flops": None})
    assert rows[TRAINER]["mfu_palm"] is None
    assert number(None, ".1%") == "–"


def test_options_after_the_dashes_go_to_fit():
    options = parse(["--size", "tiny", "--without", BARE, EAGER, "--", "--model.compile", "none"])
    assert options.without == [BARE, EAGER]
    arguments = fit_arguments(options, "folder")
    assert arguments[0] == "fit"
    assert arguments[-2:] == ["--model.compile", "none"]
    assert "--model.vocab_size" not in arguments


def test_a_round_without_steps_is_refused():
    with pytest.raises(UserError, match="steps 0 is below 1"):
        parse(["--steps", "0"])


@pytest.mark.parametrize(("rank", "ranks", "accumulate"), [(0, 1, 1), (0, 1, 3), (1, 2, 2)])
def test_the_yardsticks_take_the_trainers_windows(text, rank, ranks, accumulate):
    corpus = load_corpus(str(text), "byte")
    config = preset("tiny", context=16, vocab_size=256)
    train, _ = corpus.split(0.1, 16)
    batches = Batches(Job(config, train, 4, accumulate, "32-true", 1e-3, 10), torch.device("cpu"), rank, ranks)
    plan = plan_batch(4 * accumulate * ranks, 4, None, ranks)
    source = StepSource(plan, "random", 1337, 16, len(train), rank)
    for step in (0, 7):
        expected = source.batch(step, train).windows
        assert torch.equal(batches.windows(step), expected.long())


def test_the_docs_show_the_fabric_loop_as_it_is():
    page = (Path(__file__).parents[2] / "docs" / "own_loop.md").read_text()
    assert inspect.getsource(make_fabric) in page
    assert inspect.getsource(FabricLoop) in page
