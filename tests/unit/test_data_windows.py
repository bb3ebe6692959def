import numpy as np
import pytest

from lit_gpt_dist.data.windows import (
    BatchPlan,
    epoch_starts,
    permute,
    plan_batch,
    random_starts,
    rank_starts,
    usual_micro,
)
from lit_gpt_dist.errors import UserError


def test_random_windows_are_the_ones_of_every_earlier_version():
    assert random_starts(1337, 0, 6, 1000).tolist() == [420, 623, 956, 291, 682, 410]
    assert random_starts(1337, 1, 6, 1000).tolist() == [809, 85, 199, 44, 951, 864]


def test_epoch_windows_are_the_ones_of_every_earlier_version():
    assert epoch_starts(1337, 0, 8, 10, 64).tolist() == [512, 192, 128, 256, 576, 0, 64, 320]
    assert epoch_starts(1337, 1, 8, 10, 64).tolist() == [384, 448, 384, 320, 192, 128, 256, 0]


@pytest.mark.parametrize("seed", [0, -5, 2**63, 2**64 + 7])
def test_any_integer_is_a_seed(seed):
    starts = random_starts(seed, 3, 100, 10**9)
    assert starts.dtype == np.int64
    assert starts.min() >= 0
    assert starts.max() < 10**9


def test_seed_step_and_place_all_matter():
    draws = [random_starts(seed, step, 50, 2**40).tolist() for seed in range(4) for step in range(4)]
    assert len({start for draw in draws for start in draw}) == 16 * 50


def test_random_windows_are_uniform():
    counts = np.bincount(random_starts(7, 0, 64_000, 64), minlength=64)
    # 1000 expected in each of 64 cells: chi-square of 63 degrees exceeds 120 with probability 2e-5, and the seed is fixed
    assert ((counts - 1000) ** 2 / 1000).sum() < 120


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 4096, 4097, 99_991])
def test_the_order_of_an_epoch_is_a_permutation(size):
    assert np.array_equal(np.sort(permute(np.arange(size), size, key=size)), np.arange(size))


def test_every_epoch_takes_each_window_once_across_steps():
    windows, batch, context = 37, 8, 16
    stream = np.concatenate([epoch_starts(5, step, batch, windows, context) for step in range(windows)])
    epochs = stream.reshape(batch, windows)  # 37 steps of 8 are 8 epochs of 37
    for epoch in epochs:
        assert sorted(epoch) == [p * context for p in range(windows)]
    assert len({tuple(epoch) for epoch in epochs}) == batch


def test_an_epoch_shorter_than_the_global_batch_repeats_within_a_step():
    assert np.bincount(epoch_starts(5, 0, 9, 3, 1)).tolist() == [3, 3, 3]


def test_epoch_windows_of_a_huge_corpus_need_no_list():
    assert epoch_starts(1, 10**9, 64, 10**12, 4096).max() < 10**12 * 4096


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_share_out_the_global_batch_in_the_documented_order(ranks):
    micro = 2
    starts = np.arange(24)
    for rank in range(ranks):
        mine = rank_starts(starts, micro, rank, ranks)
        assert mine.shape == (24 // micro // ranks, micro)
        for m, micro_batch in enumerate(mine):
            first = (m * ranks + rank) * micro
            assert micro_batch.tolist() == list(range(first, first + micro))


def test_accumulation_follows_from_the_global_batch():
    assert plan_batch(64, 16, None, 2) == BatchPlan(64, 16, 2, 2)
    assert plan_batch(64, 16, 2, 2) == BatchPlan(64, 16, 2, 2)


def test_the_global_batch_follows_from_accumulation():
    assert plan_batch(None, 16, 4, 2) == BatchPlan(128, 16, 4, 2)
    assert plan_batch(None, 16, None, 1) == BatchPlan(16, 16, 1, 1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((500, 8, None, 16), ["500", "8", "16 data ranks", "3.91", "384 or 512"]),
        ((48, 16, None, 2), ["48", "16", "2 data ranks", "1.50", "32 or 64", "micro batch of 12 and accumulate 2"]),
        ((64, 16, None, 8), ["0.50", "global batch of 128", "micro batch of 8 and accumulate 1"]),
        ((64, 16, 4, 2), ["64", "16", "accumulate 4", "2 data ranks", "128"]),
        ((0, 16, None, 2), ["global batch 0"]),
        ((64, 0, None, 2), ["micro batch 0"]),
        ((None, 16, 0, 2), ["accumulate 0"]),
    ],
)
def test_a_split_that_cannot_be_names_all_numbers_and_the_nearest_that_work(given, words):
    with pytest.raises(UserError) as error:
        plan_batch(*given)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("most", "global_batch", "accumulate", "ranks", "micro"),
    [
        (64, None, None, 2, 64),
        (64, 64, None, 1, 64),
        (64, 64, None, 4, 16),
        (64, 96, None, 1, 48),
        (16, 48, 3, 2, 8),
        (64, 7, None, 2, 3),
    ],
)
def test_an_omitted_micro_batch_is_the_largest_usual_one_that_divides(
    most: int, global_batch: int | None, accumulate: int | None, ranks: int, micro: int
) -> None:
    assert usual_micro(most, global_batch, accumulate, ranks) == micro
