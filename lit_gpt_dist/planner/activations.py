"""Bytes of this project's GPT that live between forward and backward. Follows model/gpt.py line by line.

What autograd keeps, per token and layer; h width, k keys-and-values width (2·kv_heads·head width), f feed-forward
width; e bytes of a compute value, r bytes of the residual stream:

| saved by                     | tensor                                  | bytes            |
|------------------------------|-----------------------------------------|------------------|
| attention_norm               | its input, the residual stream          | r·h              |
| attention_norm               | mean and 1/σ (RMSNorm: 1/rms), fp32     | 8 (4)            |
| query_key_value              | its input, the norm's output            | e·h              |
| attention                    | queries, keys, values                   | e·(h + k)        |
| attention, RoPE              | rotated queries and keys; the values    | e·(h + k/2)      |
|                              | keep the unrotated product alive        |                  |
| attention                    | its output, shared with `output`        | e·h              |
| attention, flash             | log-sum-exp, fp32                       | 4·heads          |
| attention, not flash         | probabilities (+ dropped ones and mask) | e·heads·s (…)    |
| feed_forward_norm            | input and statistics                    | r·h + 8 (4)      |
| up (and gate)                | their input; autocast casts it for each | e·h (2·e·h)      |
| GELU; down                   | input; output                           | 2·e·f            |
| SwiGLU; down                 | gate, silu(gate), up; product           | 4·e·f            |
| dropout, when on             | two masks of one byte                   | 2·h              |

``bf16-mixed`` has everything in bf16 (r = e = 2): 32·h a GELU layer, against Korthikanti's 34·h, which has dropout masks
too. torch.autocast, which other loops and ``16-mixed`` use, keeps the residual stream and the norms' outputs in fp32 (r = 4)
and hands bf16 copies to the linear layers (e = 2): 36·h. fp32: r = e = 4. The 16-bit weight copies are not here: they are
counted with the weights.
"""

from typing import NamedTuple

from lit_gpt_dist.model.config import GPTConfig, Recompute

FP32_BYTES = 4
TOKEN_BYTES = 16  # a token and its target, 64-bit integers


class Widths(NamedTuple):
    """Bytes of a value in matrix products (``compute``) and in the residual stream."""

    compute: int
    residual: int


def widths(precision: str, autocast: bool = False) -> Widths:
    """Widths for a precision; ``autocast``: only the products are in 16 bits."""
    if precision == "32-true":
        return Widths(4, 4)
    return Widths(2, 4) if autocast else Widths(2, 2)


def norm_statistics_bytes(config: GPTConfig) -> int:
    return (2 if config.norm == "layernorm" else 1) * FP32_BYTES


def attention_saved_bytes(config: GPTConfig, context: int, width: Widths, flash: bool = True) -> float:
    """Bytes per token of one attention layer, its norm included."""
    keys_values = 2 * config.kv_heads * config.head_width
    rotated = config.width + keys_values / 2 if config.positions == "rope" else 0
    values = config.width + (config.width + keys_values) + rotated + config.width  # input, q k v, rotated, output
    if flash:
        scores = float(FP32_BYTES * config.heads)
    else:
        dropped = width.compute + 1 if config.dropout > 0 else 0
        scores = float((width.compute + dropped) * config.heads * context)
    return width.residual * config.width + norm_statistics_bytes(config) + width.compute * values + scores


def feed_forward_saved_bytes(config: GPTConfig, width: Widths) -> float:
    """Bytes per token of one feed-forward layer, its norm included."""
    inner = 2 if config.activation == "gelu" else 4
    inputs = 2 if config.activation == "swiglu" and width.compute != width.residual else 1
    values = inputs * config.width + inner * config.ff_width
    return width.residual * config.width + norm_statistics_bytes(config) + width.compute * values


def layer_saved_bytes(config: GPTConfig, context: int, width: Widths, flash: bool = True) -> float:
    """Bytes per token of one block; see the table above."""
    masks = 2 * config.width if config.dropout > 0 else 0
    return attention_saved_bytes(config, context, width, flash) + feed_forward_saved_bytes(config, width) + masks


def ends_saved_bytes(config: GPTConfig, width: Widths) -> float:
    """Bytes per token outside the blocks, logits not counted: tokens and targets, final norm, the head's input."""
    mask = config.width if config.dropout > 0 else 0
    return (
        TOKEN_BYTES
        + width.residual * config.width
        + norm_statistics_bytes(config)
        + width.compute * config.width
        + mask
    )


def layer_kept_bytes(config: GPTConfig, context: int, width: Widths, flash: bool, recompute: Recompute) -> float:
    """Bytes per token that a block keeps from its forward to its backward, under recomputation.

    ``full``: its input. ``selective``: also queries, keys and values as one product left them, attention's output and log-sum-exp
    (flash), and what `output`, up and gate left. With dropout not attention's; with dropout, or where the feed-forward is not
    wider than the model, also what `down` left.
    """
    if recompute == "none":
        return layer_saved_bytes(config, context, width, flash)
    border = float(width.residual * config.width)
    if recompute == "full":
        return border
    products = config.width + 2 * config.kv_heads * config.head_width + config.width  # q, k, v; `output`
    products += config.ff_width * (1 if config.activation == "gelu" else 2)
    products += config.width if config.dropout > 0 or config.ff_width <= config.width else 0
    attention = width.compute * config.width + FP32_BYTES * config.heads if flash and not config.dropout else 0
    return border + width.compute * products + attention


def computed_again_bytes(layer: float, kept: float, recompute: Recompute) -> float:
    """Bytes that a block has besides what it ``kept`` while backward is at it, of ``layer`` without recomputation. Under ``full``
    all of it: its input is there twice."""
    return {"none": 0.0, "selective": layer - kept, "full": layer}[recompute]


def saved_bytes(
    config: GPTConfig,
    batch: int,
    context: int,
    width: Widths,
    flash: bool = True,
    recompute: Recompute = "none",
    blocks: int | None = None,
) -> float:
    """All activations alive when the forward of one micro-batch ends, logits not counted. ``blocks`` of them are recomputed, by
    default all.

    What is computed again of the block that backward is at comes on top.
    """
    blocks = config.layers if blocks is None else blocks
    kept = blocks * layer_kept_bytes(config, context, width, flash, recompute)
    kept += (config.layers - blocks) * layer_saved_bytes(config, context, width, flash)
    return batch * context * (kept + ends_saved_bytes(config, width))


# Bytes a logit at the peak of the loss. Eager, from the operations: backward holds the log-probabilities, the gradient
# that nll_loss returns and the one log_softmax returns, each fp32. Compiled: not derived but read off measured shapes (H200,
# torch 2.11). This project's step saves the logits in the type of its products and writes their gradient into the same memory
# (gpt2-124m 64×1024 fits into 28.0 GiB with everything); a plain loop with autocast, whose model hands the logits out, needs
# more (21.2 and 40.7 GiB at 32 and 64 windows of gpt2-124m; 49.0 GiB for big 16×1024).
LOGIT_BYTES_EAGER = 12
LOGIT_BYTES_COMPILED_LOOP = 6


def logit_bytes(width: Widths, compiled: bool, other_loop: bool) -> int:
    """Bytes a logit: itself, its fp32 copies and its gradients at the peak."""
    if not compiled:
        return LOGIT_BYTES_EAGER
    return LOGIT_BYTES_COMPILED_LOOP if other_loop else width.compute
