"""Medians, spread, efficiencies and ablations, against values worked out by hand."""

import pytest

from lit_gpt_dist.report.ablations import ablations, no_sync_factor
from lit_gpt_dist.report.results import Run, without_superseded
from lit_gpt_dist.report.statistics import Bases, group_cases


def run(mode="single", world=1, micro=16, accum=1, tok_s=100.0, **fields):
    batch = micro * accum * world
    fields = dict(tag=f"{mode}-{world}", size="tiny", context=64, params=10, device="cpu", losses=(1.0,)) | fields
    return Run(
        "f:1",
        mode=mode,
        world=world,
        micro=micro,
        accum=accum,
        global_batch=batch,
        tok_s=tok_s,
        step_ms=batch * 64 / tok_s * 1000,
        **fields,
    )


def test_rounds_are_one_case_with_median_and_spread():
    (case,) = group_cases([run(tok_s=100.0), run(tok_s=130.0, tag="again"), run(tok_s=110.0)])
    assert case.tok_s == 110.0
    assert case.spread == pytest.approx(30 / 110)


def test_one_round_has_no_spread():
    (case,) = group_cases([run()])
    assert case.spread is None


def test_weak_efficiency_holds_the_batch_per_card_and_strong_the_whole_batch():
    cases = group_cases([run(micro=16, tok_s=100.0), run(micro=32, tok_s=120.0), run("ddp", 2, micro=16, tok_s=180.0)])
    ddp = next(c for c in cases if c.first.mode == "ddp")
    scaling = Bases(cases).scaling(ddp)
    assert scaling.weak_efficiency == pytest.approx(180 / (2 * 100))
    assert scaling.strong_efficiency == pytest.approx(180 / (2 * 120))
    assert scaling.speed_up == pytest.approx(180 / 120)


def test_strong_scaling_is_held_against_the_fastest_one_card_split():
    cases = group_cases(
        [run(micro=8, accum=4, tok_s=80.0), run(micro=32, tok_s=120.0), run("ddp", 2, micro=16, tok_s=180.0)]
    )
    assert Bases(cases).strong(next(c for c in cases if c.first.mode == "ddp")).tok_s == 120.0


def test_single_is_the_base_before_a_strategy_on_one_card():
    cases = group_cases([run("ddp", 1, tok_s=90.0), run(tok_s=100.0)])
    assert all(Bases(cases).weak(case).first.mode == "single" for case in cases)


@pytest.mark.parametrize(
    "field",
    [
        dict(precision="bf16-mixed"),
        dict(compile="yes"),
        dict(recompute="full"),
        dict(device="other"),
        dict(params=11),
        dict(recompute_blocks=6),
    ],
)
def test_a_run_of_another_arithmetic_model_or_card_is_no_base(field):
    cases = group_cases([run(**field), run("ddp", 2, tok_s=150.0)])
    scaling = Bases(cases).scaling(next(c for c in cases if c.first.world == 2))
    assert (scaling.weak_efficiency, scaling.strong_efficiency, scaling.speed_up) == (None, None, None)


@pytest.mark.parametrize("switch", ["no_sync", "reshard_after_forward", "cuda_graph"])
def test_runs_of_fit_that_differ_in_a_switch_are_no_rounds_of_one_case(switch):
    on, off = (
        run("fsdp2", 2, tok_s=rate, device="H200", record={switch: on}) for rate, on in ((2.0, True), (1.0, False))
    )
    cases = group_cases([on, off, run(tok_s=1.0, device="H200")])
    assert {case.options: case.tok_s for case in cases if case.first.world == 2} == {
        "32-true": 2.0,
        f"32-true, {switch} off": 1.0,
    }


def test_the_whole_model_gathered_at_once_and_block_by_block_are_two_cases():
    lines = [run("fsdp2", 2, tok_s=rate, record={"units": units}) for rate, units in ((2.0, "model"), (1.0, "blocks"))]
    cases = group_cases([*lines, run("fsdp2", 2, tok_s=1.2)])  # the last as written before there was a choice
    assert {case.options: case.tok_s for case in cases} == {"32-true, units model": 2.0, "32-true": 1.1}


def test_recomputation_in_all_and_in_some_blocks_are_cases_of_their_own():
    kinds = {"6 blocks": 6, "1 block": 1, "": None}
    lines = [run("ddp", 2, recompute="selective", recompute_blocks=blocks) for blocks in kinds.values()]
    lines += [
        run("ddp", 2, recompute="selective", recompute_blocks=6, precision="bf16-mixed", variant="precision bf16-mixed")
    ]
    cases = group_cases([*lines, run()])
    told = {f"32-true, recompute selective in {kind}" if kind else "32-true, recompute selective" for kind in kinds}
    assert {case.options for case in cases if case.first.world == 2 and not case.first.variant} == told
    (ablation,) = ablations(cases, Bases(cases))
    assert ablation.base.first.recompute_blocks == 6


