"""Everything counts optimizer steps: learning rate, logging, validation, checkpoints; straight, accumulated or resumed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from helpers.ranks import on_ranks
from helpers.training import Run, build, curves, losses, worst
from lightning.pytorch.loggers.logger import Logger

from lit_gpt_dist.callbacks.checkpoint import CheckpointCallback
from lit_gpt_dist.callbacks.recorder import StepRecorder
from lit_gpt_dist.generate import generate_tokens
from lit_gpt_dist.optim.config import OptimConfig
from lit_gpt_dist.optim.schedules import lr_factor

STEPS = 12
ONE = Run(steps=STEPS, global_batch=16, micro_batch=4, optim=dict(lr=1e-3, warmup_steps=4, schedule_steps=STEPS))


class Rates(pl.Callback):
    """The learning rate that each update was made with, and whatever else a test wants to happen."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


class Notes(Logger):
    """A logger that remembers which values came at which step."""

    name, version = "notes", 0

    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {}
        self.values: dict[str, list[float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            self.steps.setdefault(name, []).append(step or 0)
            self.values.setdefault(name, []).append(value)

    def log_hyperparams(self, *arguments: Any, **keywords: Any) -> None:
        pass


def rates(run: Run, folder: Path, resume: str | None = None) -> tuple[list[float], list[float], list[float]]:
    """Per step: the rate used, the rate logged, and the loss."""
    used, recorder, notes = Rates(), StepRecorder(), Notes()
    trainer, module, data = build(
        replace(run, trainer=dict(logger=notes)), used, recorder, CheckpointCallback(), folder=folder
    )
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    return used.rates, notes.values["train/lr"], recorder.losses


def test_learning_rate_follows_the_step_at_accumulate_1_and_4_straight_and_resumed(tmp_path: Path) -> None:
    expected = [1e-3 * lr_factor(step, OptimConfig(warmup_steps=4), STEPS) for step in range(STEPS)]
    straight, logged, curve = rates(replace(ONE, micro_batch=16), tmp_path / "straight")
    assert straight == pytest.approx(expected, rel=1e-12)
    assert logged == straight, "what is logged is what was used"
    accumulated, logged, _ = rates(ONE, tmp_path / "accumulated")
    assert accumulated == logged == straight

    first, _, begun = rates(replace(ONE, steps=5), tmp_path / "resumed")
    rest, logged, continued = rates(
        ONE, tmp_path / "resumed", resume=str(tmp_path / "resumed" / "checkpoints" / "last")
    )
    assert first + rest == straight
    assert logged == rest
    assert worst(begun + continued, curve) <= 1e-6


def test_validation_logging_and_checkpoints_count_optimizer_steps_at_accumulate_4(tmp_path: Path) -> None:
    notes = Notes()
    run = replace(ONE, val_every=4, trainer=dict(logger=notes, log_every_n_steps=3))
    saver = CheckpointCallback(every_n_steps=5, keep_last=9)
    trainer, module, data = build(run, StepRecorder(), saver, folder=tmp_path)
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == STEPS
    assert notes.steps["val/loss"] == [4, 8, 12]
    assert notes.steps["train/loss"] == [3, 6, 9, 12]
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert [int(name.split("-")[1]) for name in saved] == [5, 10, 12]


class Samples(pl.Callback):
    """Generates on all ranks in the middle of a run."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if trainer.global_step == 3:
            prompt = batch[0, 0, :4]
            self.texts.append(list(generate_tokens(module.model, prompt, 5, temperature=0)))


def with_samples(run: Run) -> tuple[list[float], list[list[int]], float]:
    recorder, samples = StepRecorder(), Samples()
    trainer, module, data = build(run, recorder, samples)
    trainer.fit(module, datamodule=data)
    return recorder.losses, samples.texts, float(trainer.callback_metrics["val/loss"])


def test_validating_and_sampling_in_the_middle_of_a_recomputed_fsdp2_run_changes_nothing() -> None:
    run = replace(ONE, steps=6, val_every=2, precision="64-true", model=ONE.model | dict(dropout=0.1))
    reference = losses(replace(run, val_every=None))
    alone, _, validation = with_samples(run)
    assert worst(alone, reference) <= 1e-12, "on one device either"
    for curve, texts, loss in on_ranks(2, with_samples, run.on("fsdp2", 2, recompute="full")):
        assert worst(curve, reference) <= 1e-12
        assert len(texts[0]) == 5
        assert loss == pytest.approx(validation, abs=1e-6), "the mean over windows is kept in fp32"


def resumed(run: Run, folder: str) -> list[float]:
    recorder = StepRecorder()
    trainer, module, data = build(run, recorder, CheckpointCallback(), folder=folder)
    trainer.fit(module, datamodule=data, ckpt_path=f"{folder}/checkpoints/last")
    return recorder.losses


def test_a_run_goes_on_under_another_strategy_and_number_of_ranks_on_the_same_curve(tmp_path: Path) -> None:
    long = replace(ONE, precision="64-true")
    reference = curves([long])[long.name]
    rates(replace(long, steps=4), tmp_path)  # one process, 4 steps
    second = on_ranks(2, resumed, long.on("fsdp2", 2, steps=8), str(tmp_path))[0]
    third = on_ranks(4, resumed, long.on("ddp", 4), str(tmp_path))[0]
    assert worst(second, reference[4:8]) <= 1e-12
    assert worst(third, reference[8:]) <= 1e-12


def test_overfitting_two_steps_brings_their_loss_to_nearly_nothing_and_is_resumed_exactly(tmp_path: Path) -> None:
    optim = dict(lr=1e-2, warmup_steps=4, schedule_steps=240)
    run = replace(ONE, steps=240, global_batch=4, optim=optim, trainer=dict(overfit_batches=2))
    straight = losses(run)
    assert max(straight[-2:]) < 0.3, "3.0 where each step has windows of its own"
    trainer, module, data = build(replace(run, steps=7), CheckpointCallback(), folder=tmp_path)
    trainer.fit(module, datamodule=data)
    assert resumed(replace(run, steps=12), str(tmp_path)) == straight[7:12]
