"""Times torch.distributed's collectives over sizes, inside ranks that torchrun or its API started.

Communicates: that is what it measures. Every rank runs the same calls in the same order; the time of a call is that of
the slowest rank.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lit_gpt_dist.doctor.bandwidth import COLLECTIVES, algorithm_bandwidth, bus_bandwidth
from lit_gpt_dist.doctor.rates import synchronize

ROUNDS, WARM_UP_CALLS = 5, 2
TIMEOUT = timedelta(seconds=120)
ELEMENT_BYTES = 4
ROUND_BYTES = {"nccl": 2e9, "gloo": 2e7}  # what one round moves, roughly: enough to time, little enough to wait for
MOST_CALLS = 50
IDENTITY_ELEMENTS = 1 << 16
# torch 2.13 renamed these two; 2.11 has the old names only
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Timing:
    """One collective at one size. ``size_bytes``: the larger buffer. ``error``: the backend does not have it."""

    backend: str
    collective: str
    ranks: int
    size_bytes: int
    seconds: float | None
    error: str = ""

    @property
    def algbw(self) -> float | None:
        return None if self.seconds is None else algorithm_bandwidth(self.size_bytes, self.seconds)

    @property
    def busbw(self) -> float | None:
        return (
            None if self.seconds is None else bus_bandwidth(self.collective, self.size_bytes, self.seconds, self.ranks)
        )


@dataclass(frozen=True)
class Identity:
    """All-reduce against reduce-scatter followed by all-gather: largest difference over largest value; None: not supported."""

    backend: str
    ranks: int
    relative_difference: float | None


@dataclass(frozen=True)
class Sweep:
    timings: tuple[Timing, ...]
    identities: tuple[Identity, ...]


def collective_call(name: str, size_bytes: int, ranks: int, device: torch.device) -> tuple[Callable[[], object], int]:
    """The call on zeros, and the bytes of its larger buffer: a multiple of the ranks."""
    elements = max(1, size_bytes // ELEMENT_BYTES // ranks) * ranks
    whole, part = torch.zeros(elements, device=device), torch.zeros(elements // ranks, device=device)
    other = torch.zeros(elements if name == "all_to_all" else 0, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: all_gather(whole, part),
        "reduce_scatter": lambda: reduce_scatter(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
    }
    return calls[name], elements * ELEMENT_BYTES


def slowest(value: float, device: torch.device) -> float:
    held = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return float(held.item())


def time_call(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds of one call: median of rounds on this rank, then the slowest rank."""
    for _ in range(WARM_UP_CALLS):
        call()
    rounds = []
    for _ in range(ROUNDS):
        synchronize(device)
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        rounds.append((time.perf_counter() - start) / calls)
    return slowest(statistics.median(rounds), device)


def time_collective(backend: str, name: str, size_bytes: int, device: torch.device) -> Timing:
    ranks = dist.get_world_size()
    call, larger = collective_call(name, size_bytes, ranks, device)
    calls = max(2, min(MOST_CALLS, int(ROUND_BYTES[backend] / larger)))
    try:
        return Timing(backend, name, ranks, larger, time_call(call, calls, device))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if isinstance(error, dist.DistBackendError | torch.OutOfMemoryError):
            raise  # a failing link or a full device is no missing feature, and other ranks would wait for ever
        return Timing(backend, name, ranks, larger, None, f"not supported by {backend}: {str(error).splitlines()[0]}")


def check_identity(backend: str, device: torch.device) -> Identity:
    """In values: all-reduce = all-gather of reduce-scatter. Sums in another order may differ by rounding."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(IDENTITY_ELEMENTS * ranks, generator=torch.Generator().manual_seed(rank)).to(device)
    summed = x.clone()
    dist.all_reduce(summed)
    part, gathered = torch.empty(IDENTITY_ELEMENTS, device=device), torch.empty_like(x)
    try:
        reduce_scatter(part, x)
        all_gather(gathered, part)
    except (RuntimeError, NotImplementedError, ValueError):
        return Identity(backend, ranks, None)
    difference = relative_difference(summed, gathered)
    return Identity(backend, ranks, slowest(difference, device))


def relative_difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max())


def sweep(backend: str, sizes: list[int], device: torch.device) -> Sweep:
    timings = tuple(time_collective(backend, name, size, device) for name in COLLECTIVES for size in sizes)
    return Sweep(timings, (check_identity(backend, device),))


def measure_in_ranks(backend: str, sizes: list[int]) -> Sweep:
    """Body of one rank: RANK, LOCAL_RANK, WORLD_SIZE and the meeting point are in the environment."""
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)  # ranks share the cores; gloo moves bytes, it does not compute much
        dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        found = sweep(backend, sizes, device)
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()
