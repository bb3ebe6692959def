"""Measures what a checkpoint costs: seconds that training stands still, at once and in the background; loading; export.

    torchrun --nproc-per-node 2 scripts/measure_saves.py --size big --strategy ddp --folder /tmp/saves

Prints a JSON document a part on rank 0: saves, loading, export. Trains on made-up text: only shapes matter here.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from lit_gpt_dist.callbacks.checkpoint import CheckpointCallback
from lit_gpt_dist.checkpoint import find
from lit_gpt_dist.checkpoint.sources import open_source
from lit_gpt_dist.data.datamodule import GPTDataModule
from lit_gpt_dist.module import GPTModule
from lit_gpt_dist.trainer import Trainer

GIB = 1 << 30
AT_ONCE, BACKGROUND = "at once", "background"
STEPS_BETWEEN = 12
EXPORT = """
import resource, sys, time
from pathlib import Path
from lit_gpt_dist.checkpoint.export import export_checkpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
size = export_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], overwrite=True)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(size, time.perf_counter() - start, before * 1024, after * 1024)
"""


class Lateness(threading.Thread):
    """How much later than it should another thread of Python runs: it waits for a core, and for the interpreter's lock."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="lateness")
        self.worst_seconds = 0.0

    def run(self) -> None:
        while True:
            start = time.perf_counter()
            time.sleep(0.001)
            self.worst_seconds = max(self.worst_seconds, time.perf_counter() - start - 0.001)

    def take(self) -> float:
        """The worst since it was asked last."""
        worst, self.worst_seconds = self.worst_seconds, 0.0
        return worst


class StepParts:
    """What a step's time went into, as far as the thread that trains can tell."""

    def __init__(self) -> None:
        self.lateness = Lateness()
        self.lateness.start()
        self.begin()

    def begin(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.thread_time()
        self._faults, self._switches = self._counts()
        self.lateness.take()

    def end(self, device_wait_seconds: float) -> dict[str, float]:
        faults, switches = self._counts()
        return {
            "seconds": time.perf_counter() - self._wall,
            "own_cpu_seconds": time.thread_time() - self._cpu,
            "device_wait_seconds": device_wait_seconds,  # in the last read of the step; the rest was waited for elsewhere
            "other_thread_late_seconds": self.lateness.take(),
            "pages_read_back": faults - self._faults,  # from the disk: the system had taken them away
            "waits": switches - self._switches,  # times the thread gave up its core: locks, the disk, the driver
        }

    @staticmethod
    def _counts() -> tuple[int, int]:
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        return usage.ru_majflt, usage.ru_nvcsw


def medians(steps: list[dict[str, float]]) -> dict[str, float] | None:
    if not steps:
        return None
    return {name: round(statistics.median(step[name] for step in steps), 6) for name in steps[0]}


class Measure(Callback):
    """Saves in turn in both ways and times steps and saves."""

    def __init__(self, callback: CheckpointCallback, saves: list[str]) -> None:
        self.callback, self.saves = callback, saves
        self.parts = StepParts()
        self.quiet: list[dict[str, float]] = []
        self.blocked: list[float] = []
        self.written: list[float] = []
        self.during: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        start = time.perf_counter()
        module.step_loss.item()  # waits for the device: a step's whole time is wanted here
        step = self.parts.end(time.perf_counter() - start)
        busy = trainer.strategy.saver.pending is not None and not trainer.strategy.saver.pending.done()
        (self.during if busy else self.quiet).append(step)
        if trainer.global_step == 1 and BACKGROUND in self.saves:
            trainer.strategy.prepare_background_saves()
        if trainer.global_step % STEPS_BETWEEN == 0:
            trainer.strategy.saver.wait()
            trainer.strategy.barrier()
            start = time.perf_counter()
            self.callback.save(trainer, background=self.saves[trainer.global_step // STEPS_BETWEEN - 1] == BACKGROUND)
            self.blocked.append(time.perf_counter() - start)
            self.written = trainer.strategy.saver.write_seconds
        self.parts.begin()


def make(options: argparse.Namespace, steps: int, *callbacks: Callback) -> tuple[Trainer, GPTModule, GPTDataModule]:
    on_gpu = torch.cuda.is_available()
    trainer = Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=options.strategy,
        precision="bf16-mixed" if on_gpu else "32-true",
        max_steps=steps,
        default_root_dir=options.folder,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
        max_epochs=-1,
    )
    data = GPTDataModule(
        str(options.folder / "corpus.txt"), tokenizer="byte", micro_batch=options.micro_batch, val_fraction=0
    )
    return trainer, GPTModule(size=options.size, vocab_size=256), data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="big")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--micro_batch", type=int, default=8)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--at_once", type=int, default=2, help="saves that training waits for")
    parser.add_argument("--background", type=int, default=3, help="saves beside training")
    parser.add_argument("--only_saves", action="store_true", help="neither load nor export")
    options = parser.parse_args()
    first = int(os.environ["RANK"]) == 0
    options.folder.mkdir(parents=True, exist_ok=True)
    if first:
        letters = "abcdefghijklmnopqrstuvwxyz \n"
        (options.folder / "corpus.txt").write_text("".join(random.Random(0).choices(letters, k=200_000)))
    callback = CheckpointCallback(keep_last=2, save_at_end=False)
    saves = [AT_ONCE] * options.at_once + [BACKGROUND] * options.background
    measure = Measure(callback, saves)
    trainer, module, data = make(options, STEPS_BETWEEN * len(saves), callback, measure)
    time.sleep(1)  # the corpus is there on all ranks
    trainer.fit(module, data)
    show(first, summary(options, measure))
    if options.only_saves:
        return
    del trainer, module
    torch.cuda.empty_cache()
    show(first, resume(options, len(saves)))
    if first:
        show(first, export(options))


