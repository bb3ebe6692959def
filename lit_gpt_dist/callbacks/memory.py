"""Memory of device and host: what is held now, and the most that was since the last reading. Never waits or communicates."""

import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

GIB = 2**30
RANKS_SHOWN = 16  # with more, only the maximum is logged


class PeakMemory:
    """The allocator's peak since the last reading, and that of the whole run, which survives the resets in between."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.run_peak_bytes = 0
        self.last_peak_bytes = 0

    def begin(self, device: torch.device) -> None:
        self.device = device if device.type == "cuda" else None
        if self.device is not None:
            torch.cuda.reset_peak_memory_stats(self.device)

    def read_peak_gib(self) -> float | None:
        """Peak since the last call, which the next one starts over from; None on a CPU."""
        if self.device is None:
            return None
        self.last_peak_bytes = torch.cuda.max_memory_allocated(self.device)
        self.run_peak_bytes = max(self.run_peak_bytes, self.last_peak_bytes)
        torch.cuda.reset_peak_memory_stats(self.device)
        return self.last_peak_bytes / GIB

    def run_peak(self) -> int:
        """Bytes allocated at most since ``begin``; 0 on a CPU."""
        now = torch.cuda.max_memory_allocated(self.device) if self.device is not None else 0
        return max(now, self.run_peak_bytes)


class MemoryPart:
    """Takes part in readings: allocated, reserved and peak device memory, and resident host memory, of every rank."""

    names = ("allocated", "reserved", "peak")

    def measure(self, trainer: pl.Trainer, module: Any) -> Sequence[float]:
        host = resident_bytes() / GIB
        if module.device.type != "cuda":
            return [host]
        device = module.device
        numbers = (
            torch.cuda.memory_allocated(device),
            torch.cuda.memory_reserved(device),
            torch.cuda.max_memory_allocated(device),  # since the recorder's last reading
        )
        return [host, *(number / GIB for number in numbers)]

    def report(self, trainer: pl.Trainer, module: Any, rows: list[list[float]]) -> dict[str, float]:
        values = {"memory/host_gib": max(row[0] for row in rows)}
        for index, name in enumerate(self.names[: len(rows[0]) - 1], start=1):
            values[f"memory/{name}_gib"] = max(row[index] for row in rows)
            if 1 < len(rows) <= RANKS_SHOWN:
                values |= {f"memory/{name}_gib_rank_{rank}": row[index] for rank, row in enumerate(rows)}
        return values


def resident_bytes() -> int:
    """Host memory this process holds now (Linux), else the most it ever held."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return most_resident_bytes()


def most_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
