"""Gradients cross the network once per optimizer step, whatever is accumulated. Counted by torch's profiler."""

from collections import Counter
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
from helpers.ranks import on_ranks
from helpers.training import Run, build
from torch.profiler import ProfilerActivity, profile

FIRST, STEPS = 3, 5  # DDP rearranges its buckets in the first steps
ONE = Run(steps=STEPS, global_batch=16, micro_batch=8, model=dict(size="tiny", context=32, layers=3), clip=None)
UNITS = 3 + 1  # a block each, and the root
OPERATORS = {
    "c10d::allreduce_": "all-reduce",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::alltoall_base_": "all-to-all",
}
GATHERS = {"c10d::_allgather_base_": "all-gather"}


class Counted(pl.Callback):
    """Counts collectives from step ``FIRST`` on."""

    def __init__(self, operators: dict[str, str]) -> None:
        self.operators = operators
        self.profiler = profile(activities=[ProfilerActivity.CPU])

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if trainer.global_step == FIRST:
            self.profiler.start()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if trainer.global_step == STEPS:
            self.profiler.stop()

    def per_step(self) -> dict[str, float]:
        counts = Counter(self.operators[e.name] for e in self.profiler.events() if e.name in self.operators)
        return {name: number / (STEPS - FIRST) for name, number in counts.items()}


def count(run: Run, operators: dict[str, str]) -> dict[str, float]:
    counted = Counted(operators)
    trainer, module, data = build(run, counted)
    trainer.fit(module, datamodule=data)
    return counted.per_step()


def counts(runs: list[Run], operators: dict[str, str] = OPERATORS) -> list[dict[str, float]]:
    return [count(run, operators) for run in runs]


class GradientPlaces(pl.Callback):
    """Which tensors hold the gradients before each micro-batch's backward."""

    def __init__(self) -> None:
        self.seen: list[set[int]] = []

    def on_before_backward(self, trainer: Any, module: Any, *rest: Any) -> None:
        self.seen.append({p.grad.untyped_storage().data_ptr() for p in module.parameters() if p.grad is not None})


def gradient_places(run: Run) -> list[tuple[int, bool]]:
    places = GradientPlaces()
    trainer, module, data = build(run, places)
    trainer.fit(module, datamodule=data)
    return [(len(now), now == before) for before, now in zip(places.seen, places.seen[1:], strict=False)]


def test_ddp_adds_gradients_up_within_its_buckets() -> None:
    """Beside them they would be there twice."""
    run = ONE.on("ddp", 2, micro_batch=2)
    for found in on_ranks(2, gradient_places, run):
        assert found[4 * 2 :] == [(1, True)] * (4 * (STEPS - 2) - 1), (
            "all in one bucket, the same one from the third step on"
        )


@pytest.fixture(scope="module")
def per_step() -> dict[str, list[dict[str, float]]]:
    """Per strategy: collectives a step without accumulation, with 4 micro-batches, and those without ``no_sync``."""
    runs = []
    for strategy, options in (("ddp", dict(bucket_cap_mb=0.1)), ("fsdp2", {}), ("fsdp2", dict(units="model"))):
        straight = ONE.on(strategy, 2, strategy_options=options)
        runs += [
            straight,
            straight.on(strategy, 2, micro_batch=2),
            straight.on(strategy, 2, micro_batch=2, strategy_options=options | dict(no_sync=False)),
        ]
    found = on_ranks(2, counts, runs)
    assert found[0] == found[1], "ranks issue the same collectives"
    return {"ddp": found[0][:3], "fsdp2": found[0][3:6], "one unit": found[0][6:]}


def test_hsdp_reduces_each_unit_once_per_step_within_a_group_and_once_across_at_accumulate_4() -> None:
    run = ONE.on("hsdp", 4, micro_batch=1, strategy_options=dict(shard_ranks=2))
    straight, accumulated = on_ranks(4, counts, [replace(run, micro_batch=4), run])[0]
    assert straight == accumulated == {"reduce-scatter": UNITS, "all-reduce": UNITS + 1}, "and one for the norm"


