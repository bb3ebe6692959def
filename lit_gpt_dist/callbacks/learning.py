"""How far an update moves the weights: ‖update‖ / ‖weights‖, at some readings. Communicates nothing of its own.

The update is recomputed from AdamW's moments, so no copy of the weights is kept: for the step t just taken with rate η and
decay λ, w ← w − η·(d + λ·w) where d = m̂/(√v̂ + ε), m̂ = m/(1−β₁ᵗ), v̂ = v/(1−β₂ᵗ) (Loshchilov and Hutter 2019, algorithm 2). In terms
of the weights after it, the update is η/(1−η·λ) · (d + λ·w). A ratio near 1e-3 is usual in the middle of training.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW

from lit_gpt_dist.callbacks.notices import Once
from lit_gpt_dist.callbacks.reading import rates_of_last_step

STEPS_BETWEEN = 200  # at least: one reads weights and moments several times, a fifth of a small model's step
CHUNK_BYTES = 64 << 20  # of weights: two temporary copies of so much are made at a time


class LearningPart:
    """Takes part in readings with two sums of squares a parameter group: of this rank's updates and of its weights."""

    def __init__(self) -> None:
        self._once = Once()
        self._measured_at: int | None = None
        self._factors: list[float] = []  # of each group: what its updates are multiplied by, at the last measurement

    def measure(self, trainer: pl.Trainer, module: Any) -> Sequence[float | Tensor]:
        optimizer: Any = trainer.optimizers[0]
        if not isinstance(optimizer, AdamW):
            self._once.tell(trainer, f"no update ratio: it is known for AdamW, not {type(optimizer).__name__}")
            return [0.0, 0.0]
        step = trainer.global_step
        if self._measured_at is not None and 0 < step - self._measured_at < STEPS_BETWEEN:
            return [0.0, 0.0] * len(optimizer.param_groups)
        self._measured_at = step
        rates = rates_of_last_step(trainer)
        self._factors = [
            rate / (1 - rate * group["weight_decay"]) for group, rate in zip(optimizer.param_groups, rates, strict=True)
        ]
        return list(sums_of_squares(optimizer, trainer.world_size).flatten().unbind())

    def rehearse(self, trainer: pl.Trainer, module: Any) -> None:
        if isinstance(trainer.optimizers[0], AdamW):
            sums_of_squares(trainer.optimizers[0], trainer.world_size)

    def report(self, trainer: pl.Trainer, module: Any, rows: list[list[float]]) -> dict[str, float]:
        sums = [sum(column) for column in zip(*rows, strict=True)]
        update = sum(factor**2 * moved for factor, moved in zip(self._factors, sums[::2], strict=False))
        weight = sum(sums[1::2])
        return {"train/update_ratio": math.sqrt(update / weight)} if weight > 0 and update > 0 else {}


def sums_of_squares(optimizer: Any, ranks: int) -> Tensor:
    """(groups, 2): of this rank's updates, each divided by its factor, and of its weights; what lies on several ranks counts
    once."""
    groups = []
    for group in optimizer.param_groups:
        parts = [
            squares(parameters, optimizer.state, group) / copies
            for copies, parameters in chunks(group["params"], optimizer.state, ranks)
        ]
        groups.append(torch.stack(parts).sum(0) if parts else torch.zeros(2, device=group["params"][0].device))
    return torch.stack(groups)


def chunks(parameters: Sequence[Tensor], state: Mapping[Tensor, Any], ranks: int) -> Iterator[tuple[int, list[Tensor]]]:
    """(on how many ranks each part lies, parameters), few enough at a time that temporary copies stay small."""
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if state.get(parameter):
            by_copies.setdefault(ranks // shards(parameter), []).append(parameter)
    for copies, same in by_copies.items():
        chunk: list[Tensor] = []
        held = 0
        for parameter in same:
            chunk.append(parameter)
            held += local(parameter).nbytes
            if held >= CHUNK_BYTES:
                yield copies, chunk
                chunk, held = [], 0
        if chunk:
            yield copies, chunk


@torch.no_grad()
def squares(parameters: list[Tensor], state: Mapping[Tensor, Any], group: dict[str, Any]) -> Tensor:
    """(2,): Σ (d + λ·w)² and Σ w² of this rank's part of ``parameters``, w after the update; a few launches for all of them."""
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    weights = [local(parameter.detach()) for parameter in parameters]
    step = torch.as_tensor(state[parameters[0]]["step"]).to(weights[0].device)  # the same for all: they move together
    correction = (1 - beta2**step).sqrt()
    roots = torch._foreach_sqrt([local(state[parameter]["exp_avg_sq"]) for parameter in parameters])
    torch._foreach_mul_(roots, 1 / correction)
    torch._foreach_add_(roots, group["eps"])  # a number of the host: given a tensor this one would wait for the device
    moved = torch._foreach_div([local(state[parameter]["exp_avg"]) for parameter in parameters], roots)
    torch._foreach_mul_(moved, 1 / (1 - beta1**step))
    if decay:
        torch._foreach_add_(moved, weights, alpha=decay)
    return torch.stack([total_square(moved), total_square(weights)])


def total_square(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(torch._foreach_norm(tuple(tensors)))).square().sum()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shards(tensor: Tensor) -> int:
    """Into how many different parts a tensor is split; 1 where every rank holds all of it."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = [tensor.device_mesh.size(dim) for dim, place in enumerate(tensor.placements) if isinstance(place, Shard)]
    return math.prod(sizes)
