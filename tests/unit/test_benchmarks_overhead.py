"""What the Trainer leaves out of every step changes nothing that a callback or a user can see."""

import lightning.pytorch as pl
from helpers.training import Run, build
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.trainer.states import RunningStage

from lit_gpt_dist.trainer import NoProfiler, Trainer


class EndOnly(pl.Callback):
    calls = 0

    def on_train_batch_end(self, *args: object) -> None:
        self.calls += 1


def test_hooks_that_do_something_are_called_at_every_step(tmp_path):
    backward: list[int] = []
    end_only = EndOnly()
    by_lambda = LambdaCallback(on_before_backward=lambda trainer, *_: backward.append(trainer.global_step))
    trainer, module, data = build(Run(steps=3), end_only, by_lambda, folder=tmp_path)
    trainer.fit(module, datamodule=data)
    assert end_only.calls == 3
    assert sorted(set(backward)) == [0, 1, 2]  # at each micro-batch


def test_a_profiler_that_is_asked_for_stays(tmp_path):
    options = dict(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    assert isinstance(Trainer(**options).profiler, NoProfiler)
    assert isinstance(Trainer(**options, profiler="simple").profiler, SimpleProfiler)


def test_training_is_the_stage(tmp_path):
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    assert not trainer.training
    trainer.training = True
    assert trainer.training
    assert trainer.state.stage == RunningStage.TRAINING
    trainer.validating = True
    assert not trainer.training
