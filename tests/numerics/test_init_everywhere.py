"""Initial weights depend on the seed alone: not on ranks, strategy, or on being built on the meta device."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.ranks import on_ranks
from helpers.training import Run, build, full_parameters
from torch import Tensor
from torch.distributed.tensor import DTensor

ONE = Run(steps=1)


class AtStart(pl.Callback):
    """Every parameter before the first step: whole, and this rank's part of it."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.whole = full_parameters(module)
        self.part = {
            name: (p.to_local() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in module.model.named_parameters()
        }


def at_start(run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    seen = AtStart()
    trainer, module, data = build(run, seen)
    trainer.fit(module, datamodule=data)
    return seen.whole, seen.part


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_meta_device_init_under_fsdp2_equals_eager_init(ranks: int) -> None:
    eager, _ = at_start(ONE)
    found = on_ranks(ranks, at_start, ONE.on("fsdp2", ranks))
    for whole, _ in found:
        assert whole.keys() == eager.keys()
        assert all(torch.equal(whole[name], value) for name, value in eager.items())
    if ranks > 1:
        first, second = found[0][1]["embedding.weight"], found[1][1]["embedding.weight"]
        assert first.shape[0] < eager["embedding.weight"].shape[0]
        assert not torch.equal(first, second), "two ranks hold the same shard"


def test_ddp_starts_from_the_same_weights_and_another_seed_from_others() -> None:
    eager, _ = at_start(ONE)
    for whole, _ in on_ranks(2, at_start, ONE.on("ddp", 2)):
        assert all(torch.equal(whole[name], value) for name, value in eager.items())
    other, _ = at_start(Run(steps=1, model=ONE.model | dict(seed=7)))
    assert not torch.equal(other["embedding.weight"], eager["embedding.weight"])
