"""What Lightning lets a module and a callback do, this project's own loop does too, or leaves to Lightning's."""

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers.training import Run, build

from lit_gpt_dist.callbacks.learning import LearningPart
from lit_gpt_dist.callbacks.recorder import StepRecorder
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.module import GPTModule
from lit_gpt_dist.trainer import why_leave_to_lightning

ONE = Run(steps=6)


@pytest.mark.parametrize("stages", ["vf", "fvf", "tf"])
def test_a_module_can_be_trained_after_it_was_validated(stages: str) -> None:
    """Lightning validates in inference mode, whose tensors nothing else may change."""
    trainer, module, data = build(replace(ONE, val_every=2))
    for stage in stages:
        run = {"f": trainer.fit, "v": trainer.validate, "t": trainer.test}[stage]
        run(module, datamodule=data, **({} if stage == "f" else {"verbose": False}))  # type: ignore[arg-type]
    assert trainer.global_step == ONE.steps


class NoMoreValidation(pl.Callback):
    def __init__(self) -> None:
        self.validated: list[int] = []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.validated.append(trainer.global_step)
        trainer.limit_val_batches = 0


def test_a_callback_may_end_validation_in_the_middle_of_a_run() -> None:
    seen = NoMoreValidation()
    fitted(None, seen, run=replace(ONE, val_every=2))
    assert seen.validated == [2]


class Outputs(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.own: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.own.append(float(module.step_loss))


class Parts(pl.Callback):
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        pass


def fitted(cls: type[GPTModule] | None = None, *callbacks: pl.Callback, run: Run = ONE) -> Any:
    trainer, module, data = build(run, *callbacks)
    if cls is not None:
        module = cls("tiny", context=32)
    trainer.fit(module, datamodule=data)
    return trainer


def test_outputs_carry_the_steps_loss_however_the_step_was_taken() -> None:
    whole, in_parts = Outputs(), Outputs()
    fitted(None, whole)
    fitted(None, in_parts, Parts())
    assert whole.losses == whole.own == in_parts.losses


class OwnStep(GPTModule):
    calls = 0

    def training_step(self, windows: torch.Tensor, step: int) -> torch.Tensor:
        OwnStep.calls += 1
        return super().training_step(windows, step)


class Stops(GPTModule):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.trainer.global_step == 3 else None


class Manual(GPTModule):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.automatic_optimization = False

    def training_step(self, windows: torch.Tensor, step: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self(windows[0]))
        optimizer.step()
        self.step_loss = torch.zeros(())


class OwnTransfer(GPTModule):
    """Sees a step's batch before it is moved, and changes it after."""

    seen: list[str] = []

    def on_before_batch_transfer(self, batch: Any, loader: int) -> Any:  # type: ignore[override]
        OwnTransfer.seen.append(type(batch).__name__)
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return torch.zeros_like(batch)


class EpochRates(GPTModule):
    rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "epoch"}]

    def on_train_batch_end(self, *arguments: Any) -> None:
        EpochRates.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def test_a_step_method_of_a_subclass_is_called_at_every_step() -> None:
    OwnStep.calls = 0
    fitted(OwnStep)
    assert OwnStep.calls == 6


def test_hooks_around_the_transfer_of_a_batch_are_called_and_may_change_it() -> None:
    OwnTransfer.seen, constant, usual = [], Outputs(), Outputs()
    fitted(OwnTransfer, constant)
    fitted(None, usual)
    assert OwnTransfer.seen == ["StepBatch"] * 6
    assert constant.losses[-1] < usual.losses[-1] - 1, "the same token again and again is soon known"


def test_minus_one_before_a_step_ends_the_epoch() -> None:
    assert fitted(Stops, run=replace(ONE, trainer=dict(max_epochs=1))).global_step == 3


def test_manual_optimization_takes_its_steps() -> None:
    assert fitted(Manual, run=replace(ONE, clip=None)).global_step == 6


def test_schedulers_that_count_epochs_step_at_their_ends() -> None:
    EpochRates.rates = []
    fitted(EpochRates, run=replace(ONE, trainer=dict(limit_train_batches=2)))
    assert EpochRates.rates == [1.0, 0.5, 0.5, 0.25, 0.25, 0.125]


def test_the_rate_of_another_schedule_is_logged_as_it_is() -> None:
    recorder = StepRecorder(parts=[LearningPart()])
    fitted(EpochRates, recorder, run=replace(ONE, trainer=dict(limit_train_batches=2)))
    assert recorder.latest is not None
    assert recorder.latest.lr == EpochRates.rates[-1]


def test_a_schedule_without_length_is_refused() -> None:
    with pytest.raises(UserError, match="has no length: max_steps is -1"):
        fitted(run=replace(ONE, steps=-1, trainer=dict(max_epochs=1)))


def test_precision_follows_the_trainer_not_the_modules_first_one() -> None:
    trainer, module, data = build(replace(ONE, steps=1))
    trainer.fit(module, datamodule=data)
    later, _, data = build(replace(ONE, steps=1, precision="bf16-mixed"))
    later.fit(module, datamodule=data)
    assert module.model is not None
    assert module.model.compute_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("cls", "extra", "reason"),
    [
        (GPTModule, {}, None),
        (OwnStep, {}, "own training_step"),
        (EpochRates, {}, "own configure_optimizers"),
        (GPTModule, {"profiler": "simple"}, "SimpleProfiler"),
    ],
)
def test_steps_that_are_not_this_projects_own_are_neither_one_call_nor_recorded(
    cls: type[GPTModule], extra: dict[str, Any], reason: str | None
) -> None:
    trainer, _, data = build(replace(ONE, steps=1, trainer=extra))
    trainer.fit(cls("tiny", context=32), datamodule=data)
    found = why_leave_to_lightning(trainer)
    assert found is None if reason is None else reason in str(found)
    loop: Any = trainer.fit_loop.epoch_loop
    assert loop.why_in_parts() == found


def test_a_callback_with_hooks_inside_a_step_keeps_it_out_of_graphs() -> None:
    loop: Any = fitted(None, Parts(), run=replace(ONE, steps=1)).fit_loop.epoch_loop
    assert loop.why_in_parts() == "Parts has hooks inside a step"
