"""Floating-point operations per trained token. Pure arithmetic on a ``GPTConfig``.

Three counts are in use; a figure without its count's name says nothing:

* ``6N``: 6 per matmul weight (2 forward, 4 backward);
* ``palm``: 6N + 12·L·h·s, full attention (Chowdhery et al. 2022, appendix B);
* ``half_attention``: 6N + 6·L·h·s, what a causal kernel computes.

N counts matmul weights, the output head included, embeddings not. Recomputation is not counted: these are model FLOPs.
"""

from typing import NamedTuple

from lit_gpt_dist.model.config import GPTConfig


class FlopsPerToken(NamedTuple):
    six_n: int
    palm: int
    half_attention: int


def flops_per_token(config: GPTConfig, context: int | None = None) -> FlopsPerToken:
    """FLOPs of forward and backward for one token of a window of ``context`` tokens (default: the model's)."""
    six_n = 6 * config.matmul_parameters()
    attention = 6 * config.layers * config.width * (context or config.context)
    return FlopsPerToken(six_n, six_n + 2 * attention, six_n + attention)


def model_flops_utilization(flops_per_token: float, tokens_per_second: float, peak_flops: float, devices: int) -> float:
    """MFU as a share of 1 (facts: FLOPs per token × tokens/s / (P × devices))."""
    return flops_per_token * tokens_per_second / (peak_flops * devices)
