"""Estimates, limits and advice: relations that must hold whatever the constants are."""

from dataclasses import replace

import pytest
from planner_helpers import H100, NVLINK, PCIE, job

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import preset
from lit_gpt_dist.planner.activations import ends_saved_bytes, widths
from lit_gpt_dist.planner.advice import advise
from lit_gpt_dist.planner.estimate import estimate
from lit_gpt_dist.planner.explain import FIGURES, explain
from lit_gpt_dist.planner.footprint import moment_bytes
from lit_gpt_dist.planner.hardware import DEVICES, GIB, Device, Link, link_by_name
from lit_gpt_dist.planner.inference import cache_bytes_per_token, plan_inference, weight_bytes
from lit_gpt_dist.planner.job import Job
from lit_gpt_dist.planner.layout import NOT_TRAINABLE, STRATEGIES, layout
from lit_gpt_dist.planner.limits import largest_dividing_micro_batch, largest_micro_batch, largest_model_parameters


def test_each_stage_of_sharding_holds_less():
    peaks = [estimate(job(units="blocks"), name).peak_bytes for name in ("ddp", "zero1", "zero2", "fsdp2")]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4


def test_accumulating_under_fsdp2_with_one_reduction_keeps_whole_gradients():
    synchronised = estimate(job(no_sync=False), "fsdp2").footprint.kinds["gradients"]
    once = estimate(job(), "fsdp2").footprint.kinds["gradients"]
    assert once - synchronised == pytest.approx(4 * job().model.parameters())


def test_one_card_frees_its_gradients_unless_it_accumulates():
    once = estimate(job(devices=1, global_batch=16), "single").footprint
    several = estimate(job(devices=1, global_batch=32), "single").footprint
    assert once.moment == "loss"
    assert once.kinds["gradients"] == 0
    assert several.kinds["gradients"] == 4 * job().model.parameters()


def test_recomputation_and_smaller_micro_batches_need_less():
    whole = estimate(job(), "ddp").peak_bytes
    assert estimate(job(recompute="full"), "ddp").peak_bytes < whole
    assert estimate(job(micro_batch=8), "ddp").peak_bytes < whole


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "tp", "pp"])
@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recomputing_some_blocks_keeps_what_lies_between_none_and_all(kind, strategy):
    peaks = [estimate(job(), strategy).peak_bytes]
    peaks += [estimate(job(recompute=kind, recompute_blocks=n), strategy).peak_bytes for n in (6, 12, 18, 24)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] == estimate(job(recompute=kind), strategy).peak_bytes < peaks[0]
    if strategy != "pp":  # there a stage is recomputed before the next
        kept = [moment_bytes(job(recompute=kind, recompute_blocks=n), layout(job(), strategy), 1, "loss")["activations"]
                for n in (6, 12, 18)]  # fmt: skip
        assert kept[0] - kept[1] == pytest.approx(kept[1] - kept[2])


def test_the_bubble_of_a_pipeline_costs_efficiency():
    found = estimate(job(global_batch=64), "pp")  # 8 stages, 4 micro-batches
    assert found.efficiency < 1 / (1 + 7 / 4) + 0.01


def test_an_unknown_device_has_memory_figures_but_no_times_and_no_mfu():
    found = estimate(job(), "ddp")
    unknown = estimate(replace(job(), device=Device("NVIDIA Something")), "ddp")
    assert unknown.times is None
    assert unknown.mfu is None
    assert unknown.fits is None
    assert unknown.peak_bytes == pytest.approx(found.peak_bytes, rel=0.01)  # but for the cuBLAS workspace


def test_an_unknown_link_leaves_the_step_unknown():
    found = estimate(job(link=Link("unknown", None, "unknown", "")), "ddp")
    assert found.times.compute is not None
    assert found.times.step is None
    assert found.tokens_per_second is None


def test_fp32_has_no_time_from_a_bf16_peak():
    assert estimate(job(precision="32-true"), "ddp").times is None


def test_a_batch_that_does_not_divide_is_named_with_ones_that_do():
    with pytest.raises(UserError, match=r"500 .* 16 × 8 data ranks = 128; use a global batch of 384 or 512"):
        job(global_batch=500).accumulate(8)


def test_the_largest_micro_batch_fits_and_one_more_does_not():
    plan = layout(job(), "ddp")
    largest = largest_micro_batch(job(), plan)
    found = [estimate(job(micro_batch=n, global_batch=8 * n), "ddp").fits for n in (largest, largest + 1)]
    assert found == [True, False]


