"""The way a recorded step takes through the Trainer, without a GPU: a stand-in for the CUDA graph calls what it was given.

What only a GPU can show (that the recording itself computes the same) is measured: docs/performance.md.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from helpers.ranks import on_ranks
from helpers.training import Run, build, full_parameters
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_gpt_dist import module as module_file
from lit_gpt_dist import recorded as recorded_file
from lit_gpt_dist.callbacks.checkpoint import CheckpointCallback
from lit_gpt_dist.callbacks.recorder import StepRecorder
from lit_gpt_dist.parallel import replicated
from lit_gpt_dist.parallel.graph import why_not

ONE = Run(steps=24, val_every=8, model=dict(size="tiny", context=32, dropout=0.0))


class CalledAgain:
    """``StepGraph``, but each replay calls the step."""

    def __init__(self, step: Any, windows: Tensor) -> None:
        self.step = step

    def replay(self, windows: Tensor) -> None:
        loss, norm = self.step(windows)
        self.results = torch.stack([loss.double(), norm.double()])


class FindsWeights(CalledAgain):
    """Notes whether weights are gathered when the recording begins: it would hold no gather of them then."""

    gathered: ClassVar[list[bool]] = []

    def __init__(self, step: Any, windows: Tensor) -> None:
        self.gathered.append(not all(isinstance(weight, DTensor) for weight in step.__self__.parameters()))
        super().__init__(step, windows)


def gathered_when_recorded(run: Run, folder: str) -> list[bool]:
    trained(run, True, folder, graph=FindsWeights)
    return FindsWeights.gathered


@dataclass
class Seen:
    """How often what is called, and with which step."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    validations: list[int] = field(default_factory=list)
    part_by_part: int = 0
    timed: int = 0  # steps that the speed is computed from


class Hooks(pl.Callback):
    def __init__(self, wants_parts: bool = True) -> None:
        self.wants_parts = wants_parts
        self.seen = Seen()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.seen.starts.append(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        assert torch.isfinite(outputs["loss"])
        self.seen.ends.append(trainer.global_step)

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen.part_by_part += 1

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.seen.validations.append(trainer.global_step)


def trained(
    run: Run,
    recorded: bool,
    folder: str,
    resume: str | None = None,
    wants_parts: bool = True,
    graph: type = CalledAgain,
) -> tuple[list[float], dict[str, Tensor], Seen, float]:
    """Losses, weights, what the hooks saw, and the last validation loss."""
    with pytest.MonkeyPatch.context() as patch:
        if recorded:
            patch.setattr(recorded_file, "StepGraph", graph)
            patch.setattr(module_file, "decide_graph", lambda *_: True)
            patch.setattr(recorded_file, "make_capturable", lambda *_: None)
            for file in (recorded_file, replicated):
                patch.setattr(file, "on_side_stream", lambda *_: nullcontext())
        recorder, hooks = StepRecorder(), Hooks(wants_parts)
        trainer, module, data = build(run, recorder, hooks, CheckpointCallback(every_n_steps=20), folder=folder)
        trainer.fit(module, datamodule=data, ckpt_path=resume)
        hooks.seen.timed = recorder.timed_steps
    return recorder.losses, full_parameters(module), hooks.seen, float(trainer.callback_metrics["val/loss"])


@pytest.mark.parametrize(("strategy", "warmup"), [("single", 4), ("ddp", 12), ("fsdp2", 4)])
def test_recorded_steps_are_the_same_steps_with_hooks_at_both_ends_only(
    tmp_path: Path, strategy: str, warmup: int
) -> None:
    run = ONE if strategy == "single" else ONE.on(strategy, 2)

    def both(recorded: bool) -> Any:
        arguments = (run, recorded, str(tmp_path / str(recorded)))
        return trained(*arguments) if strategy == "single" else on_ranks(2, trained, *arguments)[0]

    losses, weights, hooks, validation = both(False)
    recorded_losses, recorded_weights, seen, recorded_validation = both(True)
    assert recorded_losses == losses
    assert recorded_validation == validation
    assert all(torch.equal(weights[name], recorded_weights[name]) for name in weights)
    assert hooks.part_by_part == 24
    assert seen.part_by_part == warmup, "the steps before the recording"
    assert hooks.timed == 24 - 24 // 5
    assert seen.timed == 24 - max(24 // 5, warmup + 1), "recording takes long, and is no training"
    assert seen.starts == hooks.starts == list(range(24))
    assert seen.ends == hooks.ends == list(range(1, 25))
    assert seen.validations == hooks.validations == [8, 16, 24]


@pytest.mark.parametrize("units", ["blocks", "model"])
def test_a_step_recorded_right_after_a_validation_gathers_its_weights(tmp_path: Path, units: str) -> None:
    run = replace(ONE, steps=6, val_every=4).on("fsdp2", 2, strategy_options=dict(units=units))
    assert on_ranks(2, gathered_when_recorded, run, str(tmp_path)) == [[False], [False]]


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2"])
def test_a_step_that_nobody_wants_the_parts_of_is_one_call_with_the_same_result(tmp_path: Path, strategy: str) -> None:
    run = ONE if strategy == "single" else ONE.on(strategy, 2)

    def both(wants_parts: bool) -> Any:
        arguments = (run, False, str(tmp_path / str(wants_parts)), None, wants_parts)
        return trained(*arguments) if strategy == "single" else on_ranks(2, trained, *arguments)[0]

    losses, weights, in_parts, _ = both(True)
    whole_losses, whole_weights, whole, _ = both(False)
    assert (in_parts.part_by_part, whole.part_by_part) == (24, 0)
    assert whole_losses == losses
    assert all(torch.equal(weights[name], whole_weights[name]) for name in weights)
    assert whole.ends == list(range(1, 25))


def test_a_run_goes_on_from_a_recorded_step_on_the_same_curve(tmp_path: Path) -> None:
    reference = trained(ONE, False, str(tmp_path / "straight"))
    trained(Run(**{**vars(ONE), "steps": 22, "optim": dict(schedule_steps=24)}), True, str(tmp_path / "first"))
    resumed = trained(
        ONE, True, str(tmp_path / "first"), resume=str(tmp_path / "first" / "checkpoints" / "step-00000020")
    )
    assert resumed[0] == reference[0][20:]
    assert all(torch.equal(reference[1][name], resumed[1][name]) for name in reference[1])


def test_lightnings_own_trainer_records_nothing() -> None:
    trainer, module, _ = build(ONE)
    trainer.strategy._root_device = torch.device("cuda")  # type: ignore[union-attr]
    trainer.fit_loop.epoch_loop = pl.Trainer(logger=False, accelerator="cpu").fit_loop.epoch_loop
    assert "own Trainer" in (why_not(trainer, module) or "")
