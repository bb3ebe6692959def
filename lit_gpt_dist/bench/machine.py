"""What this machine is: cards, versions, topology, clocks. Only reads; an unknown fact is left out."""

import contextlib
import inspect
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from lit_gpt_dist.bench.matrix import Machine
from lit_gpt_dist.errors import UserError


def find_machine(accelerator: str) -> Machine:
    """Cards, and what the installed strategies and model take. Imports lightning, which takes seconds.

    Raises:
        UserError: GPUs are asked for and there are none, or an unknown accelerator.
    """
    from lit_gpt_dist.parallel import STRATEGIES

    return Machine(
        cards=count_cards(accelerator),
        strategy_options={name: _parameters(cls) for name, cls in STRATEGIES.items()},
    )


def count_cards(accelerator: str) -> int | None:
    import torch

    if accelerator not in ("auto", "cpu", "gpu", "cuda"):
        raise UserError(f"accelerator {accelerator!r} is not one of auto, cpu, gpu")
    cards = torch.cuda.device_count() if accelerator != "cpu" else 0
    if accelerator in ("gpu", "cuda") and not cards:
        raise UserError(f"accelerator {accelerator}: this machine has no usable GPU; use --accelerator cpu")
    return cards or None


def _parameters(cls: type) -> frozenset[str]:
    return frozenset(inspect.signature(cls.__init__).parameters) - {"self"}  # type: ignore[misc]


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_environment(argv: list[str]) -> dict[str, Any]:
    """Everything that should stand beside the numbers."""
    facts: dict[str, Any] = {
        "command": shlex.join(["lit-gpt-dist", "bench", *argv]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": f"{_cpu_name()}, {cores()} cores usable",
        "system": platform.platform(),
        "versions": {"python": platform.python_version(), **_versions("torch", "lightning")},
        "git revision": _output(
            "git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"
        )
        or os.environ.get("LIT_GPT_DIST_REVISION"),  # of a copy without its repository
        "gpus": _output(
            "nvidia-smi",
            "--query-gpu=index,name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem",
            "--format=csv,noheader",
        ),
        "topology": _output("nvidia-smi", "topo", "-m"),
    }
    return {name: value for name, value in facts.items() if value}


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.rstrip() or None


def child_environment(on_cpu: bool, memory_fraction: float | None) -> dict[str, str]:
    """The environment of a `fit` to be measured. On a CPU a process gets one thread unless the user said otherwise, so
    that N processes have N times what one has, as N cards have."""
    environment = {name: value for name, value in os.environ.items() if name != "LIT_GPT_DIST_RUN"}
    if on_cpu:
        environment.setdefault("OMP_NUM_THREADS", "1")
    if memory_fraction is not None:
        environment["LIT_GPT_DIST_MEMORY_FRACTION"] = str(memory_fraction)
    package_root = str(Path(__file__).parents[2])  # so that a fresh process finds this very package
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (package_root, environment.get("PYTHONPATH")) if p)
    return environment


class Clocks:
    """Samples the cards' SM clocks while a case runs. Says nothing on a machine without NVIDIA cards."""

    def __init__(self, seconds_between: float = 1.0) -> None:
        self._seconds_between = seconds_between
        self._next = 0.0
        self._samples_mhz: list[int] = []
        self._handles: list[Any] = []
        with contextlib.suppress(Exception):  # no library, no driver, no card: no clocks
            import pynvml

            self._nvml = pynvml
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]

    def sample(self) -> None:
        if not self._handles or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._seconds_between
        with contextlib.suppress(Exception):  # a card that does not tell its clock
            for handle in self._handles:
                if self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu >= 50:  # an idle card's clock says nothing
                    self._samples_mhz.append(self._nvml.nvmlDeviceGetClockInfo(handle, self._nvml.NVML_CLOCK_SM))

    def take(self) -> dict[str, int] | None:
        """Median and range of the busy cards' clocks since the last call."""
        samples, self._samples_mhz = self._samples_mhz, []
        if not samples:
            return None
        return {"median": int(statistics.median(samples)), "lowest": min(samples), "highest": max(samples)}


def fit_command() -> list[str]:
    return [sys.executable, "-m", "lit_gpt_dist", "fit"]
