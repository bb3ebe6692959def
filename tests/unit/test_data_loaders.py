import itertools
import pickle

import numpy as np
import pytest
import torch

from lit_gpt_dist.data.agreement import compare_settings, compare_windows, raise_together
from lit_gpt_dist.data.loaders import StepLoader, StepSource, ValLoader
from lit_gpt_dist.data.stream import TokenStream
from lit_gpt_dist.data.windows import plan_batch
from lit_gpt_dist.errors import UserError

CONTEXT, LENGTH, GLOBAL_BATCH = 8, 1000, 16
TOKENS = TokenStream([np.arange(600, dtype=np.uint16), np.arange(600, LENGTH, dtype=np.uint16)])


def source(rank=0, ranks=1, micro=2, draw="random", seed=1):
    return StepSource(plan_batch(GLOBAL_BATCH, micro, None, ranks), draw, seed, CONTEXT, LENGTH, rank)


def take(loader, count):
    return list(itertools.islice(iter(loader), count))


@pytest.mark.parametrize("draw", ["random", "epoch"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_split_and_any_workers_give_a_step_the_same_windows_once(ranks, workers, draw):
    first, steps = 5, 4
    loaders = [StepLoader(source(rank, ranks, draw=draw), lambda: first, TOKENS, workers) for rank in range(ranks)]
    by_rank = [take(loader, steps) for loader in loaders]
    for number in range(steps):
        batches = [batches[number] for batches in by_rank]
        assert [b.step for b in batches] == [first + number] * ranks
        windows = torch.cat([b.windows.flatten(0, 1) for b in batches])
        expected = source(draw=draw).global_starts(first + number)
        assert sorted(windows[:, 0].tolist()) == sorted(expected.tolist())
        assert torch.equal(windows, windows[:, :1] + torch.arange(CONTEXT + 1))


@pytest.mark.parametrize("micro", [1, 4, 16])
def test_the_micro_batch_changes_nothing_about_a_step(micro):
    assert source(micro=micro).starts(3).ravel().tolist() == source().global_starts(3).tolist()


@pytest.mark.parametrize("draw", ["random", "epoch"])
def test_steps_drawn_together_are_those_drawn_alone(draw):
    drawn = source(draw=draw)
    for step, batch in zip(range(3, 20, 2), drawn.batches(range(3, 20, 2), TOKENS), strict=True):
        alone = drawn.batch(step, TOKENS)
        assert batch.step == step
        assert torch.equal(batch.starts, alone.starts)
        assert torch.equal(batch.windows, alone.windows)


def test_windows_stay_inside_the_training_part():
    for draw in ("random", "epoch"):
        starts = np.concatenate([source(draw=draw).global_starts(step) for step in range(500)])
        assert starts.min() == 0
        assert starts.max() == (
            LENGTH - CONTEXT - 1 if draw == "random" else (LENGTH - 1) // CONTEXT * CONTEXT - CONTEXT
        )


class Run:
    """Stands for a Trainer: holds one batch in hand, as Lightning's prefetching fetcher does, or none."""

    def __init__(self, prefetch, workers):
        self.step = 0
        self.batches = iter(StepLoader(source(), lambda: self.step, TOKENS, workers))
        self.held = [next(self.batches) for _ in range(prefetch)]

    def next(self):
        self.held.append(next(self.batches))
        batch = self.held.pop(0)
        self.step += 1
        return batch.step


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_iterator_made_before_the_checkpoint_arrives_jumps_to_its_step(prefetch, workers):
    run = Run(prefetch, workers)
    run.step = 70  # the checkpoint
    steps = [run.next() for _ in range(4)]
    assert steps[prefetch:] == [70 + prefetch, 72, 73][: 4 - prefetch] if prefetch else [70, 71, 72, 73]
    assert steps[:prefetch] == [0][:prefetch]  # the batch in hand is stale; the data module replaces it


@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_undisturbed_run_never_jumps(prefetch):
    run = Run(prefetch, 0)
    assert [run.next() for _ in range(10)] == list(range(10))


def test_a_source_travels_to_other_processes():
    assert np.array_equal(pickle.loads(pickle.dumps(source())).starts(9), source().starts(9))


@pytest.mark.parametrize("limit", [1, 5, 37, 1000])
@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_validation_windows_are_the_same_whatever_the_ranks(ranks, micro, limit):
    available = (LENGTH - 1) // CONTEXT
    loaders = [ValLoader(LENGTH, CONTEXT, limit, micro, rank, ranks) for rank in range(ranks)]
    assert len({len(list(loader)) for loader in loaders} | {len(loader) for loader in loaders}) == 1
    batches = [batch for loader in loaders for batch in loader]
    assert all(batch.starts.shape == batch.weights.shape == (micro,) for batch in batches)
    starts, weights = torch.cat([b.starts for b in batches]), torch.cat([b.weights for b in batches])
    counted = sorted(starts[weights == 1].tolist())
    reference = torch.cat([b.starts for b in ValLoader(LENGTH, CONTEXT, limit, 1, 0, 1)]).tolist()
    assert counted == reference
    assert len(counted) == len(set(counted)) == min(limit, available)
    assert all(start % CONTEXT == 0 and start + CONTEXT < LENGTH for start in counted)


def test_capped_validation_windows_spread_over_the_whole_part():
    (batch,) = ValLoader(LENGTH, CONTEXT, 4, 4, 0, 1)
    assert (batch.starts // CONTEXT).tolist() == [0, 31, 62, 93]


class Gathered:
    """A strategy of several ranks in one process: the other ranks' rows are given."""

    root_device = torch.device("cpu")

    def __init__(self, *others):
        self.others = others

    def all_gather(self, tensor, group=None, sync_grads=False):
        return torch.stack([tensor, *(torch.tensor(o) for o in self.others)])


def windows_row(rank, ranks, **more):
    mine = source(rank, ranks, **more)
    return [rank, *np.concatenate([mine.starts(step).ravel() for step in range(8)]).tolist()]


def test_ranks_that_share_out_the_global_batch_pass():
    compare_windows(Gathered(windows_row(1, 2)), source(0, 2), 0)
    # two ranks of one tensor-parallel group have one data rank
    compare_windows(Gathered(windows_row(0, 2), windows_row(1, 2), windows_row(1, 2)), source(0, 2), 0)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([1, *windows_row(0, 2)[1:]], "ranks 0 and 1 would train on the same windows"),
        (windows_row(0, 2), "only 1 are there"),
        (windows_row(0, 2, seed=2), "share data rank 0, but have different windows"),
        (windows_row(1, 2, seed=2), "are not its global batch"),
    ],
)
def test_ranks_that_do_not_are_stopped(row, words):
    with pytest.raises(UserError, match=words):
        compare_windows(Gathered(row), source(0, 2), 0)


def test_another_corpus_on_a_rank_stops_all():
    settings = {"seed": 1, "corpus": "ab" * 32}
    compare_settings(Gathered([1, int("ab" * 7 + "a", 16)]), settings)
    with pytest.raises(UserError, match="rank 1 has another corpus than rank 0"):
        compare_settings(Gathered([1, int("ba" * 7 + "b", 16)]), settings)


def test_a_rank_that_cannot_read_stops_the_others():
    raise_together(Gathered([0]), None)
    with pytest.raises(UserError, match="rank 1 could not read"):
        raise_together(Gathered([1]), None)
    with pytest.raises(UserError, match="mine"):
        raise_together(Gathered([0]), UserError("mine"))
