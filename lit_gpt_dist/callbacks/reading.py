"""What a reading holds, who takes part in one, and the names under which it is logged."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import lightning.pytorch as pl
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from lit_gpt_dist.callbacks.exchange import Exchange


@dataclass(frozen=True)
class Reading:
    """What was known at one reading."""

    step: int
    loss: float  # of this step, mean over all ranks, nats
    lr: float
    gradient_norm: float | None
    tokens_per_second: float | None  # all ranks, since the last reading; None while warming up
    step_seconds: float | None
    peak_gib: float | None  # device memory allocated at most since the last reading, this rank; None on a CPU


class Request(NamedTuple):
    """A reading that has begun: what the host knew of its step, and what the device will have answered."""

    trainer: pl.Trainer
    module: Any
    step: int
    tokens: int
    lr: float
    peak_gib: float | None
    lengths: list[int]  # how many numbers each part gave
    answer: Exchange
    pairs: list[tuple[Any, Any]]  # marks of the steps since the last one
    timed: bool


class Part(Protocol):
    """Something that takes part in readings without a collective of its own."""

    def measure(self, trainer: pl.Trainer, module: Any) -> Sequence[float | Tensor]:
        """This rank's numbers since the last reading; on every rank as many. Scalars may stay on the device."""
        ...

    def report(self, trainer: pl.Trainer, module: Any, rows: list[list[float]]) -> dict[str, float]:
        """What to log, from the numbers of all ranks."""
        ...


def split_columns(table: list[list[float]], lengths: Sequence[int]) -> list[list[list[float]]]:
    """One table of all ranks for each part, from one that holds them side by side."""
    ends = list(itertools.accumulate(lengths))
    return [[row[end - length : end] for row in table] for length, end in zip(lengths, ends, strict=True)]


def tokens_per_step(trainer: Any, module: Any) -> int:
    return trainer.datamodule.tokens_per_step


def as_scalars(reading: Reading) -> dict[str, float | None]:
    """TensorBoard's names for a reading."""
    return {
        "train/loss": reading.loss,
        "train/lr": reading.lr,
        "health/grad_norm": reading.gradient_norm,
        "speed/tokens_per_second": reading.tokens_per_second,
        "speed/step_ms": reading.step_seconds and 1000 * reading.step_seconds,
        "memory/peak_gib": reading.peak_gib,
    }


def last_learning_rate(trainer: pl.Trainer) -> float:
    """The rate the step just taken was taken with: the schedule has moved on to the next step's already."""
    return rates_of_last_step(trainer)[0]


def rates_of_last_step(trainer: pl.Trainer) -> list[float]:
    """That of each parameter group. Under another schedule than this project's: the rate as it is now."""
    scheduler: Any = trainer.lr_scheduler_configs[0].scheduler if trainer.lr_scheduler_configs else None
    if isinstance(scheduler, LambdaLR):
        step = trainer.global_step - 1
        return [
            float(rate) * factor(step) for rate, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
    return [float(group["lr"]) for group in trainer.optimizers[0].param_groups]


def log_metrics(trainer: pl.Trainer, values: dict[str, float], step: int) -> None:
    """To every logger (rank 0's write), at the optimizer step, which is what Lightning's own counter lags by one."""
    for logger in trainer.loggers:
        logger.log_metrics(values, step=step)
