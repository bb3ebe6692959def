"""Seconds that a micro-batch and an optimizer step take on one card. Knows nothing of other cards.

Two ways, named in every result:

* *calibrated*: rates that `doctor --measure` found on this machine, applied to counted work: matrix products, attention,
  memory traffic of everything else, kernel launches;
* *assumed*: model FLOPs over peak × an assumed MFU. A device whose peak is not known gives no time at all.
"""

from dataclasses import dataclass
from typing import NamedTuple

from lit_gpt_dist.model.config import GPTConfig, Recompute
from lit_gpt_dist.model.flops import flops_per_token
from lit_gpt_dist.planner.activations import Widths

RECOMPUTE_FACTOR = (
    4 / 3
)  # one more forward: 8N instead of 6N; wall time about +30% (of products see products_recomputed)
ATTENTION_REDONE = (
    3.5 / 3.0
)  # flash attention computes the scores again in backward (Dao et al. 2022): 7 products for 6


@dataclass(frozen=True)
class Rates:
    """What one device achieves, measured. Seconds and bytes/s; ``matmul`` maps the inner width to FLOP/s, ascending."""

    matmul: tuple[tuple[float, float], ...]
    attention_flops: float
    copy_bandwidth: float  # bytes read plus bytes written per second
    launch_seconds: float  # host time of one eager operation, forward and backward averaged
    kernel_seconds: float  # device time of a kernel with almost nothing to do, inside a graph

    def matmul_at(self, width: float) -> float:
        """FLOP/s of products with this inner width: straight between measured widths, beyond them the end's."""
        below = [point for point in self.matmul if point[0] <= width]
        above = [point for point in self.matmul if point[0] > width]
        if not below or not above:
            return (below or above)[-1 if below else 0][1]
        (x0, y0), (x1, y1) = below[-1], above[0]
        return y0 + (y1 - y0) * (width - x0) / (x1 - x0)


class MicroTime(NamedTuple):
    """Seconds of one micro-batch, forward and backward."""

    products: float
    attention: float
    traffic: float
    kernels: float  # starting and ending kernels, on the device
    launches: float  # host time; hidden while the device has more to do
    total: float


# Bytes that pointwise kernels read and write per token and layer, forward and backward, matrix products and attention
# excluded (their measured rates contain their traffic). Counted for a pre-norm GELU block with a residual stream of r and
# compute values of e bytes, h width, f feed-forward width.
def layer_traffic_bytes(config: GPTConfig, width: Widths, compiled: bool) -> float:
    """Compiled: each residual add is fused with the norm after it. Eager: every operation reads and writes by itself."""
    e, r, h, f = width.compute, width.residual, config.width, config.ff_width
    activation = (2 if config.activation == "gelu" else 4) * e * f + (3 if config.activation == "gelu" else 6) * e * f
    joined = 2 * e * (h + 2 * config.kv_heads * config.head_width)  # gradients of q, k, v put side by side
    if compiled:
        forward = 2 * (r + e + r + e) * h  # add reads r and e, writes r; the norm writes e
        backward = 2 * (e + r + r + r + e) * h  # reads a gradient, the input, the residual gradient; writes both widths
    else:
        cast = r + e if r != e else 0
        forward = 2 * ((r + r) + cast + (r + e + r)) * h  # norm, cast, add
        norm_backward = cast + 3 * r + 2 * r  # input gradient, then the weight's gradient over the same two inputs
        backward = 2 * (norm_backward + 3 * r + cast) * h  # and the sum with the residual's gradient
    return forward + backward + activation + joined


LOSS_TRAFFIC_COMPILED = (
    2 + 2 + 2 + 2 + 2
)  # write logits, two reductions, read again, write their gradient: 2 bytes each
LOSS_TRAFFIC_EAGER = 6 + 12 + 12 + 16 + 6  # cast, log_softmax, nll backward, softmax backward, cast back: fp32 mostly
# Launched by the host a layer, forward and backward; see layer_traffic_bytes
OPERATIONS_EAGER, OPERATIONS_COMPILED = 48, 22
# What the device runs for the 22: a trace of gpt2-124m on an H200 has 660 kernels a micro-batch. A product split along its
# inner width brings a memset and a sum.
KERNELS_COMPILED = 52
OPERATIONS_ENDS = 30  # embedding, final norm, head, loss