def test_the_largest_model_grows_with_every_kind_of_sharding():
    sizes = [largest_model_parameters(job(), layout(job(), name)) for name in ("ddp", "zero1", "zero2", "fsdp2")]
    assert sizes == sorted(sizes)
    assert sizes[0] == pytest.approx(0.7 * H100.memory_bytes / 16)


# ---- advice ---------------------------------------------------------------------------------------------------------


def test_a_small_model_on_one_card_needs_nothing_else():
    advice = advise(job("gpt2-124m", devices=1, global_batch=16))
    assert advice.strategy == "single"
    assert advice.ruled_out == ()


def test_a_micro_batch_that_is_too_large_becomes_accumulation_before_anything_else():
    advice = advise(job(devices=1, micro_batch=64, global_batch=64))
    assert (advice.strategy, advice.job.recompute) == ("single", "none")
    assert advice.job.micro_batch < 64
    assert "accumulation" in advice.reason


def test_ddp_is_taken_where_it_fits_unless_nvlink_joins_cards_of_one_machine_in_16_bits():
    across = Link("50 GB/s", 50e9, "given", "")
    for other in (job(link=PCIE), job(precision="32-true"), job(devices=4, nodes=2, node_link=across)):
        assert advise(other).strategy == "ddp"
    advice = advise(job())
    assert advice.strategy == "fsdp2"
    assert "what `fit` takes by itself over NVLink" in advice.reason
    assert advice.ruled_out == advise(job(link=PCIE)).ruled_out, "ddp is not ruled out, only behind"


def test_fsdp2_is_taken_when_ddp_does_not_fit_and_the_reasons_are_given_in_order():
    advice = advise(replace(job("4b", micro_batch=2, global_batch=16, link=PCIE), device=DEVICES["a100-40gb"]))
    assert advice.strategy == "fsdp2"
    names = [line.split(":")[0] for line in advice.ruled_out]
    assert names[-3:] == ["DDP", "ZeRO-1", "ZeRO-2"]


def test_tensor_parallel_is_not_advised_over_pcie():
    tight = replace(job("4b", micro_batch=1, global_batch=8, link=PCIE), device=replace(H100, memory_bytes=10 * GIB))
    lines = [line for line in advise(tight).ruled_out if line.startswith("tensor parallel")]
    assert len(lines) == 1
    assert "not advised over pcie4" in lines[0]


def test_recomputation_is_tried_at_the_micro_batch_asked_for():
    small = DEVICES["a100-40gb"]
    link = link_by_name("nvlink", small)
    advice = advise(Job(preset("4b"), small, devices=2, link=link, global_batch=2, micro_batch=1))
    assert (advice.strategy, advice.job.micro_batch, advice.job.recompute) == ("fsdp2", 1, "full")


def test_recomputation_in_some_blocks_is_kept_where_it_fits_and_extended_to_all_where_it_does_not():
    asked = job(recompute="selective", recompute_blocks=6, global_batch=128, link=PCIE)
    roomy = advise(asked)
    assert "--model.recompute selective --model.recompute_blocks 6" in roomy.command("--model.size big")
    assert "recompute selective in 6 of 24 blocks" in roomy.reason
    one_window = replace(asked, micro_batch=1, global_batch=8)
    needed = estimate(replace(one_window, recompute_blocks=None), "ddp").peak_bytes
    tight = advise(replace(one_window, device=replace(H100, memory_bytes=needed + asked.reserve_bytes)))
    assert (tight.strategy, tight.job.recompute, tight.job.recompute_blocks) == ("ddp", "selective", None)
    assert "recompute_blocks" not in tight.command("--model.size big")


def test_fsdp2_reduces_every_micro_batch_where_whole_gradients_do_not_fit():
    small = DEVICES["a100-40gb"]
    link = link_by_name("nvlink", small)
    advice = advise(Job(preset("4b"), small, devices=2, link=link, global_batch=64, micro_batch=1))
    assert (advice.strategy, advice.job.no_sync) == ("fsdp2", False)
    assert "--trainer.strategy fsdp2 --trainer.strategy.no_sync false" in advice.command("--model.size 4b")


