"""The update of sharded parameters: each rank computes with its own part, and never with the whole."""

import torch
from helpers.ranks import on_ranks
from helpers.training import Run, build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from lit_gpt_dist.optim.groups import LocalAdamW
from lit_gpt_dist.parallel.fsdp2 import gathers_at_once

GIB = 2**30
WHOLE = (64, 16)
RATE = 1e-2


class Sizes(TorchDispatchMode):
    """Numbers of elements that fused updates were given, whoever called them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "fused_adamw" in str(func):
            self.seen |= {tensor.numel() for tensor in args[0]}
        return func(*args, **(kwargs or {}))


def values(step: int) -> torch.Tensor:
    return torch.randn(WHOLE, generator=torch.Generator().manual_seed(step))


def updated() -> tuple[torch.Tensor, set[int], bool]:
    """Weights after two steps with the rate in a tensor, as recorded steps have it."""
    mesh = init_device_mesh("cpu", (2,))
    weight = torch.nn.Parameter(distribute_tensor(values(0), mesh, [Shard(0)]))
    optimizer = LocalAdamW([weight], lr=torch.tensor(RATE), fused=True)
    with Sizes() as sizes:
        for step in (1, 2):
            weight.grad = distribute_tensor(values(step), mesh, [Shard(0)])
            optimizer.step()
    sharded = isinstance(optimizer.state[weight]["exp_avg"], DTensor)
    return weight.detach().full_tensor(), sizes.seen, sharded


def test_what_is_gathered_at_once_is_small_and_gathered_over_nvlink() -> None:
    assert gathers_at_once(GIB, nvlink=True, memory_bytes=32 * GIB)
    assert not gathers_at_once(GIB + 1, nvlink=True, memory_bytes=32 * GIB)
    assert not gathers_at_once(1, nvlink=False, memory_bytes=32 * GIB)


def units_of(run: Run) -> str:
    trainer, module, data = build(run)
    trainer.fit(module, datamodule=data)
    return trainer.strategy.units  # type: ignore[attr-defined]


def test_left_open_what_is_gathered_is_decided_when_the_model_is_built() -> None:
    assert on_ranks(2, units_of, Run(steps=1).on("fsdp2", 2)) == ["blocks", "blocks"], "a CPU has no NVLink"


def test_an_update_of_sharded_parameters_is_given_this_ranks_part_only() -> None:
    weight = torch.nn.Parameter(values(0))
    optimizer = AdamW([weight], lr=RATE, fused=True)
    for step in (1, 2):
        weight.grad = values(step)
        optimizer.step()
    for found, sizes, sharded in on_ranks(2, updated):
        assert torch.equal(found, weight.detach())
        assert sizes == {weight.numel() // 2}
        assert sharded, "checkpoints save the moments as parts of the whole"
