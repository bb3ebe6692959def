"""Verdicts on planted curves: the same run, rounding, and every fault that the report names."""

import numpy as np
import pytest
from report_helpers import BASE, GPU, NOISE, REFERENCE, STEPS, judge, judged_last, run, verdict

from lit_gpt_dist.report.compare import compare_all
from lit_gpt_dist.report.curves import Verdict, join_curves


def test_the_one_device_run_is_the_reference_whatever_the_order_of_the_lines():
    found = compare_all(join_curves([run("a"), run("b", precision="bf16-mixed", world=1), REFERENCE]))
    assert all(c.reference.run.tag == "reference" for c in found)
    assert found[-1].verdict is Verdict.REFERENCE


def test_fp32_within_1e_6_is_the_same_curve_and_beyond_is_a_different_run():
    assert verdict(run("near", BASE + 5e-7 * np.sign(NOISE))) is Verdict.SAME
    assert verdict(run("far", BASE + 1e-5 * np.sign(NOISE))) is Verdict.DIFFERENT


def test_fp64_is_held_to_1e_12_against_an_fp64_reference():
    fp64 = run("fp64", mode="single", world=1, precision="64-true")
    near = run("near", BASE + 5e-13, precision="64-true")
    far = run("far", BASE + 1e-10, precision="64-true")
    found = judge(fp64, near, far)
    assert found["near"].reference.run.tag == "fp64"
    assert found["near"].verdict is Verdict.SAME
    assert found["far"].verdict is Verdict.DIFFERENT


def test_bf16_noise_of_a_few_thousandths_is_rounding_and_a_tenth_is_not():
    bf16 = dict(precision="bf16-mixed", device="NVIDIA H200", mem_gib=1.0)
    assert verdict(run("rounding", BASE + 2e-3 * np.tanh(NOISE), **bf16)) is Verdict.ROUNDING
    assert verdict(run("bug", BASE + 0.1 * np.tanh(NOISE), **bf16)) is Verdict.DIFFERENT


def test_fp32_on_a_gpu_may_round_in_tf32_but_not_more():
    gpu = dict(device="NVIDIA H200", mem_gib=1.0)
    assert verdict(run("tf32", BASE + 1e-4 * np.tanh(NOISE), **gpu)) is Verdict.ROUNDING
    assert verdict(run("bug", BASE + 1e-2, **gpu)) is Verdict.DIFFERENT


def test_the_first_step_beyond_the_tolerance_is_named():
    losses = BASE.copy()
    losses[6:] += 0.01
    found = judge(run("late", losses))["late"]
    assert (found.first_beyond, found.max_difference) == (7, pytest.approx(0.01))


def test_ranks_that_share_data_are_told_by_the_first_loss():
    found = judge(run("shared", BASE + 0.03 * NOISE, world=4, accum=1))["shared"]
    assert found.verdict is Verdict.DIFFERENT
    assert "4 ranks share data" in found.cause
    assert "accumulation" not in found.cause


def test_a_loss_that_is_not_divided_by_accumulation_is_told_by_its_multiple():
    found = judge(run("undivided", BASE * 4, world=1, accum=4))["undivided"]
    assert found.verdict is Verdict.DIFFERENT
    assert "not divided by accumulation" in found.cause
    assert "share data" not in found.cause


def test_a_loss_that_is_summed_over_ranks_is_told_by_its_multiple():
    assert "summed over ranks" in judge(run("summed", BASE * 4, world=4, accum=1))["summed"].cause


def test_undivided_gradients_are_told_by_a_first_loss_that_agrees():
    losses = BASE.copy()
    losses[1:] += 0.002 * np.arange(1, STEPS)
    found = judge(run("gradients", losses))["gradients"]
    assert found.first_beyond == 2
    assert "step 1 agrees" in found.cause
    assert "gradients not divided by accumulation (2; the reference: 4)" in found.cause
    assert "share data" not in found.cause


