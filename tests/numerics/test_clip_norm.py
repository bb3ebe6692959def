"""The gradient norm is that of the whole model under every strategy, and clipping keeps it under the limit."""

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.ranks import on_ranks
from helpers.training import Run, build, full, full_parameters

from lit_gpt_dist.parallel.clip import CPU_PIECE, global_norm

LIMIT = 0.25
ONE = Run(steps=4, precision="64-true", clip=LIMIT, optim=dict(lr=1e-3, warmup_steps=0))


class Norms(pl.Callback):
    """Norm of every step before clipping, as the module measured it, and after it, from the gradients as they are."""

    def __init__(self) -> None:
        self.before: list[float] = []
        self.after: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.before.append(float(module.gradient_norm))
        squares = [full(parameter.grad).square().sum() for parameter in module.model.parameters()]
        self.after.append(float(torch.stack(squares).sum().sqrt()))


def norms(run: Run) -> tuple[list[float], list[float]]:
    seen = Norms()
    trainer, module, data = build(run, seen)
    trainer.fit(module, datamodule=data)
    return seen.before, seen.after


def norms_of(runs: list[Run]) -> list[tuple[list[float], list[float]]]:
    return [norms(run) for run in runs]


def test_clipping_norm_is_equal_under_single_ddp_and_fsdp2_and_stays_below_the_limit() -> None:
    before, after = norms(ONE)
    assert min(before) > LIMIT, "there is something to clip"
    assert after == pytest.approx([LIMIT] * ONE.steps, rel=1e-5)  # torch divides by norm + 1e-6
    for of_rank in on_ranks(2, norms_of, [ONE.on("ddp", 2), ONE.on("fsdp2", 2)]):
        for got_before, got_after in of_rank:
            assert got_before == pytest.approx(before, rel=1e-12)
            assert got_after == pytest.approx(after, rel=1e-12)


def test_a_fused_update_clips_on_its_way_and_moves_the_weights_as_far() -> None:
    """In fp32: the scale that fused optimizers take is one number of it. Gradients are compared after the update."""
    run = Run(steps=4, clip=LIMIT, optim=dict(lr=1e-3, warmup_steps=0))
    before, after = norms(run)
    assert min(before) > LIMIT
    assert after == pytest.approx([LIMIT] * run.steps, rel=1e-5)
    fused, in_place = weights(run), weights(Run(**{**vars(run), "optim": dict(run.optim, fused=False)}))
    start = weights(Run(**{**vars(run), "steps": 0}))
    for name in fused:
        moved = (in_place[name] - start[name]).norm()
        assert (fused[name] - in_place[name]).norm() <= 1e-5 * moved, name
    for of_rank in on_ranks(2, norms_of, [run.on("ddp", 2), run.on("fsdp2", 2)]):
        for got_before, got_after in of_rank:
            assert got_before == pytest.approx(before, rel=1e-5)
            assert got_after == pytest.approx(after, rel=1e-5)


def weights(run: Run) -> dict[str, torch.Tensor]:
    trainer, module, data = build(run)
    trainer.fit(module, datamodule=data)
    assert not any(hasattr(optimizer, "grad_scale") for optimizer in trainer.optimizers), "later updates are the user's"
    return full_parameters(module)


def test_without_a_limit_the_norm_is_measured_and_nothing_clipped() -> None:
    before, after = norms(Run(steps=2, precision="64-true", clip=None))
    assert after == pytest.approx(before, rel=1e-12)


@pytest.mark.parametrize(("size", "finite"), [(1e18, True), (1e25, False), (3e38, False)])
def test_a_norm_whose_square_leaves_the_range_of_the_gradients_is_infinite(size: float, finite: bool) -> None:
    """It is summed in fp64, which has room; AdamW's second moments have none, and would stay infinite."""
    norm = global_norm([torch.ones(3), torch.tensor([size])])
    assert bool(torch.isfinite(norm)) == finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_of_large_gradients_on_a_cpu_is_a_sum_in_fp64(dtype: torch.dtype) -> None:
    """Taken piece by piece; also of one that does not lie in one row, and beside small ones."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(700, 400), (3 * CPU_PIECE,), (17,)]
    gradients = [torch.randn(shape, generator=generator).to(dtype) * 10.0**n for n, shape in enumerate(shapes)]
    gradients[0] = gradients[0].t()
    exact = math.sqrt(math.fsum(float(x) ** 2 for gradient in gradients for x in gradient.flatten().tolist()))
    assert float(global_norm(gradients)) == pytest.approx(exact, rel=1e-13)
