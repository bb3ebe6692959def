"""A whole optimizer step as one CUDA graph: recorded once, then replayed with a single launch.

Small models are bound by the CPU launching kernels (baby: some 1,500 a step); a replay launches none of them.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_gpt_dist.errors import UserError

WARMUP_STEPS = 4  # eager steps first: they make the optimizer's state, compile, and let libraries set up
DDP_WARMUP_STEPS = 12  # DDP rebuilds its buckets and must have seen 11 iterations (PyTorch notes on CUDA graphs)

Step = Callable[[Tensor], Tensor]  # windows -> (2,) on the device: the step's loss, and its gradient norm

_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


class StepGraph:
    """Replays ``step`` on whatever windows it is given; their shape never changes.

    Args:
        step: forward, backward, clipping and update of one optimizer step, without anything that waits for the device.
        windows: (accumulate, micro, context + 1), of the shape of all to come.
    """

    def __init__(self, step: Step, windows: Tensor) -> None:
        self.windows = windows.clone()
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (pinning, NCCL's watchdog) may call CUDA while this one records
        stream = side_stream(windows.device)
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.results = step(self.windows)

    def replay(self, windows: Tensor) -> None:
        """Takes one optimizer step; ``results`` (2,) then holds its loss and gradient norm, on the device."""
        self.windows.copy_(windows)
        self.graph.replay()


def make_capturable(optimizer: Optimizer, device: torch.device) -> None:
    """Moves what an update reads besides parameters, learning rate and step count, onto the device.

    A recorded kernel keeps the numbers it was given; it reads tensors anew at each replay. Groups of one rate share its tensor.
    """
    rates: dict[float, Tensor] = {}
    for group in optimizer.param_groups:
        group["capturable"] = True
        rate = float(group["lr"])
        group["lr"] = rates.setdefault(rate, torch.tensor(rate, device=device))
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(device)


def recording() -> bool:
    """Whether the current stream is being recorded: then nothing may be decided or seeded on the CPU."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of a device on which steps are warmed up and recorded, and on which DDP is built for that."""
    if device not in _SIDE_STREAMS:
        _SIDE_STREAMS[device] = torch.cuda.Stream(device)
    return _SIDE_STREAMS[device]


@contextmanager
def on_side_stream(device: torch.device) -> Generator[None, None, None]:
    """Runs on a stream of its own that waits for, and is waited for by, the current one."""
    current = torch.cuda.current_stream(device)
    side = side_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


def decide_graph(option: bool | None, trainer: Any, module: Any) -> bool:
    """Whether this run records its steps; ``option`` None: wherever it can.

    Raises:
        UserError: it was asked for, but cannot be.
    """
    reason = why_not(trainer, module)
    if option and reason:
        raise UserError(f"model.cuda_graph true, but {reason}; leave the option out")
    return reason is None if option is None else option


def why_not(trainer: Any, module: Any) -> str | None:
    """The reason why a step of this run cannot be recorded, or None."""
    if trainer.strategy.root_device.type != "cuda":
        return "the device is not a GPU"
    why_in_parts = getattr(trainer.fit_loop.epoch_loop, "why_in_parts", None)
    if why_in_parts is None:
        return "Lightning's own Trainer goes through a step part by part (lit_gpt_dist.trainer.Trainer does not)"
    if (reason := why_in_parts()) is not None:
        return str(reason)
    if str(trainer.precision) == "16-mixed":
        return "the loss scaler of 16-mixed decides on the CPU whether to take a step"
    if trainer.gradient_clip_algorithm == "value":
        return "clipping by value is not recorded"
    if any(getattr(callback, "spike_factor", None) for callback in trainer.callbacks):
        return "spikes of the gradient norm are told from its past on the CPU"
    if module.config.dropout > 0 and trainer.datamodule.plan.accumulate > 1:
        return "dropout masks are seeded for each micro-batch from the CPU"
    return None
