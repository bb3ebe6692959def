"""A reading that is finished some steps after it was begun, as on a GPU, says the same; and a bad step found that late did no
harm. No GPU needed: the lag is given."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import on_ranks
from helpers.training import Run, build, full_parameters
from lightning.pytorch.loggers import Logger

from lit_gpt_dist.callbacks.checkpoint import CheckpointCallback
from lit_gpt_dist.callbacks.guard import BadStepGuard, Diverged
from lit_gpt_dist.callbacks.memory import MemoryPart
from lit_gpt_dist.callbacks.recorder import StepRecorder

ONE = Run(steps=12, trainer=dict(log_every_n_steps=4), optim=dict(schedule_steps=12))
SAME_AT_ANY_LAG = ("train/loss", "train/lr", "train/tokens", "health/grad_norm")


class Notes(Logger):
    name, version = "notes", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}
        self.logged_at: list[tuple[int, int]] = []  # (step of the reading, step it was logged at)
        self.trainer: Any = None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.setdefault(step or 0, {}).update(metrics)
        if "train/loss" in metrics:
            self.logged_at.append((step or 0, self.trainer.global_step))

    def log_hyperparams(self, *arguments: Any, **keywords: Any) -> None:
        pass


def noted(run: Run, lag: int) -> tuple[dict[int, dict[str, float]], list[tuple[int, int]], list[float]]:
    notes, recorder = Notes(), StepRecorder(parts=[MemoryPart()], lag=lag)
    run = Run(**{**vars(run), "trainer": run.trainer | dict(logger=notes)})
    trainer, module, data = build(run, recorder, BadStepGuard())
    notes.trainer = trainer
    trainer.fit(module, datamodule=data)
    return notes.rows, notes.logged_at, recorder.losses


@pytest.mark.parametrize("val_every", [None, 6])
def test_a_late_reading_logs_the_same_numbers_for_the_same_steps(val_every: int | None) -> None:
    run = ONE.on("single", 1, val_every=val_every)
    at_once, steps, losses = noted(run, 0)
    late, late_steps, late_losses = noted(run, 3)
    assert steps == [(4, 4), (8, 8), (12, 12)]
    assert late_steps == [(4, 6 if val_every else 7), (8, 11), (12, 12)], (
        "validation waits for what was begun before it"
    )
    assert late_losses == losses
    for step in (4, 8, 12):
        assert {name: late[step][name] for name in SAME_AT_ANY_LAG} == {
            name: at_once[step][name] for name in SAME_AT_ANY_LAG
        }


@dataclass
class Ended:
    named: list[int]  # the steps found bad
    at: int  # the step that the run ended with
    weights: dict[str, torch.Tensor]


def with_a_bad_step(run: Run, policy: str, bad_step: int, folder: str, lag: int = 3) -> Ended:
    """NaN on the last rank alone, once."""
    guard = BadStepGuard(policy)  # type: ignore[arg-type]
    trainer, module, data = build(run, StepRecorder(lag=lag), guard, CheckpointCallback(every_n_steps=5), folder=folder)
    micro_loss, planted = module._micro_loss, []

    def poisoned(windows: torch.Tensor, index: int) -> torch.Tensor:
        bad = trainer.global_step + 1 == bad_step and trainer.global_rank == trainer.world_size - 1 and not planted
        planted.extend([True] if bad else [])
        return micro_loss(windows, index) * (float("nan") if bad else 1.0)

    module._micro_loss = poisoned  # type: ignore[method-assign]
    named: list[int] = []
    try:
        trainer.fit(module, datamodule=data)
    except Diverged as found:
        named = [found.step]
    named += guard.skipped_steps + [step for step, _ in guard.rollbacks]
    return Ended(named, trainer.global_step, full_parameters(module))


def with_every_policy(run: Run, folder: str) -> dict[str, Ended]:
    return {policy: with_a_bad_step(run, policy, 7, f"{folder}/{policy}") for policy in ("stop", "skip", "rollback")}


def weights_after(run: Run) -> dict[str, torch.Tensor]:
    trainer, module, data = build(run)
    trainer.fit(module, datamodule=data)
    return full_parameters(module)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_bad_step_found_late_on_two_ranks_is_named_rightly_and_leaves_equal_weights(
    tmp_path: Path, strategy: str
) -> None:
    run = ONE.on(strategy, 2)
    expected = on_ranks(2, weights_after, Run(**{**vars(run), "steps": 6}))[0]
    ranks = on_ranks(2, with_every_policy, run, str(tmp_path))
    for ended in ranks:
        # a save is due at step 10: nothing is saved behind a bad step, so it is looked for before the reading of step 8 is done
        assert (ended["stop"].named, ended["stop"].at) == ([7], 10)
        assert all(torch.equal(ended["stop"].weights[name], expected[name]) for name in expected), "those of step 6"
        assert (ended["skip"].named, ended["skip"].at) == ([7], 12)
        assert (ended["rollback"].named, ended["rollback"].at) == ([7], 12)
    for policy, of_first in ranks[0].items():
        for name, weights in of_first.weights.items():
            assert torch.isfinite(weights).all(), (policy, name)
            assert torch.equal(weights, ranks[1][policy].weights[name]), (policy, name)


def test_a_reading_tells_of_a_bad_step_some_steps_later(tmp_path: Path) -> None:
    run = ONE.on("single", 1, steps=20, optim=dict(schedule_steps=20), trainer=dict(log_every_n_steps=8))
    ended = with_a_bad_step(run, "stop", 6, str(tmp_path / "run"), lag=1)
    assert (ended.named, ended.at) == ([6], 9), "read at step 8, told one later; a save would have been at 10"


@pytest.mark.parametrize("lag", [0, 3])
def test_a_second_bad_step_before_the_first_one_is_found_too(tmp_path: Path, lag: int) -> None:
    """After going back, steps have numbers that a reading has covered already."""
    run = ONE.on("single", 1, steps=30, optim=dict(schedule_steps=30), trainer=dict(log_every_n_steps=5))
    guard = BadStepGuard("rollback")
    saver = CheckpointCallback(every_n_steps=10)
    trainer, module, data = build(run, StepRecorder(lag=lag), guard, saver, folder=tmp_path)
    micro_loss, taken = module._micro_loss, []

    def poisoned(windows: torch.Tensor, index: int) -> torch.Tensor:
        taken.extend([trainer.global_step + 1] if index == 0 else [])
        # step 17 when it is taken first, and step 13 when it is taken again
        bad = trainer.global_step + 1 in (17, 13) and taken.count(13) == (1 if trainer.global_step + 1 == 17 else 2)
        return micro_loss(windows, index) * (float("nan") if bad else 1.0)

    module._micro_loss = poisoned  # type: ignore[method-assign]
    trainer.fit(module, datamodule=data)
    assert guard.rollbacks == [(17, 10), (13, 10)]
    assert trainer.global_step == 30
    assert all(torch.isfinite(weights).all() for weights in full_parameters(module).values())