def test_where_the_first_loss_is_within_doubt_both_causes_are_named():
    losses = BASE + 0.2 * np.sign(NOISE)
    losses[0] = BASE[0] + 5e-3  # bf16: more than agreement, less than a fault
    cause = judge(run("doubt", losses, precision="bf16-mixed"))["doubt"].cause
    assert "share data" in cause
    assert "not divided by accumulation" in cause


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(seed=2), "another seed (seed 2 against 1)"),
        (dict(corpus_hash="xyz"), "another corpus (corpus_hash xyz against abc)"),
        (dict(context=32), "another context (context 32 against 64)"),
    ],
)
def test_a_field_that_differs_is_named(fields, words):
    found = judge(run("other", BASE + 0.01, **fields))["other"]
    assert found.verdict is Verdict.DIFFERENT
    assert words in found.cause


def test_an_option_that_differs_is_named_and_neutral_ones_are_not():
    reference = run(
        "r", mode="single", world=1, accum=4, command="lit-gpt-dist fit --tag r --trainer.devices 1 --optim.lr 1e-3"
    )
    neutral = (
        "--quiet --export false --sample_tokens 0 --monitor.csv false --data.corpus a --data.val_windows 8 --profile x"
    )
    other = run("o", BASE + 0.01, command=f"lit-gpt-dist fit --tag o {neutral} --trainer.devices 2 --optim.lr=3e-4")
    found = compare_all(join_curves([reference, other]))[1]
    assert found.cause == "options differ: optim.lr 3e-4 against 1e-3"


def test_saved_configurations_tell_what_command_lines_do_not(tmp_path):
    paths = [tmp_path / "a.yaml", tmp_path / "b.yaml", tmp_path / "gone.yaml"]
    paths[0].write_text("trainer: {max_steps: 40, devices: 1}\noptim: {lr: 1.0e-3, beta1: 0.9}\nexport: true\n")
    paths[1].write_text("trainer: {max_steps: 40, devices: 2}\noptim: {lr: null, beta1: 0.9}\nexport: false\n")
    command = "lit-gpt-dist fit --config some.yaml"
    reference = run("r", mode="single", world=1, accum=4, command=command, config=str(paths[0]))
    others = [run(path.stem, BASE + 0.01, command=command, config=str(path)) for path in paths[1:]]
    read, gone = compare_all(join_curves([reference, *others]))[1:]
    assert read.cause == "options differ: optim.lr the default against 0.001"
    assert "options differ" not in gone.cause


def test_a_run_that_ends_early_on_the_same_schedule_differs_in_no_option():
    commands = ("--trainer.max_steps 40", "--trainer.max_steps 20 --optim.schedule_steps 40", "--trainer.max_steps 20")
    runs = [run(f"{i}", BASE + 0.01 * i, command=f"lit-gpt-dist fit {words}") for i, words in enumerate(commands)]
    causes = [c.cause for c in compare_all(join_curves(runs), "0")]
    assert "options differ" not in causes[1]
    assert causes[2] == "options differ: length of the schedule 20 against 40"


def test_dropout_under_another_micro_batch_is_a_cause():
    base = run("base", mode="single", world=1, micro=64, accum=1, dropout=0.1)
    found = compare_all(join_curves([base, run("other", BASE + 0.01 * NOISE, dropout=0.1)]))[1]
    assert found.cause == "dropout masks belong to a micro-batch, and these differ (16 against 64)"
    assert "dropout" not in judge(run("without", BASE + 0.01 * NOISE, micro=8, accum=4))["without"].cause


def test_another_shape_is_named_where_both_lines_have_one():
    shape = dict(layers=2, heads=2, context=64)
    base = run("base", mode="single", world=1, accum=4, shape=shape)
    found = compare_all(join_curves([base, run("other", BASE + 0.01, shape=shape | {"heads": 4})]))[1]
    assert found.cause == "another shape (heads 4 against 2)"


def test_a_first_loss_beyond_the_tolerance_agrees_within_rounding():
    losses = BASE + np.linspace(1e-5, 0.3, STEPS)
    found = judge(run("tf32", losses, device="NVIDIA H200", mem_gib=1.0))["tf32"]
    assert (found.verdict, found.first_beyond) == (Verdict.DIFFERENT, 1)
    assert found.cause.startswith("step 1 agrees within rounding (1.0e-05), so its data")


