"""Validation after the last step, also where the interval does not divide the number of steps. Observes only."""

from typing import Any

import lightning.pytorch as pl


class FinalValidation(pl.Callback):
    """Asks Lightning to stop at the last step: a stop that was asked for validates first, running out of steps does not."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= trainer.max_steps:
            trainer.should_stop = True