def show(first: bool, result: dict[str, Any]) -> None:
    """At once: whoever stops the script early keeps what was measured."""
    if first:
        print(json.dumps(result), flush=True)


def summary(options: argparse.Namespace, measure: Measure) -> dict[str, Any]:
    checkpoint = find.list_checkpoints(options.folder)[-1]
    assert checkpoint.manifest is not None
    return {
        "size": options.size,
        "strategy": options.strategy,
        "ranks": int(os.environ["WORLD_SIZE"]),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "checkpoint_gib": sum(facts["bytes"] for facts in checkpoint.manifest.files.values()) / GIB,
        "blocked_seconds": list(zip(measure.saves, [round(s, 4) for s in measure.blocked], strict=True)),
        "until_committed_seconds": [round(s, 3) for s in measure.written],
        "step_seconds": statistics.median(step["seconds"] for step in measure.quiet),
        "step_seconds_while_writing": statistics.median(s["seconds"] for s in measure.during)
        if measure.during
        else None,
        "steps_while_writing": len(measure.during),
        "step_parts": medians(measure.quiet),
        "step_parts_while_writing": medians(measure.during),
    }


def resume(options: argparse.Namespace, saves: int) -> dict[str, float]:
    """Seconds to verify and to load on this machine, whose memory still holds the files."""
    start = time.perf_counter()
    if int(os.environ["RANK"]) == 0:
        find.newest_good(options.folder)
    verify_seconds = time.perf_counter() - start
    last = STEPS_BETWEEN * saves
    trainer, module, data = make(options, last + 1, CheckpointCallback(save_at_end=False))
    times: dict[str, float] = {}
    for name in ("load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict"):
        _time(trainer.strategy, name, times)
    trainer.fit(module, data, ckpt_path=find.resolve("last", options.folder))
    return {"verify_seconds": verify_seconds} | {f"{name}_seconds": seconds for name, seconds in times.items()}


def _time(owner: Any, name: str, times: dict[str, float]) -> None:
    call = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = call(*args, **kwargs)
        times[name] = time.perf_counter() - start
        return result

    setattr(owner, name, timed)


def export(options: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of an export in a process of its own."""
    checkpoint = find.newest_good(options.folder)[0]
    largest = max(torch.Size(shape).numel() * kind.itemsize for kind, shape in open_source(checkpoint).tensors.values())
    result: dict[str, Any] = {"largest_tensor_gib": largest / GIB}
    for form in ("safetensors", "hf"):
        target = options.folder / (form if form == "hf" else "weights.safetensors")
        arguments = [sys.executable, "-c", EXPORT, str(checkpoint), str(target), form]
        environment = {
            key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        }
        done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
        size, seconds, before, after = map(float, done.stdout.split())
        result[f"export_{form}"] = {
            "gib": size / GIB,
            "seconds": seconds,
            "peak_gib": after / GIB,
            "peak_over_imports_gib": (after - before) / GIB,
        }
    return result


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