def in_bf16(difference: np.ndarray):
    lines = [run("one", **GPU), run("other", BASE + difference, mode="fsdp2", **GPU)]
    return compare_all(join_curves(lines))[1]


def test_a_difference_that_grows_as_rounding_does_is_not_called_a_fault_alone():
    """fsdp2 against ddp in bf16: 4e-4 before any update, and 3e-2 where the loss has fallen by six."""
    found = in_bf16(4e-4 * 1.5 ** np.minimum(np.arange(STEPS), 11))
    assert found.verdict is Verdict.DIFFERENT
    assert "the difference grows from there, at most 1.5 × a step once it is 1e-04" in found.cause
    assert found.cause.endswith(
        "gradients not averaged over the 2 ranks, or another learning rate, clipping or schedule"
    )


def test_a_difference_that_is_there_at_once_or_too_large_for_rounding_is_a_fault():
    at_once, small = (np.where(np.arange(STEPS) > 0, size, 1e-5) for size in (0.05, 0.005))
    for difference in (at_once, small + 1e-3 * np.arange(STEPS), 4e-4 * 1.2 ** np.arange(STEPS)):
        assert "so its data and the initial weights do too, and the update differs" in in_bf16(difference).cause


@pytest.mark.parametrize("device", ["cpu", "NVIDIA H200"])
def test_an_fp32_run_that_parts_slowly_after_many_equal_steps_is_not_called_a_fault_alone(device):
    def in_fp32(difference):
        lines = [
            run(tag, losses, device=device, matmul_precision="highest")
            for tag, losses in (("one", BASE), ("other", BASE + difference))
        ]
        return compare_all(join_curves(lines))[1]

    later = np.maximum(np.arange(STEPS) - 24, 0)  # from step 26 on
    found = in_fp32(np.where(later > 0, 2e-7 * 2.0**later, 0))
    assert (found.verdict, found.first_beyond) == (Verdict.DIFFERENT, 28)
    assert found.cause.startswith("steps 1 to 27 agree, and the difference grows from there, at most 2.0 × a step once")
    assert "compare in fp64. Or, in the update: gradients not averaged over the 2 ranks" in found.cause
    for fault in (np.where(later > 0, 1e-3, 0), 2e-7 * 2.0 ** np.arange(STEPS).clip(max=18)):  # at once, and early
        assert in_fp32(fault).cause.startswith(
            "step 1 agrees, so its data and the initial weights do too, and the update"
        )


def test_another_global_batch_is_not_compared_and_says_so():
    found = judge(run("weak", BASE + 0.1, world=4, global_batch=128))["weak"]
    assert found.verdict is Verdict.ALONE
    assert "128" in found.cause
    assert "64" in found.cause


def test_another_global_batch_held_against_a_named_reference_is_a_different_run():
    found = judge(run("weak", BASE + 0.1, global_batch=128), reference="reference")["weak"]
    assert "another global batch (global_batch 128 against 64)" in found.cause


def test_a_run_of_another_size_than_the_named_reference_says_so():
    other = run("big", size="big", world=1)
    assert (
        "the reference asked for, is a run of tiny"
        in judge(other, run("b", size="big"), reference="reference")["b"].cause
    )


def test_a_resumed_run_is_one_curve():
    parts = run("r", BASE[:20]), run("r", BASE[20:], start=20, mode="fsdp2")
    found = judge(*parts)["r"]
    assert (found.verdict, found.curve.seams, len(found.steps)) == (Verdict.SAME, (20,), STEPS)


def test_steps_done_again_after_a_kill_replace_the_lost_ones():
    parts = run("r", [*BASE[:20], 9.0, 9.0]), run("r", BASE[20:], start=20)
    assert judge(*parts)["r"].verdict is Verdict.SAME


