"""Joining the process group again after torchrun has restarted the ranks."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def restarts() -> int:
    """How often torchrun has restarted this job's ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def join_after_restart(backend: str, device: torch.device, timeout: timedelta | None) -> None:
    """Initialises the process group under keys of this attempt's own.

    torchrun keeps its store over a restart, and further groups (torch 2.13, gloo) find in it the addresses that the ended
    processes had: they try to connect to those, and fail.
    """
    store, rank, world_size = next(iter(dist.rendezvous("env://")))  # type: ignore[operator]
    attempt = dist.PrefixStore(f"lit_gpt_dist/attempt-{restarts()}", store)
    on_gpu: dict[str, Any] = {"device_id": device} if device.type != "cpu" else {}
    if timeout is not None:
        attempt.set_timeout(timeout)
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=world_size, timeout=timeout, **on_gpu)
