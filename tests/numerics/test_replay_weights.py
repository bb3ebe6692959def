"""Weights that change behind FSDP2's back, as a CUDA graph changes them, are those of the next forward. No GPU needed: the
change is made by hand."""

from typing import Any

import lightning.pytorch as pl
import torch
from helpers.ranks import on_ranks
from helpers.training import Run, build


class ChangedBehind(pl.Callback):
    """Losses after two changes of all shards, each followed by a forward and, once more, by one from gathered-anew weights."""

    def __init__(self) -> None:
        self.unannounced: tuple[float, float] = (0.0, 0.0)
        self.announced: tuple[float, float] = (0.0, 0.0)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        def loss() -> float:
            with torch.no_grad():
                return float(module(batch[0]))

        def change() -> None:
            for group in trainer.optimizers[0].param_groups:
                for parameter in group["params"]:
                    parameter.data.to_local().mul_(1.5)

        def both() -> tuple[float, float]:
            found = loss()
            trainer.strategy.before_recorded_step()
            return found, loss()

        loss()  # gathers the root, and no backward gives it back
        change()
        self.unannounced = both()
        trainer.strategy.before_recorded_step()
        change()
        self.announced = both()


def changed_behind(run: Run) -> tuple[tuple[float, float], tuple[float, float]]:
    seen = ChangedBehind()
    trainer, module, data = build(run, seen)
    trainer.fit(module, datamodule=data)
    return seen.unannounced, seen.announced


def test_a_forward_after_a_replay_gathers_what_the_replay_left() -> None:
    for unannounced, announced in on_ranks(2, changed_behind, Run("fsdp2", 2, steps=1)):
        assert unannounced[0] != unannounced[1], "FSDP2 has no such trap any more: before_recorded_step can go"
        assert announced[0] == announced[1]