def test_ddp_reduces_each_bucket_once_per_step_at_accumulate_4(per_step: dict[str, list[dict[str, float]]]) -> None:
    straight, accumulated, every_micro_batch = per_step["ddp"]
    print(f"ddp: {accumulated} a step at accumulate 4, {every_micro_batch} with no_sync=False")
    buckets = straight["all-reduce"]
    assert buckets > 1, "small buckets, so that there are several"
    assert accumulated == {"all-reduce": buckets}
    assert every_micro_batch == {"all-reduce": 4 * buckets}


def test_ddp_without_overlap_reduces_all_gradients_in_one_piece_or_exchanges_those_of_one_micro_batch_as_computed() -> (
    None
):
    straight = ONE.on("ddp", 2, strategy_options=dict(overlap=False))
    accumulated = straight.on("ddp", 2, micro_batch=2)
    each = accumulated.on("ddp", 2, strategy_options=dict(overlap=False, no_sync=False))
    in_bf16 = [replace(run, precision="bf16-mixed") for run in (straight, accumulated)]
    found = on_ranks(2, counts, [straight, accumulated, each, *in_bf16])[0]
    once = {"all-reduce": 1}
    assert found == [once, once, {"all-reduce": 4}, {"all-to-all": 1}, once]


def test_fsdp2_reduce_scatters_each_unit_once_per_step_at_accumulate_4(
    per_step: dict[str, list[dict[str, float]]],
) -> None:
    straight, accumulated, every_micro_batch = per_step["fsdp2"]
    print(f"fsdp2: {accumulated} a step at accumulate 4, {every_micro_batch} with no_sync=False")
    norm = {"all-reduce": 1}  # the squares of the shards are summed once, for the gradient norm
    assert straight == accumulated == {"reduce-scatter": UNITS} | norm
    assert every_micro_batch == {"reduce-scatter": 4 * UNITS} | norm


def test_fsdp2_as_one_unit_reduces_all_gradients_in_one_piece(per_step: dict[str, list[dict[str, float]]]) -> None:
    straight, accumulated, every_micro_batch = per_step["one unit"]
    norm = {"all-reduce": 1}
    assert straight == accumulated == {"reduce-scatter": 1} | norm
    assert every_micro_batch == {"reduce-scatter": 4} | norm


@pytest.mark.parametrize(("options", "units"), [({}, UNITS), (dict(units="model"), 1)])
def test_fsdp2_in_bf16_sends_each_unit_s_gradients_as_they_are_unless_they_were_added_up(
    options: dict[str, Any], units: int
) -> None:
    straight = ONE.on("fsdp2", 2, precision="bf16-mixed", strategy_options=options)
    accumulated = straight.on("fsdp2", 2, micro_batch=2)
    each = accumulated.on("fsdp2", 2, strategy_options=options | dict(no_sync=False))
    found = on_ranks(2, counts, [straight, accumulated, each])[0]
    norm = {"all-reduce": 1}
    assert found == [{"all-to-all": units} | norm, {"reduce-scatter": units} | norm, {"all-to-all": 4 * units} | norm]


def test_fsdp2_gathers_weights_once_a_step_where_they_are_kept() -> None:
    given_back = ONE.on("fsdp2", 2, micro_batch=2)
    kept = given_back.on("fsdp2", 2, strategy_options=dict(reshard_after_forward=False))
    at_once = given_back.on("fsdp2", 2, strategy_options=dict(units="model"))
    twice, once, whole = on_ranks(2, counts, [given_back, kept, at_once], GATHERS)[0]
    print(f"fsdp2 at accumulate 4: {twice} a step, {once} where weights are kept, {whole} as one unit")
    assert once == {"all-gather": UNITS}
    assert whole == {"all-gather": 1}
    # the root is kept until backward in any case; the last block may still be there when backward begins
    assert 4 * (2 * UNITS - 2) <= twice["all-gather"] <= 4 * (2 * UNITS - 1)
