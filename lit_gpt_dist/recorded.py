"""Optimizer steps in one call, recorded as a CUDA graph where that can be: when one is armed, recorded, replayed and forgotten.

Knows nothing of models or data; what a step is, a subclass says.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lit_gpt_dist.parallel.clip import forget_scale
from lit_gpt_dist.parallel.graph import (
    StepGraph,
    make_capturable,
    on_side_stream,
)


class RecordedSteps(pl.LightningModule):
    """A module whose steps ``Trainer`` may take whole, through ``take_step``.

    Attributes:
        graph_wanted: steps will be recorded, once some have been taken one by one.
        step_graph: the recording, once there is one.
        step_loss: mean loss of this rank's last step, a scalar on the device.
        gradient_norm: of the last step, before clipping, over all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph_wanted = False
        self.step_graph: StepGraph | None = None
        self.step_loss: Tensor | None = None
        self.gradient_norm: Tensor | None = None
        self._graph_from = sys.maxsize  # no step is recorded until the graph is armed
        self._step_results: Callable[[list[Tensor], Tensor], Tensor] = step_results

    def _whole_step(self, windows: Tensor) -> tuple[list[Tensor], Tensor]:
        """Takes an optimizer step: each micro-batch's loss, and the gradient norm before clipping."""
        raise NotImplementedError

    def _before_recorded_step(self) -> None:
        """What a step does on the host, which no recording repeats: before the step is recorded, which must find what all will
        find, and before each replay."""
        self.trainer.strategy.before_recorded_step()  # type: ignore[attr-defined]

    def take_step(self, windows: Tensor) -> Tensor:
        """A whole optimizer step in one call, recorded or not; its loss. Nobody is told of its parts."""
        if self.in_graph:
            if self.step_graph is None:
                self._before_recorded_step()
                self._rehearse_results(len(windows))
                self.step_graph = StepGraph(self._recorded_step, windows)
            return self._replay(windows)
        losses, self.gradient_norm = self._whole_step(windows)
        self.step_loss = mean_loss(losses)
        return self.step_loss

    def _rehearse_results(self, accumulate: int) -> None:
        """The steps before were Lightning's, which need no ``step_results``; it may not be compiled within a recording."""
        assert self.gradient_norm is not None
        wide = torch.float64 if self.trainer.precision == "64-true" else torch.float32
        self._step_results([torch.zeros((), dtype=wide, device=self.device)] * accumulate, self.gradient_norm)

    def on_train_start(self) -> None:
        self.arm_graph()

    def arm_graph(self) -> None:
        """Some steps one by one from here on, then a new recording: also after a rollback, for what was recorded reads the
        moments and the rate where they lay before."""
        self.step_graph = None
        self._graph_from = self.trainer.global_step + self.trainer.strategy.warmup_steps  # type: ignore[attr-defined]
        if self.graph_wanted:
            make_capturable(self.trainer.optimizers[0], self.device)

    @property
    def in_graph(self) -> bool:
        """Whether the next step is a replay: then no hook is called between its parts."""
        return self.graph_wanted and self.trainer.global_step >= self._graph_from

    @property
    def recorded_at(self) -> int | None:
        """The step that is recorded, with the first replay; None where none will be."""
        return self._graph_from + 1 if self.graph_wanted else None

    def on_train_end(self) -> None:
        for optimizer in self.trainer.optimizers:
            forget_scale(optimizer)
        self.step_graph = None  # Lightning moves the model to the CPU next; a replay after that would crash

    def on_exception(self, exception: BaseException) -> None:
        self.step_graph = None
        for optimizer in self.trainer.optimizers:
            forget_scale(optimizer)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Lightning's own. On a side stream where steps will be recorded: what autograd keeps must not belong to the default
        one."""
        with on_side_stream(self.device) if self.graph_wanted else nullcontext():
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def _recorded_step(self, windows: Tensor) -> Tensor:
        return self._step_results(*self._whole_step(windows))

    def _replay(self, windows: Tensor) -> Tensor:
        assert self.step_graph is not None
        self._before_recorded_step()
        self.step_graph.replay(windows)
        # a copy: the next replay writes its results to the same place
        self.step_loss, self.gradient_norm = self.step_graph.results.clone().unbind()
        return self.step_loss


def mean_loss(losses: list[Tensor]) -> Tensor:
    """Mean of scalars, in fp64: a curve is compared to 1e-6, and fp32 near 4 has steps of 5e-7."""
    if losses[0].device.type == "mps":  # has no fp64
        return torch.stack(losses).mean()
    if len(losses) == 1:
        return losses[0].double()
    return torch.stack([loss.double() for loss in losses]).mean()


def step_results(losses: list[Tensor], norm: Tensor) -> Tensor:
    """(2,) in fp64: mean of the micro-batches' losses, and the gradient norm."""
    return torch.stack([mean_loss(losses), norm.double()])
