"""The promise: the same run on any number of devices, under any strategy, follows one loss curve."""

from dataclasses import replace

import pytest
from helpers.ranks import on_ranks
from helpers.training import Run, curves, losses, worst

BF16, FP32, FP64 = "bf16-mixed", "32-true", "64-true"
# fp32 sums in another order differ by about 1e-7 near a loss of 4; fp64 ones by 1e-15. The margins are what is promised.
TOLERANCE = {FP32: 1e-6, FP64: 1e-12}
ONE = Run(steps=16, global_batch=16, micro_batch=4)  # accumulates 4
ON_THREE = replace(ONE, global_batch=24)
DROPOUT = replace(ONE, model=ONE.model | dict(dropout=0.2))
LLAMA = replace(
    ONE,
    model=ONE.model
    | dict(norm="rmsnorm", positions="rope", activation="swiglu", tied=False, bias=True, heads=4, kv_heads=2),
)
RUNS = {
    2: [
        ONE.on("ddp", 2),
        ONE.on("fsdp2", 2),
        ONE.on("fsdp2", 2, recompute="full"),
        ONE.on("fsdp2", 2, recompute="selective"),
        ONE.on("ddp", 2, micro_batch=8),
        ONE.on("ddp", 2, strategy_options=dict(overlap=False)),
        ONE.on("ddp", 2, micro_batch=8, strategy_options=dict(overlap=False)),
        ONE.on("fsdp2", 2, micro_batch=2, strategy_options=dict(reshard_after_forward=False)),
        ONE.on("fsdp2", 2, micro_batch=2, strategy_options=dict(units="model")),
        ONE.on("fsdp2", 2, recompute="full", strategy_options=dict(units="model")),
    ],
    4: [
        ONE.on("ddp", 4),
        ONE.on("ddp", 4, strategy_options=dict(overlap=False)),
        ONE.on("fsdp2", 4),
        ONE.on("fsdp2", 4, micro_batch=1),
        ONE.on("hsdp", 4, micro_batch=2, strategy_options=dict(shard_ranks=2)),
        ONE.on("hsdp", 4, micro_batch=2, strategy_options=dict(shard_ranks=2, units="model")),
    ],
    3: [ON_THREE.on("ddp", 3), ON_THREE.on("fsdp2", 3)],
}


@pytest.mark.parametrize("precision", [FP32, FP64])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_strategy_follows_the_single_process_curve(ranks: int, precision: str) -> None:
    runs = [replace(run, precision=precision) for run in RUNS[ranks]]
    reference = losses(replace(ON_THREE if ranks == 3 else ONE, precision=precision))
    on_each_rank = on_ranks(ranks, curves, runs)
    differences = {name: worst(curve, reference) for name, curve in on_each_rank[0].items()}
    for name, difference in differences.items():
        print(f"{name}: worst difference {difference:.2e} over {ONE.steps} steps")
    assert max(differences.values()) <= TOLERANCE[precision]
    assert all(other == on_each_rank[0] for other in on_each_rank), "the recorded losses are the same on every rank"
    assert reference[-1] < reference[0] - 0.1, "a curve that does not fall proves little"


@pytest.mark.parametrize("ranks", [2, 4])
def test_in_bf16_the_curve_is_the_same_to_the_last_bit_on_the_same_micro_batches(ranks: int) -> None:
    """Gradients of 8 significant bits add up in fp32 to the same sum in nearly any order; nothing else depends on the layout."""
    layouts = [*RUNS[ranks], ONE.on("hsdp", 4, strategy_options=dict(shard_ranks=2))]
    runs = [
        replace(run, precision=BF16) for run in layouts if run.ranks == ranks and run.micro_batch == ONE.micro_batch
    ]
    reference = losses(replace(ONE, precision=BF16))
    assert reference[-1] < reference[0] - 0.1, "a curve that does not fall proves little"
    for name, curve in on_ranks(ranks, curves, runs)[0].items():
        assert curve == reference, name


def test_accumulation_and_recomputation_do_not_change_the_curve_of_one_process() -> None:
    reference = losses(replace(ONE, precision=FP64))
    for change in (dict(micro_batch=16), dict(micro_batch=1), dict(recompute="selective"), dict(recompute="full")):
        assert worst(losses(replace(ONE, precision=FP64, **change)), reference) <= TOLERANCE[FP64]
    for kind in ("selective", "full"):
        in_one_block = replace(ONE, precision=FP64, recompute=kind, model=ONE.model | dict(recompute_blocks=1))
        assert losses(in_one_block) == reference, "to the last bit"


def test_dropout_and_the_llama_shape_follow_the_curve_on_any_layout_of_the_same_micro_batches() -> None:
    """Dropout masks belong to a micro-batch of a step, so they do not depend on the rank that computes it."""
    layouts = [("ddp", "none"), ("ddp", "selective"), ("fsdp2", "none"), ("fsdp2", "full")]
    for run in (DROPOUT, LLAMA):
        one = replace(run, precision=FP64, steps=8)
        runs = [one.on(strategy, 2, recompute=recompute) for strategy, recompute in layouts]
        reference = losses(one)
        for name, curve in on_ranks(2, curves, runs)[0].items():
            assert worst(curve, reference) <= TOLERANCE[FP64], name
    assert worst(losses(replace(DROPOUT, steps=3)), losses(replace(ONE, steps=3))) > 1e-3, "dropout does something"
