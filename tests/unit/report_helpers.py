"""Result lines to judge: a curve that all runs share, and small differences from it."""

import numpy as np

from lit_gpt_dist.report.compare import compare_all
from lit_gpt_dist.report.curves import join_curves
from lit_gpt_dist.report.results import Run

STEPS = 40
BASE = 4.0 * np.exp(-np.arange(STEPS) / 40) + 1.2
NOISE = np.random.default_rng(0).standard_normal(STEPS)
STEPPED = np.linspace(0, 1, STEPS)
GPU = dict(device="NVIDIA H200", precision="bf16-mixed", git_revision="abc")


def run(tag, losses=BASE, mode="ddp", world=2, micro=16, accum=2, **fields):
    fields = dict(size="tiny", context=64, params=10, device="cpu", seed=1, corpus_hash="abc", tok_s=1.0) | fields
    batch = fields.pop("global_batch", 64)
    return Run(
        f"f:{tag}",
        tag,
        mode=mode,
        world=world,
        micro=micro,
        accum=accum,
        global_batch=batch,
        losses=tuple(losses),
        **fields,
    )


REFERENCE = run("reference", mode="single", world=1, accum=4)


def judge(*runs, reference=None):
    return {c.curve.run.tag: c for c in compare_all(join_curves([REFERENCE, *runs]), reference)}


def verdict(other):
    return judge(other)[other.tag].verdict


def judged_last(runs):
    """The verdict on the last of them, and why."""
    found = compare_all(join_curves(runs))[-1]
    return found.verdict, found.cause
