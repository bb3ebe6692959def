"""Marks on a device's timeline that cost no waiting: CUDA events, or the host's clock on a CPU. Knows nothing of training."""

import os
import time
from pathlib import Path
from typing import Any, Protocol

import torch

_IMPORTED = time.monotonic()


def process_seconds() -> float:
    """Seconds since this process was started (Linux), else since this module was imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # a program's name may hold blanks
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), after boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _IMPORTED


class Clock(Protocol):
    """``mark`` now; ``seconds`` between two marks later, when the device has reached both."""

    def mark(self) -> Any: ...

    def seconds(self, first: Any, second: Any) -> float: ...


class HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, first: float, second: float) -> float:
        return second - first


class CudaClock:
    """Marks the current stream: when the device gets there, not when the host did."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return first.elapsed_time(second) / 1000


def clock_for(device: torch.device) -> Clock | None:
    """None on a device whose timeline cannot be marked: its step times stay unknown."""
    if device.type == "cuda":
        return CudaClock()
    return HostClock() if device.type == "cpu" else None
