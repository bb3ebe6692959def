"""The yardstick: the usual PyTorch loop on the same model and the same windows, eager or compiled. No Lightning.

It logs nothing, validates nothing and saves nothing.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.job import Batches, Job
from lit_gpt_dist.model.gpt import GPT
from lit_gpt_dist.model.init import initialize
from lit_gpt_dist.optim.groups import make_adamw


class PlainLoop:
    """Forward, backward, clipping, AdamW (fused), step after step.

    Args:
        compiled: the whole model through ``torch.compile``.
        weights: to start from; by default those of the job's seed.

    Attributes:
        loss: of the last step, on the device.
    """

    def __init__(
        self, job: Job, device: torch.device, compiled: bool = False, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        self.job, self.device, self.step = job, device, 0
        self.batches = Batches(job, device)
        with device:
            self.model = GPT(job.config)
        if weights is None:
            initialize(self.model, job.seed)
        else:
            self.model.load_state_dict(weights)
        self.forward = torch.compile(self.model, dynamic=False) if compiled else self.model
        self.optimizer = make_adamw(self.model, job.lr, job.optim, job.optim.fused, device)
        self.loss = torch.zeros((), device=device)

    def run(self, steps: int) -> None:
        """Does not wait for the device."""
        for _ in range(steps):
            self._one_step()

    def _one_step(self) -> None:
        windows = self.batches.windows(self.step)  # (accumulate, micro, context + 1)
        self.loss = torch.zeros((), device=self.device)
        for micro in windows:
            with self.job.autocast(self.device):
                loss = self.forward(micro[:, :-1], micro[:, 1:]) / len(windows)
            loss.backward()
            self.loss += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.job.lr_at(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()  # here: between its rounds a contender holds no gradients
        self.step += 1
