"""A reading that is finished some steps after it was begun, as on a GPU, says the same; and a bad step found that late did no
harm. No GPU needed: the lag is given."""

from typing import Any

import pytest
import torch
from helpers.ranks import on_ranks
from helpers.training import Run, build, full_parameters
from lightning.pytorch.loggers import Logger

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


def stopped(run: Run, lag: int, bad_step: int) -> tuple[int, int, dict[str, torch.Tensor]]:
    """The step named as bad, the step at which the run stopped, and the weights it ended with."""
    trainer, module, data = build(run, StepRecorder(lag=lag), BadStepGuard("stop"))
    micro_loss = module._micro_loss

    def poisoned(windows: torch.Tensor, index: int) -> torch.Tensor:
        bad = trainer.global_step + 1 == bad_step and trainer.global_rank == trainer.world_size - 1
        return micro_loss(windows, index) * (float("nan") if bad else 1.0)

    module._micro_loss = poisoned  # type: ignore[method-assign]
    try:
        trainer.fit(module, datamodule=data)
    except Diverged as found:
        return found.step, trainer.global_step, full_parameters(module)
    raise AssertionError("the bad step was not found")


def weights_after(run: Run) -> dict[str, torch.Tensor]:
    trainer, module, data = build(run)
    trainer.fit(module, datamodule=data)
    return full_parameters(module)


def test_a_bad_step_found_late_on_two_ranks_is_named_rightly_and_has_left_the_weights_alone() -> None:
    run = ONE.on("ddp", 2)
    expected = on_ranks(2, weights_after, Run(**{**vars(run), "steps": 5}))[0]
    for step, at, weights in on_ranks(2, stopped, run, 3, 6):
        assert (step, at) == (6, 11), "the reading of step 8 tells, three steps later"
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
