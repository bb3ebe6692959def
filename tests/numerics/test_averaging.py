"""Gradients averaged when backward is over: the same means as DDP's, in pieces of any size."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from helpers.training import Run, build, losses

from lit_gpt_dist.callbacks.recorder import StepRecorder
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.module import GPTModule
from lit_gpt_dist.parallel import DDP, averaging

SHAPES = [(30, 7), (5,), (64, 3), (1,), (11, 11)]


def parameters_of(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """With gradients that are bf16 numbers, but for one that rank 0 has none of."""
    generator = torch.Generator().manual_seed(rank)
    found = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in SHAPES]
    for parameter in found if rank else found[:3] + found[4:]:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(torch.bfloat16).to(dtype)
    return found


def averaged(case: tuple[str, int, torch.dtype]) -> list[torch.Tensor]:
    how, piece, dtype = case
    averaging.PIECE_ELEMENTS = piece
    parameters = parameters_of(dist.get_rank(), dtype)
    if how == "exchange":
        averaging.exchange_gradients(parameters, torch.bfloat16, averaging.mean_of_ranks)
    else:
        averaging.average_gradients(parameters)
    return [averaging.gradient_of(parameter) for parameter in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("piece", [1, 200, 10**6])
@pytest.mark.parametrize(("how", "ranks"), [("exchange", 2), ("average", 2), ("average", 4)])
def test_each_rank_ends_with_the_mean_in_the_gradients_own_type(
    how: str, ranks: int, piece: int, dtype: torch.dtype
) -> None:
    everyone = [parameters_of(rank, dtype) for rank in range(ranks)]
    for found in on_ranks(ranks, averaged, (how, piece, dtype)):
        for index, gradient in enumerate(found):
            own = [parameters[index].grad for parameters in everyone]
            mean = torch.stack([torch.zeros_like(gradient) if one is None else one for one in own]).mean(dim=0)
            assert gradient.dtype == dtype
            assert torch.allclose(gradient, mean, rtol=1e-6 if ranks > 2 else 0, atol=1e-7 if ranks > 2 else 0)


class GradientsSeen(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.seen.append(float(sum(p.grad.double().sum() for p in module.parameters())))


def seen(run: Run) -> list[float]:
    callback = GradientsSeen()
    trainer, module, data = build(run, callback)
    trainer.fit(module, datamodule=data)
    return callback.seen


def test_a_callback_sees_averaged_gradients_after_the_last_backward_and_its_rank_s_own_before() -> None:
    run = Run(steps=2, micro_batch=4).on("ddp", 2, strategy_options=dict(overlap=False))  # 2 micro-batches a step
    one, other = on_ranks(2, seen, run)
    assert len(one) == 4
    assert one[0] != other[0]
    assert one[1] == other[1]
    assert one[3] == other[3]


class OwnBackward(GPTModule):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


def own_backward(run: Run) -> list[float]:
    callback = StepRecorder()
    trainer, _, data = build(run, callback)
    trainer.fit(OwnBackward(**run.model), datamodule=data)
    return callback.losses


def test_gradients_are_averaged_for_a_module_that_runs_backward_its_own_way() -> None:
    run = Run(steps=3, micro_batch=4).on("ddp", 2, strategy_options=dict(overlap=False))
    assert on_ranks(2, own_backward, run) == on_ranks(2, losses, run)


def test_what_is_exchanged_follows_the_curve_of_buckets_to_the_last_bit() -> None:
    run = Run(steps=12, precision="bf16-mixed", micro_batch=8)
    buckets = on_ranks(2, losses, run.on("ddp", 2))[0]
    assert on_ranks(2, losses, run.on("ddp", 2, strategy_options=dict(overlap=False)))[0] == buckets


class Penalised(GPTModule):
    """Whose gradients are no bf16 numbers."""

    def training_step(self, windows: torch.Tensor, step: int) -> torch.Tensor:
        return super().training_step(windows, step) + 1e-3 * sum(p.square().sum() for p in self.parameters())


def penalised(runs: list[Run]) -> list[list[float]]:
    found = []
    for run in runs:
        recorder = StepRecorder()
        trainer, _, data = build(run, recorder)
        trainer.fit(Penalised(**run.model), datamodule=data)
        found.append(recorder.losses)
    return found


def test_gradients_that_are_no_bf16_numbers_are_averaged_as_they_are() -> None:
    run = Run(steps=4, precision="bf16-mixed", micro_batch=8).on("ddp", 2)
    buckets, afterwards = on_ranks(2, penalised, [run, run.on("ddp", 2, strategy_options=dict(overlap=False))])[0]
    assert afterwards == buckets


def test_buckets_mean_nothing_without_overlap_and_ask_for_it() -> None:
    with pytest.raises(UserError, match="bucket_cap_mb 50 means nothing with overlap false"):
        DDP(overlap=False, bucket_cap_mb=50).check()
    assert DDP(bucket_cap_mb=50).overlap_option is True
    assert DDP(static_graph=True).overlap_option is True
    assert DDP(static_graph=True, overlap=False).overlap_option is False
