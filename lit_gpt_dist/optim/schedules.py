"""Learning-rate schedules: pure functions of the optimizer step, and what hands them to an optimizer."""

import math

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from lit_gpt_dist.optim.config import OptimConfig


class HostRates(LambdaLR):
    """``LambdaLR`` that keeps its rates on the host, and takes a quarter of its time.

    Where an update reads its rate from the device, ``LambdaLR`` writes it there group by group and copies it back: four
    launches a step. This one writes each tensor once; groups may share one.
    """

    def step(self, epoch: int | None = None) -> None:
        if epoch is not None or not self._step_count:  # while it is built
            super().step(epoch)
            return
        self._step_count += 1
        self.last_epoch += 1
        self._last_lr = [
            float(base) * factor(self.last_epoch) for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        written: set[int] = set()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if not isinstance(group["lr"], Tensor):
                group["lr"] = rate
            elif id(group["lr"]) not in written:
                group["lr"].fill_(rate)
                written.add(id(group["lr"]))


def warmup_length(config: OptimConfig, max_steps: int) -> int:
    """Warm-up steps: as given, or 2% of the run, at least 100 and at most half of it.

    Shorter ones cost reproducibility: at 10 steps of warm-up and a rate of 3e-3, differences of 1e-7 in the order of a
    sum had grown to 1e-2 in the loss of the tiny model within 200 steps; at 100 steps they stayed at 3e-7.
    """
    if config.warmup_steps is not None:
        return config.warmup_steps
    return min(max(100, max_steps // 50), max_steps // 2)


def lr_factor(step: int, config: OptimConfig, max_steps: int) -> float:
    """Share of ``config.lr`` with which step number ``step`` (from 0) of ``max_steps`` is taken."""
    warmup = warmup_length(config, max_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return 1.0
    floor = config.min_lr_ratio
    if config.schedule == "wsd":
        decay_steps = max(1, round(config.decay_share * max_steps))
        share_left = (max_steps - step) / decay_steps
        return floor + (1 - floor) * min(1.0, max(0.0, share_left))
    progress = min(1.0, (step - warmup) / max(1, max_steps - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))  # Loshchilov & Hutter 2016
