"""What fsdp2 and hsdp gather at a time, whether ddp overlaps, and which of them it is, where that is left to them. No ranks, no cards: what they would see is made up."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lit_gpt_dist import trainer
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import GPTConfig
from lit_gpt_dist.model.gpt import GPT
from lit_gpt_dist.parallel import DDP, FSDP2, HSDP, replicated, sharded
from lit_gpt_dist.parallel.recompute import check_recompute, set_recompute
from lit_gpt_dist.trainer import default_strategy

LARGEST = 2**15  # bytes of weights that are gathered at once


def placed(kind, processes=2, nodes=1, device="cuda", dtype=torch.bfloat16, rank_0_says=None, **options):
    """A strategy as Lightning would have placed it."""

    class Placed(kind):
        root_device = torch.device(device)
        num_processes = processes
        world_size = processes * nodes
        compute_dtype = dtype

        def broadcast(self, found, src=0):
            return rank_0_says or found

    return Placed(**options)


def weights(count):
    with torch.device("meta"):
        return nn.Embedding(count, 1)


def units(strategy, count=1000):
    strategy.prepare(weights(count))
    assert strategy.gathers_blocks == (strategy.units == "blocks")
    return strategy.units


@pytest.fixture
def nvlink(monkeypatch):
    """And cards of 1 MiB, of which a 32nd is LARGEST."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**20))
    monkeypatch.setattr(sharded, "joined_by_nvlink", lambda: True)


