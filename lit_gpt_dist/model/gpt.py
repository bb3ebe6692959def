"""A decoder-only GPT. Runs unchanged on one CPU; knows nothing of ranks or training.

Every layer computes in the type of its input and casts its weights to that, so activations of one type (``compute_dtype``)
meet weights of another. Weights stored in fp32 and activations in bf16 is what FSDP2's mixed precision does too.

Shapes: batch B, sequence T, width W, query heads H, key/value heads K, head width D = W / H, vocabulary V.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lit_gpt_dist.model.config import GPTConfig

# What takes long to compute again. Attention by each kernel of scaled_dot_product_attention, but for the one that is made of others
aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default}
ATTENTIONS = {
    getattr(aten, f"_scaled_dot_product_{kernel}").default
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
}

Phases = tuple[Tensor, Tensor]  # cosine and sine of the rotary angles, (T, D) each, at least fp32


class LayerCache:
    """Keys and values that one attention layer has seen, for generation: (B, K, capacity, D) each."""

    def __init__(self, batch: int, config: GPTConfig, device: torch.device, dtype: torch.dtype) -> None:
        shape = (batch, config.kv_heads, config.context, config.head_width)
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + keys.size(2)
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class Linear(nn.Linear):
    """In the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class LayerNorm(nn.LayerNorm):
    """In the type of its input; mean and variance are fp32 in any case."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """In the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal self-attention with grouped queries, through ``scaled_dot_product_attention``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = config.heads, config.kv_heads, config.head_width
        self.dropout = config.dropout
        rows = (config.heads + 2 * config.kv_heads) * config.head_width  # queries, then keys, then values
        self.query_key_value = Linear(config.width, rows, bias=config.bias)
        self.output = Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor, phases: Phases | None, cache: LayerCache | None = None) -> Tensor:
        batch, sequence, width = x.shape
        rows = self.query_key_value(x).view(batch, sequence, -1, self.head_width).transpose(1, 2)
        query, key, value = rows.split((self.heads, self.kv_heads, self.kv_heads), dim=1)  # (B, H or K, T, D)
        if phases is not None:
            query, key = rotate(query, phases), rotate(key, phases)
        causal = True
        if cache is not None:
            causal = cache.length == 0  # later calls bring one token, which may see everything before it
            key, value = cache.append(key, value)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=causal,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.kv_heads != self.heads,
        )  # (B, H, T, D)
        return self.output(mixed.transpose(1, 2).reshape(batch, sequence, width))


