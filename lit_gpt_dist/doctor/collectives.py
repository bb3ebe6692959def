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
MOST_CALLS = 20
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
    identity: Identity


@dataclass(frozen=True)
class Ring:
    """A group of all ranks under one backend, and where its tensors live."""

    backend: str
    group: dist.ProcessGroup
    device: torch.device


def collective_call(name: str, size_bytes: int, ring: Ring) -> tuple[Callable[[], object], int]:
    """The call on zeros, and the bytes of its larger buffer: a multiple of the ranks."""
    ranks, device, group = dist.get_world_size(), ring.device, ring.group
    elements = max(1, size_bytes // ELEMENT_BYTES // ranks) * ranks
    whole, part = torch.zeros(elements, device=device), torch.zeros(elements // ranks, device=device)
    other = torch.zeros(elements if name == "all_to_all" else 0, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: all_gather(whole, part, group=group),
        "reduce_scatter": lambda: reduce_scatter(part, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    return calls[name], elements * ELEMENT_BYTES


def slowest(value: float, ring: Ring) -> float:
    held = torch.tensor([value], dtype=torch.float64, device=ring.device)
    dist.all_reduce(held, op=dist.ReduceOp.MAX, group=ring.group)
    return float(held.item())


def time_call(call: Callable[[], object], calls: int, ring: Ring) -> float:
    """Seconds of one call: median of rounds on this rank, then the slowest rank."""
    for _ in range(WARM_UP_CALLS):
        call()
    rounds = []
    for _ in range(ROUNDS):
        synchronize(ring.device)
        dist.barrier(group=ring.group)
        synchronize(ring.device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(ring.device)
        rounds.append((time.perf_counter() - start) / calls)
    return slowest(statistics.median(rounds), ring)


def time_collective(ring: Ring, name: str, size_bytes: int) -> Timing:
    backend, ranks = ring.backend, dist.get_world_size()
    call, larger = collective_call(name, size_bytes, ring)
    calls = max(2, min(MOST_CALLS, int(ROUND_BYTES[backend] / larger)))
    try:
        return Timing(backend, name, ranks, larger, time_call(call, calls, ring))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if isinstance(error, dist.DistBackendError | torch.OutOfMemoryError):
            raise  # a failing link or a full device is no missing feature, and other ranks would wait for ever
        return Timing(backend, name, ranks, larger, None, f"not supported by {backend}: {str(error).splitlines()[0]}")


def check_identity(ring: Ring) -> Identity:
    """In values: all-reduce = all-gather of reduce-scatter. Sums in another order may differ by rounding."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = torch.randn(IDENTITY_ELEMENTS * ranks, generator=torch.Generator().manual_seed(rank)).to(ring.device)
    summed = x.clone()
    dist.all_reduce(summed, group=ring.group)
    part, gathered = torch.empty(IDENTITY_ELEMENTS, device=ring.device), torch.empty_like(x)
    try:
        reduce_scatter(part, x, group=ring.group)
        all_gather(gathered, part, group=ring.group)
    except (RuntimeError, NotImplementedError, ValueError):
        return Identity(ring.backend, ranks, None)
    return Identity(ring.backend, ranks, slowest(relative_difference(summed, gathered), ring))


def relative_difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max())


def sweep(ring: Ring, sizes: list[int]) -> Sweep:
    timings = tuple(time_collective(ring, name, size) for name in COLLECTIVES for size in sizes)
    return Sweep(timings, check_identity(ring))


def backend_device(backend: str) -> torch.device:
    """This rank's GPU for NCCL; the CPU for gloo."""
    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def measure_in_ranks(sizes: dict[str, list[int]]) -> list[Sweep]:
    """Body of one rank, a sweep per backend. RANK, LOCAL_RANK, WORLD_SIZE and the meeting point are in the environment.

    The first backend makes the default group; a second one is a group beside it, since a second default group would meet
    the first one's traces in torchrun's store.
    """
    torch.set_num_threads(1)  # ranks share the cores; gloo moves bytes, it does not compute much
    first, *others = sorted(sizes, reverse=True)  # nccl before gloo
    device = backend_device(first)
    dist.init_process_group(first, timeout=TIMEOUT, device_id=device if first == "nccl" else None)
    try:
        assert dist.group.WORLD is not None
        rings = [Ring(first, dist.group.WORLD, device)]
        rings += [Ring(name, dist.new_group(backend=name, timeout=TIMEOUT), backend_device(name)) for name in others]
        found = [sweep(ring, sizes[ring.backend]) for ring in rings]
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()
