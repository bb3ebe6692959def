"""Rounds of one case show what rounding does to other runs of its model, and excuse no fault."""

from dataclasses import replace

import numpy as np
from report_helpers import BASE, GPU, STEPPED, STEPS, judged_last, run

from lit_gpt_dist.report.compare import compare_all
from lit_gpt_dist.report.curves import Verdict, join_curves


def rounds(apart: float, growing=True, **fields):
    """Two rounds of one case that rounding takes ``apart`` by the end."""
    path = np.linspace(0, apart, STEPS) if growing else np.full(STEPS, apart)
    fields = dict(mode="single", world=1, accum=1, case="single") | GPU | fields
    return [run("round", BASE + k * path, round=k, **fields) for k in (0, 1)]


def test_what_rounds_of_one_case_differ_by_counts_as_rounding_in_other_runs_of_the_model():
    base, other = (run(mode, BASE + gap, mode=mode, **GPU) for mode, gap in (("ddp", 0.0), ("fsdp2", 0.03 * STEPPED)))
    alone, _ = judged_last([base, other])
    assert alone is Verdict.DIFFERENT, "1e-2 is what bf16 may do by itself"
    found, cause = judged_last([*rounds(0.02, global_batch=16), base, other])
    assert found is Verdict.ROUNDING
    assert cause == "within 2 × what rounds of single differ by, 2.0e-02"
    assert judged_last([*rounds(0.01, global_batch=16), base, other])[0] is Verdict.DIFFERENT, "further than twice that"
    assert judged_last([*rounds(0.02, params=11), base, other])[0] is Verdict.DIFFERENT, "another model's rounds"


def test_rounds_of_the_same_batch_are_asked_first_and_no_rounds_explain_a_tenth():
    base, other = (run(mode, BASE + gap, mode=mode, **GPU) for mode, gap in (("ddp", 0.0), ("fsdp2", 0.03 * STEPPED)))
    assert (
        judged_last([*rounds(0.03, global_batch=16), *rounds(0.001, case="own"), base, other])[0] is Verdict.DIFFERENT
    )
    broken = run("fsdp2", BASE + 0.12 * STEPPED, mode="fsdp2", **GPU)
    assert judged_last([*rounds(0.09, global_batch=16), base, broken])[0] is Verdict.DIFFERENT
    far = rounds(0.2, global_batch=16)
    assert judged_last([*far, base, other])[0] is Verdict.DIFFERENT, "rounds so far apart are no control"


def test_a_round_that_is_at_fault_excuses_neither_itself_nor_others():
    good, bad = rounds(0.05, growing=False)
    other = run("ddp", BASE + 0.05, mode="ddp", **GPU)
    found = {
        c.curve.run.source + str(c.curve.run.round): c.verdict for c in compare_all(join_curves([good, bad, other]))
    }
    assert found == {"f:round0": Verdict.REFERENCE, "f:round1": Verdict.DIFFERENT, "f:ddp" + "None": Verdict.DIFFERENT}


def test_rounds_of_other_options_or_on_another_card_are_no_control():
    base, other = (run(mode, BASE + gap, mode=mode, **GPU) for mode, gap in (("ddp", 0.0), ("fsdp2", 0.03 * STEPPED)))
    for changed in (dict(command="lit-gpt-dist fit --optim.lr 1e-3"), dict(device="NVIDIA A100-SXM4-80GB")):
        first, second_round = rounds(0.02, global_batch=16, command="lit-gpt-dist fit")
        assert judged_last([first, replace(second_round, **changed), base, other])[0] is Verdict.DIFFERENT
    assert judged_last([*rounds(0.02, global_batch=16, command="lit-gpt-dist fit"), base, other])[0] is Verdict.ROUNDING
