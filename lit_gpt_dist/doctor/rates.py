"""Measures one device: matrix products, attention, copies, launches. The figures that `plan` calls calibration.

Runs the same on a GPU (bf16) and on a CPU (fp32, small); knows nothing of other ranks.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_gpt_dist.planner.compute import ATTENTION_REDONE, Rates

WARM_UP_CALLS, ROUNDS = 3, 5
ROUND_SECONDS = {"cuda": 0.08, "cpu": 0.02}
MOST_CALLS = 200


class Sizes(NamedTuple):
    """What is measured: small on a CPU, so that it takes seconds there too."""

    tokens: int
    widths: tuple[int, ...]
    attention: tuple[int, int, int, int]  # batch, heads, sequence, head width
    copy_bytes: int


GPU_SIZES = Sizes(8192, (384, 768, 1536, 2048, 4096, 8192), (8, 12, 1024, 64), 2**30)
CPU_SIZES = Sizes(256, (64, 128, 256), (2, 4, 128, 64), 2**26)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_per_call(work: Callable[[], object], device: torch.device) -> float:
    """Median of several rounds of back-to-back calls, warmed up, the device waited for around each round."""
    for _ in range(WARM_UP_CALLS):
        work()
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    calls = max(1, min(MOST_CALLS, int(ROUND_SECONDS[device.type] / max(time.perf_counter() - start, 1e-7))))
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        synchronize(device)
        rounds.append((time.perf_counter() - start) / calls)
    return statistics.median(rounds)


def value_type(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def layer_product_rate(width: int, tokens: int, device: torch.device) -> float:
    """FLOP/s over a GPT layer's products, forward and both backward ones: q/k/v, output, up, down at 4 × width."""
    dtype, seconds, flops = value_type(device), 0.0, 0.0
    for inner, outer in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
        x = torch.randn(tokens, inner, device=device, dtype=dtype)
        weight = torch.randn(outer, inner, device=device, dtype=dtype)
        gradient = torch.randn(tokens, outer, device=device, dtype=dtype)
        products: tuple[Callable[[], Tensor], ...] = (
            lambda x=x, weight=weight: x @ weight.T,  # type: ignore[misc]
            lambda gradient=gradient, weight=weight: gradient @ weight,  # type: ignore[misc]
            lambda gradient=gradient, x=x: gradient.T @ x,  # type: ignore[misc]
        )
        seconds += sum(seconds_per_call(product, device) for product in products)
        flops += 3 * 2 * tokens * inner * outer
    return flops / seconds


def square_product_rate(size: int, device: torch.device) -> float:
    """FLOP/s of one size³ product: the ceiling people quote."""
    a = torch.randn(size, size, device=device, dtype=value_type(device))
    b = torch.randn(size, size, device=device, dtype=value_type(device))
    return 2 * size**3 / seconds_per_call(lambda: a @ b, device)


def attention_rate(shape: tuple[int, int, int, int], device: torch.device) -> float:
    """FLOP/s of causal attention, forward and backward, counted as the planner counts it."""
    batch, heads, sequence, head_width = shape
    query, key, value = (
        torch.randn(*shape, device=device, dtype=value_type(device), requires_grad=True) for _ in range(3)
    )
    gradient = torch.randn(*shape, device=device, dtype=value_type(device))

    def both() -> None:
        F.scaled_dot_product_attention(query, key, value, is_causal=True).backward(gradient)

    flops = 6.0 * heads * head_width * sequence * (batch * sequence) * ATTENTION_REDONE
    return flops / seconds_per_call(both, device)


def copy_bandwidth(size_bytes: int, device: torch.device) -> float:
    """Bytes read plus bytes written per second of a copy on the device."""
    source = torch.empty(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / seconds_per_call(lambda: target.copy_(source), device)


def host_to_device_bandwidth(device: torch.device, size_bytes: int = 2**28) -> float | None:
    """Bytes/s from pinned host memory, or None on a CPU: there is nowhere to send them."""
    if device.type != "cuda":
        return None
    source = torch.empty(size_bytes // 4, pin_memory=True)
    target = torch.empty_like(source, device=device)
    return size_bytes / seconds_per_call(lambda: target.copy_(source, non_blocking=True), device)


class TinyBlock(nn.Module):
    """A pre-norm feed-forward so small that only launching it takes time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


TINY_BLOCKS = 8
# Forward: norm, up, GELU, down, add, and under autocast three casts (input and two weights); backward about twice that.
TINY_OPERATIONS, TINY_OPERATIONS_CAST = 15, 24


def launch_seconds(device: torch.device) -> float:
    """Host time per eager operation of a forward and a backward whose kernels have nothing to do."""
    model = nn.Sequential(*(TinyBlock() for _ in range(TINY_BLOCKS))).to(device)
    x = torch.randn(4, 16, device=device)
    cast = device.type == "cuda"

    def both() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=cast):
            loss = model(x).sum()
        loss.backward()
        model.zero_grad()

    return seconds_per_call(both, device) / (TINY_BLOCKS * (TINY_OPERATIONS_CAST if cast else TINY_OPERATIONS))


def kernel_seconds(device: torch.device, kernels: int = 500) -> float:
    """Device time from one almost empty kernel to the next inside a CUDA graph; 0 on a CPU, which has no such gap."""
    if device.type != "cuda":
        return 0.0
    x = torch.zeros(1024, device=device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        x.add_(1.0)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(kernels):
            x.add_(1.0)
    return seconds_per_call(graph.replay, device) / kernels


def measure_rates(device: torch.device) -> Rates:
    """All rates of one device; a minute at most."""
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    return Rates(
        matmul=tuple((float(width), layer_product_rate(width, sizes.tokens, device)) for width in sizes.widths),
        attention_flops=attention_rate(sizes.attention, device),
        copy_bandwidth=copy_bandwidth(sizes.copy_bytes, device),
        launch_seconds=launch_seconds(device),
        kernel_seconds=kernel_seconds(device),
    )
