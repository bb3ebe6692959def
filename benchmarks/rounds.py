"""Rounds of several contenders in one process, one of them a Trainer inside its own ``fit``.

Every so many optimizer steps a callback stops the clock of the Trainer, lets every other contender take as many steps, and
starts the Trainer's clock again. Nothing is set up twice, and a card that drifts hurts all alike.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor

from benchmarks.job import Batches, Job
from lit_gpt_dist.callbacks.recorder import find_recorder, not_training
from lit_gpt_dist.recorded import mean_loss

TRAINER, BARE, EAGER, COMPILED, FABRIC = NAMES = ("trainer", "bare", "eager", "compiled", "fabric")


class Contender(Protocol):
    loss: Tensor

    def run(self, steps: int) -> None:
        """Takes ``steps`` optimizer steps; need not wait for the device."""
        ...


class BareStep:
    """The Trainer's own step, on its own model, without the Trainer: replays of its graph, or the step's function."""

    def __init__(self, trainer: Any, module: Any, job: Job) -> None:
        self.trainer, self.module, self.step = trainer, module, 0
        self.batches = Batches(job, module.device)
        self.loss = torch.zeros((), device=module.device)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            windows = self.batches.windows(self.step)
            if self.module.step_graph is not None:
                self.module.step_graph.replay(windows)
            else:
                with self.trainer.precision_plugin.train_step_context():
                    losses, _ = self.module._whole_step(windows)
                    self.loss = mean_loss(losses)
            self.step += 1


def first_extra(steps: int) -> int:
    """Steps by which the first round of ``steps`` is longer.

    Rounds then do not end where a reading has just begun: a reading ends some steps later, and stopping between the two would
    make the round wait for all of it, which a run does not.
    """
    return min(11, steps // 2)


@dataclass
class Timing:
    """One contender's rounds, the first left out: it compiles, records and warms up."""

    seconds: list[float] = field(default_factory=list)  # of the wall clock
    cpu_seconds: list[float] = field(default_factory=list)  # all threads of this process: steadier on a shared machine


class Stopwatch:
    """Times a stretch between two moments at which the device has nothing left to do."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        self._wait()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def stop(self) -> tuple[float, float]:
        self._wait()
        return time.perf_counter() - self._wall, time.process_time() - self._cpu

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Rounds(pl.Callback):
    """Must stand behind all other callbacks, so that a segment of the Trainer ends where a step does.

    Args:
        steps: optimizer steps of a round.
        make: builds the other contenders, once the Trainer is set up and before its first step.

    Attributes:
        timings: by contender.
        losses: by contender, after the first round: all but the bare step then have done the same.
    """

    def __init__(self, steps: int, make: Callable[[Any, Any], dict[str, Contender]]) -> None:
        self.steps, self.make = steps, make
        self.contenders: dict[str, Contender] = {}
        self.timings: dict[str, Timing] = {TRAINER: Timing()}
        self.losses: dict[str, float] = {}
        self.facts: dict[str, Any] = {}
        self.done = 0

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        with not_training(trainer, "contenders"):
            self.contenders = self.make(trainer, module)
        self.timings |= {name: Timing() for name in self.contenders}
        self.watch = Stopwatch(module.device)
        self.watch.start()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        beyond = trainer.global_step - first_extra(self.steps)
        if beyond <= 0 or beyond % self.steps:
            return
        steps = self.steps if self.done else trainer.global_step
        with not_training(trainer, "contenders"):
            self._note(TRAINER, *self.watch.stop(), module.step_loss)
            names = list(self.contenders)
            for name in names if self.done % 2 else reversed(names):
                self.watch.start()
                self.contenders[name].run(steps)
                self._note(name, *self.watch.stop(), self.contenders[name].loss)
            self._tell()
            self.done += 1
        self.watch.start()

    def _note(self, name: str, wall: float, cpu: float, loss: Tensor) -> None:
        if self.done == 0:
            self.losses[name] = float(loss)
        else:
            self.timings[name].seconds.append(wall)
            self.timings[name].cpu_seconds.append(cpu)

    def _tell(self) -> None:
        last = {name: 1000 * t.seconds[-1] / self.steps for name, t in self.timings.items() if t.seconds}
        text = "  ".join(f"{name} {milliseconds:.3f}" for name, milliseconds in last.items())
        line = f"round {self.done}: {text + '  ms a step' if text else 'warm-up'}"
        print(line, file=sys.__stderr__, flush=True)  # a progress bar takes sys.stderr for itself

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        recorder = find_recorder(trainer)
        graph = module.step_graph is not None
        self.facts |= {"compile": module.compiled, "cuda_graph": graph, "loss": recorder and recorder.losses[-1]}
        if module.device.type == "cuda":
            self.facts["peak_allocated_gib"] = (recorder.memory.run_peak() if recorder else 0) / 2**30
            self.facts["reserved_gib"] = torch.cuda.memory_reserved(module.device) / 2**30
        self.contenders = {}