def micro_seconds(
    config: GPTConfig,
    batch: int,
    context: int,
    width: Widths,
    rates: Rates,
    execution: str,
    recompute: Recompute,
    share: float = 1.0,
) -> MicroTime:
    """Calibrated time of one micro-batch; ``execution`` is eager, compiled or graph (no launches left); ``share`` of the blocks is
    recomputed."""
    tokens = batch * context
    compiled = execution != "eager"
    once_more = recompute_factor(share)
    again = once_more if recompute == "full" else 1.0
    attention_again = once_more if recompute == "selective" and config.dropout > 0 else again
    pointwise_again = once_more if recompute != "none" else 1.0
    head = 6.0 * config.vocab_size * config.width
    flops = flops_per_token(config, context)
    products_again = 1 + share * products_recomputed(config) / 3 if recompute == "full" else 1.0
    products = tokens * ((flops.six_n - head) * products_again + head) / rates.matmul_at(config.width)
    attention = (
        tokens * (flops.half_attention - flops.six_n) * ATTENTION_REDONE * attention_again / rates.attention_flops
    )
    loss = config.vocab_size * (LOSS_TRAFFIC_COMPILED if compiled else LOSS_TRAFFIC_EAGER)
    pointwise = tokens * (config.layers * layer_traffic_bytes(config, width, compiled) * pointwise_again + loss)
    casts = (
        12 * config.matmul_parameters() if width.compute != width.residual else 0
    )  # weights to 16 bits, gradients back
    traffic = (pointwise + casts) / rates.copy_bandwidth
    operations = config.layers * (OPERATIONS_COMPILED if compiled else OPERATIONS_EAGER) * again + OPERATIONS_ENDS
    run = config.layers * (KERNELS_COMPILED if compiled else OPERATIONS_EAGER) * again + OPERATIONS_ENDS
    kernels = run * rates.kernel_seconds
    launches = 0.0 if execution == "graph" else operations * rates.launch_seconds
    device = products + attention + traffic + kernels
    return MicroTime(products, attention, traffic, kernels, launches, max(device, launches))


def recompute_factor(share: float) -> float:
    """By how much a block's forward and backward become more, over all blocks, where ``share`` of them are recomputed."""
    return 1 + share * (RECOMPUTE_FACTOR - 1)


def products_recomputed(config: GPTConfig) -> float:
    """Share of a block's forward products that recomputation repeats: all but the last, whose result backward does not need
    (torch.utils.checkpoint stops there, and a compiler drops it)."""
    block = (config.matmul_parameters() - config.vocab_size * config.width) / config.layers
    return 1 - config.width * config.ff_width / block


def accumulation_seconds(gradient_bytes: float, copy_bandwidth: float) -> float:
    """A further micro-batch's gradients are added to those there are: two reads and a write of ``gradient_bytes``."""
    return 3 * gradient_bytes / copy_bandwidth


BLOCK_TENSORS = 6  # parameters of a block: four matrices and two norms


def bucket_seconds(gradient_bytes: float, layers: int, rates: Rates) -> float:
    """DDP copies gradients into its buckets, one by one: a read and a write, and a kernel for each."""
    return 2 * gradient_bytes / rates.copy_bandwidth + BLOCK_TENSORS * layers * rates.kernel_seconds


def averaging_seconds(
    parameters: float, gradient_width: float, sent_width: float | None, copy_bandwidth: float
) -> float:
    """Of packing gradients when backward is over and, where two ranks exchange them in ``sent_width`` bytes each, of adding up
    both; else they are divided and reduced where they were packed."""
    if sent_width is None:
        return parameters * 4 * gradient_width / copy_bandwidth
    return parameters * (2 * gradient_width + 3 * sent_width) / copy_bandwidth


def optimizer_seconds(parameters: float, state_bytes: float, weight_bytes: float, copy_bandwidth: float) -> float:
    """Clipping reads, then scales the gradients; a fused optimizer reads all state and writes weights and moments.

    ``state_bytes`` a parameter (weights, gradients, moments); gradients are ``weight_bytes`` wide.
    """
    clipping = 3 * weight_bytes
    update = 2 * state_bytes - weight_bytes  # everything read, all but the gradients written
    return parameters * (clipping + update) / copy_bandwidth


def assumed_micro_seconds(
    flops: float, tokens: float, peak_flops: float, mfu: float, recompute: Recompute, share: float = 1.0
) -> float:
    """Model FLOPs over peak × MFU; full recomputation costs one more forward on top. What selective costs is no FLOPs to speak of."""
    return flops * tokens / (peak_flops * mfu) * (recompute_factor(share) if recompute == "full" else 1.0)
