"""When device memory runs out: says what held it and what to do, cheapest first. Otherwise does nothing at all."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lit_gpt_dist.callbacks.learning import local

GIB = 2**30
HISTORY_ENTRIES = 100_000
FRAGMENTED = 0.1  # reserved but unused share of the device from which fragmentation is worth naming


class OutOfMemory(pl.Callback):
    """Adds to the error what was held and three remedies.

    Args:
        snapshot: record allocations from the start and write them out (for pytorch.org/memory_viz) when memory runs out.
    """

    def __init__(self, snapshot: bool = False) -> None:
        self.snapshot = snapshot

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        if self.snapshot and module.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        if not out_of_memory(exception):
            return
        lines = [f"rank {trainer.global_rank}: {held_line(trainer, module)}", "what to do, cheapest first:"]
        lines += [f"  {number}. {remedy}" for number, remedy in enumerate(remedies(trainer, module)[:3], start=1)]
        if self.snapshot and module.device.type == "cuda":
            lines.append(f"allocations written to {self._write(trainer)}; open it at pytorch.org/memory_viz")
        exception.add_note("\n".join(lines))

    def _write(self, trainer: Any) -> Path:
        path = Path(trainer.run_dir) / f"memory-rank-{trainer.global_rank}.pickle"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
        return path


def out_of_memory(exception: BaseException) -> bool:
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(exception, RuntimeError) and "can't allocate memory" in str(exception)  # torch's CPU allocator


def held_bytes(trainer: Any, module: Any) -> dict[str, int]:
    """Bytes on this rank by kind, counted from the tensors themselves: those that are updated, not what is gathered of them."""
    parameters = [p for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]]
    states = [
        value
        for optimizer in trainer.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return {
        "weights": sum(local(parameter).nbytes for parameter in parameters),
        "gradients": sum(local(parameter.grad).nbytes for parameter in parameters if parameter.grad is not None),
        "moments": sum(local(value).nbytes for value in states),
    }


def held_line(trainer: Any, module: Any) -> str:
    held = held_bytes(trainer, module)
    parts = [f"{name} {size / GIB:.2f}" for name, size in held.items()]
    if module.device.type != "cuda":
        return f"held, in GiB: {', '.join(parts)}"
    allocated = torch.cuda.max_memory_allocated(module.device)
    reserved = torch.cuda.memory_reserved(module.device)
    free, total = torch.cuda.mem_get_info(module.device)
    rest = max(0, allocated - sum(held.values()))
    parts += [f"activations and everything else {rest / GIB:.2f}"]
    return (
        f"held at most, in GiB: {', '.join(parts)}; allocated {allocated / GIB:.2f}, reserved {reserved / GIB:.2f}, free on the "
        f"device {free / GIB:.2f} of {total / GIB:.2f}"
    )


def remedies(trainer: Any, module: Any) -> list[str]:
    """In order of what they cost; those that are in use already are left out."""
    plan = trainer.datamodule.plan
    found = []
    if fragmented(module.device):
        found.append(
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment: memory is in pieces; costs nothing"
        )
    if plan.micro_batch > 1:
        half = plan.micro_batch // 2
        found.append(
            f"--data.micro_batch {half} --data.global_batch {plan.global_batch}: the same run in smaller pieces, accumulate "
            f"{plan.global_batch // (half * plan.ranks)}; costs a little speed"
        )
    blocks, layers = module.recompute_blocks, module.config.layers
    if module.recompute == "none" and trainer.precision != "16-mixed":
        found.append("--model.recompute selective: what is cheap to compute is computed twice instead of kept")
    if blocks is not None and blocks < layers:
        found.append(
            f"--model.recompute_blocks {min(2 * blocks, layers)} instead of {blocks}: more of the {layers} blocks keep less"
        )
    elif module.recompute != "full":
        found.append("--model.recompute full: all activations are computed twice instead of kept; about +30% time")
    if getattr(trainer.strategy, "units", None) == "model":
        found.append(
            f"--trainer.strategy {trainer.strategy.name} --trainer.strategy.units blocks: weights are gathered block by "
            "block instead of at once; costs a little speed"
        )
    if not trainer.strategy.shards_weights:
        found.append(
            "--trainer.strategy fsdp2 on several devices: weights, gradients and moments in shards; costs communication"
        )
    found.append(f"a smaller --model.context than {module.config.context} or another --model.size: another model")
    found.append("more devices: each holds a smaller share")
    return found


def fragmented(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return unused > FRAGMENTED * torch.cuda.mem_get_info(device)[1]