def test_a_smaller_micro_batch_is_judged_with_the_accumulation_it_leads_to():
    plan, asked = layout(job(), "fsdp2"), job(global_batch=128)
    needed = estimate(replace(asked, micro_batch=8, global_batch=64), "fsdp2").peak_bytes  # not accumulating
    tight = replace(asked, device=replace(H100, memory_bytes=needed + asked.reserve_bytes))
    assert largest_dividing_micro_batch(replace(tight, global_batch=64), plan) == 8
    assert largest_dividing_micro_batch(tight, plan) < 8  # whole gradients besides


def test_a_later_strategy_that_is_clearly_faster_is_said_with_both_times():
    links = dict(link=NVLINK, node_link=Link("50 GB/s", 50e9, "given", ""))
    card = replace(H100, memory_bytes=72 * GIB)
    asked = Job(preset("4b"), card, devices=8, nodes=2, global_batch=512, micro_batch=2, **links)
    advice = advise(asked)
    assert (advice.strategy, advice.job.recompute) == ("ddp", "full")
    assert advice.faster.job.recompute == "none"
    assert estimate(advice.faster.job, advice.faster.strategy).times.step * 1.1 < estimate(advice.job, "ddp").times.step
    line = advice.faster.sentence("ddp", "--model.size 4b")
    assert line.startswith("faster by 3")
    assert f"--trainer.strategy {advice.faster.strategy}" in line


def test_nothing_is_said_of_strategies_that_are_hardly_faster_or_of_steps_too_short_to_plan():
    assert advise(job()).faster is None
    assert advise(replace(job(global_batch=128), model=preset("baby"))).faster is None


def test_tensor_parallel_divides_activations_but_for_those_that_stay_whole():
    tokens = 16 * 1024
    for recompute, whole_values in (("none", 4), ("selective", 2), ("full", 1)):  # bf16 values of the width, a token
        asked = job(recompute=recompute)
        alone, divided = (moment_bytes(asked, layout(asked, name), 1, "loss")["activations"] for name in ("ddp", "tp"))
        whole = asked.model.layers * tokens * whole_values * 2 * asked.model.width
        ends = tokens * ends_saved_bytes(asked.model, widths("bf16-mixed"))
        assert divided - ends == pytest.approx(whole + (alone - ends - whole) / 8)


def test_a_strategy_that_fit_does_not_run_is_never_recommended():
    for micro_batch in (1, 16, 64):
        for size in ("gpt2-124m", "big", "4b"):
            assert advise(job(size, micro_batch=micro_batch)).strategy not in NOT_TRAINABLE


def test_unknown_memory_gives_no_recommendation():
    advice = advise(replace(job(), device=Device("NVIDIA Something")))
    assert advice.strategy is None
    assert "--memory_gib" in advice.reason


# ---- explanations and inference -------------------------------------------------------------------------------------


@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_explains_itself_under_every_strategy(figure):
    for name in STRATEGIES:
        found = estimate(job(), name)
        if not found.impossible:
            assert len(explain(job(), found, figure)) >= 2


def test_an_explanation_ends_in_the_figure_of_the_table():
    found = estimate(job(), "ddp")
    assert f"{found.sent_bytes / 1e9:.3f} GB" in "\n".join(explain(job(), found, "sent"))
    assert f"{found.peak_bytes / GIB:.2f} GiB" in "\n".join(explain(job(), found, "peak"))


def test_an_unknown_figure_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="peak"):
        explain(job(), estimate(job(), "ddp"), "nonsense")


def test_the_cache_of_grouped_queries_is_a_third():
    model = preset("4b")  # 24 query heads, 8 key/value heads
    assert cache_bytes_per_token(model) == 2 * 32 * 8 * 128 * 2
    assert cache_bytes_per_token(preset("4b", kv_heads=24)) == 3 * cache_bytes_per_token(model)


def test_quantised_weights_shrink_the_layers_and_not_the_embedding():
    model = preset("4b")
    assert weight_bytes(model, 16) == 2 * model.parameters()
    assert weight_bytes(model, 4) > model.parameters() * 0.5
    assert weight_bytes(model, 4) < weight_bytes(model, 8) < weight_bytes(model, 16)


def test_inference_says_how_many_cards_and_how_many_sequences():
    plan = plan_inference(preset("4b"), 64, 4096, 16, 24 * GIB)
    assert plan.cards == 2
    assert plan.weights_bytes + plan.largest_batch * plan.cache_bytes / 64 <= 24 * GIB
