"""What is sent in a step, in how many pieces, and what of it hides: relations that must hold whatever the constants are."""

from dataclasses import replace

import pytest
from planner_helpers import PCIE, job

from lit_gpt_dist.model.config import preset
from lit_gpt_dist.parallel import averaging
from lit_gpt_dist.planner.estimate import estimate
from lit_gpt_dist.planner.explain import explain, micro_compute_seconds
from lit_gpt_dist.planner.footprint import averages_after_backward, gathers_at_once, moment_bytes
from lit_gpt_dist.planner.hardware import Link
from lit_gpt_dist.planner.job import AT_ONCE_SHARE, PIECE_ELEMENTS
from lit_gpt_dist.planner.layout import STRATEGIES, layout
from lit_gpt_dist.planner.traffic import communication_seconds, last_bucket_bytes, sent_bytes


def test_no_sync_divides_what_ddp_sends_by_the_accumulation():
    found = estimate(job(), "ddp")
    assert found.accumulate == 4
    assert found.sent_without_no_sync == pytest.approx(4 * found.sent_bytes)


def test_overlap_never_makes_a_step_longer():
    for name in STRATEGIES:
        times = estimate(job(link=PCIE), name).times
        if times is not None:
            assert times.step <= times.serial_step


def exposed(strategy: str, **changes) -> float:
    return estimate(job(**changes), strategy).times.exposed


def test_ddp_never_hides_its_last_bucket_which_holds_the_embedding():
    whole = communication_seconds(job(), layout(job(), "ddp")).step
    embedding = 50_304 / job().model.parameters() * job().model.width
    assert exposed("ddp") == pytest.approx(whole * embedding)
    assert estimate(job(), "ddp").efficiency < 1


def test_the_last_bucket_is_a_bucket_of_small_models_and_at_most_all_gradients():
    tiny = replace(job(), model=preset("tiny"))
    baby = replace(job(), model=preset("baby"))
    assert last_bucket_bytes(tiny, layout(tiny, "ddp")) == 4 * tiny.model.parameters()
    assert last_bucket_bytes(baby, layout(baby, "ddp")) == 25 * 2**20
    small_bucket = replace(baby, execution="graph", bucket_bytes=5 * 2**20)
    assert last_bucket_bytes(small_bucket, layout(small_bucket, "ddp")) == 5 * 2**20


def test_the_planned_bucket_is_the_one_that_fit_takes():
    from lit_gpt_dist.parallel.replicated import BUCKET_MB, COMPILED_BUCKET_MB

    assert job(execution="eager").bucket == BUCKET_MB * 2**20
    assert job(execution="graph").bucket == COMPILED_BUCKET_MB * 2**20


def at_once(**changes) -> bool:
    asked = job(**changes)
    return gathers_at_once(asked, layout(asked, "fsdp2"))


def test_the_planner_gathers_at_once_what_fit_does():
    from lit_gpt_dist.parallel import fsdp2

    assert AT_ONCE_SHARE == fsdp2.AT_ONCE_SHARE
    assert at_once(size="gpt2-124m")
    assert not at_once(size="4b"), "its weights take more than a 32nd of the card's memory"
    assert at_once(size="4b", units="model")
    assert not at_once(size="gpt2-124m", units="blocks")
    assert not at_once(size="gpt2-124m", link=PCIE), "where gathers take long they are hidden"
    assert not at_once(size="gpt2-124m", nodes=2, node_link=PCIE)


def test_what_is_gathered_at_once_is_not_hidden_and_lies_in_memory_whole():
    blocks, whole = job(units="blocks"), job(units="model")
    plan = layout(whole, "fsdp2")
    parts, parameters = communication_seconds(whole, plan), whole.model.parameters()
    assert exposed("fsdp2", units="model") == pytest.approx(parts.gather + parts.reduce)
    assert sent_bytes(whole, plan, 4, True) == pytest.approx(
        parameters * (2 + 4) * (plan.weight_shards - 1) / plan.weight_shards
    )
    assert sent_bytes(whole, plan, 4, True) < sent_bytes(blocks, plan, 4, True)
    assert moment_bytes(whole, plan, 1, "loss")["copies"] == 2 * parameters
    assert moment_bytes(whole, plan, 1, "loss")["buffers"] == 0, (
        "what it came in is given back before anything is computed"
    )