class FeedForward(nn.Module):
    """Two linear layers around GELU (tanh form, as GPT-2's), or the gated SwiGLU (Shazeer 2020)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.width, config.ff_width, bias=config.bias)
        self.gate = Linear(config.width, config.ff_width, bias=config.bias) if config.activation == "swiglu" else None
        self.down = Linear(config.ff_width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm transformer block. ``recompute``: what of its activations is computed again in backward instead of being kept:
    ``none``, ``selective``, which is all but what products and attention left, or ``full``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)
        self.recompute = "none"

    def forward(self, x: Tensor, phases: Phases | None, cache: LayerCache | None = None) -> Tensor:
        if self.recompute == "none" or not (self.training and torch.is_grad_enabled()):
            return self.transform(x, phases, cache)
        how: dict[str, Any] = dict(use_reentrant=False)
        how["preserve_rng_state"] = self.dropout.p > 0  # without dropout nothing random is recomputed
        if self.recompute == "selective":
            how["context_fn"] = partial(create_selective_checkpoint_contexts, self._keeps())
        return checkpoint(self.transform, x, phases, **how)

    def _keeps(self) -> Callable[..., CheckpointPolicy]:
        if self.dropout.p > 0:
            return keeps_products
        down = self.feed_forward.down
        # a compiler leaves out by itself what backward does not need
        told_apart = down.in_features > down.out_features and not torch.compiler.is_compiling()
        return keeps_all_but_last if told_apart else keeps_all

    def transform(self, x: Tensor, phases: Phases | None, cache: LayerCache | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), phases, cache))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


# Whether selective recomputation keeps an operation's result. Functions of the module: the compiler follows no others here.


def keeps_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """With dropout: every operation that draws random numbers must run again, or those behind it would draw others."""
    return CheckpointPolicy.MUST_SAVE if operation in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def keeps_all(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Products and attention."""
    kept = operation in PRODUCTS or operation in ATTENTIONS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def keeps_all_but_last(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Not the block's last product, whose result backward does not need: the only one to give less than it is given, where the
    feed-forward is wider than the model."""
    if operation in PRODUCTS and args[-1].size(0) > args[-1].size(1):  # its weights, transposed
        return CheckpointPolicy.PREFER_RECOMPUTE
    return keeps_all(context, operation)


class GPT(nn.Module):
    """Embedding, blocks, final norm, output head.

    ``compute_dtype`` is the activations' type; None: the weights'.

    Parameters come uninitialised from ``torch.nn``'s defaults; ``initialize`` gives them their values, so that a model
    built on the meta device and one built in place end up the same.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width) if config.positions == "learned" else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = make_norm(config)
        self.head = Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        reduction: str = "mean",
        caches: list[LayerCache] | None = None,
    ) -> Tensor:
        """Logits, or the loss against ``targets``.

        Args:
            tokens: (B, T) integers below the vocabulary size, T at most the context.
            targets: (B, T) the token after each; with them the cross-entropy in nats is returned.
            reduction: ``mean`` over all tokens (a scalar), or ``window``: the mean of each window, (B,).
            caches: one per block, for generation; the tokens follow those already cached.

        Returns:
            Logits (B, T, V), or the loss, computed in at least fp32.
        """
        start = caches[0].length if caches else 0
        positions = torch.arange(start, start + tokens.size(1), device=tokens.device)  # (T,)
        # cast once: head and embedding of a tied model add their gradients in one type, also where it was gathered in that
        table = self._compute(self.embedding.weight)
        x = self.dropout(self.embed(tokens, positions, table))
        phases = self.phases(positions, x.dtype) if self.config.positions == "rope" else None
        for index, block in enumerate(self.blocks):
            x = block(x, phases, caches[index] if caches else None)
        return self.readout(x, table if self.config.tied else self.head.weight, targets, reduction)

    def _compute(self, x: Tensor) -> Tensor:
        return x if self.compute_dtype is None else x.to(self.compute_dtype)

    def embed(self, tokens: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """The first block's input (B, T, W), without dropout, from the embedding's ``table`` (V, W): one piece, as ``readout``."""
        x = lookup(tokens, table)
        return x if self.positions is None else x + lookup(positions, self._compute(self.positions.weight))

    def phases(self, positions: Tensor, dtype: torch.dtype) -> Phases:
        """One piece too: compiled, sines have other last bits."""
        return rotary_phases(positions, self.config, dtype)

    def readout(self, x: Tensor, head: Tensor, targets: Tensor | None, reduction: str) -> Tensor:
        """From the last block's output (B, T, W) and the head's weights (V, W) to logits or loss: one piece, so that it can be
        compiled as one."""
        x, head = self.norm(x), head.to(x.dtype)
        if targets is not None and torch.compiler.is_compiling():
            return compiled_cross_entropy(x, head, targets, reduction)
        logits = F.linear(x, head)  # (B, T, V)
        return logits if targets is None else cross_entropy(logits, targets, reduction)

    def make_caches(self, batch: int, dtype: torch.dtype) -> list[LayerCache]:
        device = self.embedding.weight.device
        return [LayerCache(batch, self.config, device, dtype) for _ in self.blocks]


def lookup(indices: Tensor, table: Tensor) -> Tensor:
    """Rows of ``table``, whose gradient adds up in at least fp32; by itself PyTorch adds in the table's type on a CPU."""
    if not torch.is_grad_enabled():  # generation looks up a token at a time: no copy of the table for that
        return F.embedding(indices, table)
    return F.embedding(indices, table.to(torch.promote_types(table.dtype, torch.float32))).to(table.dtype)


def make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.width, eps=config.norm_eps)
    return LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Mean negative log-likelihood in nats, in fp32 or wider; ``window`` gives one mean per window."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if reduction == "mean":
        return F.cross_entropy(wide.flatten(0, 1), targets.flatten())
    return F.cross_entropy(wide.transpose(1, 2), targets, reduction="none").mean(dim=1)


def compiled_cross_entropy(x: Tensor, head: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """``cross_entropy`` of the logits ``x`` @ ``head``ᵀ, written so that the compiler needs nothing as large as the logits but them.

    The target's logit is found by comparing, since the gradient of a gather would be scattered into zeros; and rows of logits
    start at multiples of 16 bytes, without which products are several times slower on a GPU.
    """
    vocabulary = head.size(0)
    if vocabulary % 8:  # by nothing it would still be a copy
        head = F.pad(head, (0, 0, 0, -vocabulary % 8))
    logits = F.linear(x, head)[..., :vocabulary]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    is_target = torch.arange(vocabulary, device=targets.device) == targets.unsqueeze(-1)  # (B, T, V)
    losses = wide.logsumexp(dim=-1) - torch.where(is_target, wide, 0).sum(dim=-1)  # (B, T)
    return losses.mean() if reduction == "mean" else losses.mean(dim=1)


def rotary_phases(positions: Tensor, config: GPTConfig, dtype: torch.dtype) -> Phases:
    """Cosine and sine of position × base^(−2i/D) (Su et al. 2021), (T, D) each, the two halves alike.

    Computed, not stored: a buffer would be rounded when the model is cast to 16 bits, and in 16 bits positions beyond
    256 are no longer told apart.
    """
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, config.head_width, 2, device=positions.device, dtype=wide) / config.head_width
    angles = positions.to(wide)[:, None] * config.rope_base**-exponents  # (T, D / 2)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, phases: Phases) -> Tensor:
    """Turns each pair (i, i + D/2) of ``x`` (B, heads, T, D) by its phase, in the phases' precision."""
    cosine, sine = phases
    first, second = x.chunk(2, dim=-1)
    return (x * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)
