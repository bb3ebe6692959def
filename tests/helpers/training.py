"""Small trainings through this project's Trainer, and what they leave to look at. Runs on a rank of ``on_ranks``, or alone."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_gpt_dist.callbacks.recorder import StepRecorder
from lit_gpt_dist.data.datamodule import GPTDataModule
from lit_gpt_dist.fit import quiet_libraries
from lit_gpt_dist.module import GPTModule
from lit_gpt_dist.optim.config import OptimConfig
from lit_gpt_dist.parallel import STRATEGIES
from lit_gpt_dist.trainer import Trainer

CORPUS = Path(__file__).parents[2] / "LICENSE"


@dataclass(frozen=True)
class Run:
    """One training. ``model``, ``strategy_options`` and ``trainer`` are further arguments of what they name."""

    strategy: str = "single"
    ranks: int = 1
    steps: int = 12
    global_batch: int = 16
    micro_batch: int = 4
    precision: str = "32-true"
    recompute: str = "none"
    clip: float | None = 1.0
    val_every: int | None = None
    model: dict = field(default_factory=lambda: dict(size="tiny", context=32))
    optim: dict = field(default_factory=dict)
    strategy_options: dict = field(default_factory=dict)
    trainer: dict = field(default_factory=dict)
    data: dict = field(default_factory=dict)

    def on(self, strategy: str, ranks: int, **changes: Any) -> "Run":
        return replace(self, strategy=strategy, ranks=ranks, **changes)

    @property
    def name(self) -> str:
        extra = f", recompute {self.recompute}" if self.recompute != "none" else ""
        extra += "".join(f", {option} {value}" for option, value in self.strategy_options.items())
        return f"{self.strategy} {self.ranks}{extra}, micro {self.micro_batch}, {self.precision}"


def build(
    run: Run, *callbacks: pl.Callback, folder: str | Path | None = None
) -> tuple[Trainer, GPTModule, GPTDataModule]:
    quiet_libraries()
    trainer = Trainer(
        accelerator="cpu",
        devices=run.ranks,
        strategy=STRATEGIES[run.strategy](**run.strategy_options),
        precision=run.precision,
        max_steps=run.steps,
        gradient_clip_val=run.clip,
        callbacks=list(callbacks),
        default_root_dir=folder or tempfile.gettempdir(),
        val_check_interval=run.val_every,
        check_val_every_n_epoch=None,
        limit_val_batches=1.0 if run.val_every else 0,
        **dict(
            max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, num_sanity_val_steps=0, log_every_n_steps=1,
        ) | run.trainer,
    )  # fmt: skip
    module = GPTModule(**run.model, recompute=run.recompute, optim=OptimConfig(**run.optim))
    data = GPTDataModule(
        str(CORPUS), tokenizer="byte", global_batch=run.global_batch, micro_batch=run.micro_batch, **run.data
    )
    return trainer, module, data


def losses(run: Run) -> list[float]:
    """Loss of every step, the mean over all ranks."""
    recorder = StepRecorder()
    trainer, module, data = build(run, recorder)
    trainer.fit(module, datamodule=data)
    return recorder.losses


def curves(runs: Sequence[Run]) -> dict[str, list[float]]:
    return {run.name: losses(run) for run in runs}


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be in shards. Collective where it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_parameters(module: GPTModule) -> dict[str, Tensor]:
    assert module.model is not None
    return {name: full(parameter.detach()).clone() for name, parameter in module.model.named_parameters()}


def gradients_after_one_step(run: Run) -> dict[str, Tensor]:
    """Full gradient of every parameter after the first step: averaged over ranks and micro-batches, not clipped."""
    trainer, module, data = build(replace(run, steps=1, clip=None))
    trainer.fit(module, datamodule=data)
    assert module.model is not None
    return {name: full(p.grad.detach()).clone() for name, p in module.model.named_parameters() if p.grad is not None}


@contextmanager
def seen_by(see: Callable[..., None], owner: Any, name: str) -> Iterator[None]:
    """Calls ``see(*arguments, **keywords)`` whenever ``owner.name`` is called with them."""
    original = getattr(owner, name)

    def watched(*arguments: Any, **keywords: Any) -> Any:
        see(*arguments, **keywords)
        return original(*arguments, **keywords)

    setattr(owner, name, watched)
    try:
        yield
    finally:
        setattr(owner, name, original)


def worst(curve: Sequence[float], reference: Sequence[float]) -> float:
    assert len(curve) == len(reference) > 0
    return max(abs(a - b) for a, b in zip(curve, reference, strict=True))
