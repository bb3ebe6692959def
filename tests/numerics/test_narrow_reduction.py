"""Gradients that travel in bf16 and are added up in fp32: the sums of a reduction in fp32, from half the bytes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from helpers.training import Run, build, losses

from lit_gpt_dist.callbacks.recorder import StepRecorder
from lit_gpt_dist.parallel.averaging import mean_of_ranks
from lit_gpt_dist.parallel.fsdp2 import NarrowReduceScatter

COUNT = 1000  # of values on each rank, which each rank ends with a part of


def gradients(rank: int) -> torch.Tensor:
    """bf16 numbers of very different sizes, as gradients are."""
    generator = torch.Generator().manual_seed(rank)
    wide = torch.randn(COUNT, generator=generator) * torch.exp(4 * torch.randn(COUNT, generator=generator))
    return wide.to(torch.bfloat16)


def reduce(comm: Any) -> torch.Tensor:
    """As FSDP2 does: asks for the input, casts into it, asks for the output."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    sent = comm.allocate((COUNT,), dtype=torch.float32, device=device)
    sent.copy_(gradients(rank))
    found = comm.allocate((COUNT // ranks,), dtype=torch.float32, device=device)
    comm(output_tensor=found, input_tensor=sent, group=dist.group.WORLD, op=dist.ReduceOp.AVG)
    assert (sent.dtype, found.dtype) == (torch.bfloat16, torch.float32)
    return found


def twice(_: None) -> list[torch.Tensor]:
    comm = NarrowReduceScatter(torch.bfloat16, mean_of_ranks)
    return [reduce(comm), reduce(comm)]  # the second asks for its input again


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_gets_the_mean_of_its_part_added_up_in_fp32(ranks: int) -> None:
    wide = torch.stack([gradients(rank).float() for rank in range(ranks)])
    expected = wide[0]
    for other in wide[1:]:
        expected = expected + other
    expected = (expected / ranks).chunk(ranks)
    rounded = torch.stack([gradients(rank) for rank in range(ranks)]).sum(dim=0).float() / ranks
    assert not torch.equal(torch.cat(expected), rounded), "sums in bf16 would be others"
    for rank, found in enumerate(on_ranks(ranks, twice, None)):
        for one in found:
            assert torch.equal(one, expected[rank])


def test_the_mean_is_the_same_compiled() -> None:
    parts = torch.stack([gradients(rank) for rank in range(4)])
    plain, compiled = torch.empty(COUNT), torch.empty(COUNT)
    mean_of_ranks(parts, plain)
    torch.compile(mean_of_ranks, dynamic=False)(parts, compiled)
    assert torch.equal(compiled, plain)


def refused(_: None) -> str:
    comm = NarrowReduceScatter(torch.bfloat16, mean_of_ranks)
    tensor = torch.zeros(2, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="sums would be wrong"):
        comm(output_tensor=tensor[:1].float(), input_tensor=tensor, group=dist.group.WORLD, op=dist.ReduceOp.SUM)
    return "refused"


def test_another_reduction_than_the_mean_is_refused() -> None:
    assert on_ranks(2, refused, None) == ["refused", "refused"]


@pytest.mark.parametrize("units", ["blocks", "model"])
def test_a_curve_is_the_same_whether_gradients_travel_in_bf16_or_fp32(units: str) -> None:
    """Two ranks: a sum of two has no order. `ddp` sends them in fp32."""
    one = Run(steps=12, precision="bf16-mixed", micro_batch=8)
    narrow = on_ranks(2, losses, one.on("fsdp2", 2, strategy_options=dict(units=units)))[0]
    wide = on_ranks(2, losses, one.on("ddp", 2))[0]
    assert narrow == wide


def fitted_again(runs: list[Run]) -> list[list[float]]:
    """Losses of one module that each run's Trainer fits in turn."""
    found, module = [], None
    for run in runs:
        recorder = StepRecorder()
        trainer, built, data = build(run, recorder)
        module = module or built
        trainer.fit(module, datamodule=data)
        found.append(recorder.losses)
    return found


def test_a_module_fitted_again_sends_what_was_added_up_in_fp32() -> None:
    straight = Run(steps=3, precision="bf16-mixed", micro_batch=8).on("fsdp2", 2)
    runs = [straight, replace(straight, micro_batch=2)]
    wide = [replace(run, strategy="ddp") for run in runs]
    assert on_ranks(2, fitted_again, runs)[0] == on_ranks(2, fitted_again, wide)[0]
