"""One JSON line about the run in ``results.jsonl``, when it ends. Reports read it; nothing else does.

Communicates once, at the end (the peak memory's maximum over ranks).
"""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch

from lit_gpt_dist.callbacks.device import device_name
from lit_gpt_dist.callbacks.memory import most_resident_bytes
from lit_gpt_dist.callbacks.recorder import GIB, find_recorder
from lit_gpt_dist.callbacks.utilization import utilization
from lit_gpt_dist.errors import RunStopped

SHAPE = ("layers", "heads", "kv_heads", "width", "ff_width", "norm", "positions", "activation", "tied", "bias")


class ResultsWriter(pl.Callback):
    """Appends the line to ``<default_root_dir>/results.jsonl`` on rank 0.

    Args:
        tag: name of the run.
        command: the command line that started it.
        extra: further fields, as the command line knows them.
    """

    def __init__(self, tag: str, command: str = "", extra: dict[str, Any] | None = None) -> None:
        self.tag = tag
        self.command = command
        self.extra = extra or {}
        self.line: dict[str, Any] | None = None

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._append(trainer, module)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        if isinstance(exception, RunStopped):  # a signal or a bad step, after the same step on all ranks
            self._append(trainer, module, str(exception))

    def _append(self, trainer: pl.Trainer, module: Any, stopped: str | None = None) -> None:
        memory = peak_memory(trainer)
        if trainer.is_global_zero:
            self.line = self._line(trainer, module) | memory | {"stopped": stopped}
            if trainer.fast_dev_run:  # type: ignore[attr-defined]  # Lightning leaves nothing behind then
                return
            path = Path(trainer.default_root_dir) / "results.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.line) + "\n")

    def _line(self, trainer: Any, module: Any) -> dict[str, Any]:
        recorder = find_recorder(trainer)
        assert recorder is not None
        plan, strategy = trainer.datamodule.plan, trainer.strategy
        seconds = recorder.mean_step_seconds
        tokens = trainer.datamodule.tokens_per_step
        validation = trainer.callback_metrics.get("val/loss")
        return {
            "tag": self.tag,
            "mode": strategy.name,
            "size": module.size,
            "world": trainer.world_size,
            "accum": plan.accumulate,
            "micro": plan.micro_batch,
            "global_batch": plan.global_batch,
            "context": trainer.datamodule.context,
            "vocab": module.config.vocab_size,
            "dropout": module.config.dropout,
            "shape": {name: value for name, value in module.config.to_dict().items() if name in SHAPE},
            "params": module.config.parameters(),
            "tokens_per_step": tokens,
            "start": recorder.start,
            "steps": trainer.global_step,
            "step_ms": seconds and 1000 * seconds,
            "tok_s": seconds and tokens / seconds,
            **utilization(trainer, module, seconds and tokens / seconds),
            "val_loss": None if validation is None else float(validation),
            "seed": module.seed,
            "precision": str(trainer.precision),
            "recompute": module.recompute,
            "recompute_blocks": module.recompute_blocks,
            "compile": module.compiled,
            "cuda_graph": module.graph_wanted,
            "bucket_cap_mb": getattr(strategy, "bucket_cap_mb", None),
            "overlap": getattr(strategy, "overlap", None),
            "no_sync": getattr(strategy, "no_sync", None),
            "reshard_after_forward": getattr(strategy, "reshard_after_forward", None),
            "units": getattr(strategy, "units", None),
            "start_s": recorder.start_seconds,
            "paused_s": recorder.paused_seconds,
            "device": device_name(module.device),
            "corpus": trainer.datamodule.corpus.name,
            "corpus_hash": trainer.datamodule.corpus.digest,
            "git_revision": git_revision(),
            "versions": versions(),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": self.command,
            "run_dir": str(trainer.run_dir),
            "config": saved_config(trainer),
            **self.extra,
            "losses": recorder.losses,
        }


def saved_config(trainer: Any) -> str | None:
    """The run's whole configuration, which ``report`` compares; None where there is no such file, as in a script."""
    path = trainer.run_dir / "config.yaml" if trainer.run_dir != Path(trainer.default_root_dir) else None
    return str(path.resolve()) if path is not None and path.is_file() else None


def peak_memory(trainer: Any) -> dict[str, float | None]:
    """Most memory any rank had, in GiB: allocated on the device (None on a CPU), and resident on the host."""
    device = trainer.strategy.root_device
    recorder = find_recorder(trainer)
    on_device = recorder.memory.run_peak() if recorder else 0
    pair = torch.tensor([on_device, most_resident_bytes()], dtype=torch.float64, device=device)
    on_device, on_host = trainer.strategy.reduce(pair, reduce_op="max").tolist()
    return {"mem_gib": on_device / GIB if on_device else None, "host_gib": on_host / GIB}


def versions() -> dict[str, str | None]:
    return {
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }


def git_revision() -> str | None:
    """Revision of the working copy this package runs from; None where it is installed without one."""
    try:
        folder = Path(__file__).parent
        found = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("LIT_GPT_DIST_REVISION")
    return found.stdout.strip()
