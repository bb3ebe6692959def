"""After one step every parameter has the gradient that one process computes, on any layout."""

from dataclasses import replace

import pytest
from helpers.ranks import on_ranks
from helpers.training import Run, gradients_after_one_step
from torch import Tensor

ONE = Run(global_batch=16, micro_batch=16, precision="64-true")  # one micro-batch: nothing is accumulated
RELATIVE = 1e-12  # fp64 has 2e-16; sums over a thousand tokens in another order lose three digits


def several(runs: list[Run]) -> dict[str, dict[str, Tensor]]:
    return {run.name: gradients_after_one_step(run) for run in runs}


def assert_equal(gradients: dict[str, Tensor], reference: dict[str, Tensor], name: str) -> None:
    assert gradients.keys() == reference.keys()
    worst = {key: float((gradients[key] - g).norm() / g.norm()) for key, g in reference.items()}
    parameter = max(worst, key=lambda key: worst[key])
    print(f"{name}: worst relative difference {worst[parameter]:.1e} ({parameter}) of {len(worst)} parameters")
    assert worst[parameter] <= RELATIVE


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_of_every_parameter_equal_one_process_under_every_strategy(ranks: int) -> None:
    reference = gradients_after_one_step(ONE)
    micros = (16 // ranks, 2)  # without and with accumulation
    runs = [ONE.on(strategy, ranks, micro_batch=micro) for strategy in ("ddp", "fsdp2") for micro in micros]
    runs.append(runs[-1].on("fsdp2", ranks, recompute="full"))
    runs.append(ONE.on("hsdp", ranks, micro_batch=2, strategy_options=dict(shard_ranks=2)))
    for name, of_run in on_ranks(ranks, several, runs)[-1].items():
        assert_equal(of_run, reference, name)


def test_four_accumulated_micro_batches_have_the_gradient_of_one_large_batch() -> None:
    reference = gradients_after_one_step(ONE)
    assert len(reference) == 15, "embedding, positions, two blocks of six, final norm; the tied head is the embedding"
    assert_equal(gradients_after_one_step(replace(ONE, micro_batch=4)), reference, "accumulate 4")