def test_a_compiled_run_is_held_against_single_whatever_is_compiled_as_one():
    """Left to ``auto``, one card compiles the whole model and fsdp2 blocks."""
    cases = group_cases(
        [
            run(compile="model", tok_s=100.0),
            run("ddp", 1, compile="blocks", tok_s=95.0),
            run("fsdp2", 2, compile="blocks", tok_s=170.0),
            run("fsdp2", 2, compile="none", tok_s=80.0),
        ]
    )
    efficiencies = {c.first.compile: Bases(cases).scaling(c).weak_efficiency for c in cases if c.first.world == 2}
    assert efficiencies == {"blocks": pytest.approx(0.85), "none": None}


def test_a_round_that_ran_out_of_memory_joins_its_case():
    lost = Run("f:9", "a", "ddp", "tiny", 2, 16, 1, 32, status="oom", case="x", error="out of memory")
    (case,) = group_cases([run("ddp", 2, case="x"), lost])
    assert (case.status, len(case.runs), case.tok_s) == ("ok", 2, 100.0)
    (alone,) = group_cases([lost])
    assert (alone.status, alone.tok_s) == ("oom", None)


def test_no_sync_factors_are_those_of_the_formulas():
    assert no_sync_factor("ddp", 4, "32-true") == 4
    assert no_sync_factor("fsdp2", 1, "32-true") == 1
    # 4 × (2·4 + 4) over 4 × 2·4 + 4
    assert no_sync_factor("fsdp2", 4, "32-true") == pytest.approx(48 / 36)
    # gradients of one micro-batch are sent in the 2 bytes they were computed in
    assert no_sync_factor("fsdp2", 4, "bf16-mixed") == pytest.approx(4 * (2 * 2 + 2) / (4 * 2 * 2 + 4))
    assert no_sync_factor("fsdp2", 4, "bf16-mixed", gathers_once=True) == pytest.approx((2 + 4 * 2) / (2 + 4))
    assert no_sync_factor("fsdp2", 1, "bf16-mixed") == 1
    assert no_sync_factor("single", 4, "32-true") is None


def test_a_switch_is_held_against_what_differs_in_nothing_else():
    """Units bring another way of compiling with them; a recomputed run that is compiled the same way is not the base."""
    whole = run("fsdp2", 2, tok_s=100.0, compile="model", record=dict(units="model"))
    recomputed = run("fsdp2", 2, tok_s=70.0, compile="blocks", recompute="full")
    blocks = run("fsdp2", 2, tok_s=95.0, compile="blocks", variant="units blocks")
    cases = group_cases([recomputed, whole, blocks])
    (ablation,) = ablations(cases, Bases(cases))
    assert ablation.change == pytest.approx(-0.05)


def test_the_no_sync_ablation_is_measured_beyond_the_one_card_step():
    one, ddp = run(accum=4, tok_s=64_000.0), run("ddp", 2, accum=4, tok_s=102_400.0)
    switched = run("ddp", 2, accum=4, tok_s=64_000.0, variant="no_sync off")
    cases = group_cases([one, ddp, switched])
    (ablation,) = ablations(cases, Bases(cases))
    # steps: 64 ms on one card, 80 ms on two, 128 ms with every micro-batch reduced
    assert ablation.extra_ms == pytest.approx(48)
    assert ablation.change == pytest.approx(64 / 102.4 - 1)
    assert ablation.expected_factor == 4
    assert ablation.measured_factor == pytest.approx((128 - 64) / (80 - 64))


def test_a_switched_field_finds_its_base_too():
    cases = group_cases(
        [run("ddp", 2), run("ddp", 2, precision="bf16-mixed", variant="precision bf16-mixed", tok_s=200.0)]
    )
    (ablation,) = ablations(cases, Bases(cases))
    assert ablation.change == pytest.approx(1.0)


def test_a_step_beyond_the_one_card_step_bounds_the_communication():
    cases = group_cases([run(tok_s=100.0), run("ddp", 2, tok_s=160.0)])
    one, two = (Bases(cases).scaling(case).beyond_one_card for case in cases)
    assert one is None
    assert two == pytest.approx(1 - 160 / 200)  # the same as 1 − weak efficiency


def test_a_failure_that_was_run_again_is_forgotten():
    failed = Run("f:1", "a", "ddp", "tiny", 2, 16, 1, 32, status="failed", case="x", round=0)
    lasting = Run("f:2", "a", "ddp", "tiny", 2, 16, 1, 32, status="failed", case="x", round=1)
    assert without_superseded([failed, lasting, run("ddp", 2, case="x", round=0)])[0] is lasting
