"""What every contender has to do: one model, one stream of windows, one schedule. Knows nothing of how it is done."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_gpt_dist.data.loaders import torch_tokens
from lit_gpt_dist.data.stream import TokenStream
from lit_gpt_dist.data.windows import random_starts, rank_starts
from lit_gpt_dist.model.config import GPTConfig
from lit_gpt_dist.optim.config import LEARNING_RATES, OptimConfig
from lit_gpt_dist.optim.schedules import lr_factor

DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True)
class Job:
    """One training.

    Args:
        config: shape of the model.
        tokens: the part of the corpus to train on.
        micro: windows a device forwards at once.
        accumulate: micro-batches of one rank in a step.
        precision: in Lightning's words.
        lr: peak learning rate.
        max_steps: length of the schedule, in optimizer steps.
        clip: the gradient norm is limited to this.
        seed: of windows and initial weights.
        optim: AdamW's other settings, and the schedule's.
    """

    config: GPTConfig
    tokens: TokenStream
    micro: int
    accumulate: int
    precision: str
    lr: float
    max_steps: int
    clip: float = 1.0
    seed: int = 1337
    optim: OptimConfig = field(default_factory=OptimConfig)

    @property
    def tokens_per_step(self) -> int:
        """Of one device."""
        return self.micro * self.accumulate * self.config.context

    def lr_at(self, step: int) -> float:
        return self.lr * lr_factor(step, self.optim, self.max_steps)

    def autocast(self, device: torch.device) -> AbstractContextManager:
        dtype = DTYPES.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


class Batches:
    """The windows of a step, gathered on the device from all of the job's tokens, which lie there."""

    def __init__(self, job: Job, device: torch.device, rank: int = 0, ranks: int = 1) -> None:
        self.job, self.device, self.rank, self.ranks = job, device, rank, ranks
        self.tokens = torch_tokens(job.tokens.to_numpy()).to(device)
        self.within = torch.arange(job.config.context + 1, device=device)

    def windows(self, step: int) -> Tensor:
        """(accumulate, micro, context + 1) int64, the same that the data module gives the Trainer."""
        job = self.job
        count = job.micro * job.accumulate * self.ranks
        starts = random_starts(job.seed, step, count, len(job.tokens) - job.config.context)
        mine = torch.from_numpy(np.ascontiguousarray(rank_starts(starts, job.micro, self.rank, self.ranks)))
        if self.device.type == "cuda":
            mine = mine.pin_memory()  # copying pageable memory waits for the device
        first = mine.to(self.device, non_blocking=True)
        return self.tokens[first.unsqueeze(-1) + self.within].long()


def job_of(trainer: Any, module: Any) -> Job:
    """The work of a Trainer that is set up, on one device."""
    data = trainer.datamodule
    train, _ = data.corpus.split(data.val_fraction, data.context)
    return Job(
        config=module.config,
        tokens=train,
        micro=data.plan.micro_batch,
        accumulate=data.plan.accumulate,
        precision=str(trainer.precision),
        lr=module.optim.lr or LEARNING_RATES[module.size],
        max_steps=module.optim.schedule_steps or trainer.max_steps,
        clip=trainer.gradient_clip_val,
        seed=module.seed,
        optim=module.optim,
    )