@pytest.mark.usefixtures("nvlink")
def test_over_nvlink_a_model_of_at_most_a_32nd_of_the_memory_is_gathered_at_once():
    assert units(placed(FSDP2), LARGEST // 2) == "model"
    assert units(placed(FSDP2), LARGEST // 2 + 1) == "blocks"
    assert units(placed(FSDP2, dtype=None), LARGEST // 4) == "model", "four bytes a weight without 16-bit precision"
    assert units(placed(FSDP2, dtype=None), LARGEST // 4 + 1) == "blocks"


def test_without_nvlink_or_on_a_cpu_blocks_are_gathered(monkeypatch):
    monkeypatch.setattr(sharded, "joined_by_nvlink", lambda: False)
    assert units(placed(FSDP2)) == "blocks"
    monkeypatch.setattr(sharded, "joined_by_nvlink", lambda: True)
    assert units(placed(FSDP2, device="cpu")) == "blocks"


@pytest.mark.usefixtures("nvlink")
def test_what_crosses_machines_is_gathered_by_blocks():
    assert units(placed(FSDP2, processes=4, nodes=2)) == "blocks"
    assert units(placed(HSDP, processes=4, nodes=3)) == "model", "groups of a machine"
    assert units(placed(HSDP, processes=4, nodes=3, shard_ranks=2)) == "model"
    assert units(placed(HSDP, processes=4, nodes=3, shard_ranks=3)) == "blocks", "the second group lies on two machines"


@pytest.mark.usefixtures("nvlink")
def test_all_ranks_do_what_rank_0_says_and_a_second_model_is_decided_anew():
    assert units(placed(FSDP2, rank_0_says="blocks")) == "blocks"
    strategy = placed(FSDP2)
    assert [units(strategy, count) for count in (10, LARGEST, 10)] == ["model", "blocks", "model"]


@pytest.mark.usefixtures("nvlink")
def test_units_that_are_given_stay():
    assert units(placed(FSDP2, units="blocks")) == "blocks"
    assert units(placed(HSDP, processes=1, nodes=2, units="model"), LARGEST) == "model"


def test_gradients_travel_as_they_were_computed_within_a_machine_and_unless_they_were_added_up():
    assert placed(FSDP2).sends_as_computed(accumulate=1)
    assert not placed(FSDP2).sends_as_computed(accumulate=2), "they have been added up in fp32"
    assert placed(FSDP2, no_sync=False).sends_as_computed(accumulate=2), "each micro-batch's are sent"
    assert not placed(FSDP2, dtype=None).sends_as_computed(accumulate=1), "nothing is narrower"
    assert not placed(FSDP2, processes=4, nodes=2).sends_as_computed(accumulate=1), "a ring sends less between machines"
    assert placed(HSDP, processes=4, nodes=2).sends_as_computed(accumulate=1), "groups of a machine"


@pytest.mark.parametrize("kind", [FSDP2, HSDP])
def test_units_that_mean_nothing_are_refused(kind):
    with pytest.raises(UserError, match="'Model' is not one of auto, blocks, model"):
        kind(units="Model")
    with pytest.raises(UserError, match="leave one out"):
        units(placed(kind, units="model", reshard_after_forward=False))


def test_selective_recomputation_is_refused_where_its_casts_are_cached():
    check_recompute("selective", "bf16-mixed", None, 2)
    check_recompute("full", "16-mixed", None, 2)
    with pytest.raises(UserError, match="use bf16-mixed, or recompute full"):
        check_recompute("selective", "16-mixed", None, 2)


def test_so_many_blocks_are_recomputed_the_first():
    model = GPT(GPTConfig(layers=3))
    for blocks, kinds in ((None, ["full"] * 3), (3, ["full"] * 3), (1, ["full", "none", "none"])):
        set_recompute(model, "full", blocks)
        assert [block.recompute for block in model.blocks] == kinds


@pytest.mark.parametrize(
    ("mode", "blocks", "words"),
    [
        ("none", 1, "recompute_blocks is 1, but recompute is none; give recompute selective or full"),
        ("full", 0, "recompute_blocks is 0, but must be at least 1 and at most the model's 2 layers; leave it out"),
        ("selective", 3, "recompute_blocks is 3, but must be at least 1 and at most the model's 2 layers"),
    ],
)
def test_blocks_of_which_nothing_would_be_recomputed_or_that_are_not_there_are_refused(mode, blocks, words):
    check_recompute("full", "bf16-mixed", 2, 2)
    with pytest.raises(UserError, match=words):
        check_recompute(mode, "bf16-mixed", blocks, 2)


def overlaps(**options):
    return placed(DDP, **options)._decide_overlap()


def test_ddp_overlaps_but_on_two_gpus_joined_by_nvlink(monkeypatch):
    monkeypatch.setattr(replicated, "joined_by_nvlink", lambda: True)
    assert not overlaps()
    assert overlaps(overlap=True)
    assert overlaps(bucket_cap_mb=100), "who gives buckets a size wants them"
    assert overlaps(processes=4)
    assert overlaps(processes=1, nodes=2)
    assert overlaps(device="cpu")
    assert not overlaps(device="cpu", overlap=False)
    assert overlaps(rank_0_says=True), "all ranks do the same"
    monkeypatch.setattr(replicated, "joined_by_nvlink", lambda: False)
    assert overlaps()


def test_gpus_that_nvlink_joins_are_for_fsdp2_unless_something_is_asked_for_that_it_does_not_do_better(monkeypatch):
    def found(accelerator=None, devices=None, num_nodes=1, precision="bf16-mixed"):
        chosen = default_strategy(accelerator, devices, num_nodes, precision)
        return chosen if isinstance(chosen, str) else chosen.name

    monkeypatch.setattr(trainer, "joined_by_nvlink", lambda: True)
    assert (found(), found("cpu", 4)) == ("single", "auto"), "no GPU here"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert (found(), found("gpu", "auto"), found(devices="0,2"), found(devices=1)) == (
        "fsdp2",
        "fsdp2",
        "fsdp2",
        "single",
    )
    for other in (
        dict(num_nodes=2),
        dict(precision="16-mixed"),
        dict(precision=None),
        dict(accelerator="cpu", devices=2),
    ):
        assert found(**other) == "auto"
    monkeypatch.setattr(trainer, "joined_by_nvlink", lambda: False)
    assert found() == "auto"
