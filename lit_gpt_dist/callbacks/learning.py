"""How far an update moves the weights: ‖update‖ / ‖weights‖, at some readings. Communicates nothing of its own.

The update is recomputed from AdamW's moments, so no copy of the weights is kept: for the step t just taken with rate η and
decay λ, u = η·m̂/(√v̂ + ε) + η·λ·w, where m̂ = m/(1−β₁ᵗ), v̂ = v/(1−β₂ᵗ) and w are the weights before it (Loshchilov and Hutter
2019, algorithm 2). A ratio near 1e-3 is usual in the middle of training.
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
from lit_gpt_dist.callbacks.recorder import rates_of_last_step

STEPS_BETWEEN = 200  # at least: one reads weights and moments a dozen times, a fifth of a small model's step
CHUNK_BYTES = 64 << 20  # of weights: three temporary copies of so much are made at a time


class LearningPart:
    """Takes part in readings with two sums of squares: of this rank's updates and of its weights."""

    def __init__(self) -> None:
        self._once = Once()
        self._measured_at: int | None = None

    def measure(self, trainer: pl.Trainer, module: Any) -> Sequence[float | Tensor]:
        optimizer: Any = trainer.optimizers[0]
        if not isinstance(optimizer, AdamW):
            self._once.tell(trainer, f"no update ratio: it is known for AdamW, not {type(optimizer).__name__}")
            return [0.0, 0.0]
        step = trainer.global_step
        if self._measured_at is not None and 0 < step - self._measured_at < STEPS_BETWEEN:
            return [0.0, 0.0]
        self._measured_at = step
        return list(sums_of_squares(trainer, module).unbind())

    def rehearse(self, trainer: pl.Trainer, module: Any) -> None:
        if isinstance(trainer.optimizers[0], AdamW):
            sums_of_squares(trainer, module)

    def report(self, trainer: pl.Trainer, module: Any, rows: list[list[float]]) -> dict[str, float]:
        update, weight = (sum(row[index] for row in rows) for index in (0, 1))
        return {"train/update_ratio": math.sqrt(update / weight)} if weight > 0 and update > 0 else {}


def sums_of_squares(trainer: pl.Trainer, module: Any) -> Tensor:
    """(2,): of this rank's updates and of its weights; what lies on several ranks counts once."""
    optimizer: Any = trainer.optimizers[0]
    sums = torch.zeros(2, device=module.device)
    for group, rate in zip(optimizer.param_groups, rates_of_last_step(trainer), strict=True):
        for copies, parameters in chunks(group["params"], optimizer.state, trainer.world_size):
            sums += squares(parameters, optimizer.state, group, rate) / copies
    return sums


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
def squares(parameters: list[Tensor], state: Mapping[Tensor, Any], group: dict[str, Any], rate: float) -> Tensor:
    """(2,): Σ update² and Σ weight² of this rank's part of ``parameters``; a few launches for all of them."""
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    weights = [local(parameter.detach()) for parameter in parameters]
    step = torch.as_tensor(state[parameters[0]]["step"]).to(weights[0].device)  # the same for all: they move together
    correction = (1 - beta2**step).sqrt()
    roots = torch._foreach_sqrt([local(state[parameter]["exp_avg_sq"]) for parameter in parameters])
    torch._foreach_add_(roots, group["eps"] * correction)
    moved = torch._foreach_div([local(state[parameter]["exp_avg"]) for parameter in parameters], roots)
    torch._foreach_mul_(moved, rate * correction / (1 - beta1**step))
    # after = kept · before − moved, so before = (after + moved) / kept, and before − after = (moved + rate·decay·after) / kept
    kept = 1 - rate * decay
    before = total_square(torch._foreach_add(weights, moved))
    if decay:
        torch._foreach_add_(moved, weights, alpha=rate * decay)
    return torch.stack([total_square(moved), before]) / kept**2


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
