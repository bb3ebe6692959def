"""The optimizer's and the schedule's options (``--optim.*``)."""

from dataclasses import dataclass
from typing import Literal

from lit_gpt_dist.errors import UserError

# Peak learning rates: small models as tried here on characters; from gpt2-124m on, those of GPT-3 (Brown et al. 2020,
# table 2.1) for the nearest size.
LEARNING_RATES = {"tiny": 2e-3, "baby": 1e-3, "gpt2": 6e-4, "big": 2e-4, "gpt2-124m": 6e-4, "4b": 1.6e-4}

FINE_TUNING_RATE = 5e-5  # of weights that come from elsewhere; GPT's own fine-tuning used 6.25e-5 (Radford et al. 2018)


@dataclass
class OptimConfig:
    """AdamW and its learning-rate schedule; all lengths in optimizer steps.

    Args:
        lr: peak learning rate; by default what suits the model's size (``LEARNING_RATES``).
        min_lr_ratio: the schedule ends at this share of ``lr``.
        warmup_steps: steps of linear warm-up from 0; by default 2% of the run, at least 100, at most half of it.
        schedule: cosine; wsd (warm-up, stable, linear decay); or constant after the warm-up.
        schedule_steps: length of the schedule; by default the run's. Give it where a run will be resumed to go further.
        decay_share: share of the run that wsd decays over.
        weight_decay: on matrices only.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        fused: one kernel for all parameters; by default where the device has it.
    """

    lr: float | None = None
    min_lr_ratio: float = 0.1
    warmup_steps: int | None = None
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    schedule_steps: int | None = None
    decay_share: float = 0.2
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    fused: bool | None = None

    def __post_init__(self) -> None:
        if self.lr is not None and not self.lr > 0:
            raise UserError(f"optim.lr {self.lr} must be above 0")
        if self.weight_decay < 0:
            raise UserError(f"optim.weight_decay {self.weight_decay} must be 0 or more")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise UserError(f"optim.warmup_steps {self.warmup_steps} must be 0 or more")
        if self.schedule_steps is not None and self.schedule_steps < 1:
            raise UserError(f"optim.schedule_steps {self.schedule_steps} must be at least 1")
        for name in ("min_lr_ratio", "decay_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"optim.{name} {getattr(self, name)} must lie between 0 and 1")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optim.{name} {getattr(self, name)} must lie in 0 ≤ {name} < 1")
        if self.schedule not in ("cosine", "wsd", "constant"):
            raise UserError(f"optim.schedule {self.schedule!r} is not one of cosine, wsd, constant")