def test_gradients_are_sent_in_16_bits_within_a_machine_unless_they_were_added_up():
    straight, several = (job(global_batch=n, micro_batch=8, units="blocks") for n in (64, 128))
    assert [found.accumulate(8) for found in (straight, several)] == [1, 2]
    plan = layout(straight, "fsdp2")
    share = straight.model.parameters() * (plan.weight_shards - 1) / plan.weight_shards
    assert sent_bytes(straight, plan, 1, True) == pytest.approx(share * (2 * 2 + 2))
    assert sent_bytes(several, plan, 2, True) == pytest.approx(share * (2 * 2 * 2 + 4))
    assert sent_bytes(several, plan, 2, False) == pytest.approx(share * 2 * (2 * 2 + 2))
    assert sent_bytes(job(precision="32-true", units="blocks"), plan, 1, True) == pytest.approx(share * (2 * 4 + 4))
    assert sent_bytes(job(precision="bf16-true", units="blocks"), plan, 2, True) == pytest.approx(
        share * (2 * 2 * 2 + 2)
    )
    assert sent_bytes(job(nodes=2, node_link=PCIE, units="blocks"), plan, 1, True) == pytest.approx(share * (2 * 2 + 4))
    (formula, *_) = explain(straight, estimate(straight, "fsdp2"), "sent")[1:]
    assert "2 bytes × 1 reductions" in formula


def test_fsdp2_never_hides_its_first_gather_and_its_last_reduction():
    asked = job(units="blocks")
    parts = communication_seconds(asked, layout(asked, "fsdp2"))
    accumulate = estimate(asked, "fsdp2").accumulate
    assert exposed("fsdp2", units="blocks") == pytest.approx(accumulate * parts.first_gather + parts.last_reduce)
    assert parts.first_gather > parts.gather / job().model.layers
    each = communication_seconds(replace(asked, no_sync=False), layout(asked, "fsdp2"))
    assert each.last_reduce == pytest.approx(parts.last_reduce / 2), "nothing is added up before it is sent"
    assert exposed("fsdp2", units="blocks", no_sync=False) == pytest.approx(
        accumulate * (each.first_gather + each.last_reduce)
    )


def test_hsdp_reduces_across_groups_as_often_as_within():
    asked = dict(nodes=2, devices=4, node_link=PCIE, overlap=False)
    once, each = (estimate(job(**asked, no_sync=no_sync), "hsdp") for no_sync in (True, False))
    within, narrow = (
        communication_seconds(job(**asked, no_sync=s), layout(job(**asked), "hsdp")) for s in (True, False)
    )
    assert once.accumulate > 1
    assert narrow.reduce == pytest.approx(within.reduce / 2)
    more = once.accumulate * narrow.reduce - within.reduce + (once.accumulate - 1) * within.step
    assert each.times.communication - once.times.communication == pytest.approx(more)
    (formula, _, _) = explain(job(**asked), once, "sent")[1:]
    assert "across groups" in formula


def test_what_cannot_be_hidden_changes_nothing_where_more_than_that_is_exposed():
    slow = Link("slow", 1e9, "given", "")
    parts = communication_seconds(job(link=slow), layout(job(), "ddp"))
    backward = 2 / 3 * micro_compute_seconds(job(), layout(job(), "ddp"))
    assert exposed("ddp", link=slow) == pytest.approx(parts.step - backward)


def test_on_two_cards_with_nvlink_ddp_has_no_buckets_and_each_sends_the_other_16_bits() -> None:
    two = job(devices=2, global_batch=32)
    plan, parameters = layout(two, "ddp"), two.model.parameters()
    found = estimate(two, "ddp")
    assert found.sent_bytes == 2 * parameters
    assert found.times.exposed == found.times.communication
    assert found.footprint.moment == "loss"
    assert found.footprint.kinds["gradients"] == 0
    at_the_end = moment_bytes(two, plan, 1, "end")
    assert at_the_end["buffers"] == 2 * 2 * min(parameters, 2 * PIECE_ELEMENTS) + 4 * PIECE_ELEMENTS
    assert f"  {parameters:,.0f} × 2 bytes, to the only other card" in explain(two, found, "sent")
    assert any("averaged when backward has ended" in line for line in explain(two, found, "step"))
    in_buckets = estimate(replace(two, ddp_overlap=True), "ddp")
    assert in_buckets.footprint.kinds["gradients"] == 4 * parameters
    assert in_buckets.sent_bytes == 4 * parameters
    assert in_buckets.times.exposed < in_buckets.times.communication


def test_gradients_that_were_added_up_or_have_32_bits_are_reduced_as_they_are() -> None:
    two = job(devices=2, global_batch=32)
    for wide in (replace(two, global_batch=64), replace(two, precision="32-true"), replace(two, autocast=True)):
        assert estimate(wide, "ddp").sent_bytes == 4 * two.model.parameters()


def test_ddp_has_buckets_on_other_machines_and_where_they_have_a_size() -> None:
    two = job(devices=2, global_batch=32)
    others = (replace(two, link=PCIE), replace(two, devices=4, global_batch=64), replace(two, bucket_bytes=2.0**20))
    across = replace(two, devices=1, nodes=2, node_link=PCIE)
    for other in (*others, across, replace(two, ddp_overlap=True)):
        assert not averages_after_backward(other, layout(other, "ddp"))
    assert averages_after_backward(two, layout(two, "ddp"))
    assert averages_after_backward(replace(others[0], ddp_overlap=False), layout(two, "ddp"))


def test_pieces_have_the_size_that_fit_takes() -> None:
    assert averaging.PIECE_ELEMENTS == PIECE_ELEMENTS