def test_a_resume_that_reads_data_again_is_named_at_its_step():
    parts = run("r", BASE[:20]), run("r", BASE[:20] + 0.01, start=20)
    found = judge(*parts)["r"]
    assert found.first_beyond == 21
    assert "resume after step 20" in found.cause


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(global_batch=128), "another global batch (128 against 64)"),
        (dict(seed=2), "another seed (2 against 1)"),
        (dict(corpus_hash="xyz"), "another corpus (xyz against abc)"),
        (dict(context=32), "another context (32 against 64)"),
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_a_resume_with_other_facts_is_not_joined_and_says_so(fields, words, world):
    parts = run("r", BASE[:20], world=world), run("r", BASE[20:], start=20, world=world, **fields)
    begun, rest = [c for c in compare_all(join_curves([REFERENCE, *parts])) if c.curve.run.tag == "r"]
    assert (begun.verdict, begun.curve.last_step, begun.curve.run.global_batch) == (Verdict.SAME, 20, 64)
    assert rest.curve.steps[0] == 21
    assert rest.verdict in (Verdict.ALONE, Verdict.DIFFERENT, Verdict.SAME)
    assert rest.cause == f"the part from step 20 on was run with {words}"


def test_a_mistaken_resume_in_between_does_not_part_a_curve():
    parts = run("r", BASE[:20]), run("r", BASE[20:], start=20, seed=2), run("r", BASE[20:], start=20)
    whole, mistaken = [c for c in join_curves(parts)]
    assert (whole.last_step, whole.seams, mistaken.apart != "") == (STEPS, (20,), True)
    # from step 30 of the mistaken part, however, nothing of the first is continued
    again = join_curves([*parts[:2], run("r", BASE[30:], start=30)])
    assert [c.apart[:30] for c in again] == ["", "the part from step 20 on was r", "the part from step 30 on was r"]


def test_a_part_whose_beginning_is_missing_is_compared_where_it_can_be():
    found = judge(run("late", BASE[20:], start=20))["late"]
    assert (found.verdict, int(found.steps[0])) == (Verdict.SAME, 21)


def test_repeated_tags_from_the_start_are_rounds_not_resumes():
    assert len(join_curves([run("a"), run("a")])) == 2


def test_a_jump_of_both_losses_before_they_part_is_named_rather_than_a_fault():
    jumping = BASE.copy()
    jumping[10] *= 3
    few_bits = dict(seed=2, precision="bf16-mixed")
    base = run("base", jumping, mode="single", world=1, accum=4, **few_bits)
    parted = jumping + np.where(np.arange(STEPS) >= 10, 0.05, 0.0)
    late = jumping + np.where(np.arange(STEPS) >= 30, 0.05, 0.0)
    found = judge(
        base, run("after", parted, **few_bits), run("earlier", parted + 0.05, **few_bits), run("late", late, **few_bits)
    )
    assert "jumps at step 11, to 12" in found["after"].cause
    assert "jumps" not in found["earlier"].cause, "they were apart before"
    assert "jumps" not in found["late"].cause, "they part long after it"
    whole = run("whole", jumping, mode="single", world=1, accum=4, seed=3)
    assert "jumps" not in judge(whole, run("fp32", parted, seed=3))["fp32"].cause, "fp32 does not round so far"


def test_a_loss_that_is_not_finite_is_named():
    losses = BASE.copy()
    losses[10:] = np.nan
    found = judge(run("nan", losses))["nan"]
    assert found.verdict is Verdict.DIFFERENT
    assert "not finite from step 11" in found.cause


def test_runs_that_part_for_a_few_steps_and_meet_again_are_told_from_a_wrong_update():
    gap = np.zeros(STEPS)
    gap[[9, 10]] = 0.05, 0.02
    base, other = run("ddp", **GPU), run("fsdp2", BASE + gap, mode="fsdp2", **GPU)
    found, cause = judged_last([base, other])
    assert found is Verdict.DIFFERENT
    assert cause.startswith("beyond rounding only at step 10, 11, and together again after that")
    gap[-1] = 0.05
    _, cause = judged_last([base, run("fsdp2", BASE + gap, mode="fsdp2", **GPU)])
    assert "the update differs" in cause
