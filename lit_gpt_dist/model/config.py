"""The shape of a GPT, and the presets. Numbers only: imports no torch, so the planner starts in a blink."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from lit_gpt_dist.errors import UserError

Norm = Literal["layernorm", "rmsnorm"]
Positions = Literal["learned", "rope"]
Activation = Literal["gelu", "swiglu"]
Recompute = Literal["none", "selective", "full"]  # what of a block is computed again in backward: model/gpt.py, Block


@dataclass(frozen=True)
class GPTConfig:
    """A decoder-only GPT. ``__post_init__`` refuses a shape that cannot be built.

    ``kv_heads`` and ``ff_width`` of 0 mean the usual: as many as ``heads``; 4 × width (GELU) or 8/3 × width rounded up
    to a multiple of 64 (SwiGLU).
    """

    layers: int = 2
    heads: int = 2
    width: int = 64
    context: int = 64  # tokens a window feeds; the longest sequence the model can see
    vocab_size: int = 256  # rows of the embedding and of the output head
    kv_heads: int = 0  # key/value heads of grouped-query attention
    ff_width: int = 0  # hidden width of the feed-forward
    norm: Norm = "layernorm"
    positions: Positions = "learned"
    activation: Activation = "gelu"
    tied: bool = True  # the output head shares the embedding's weights
    bias: bool = False  # biases in linear layers and norms
    dropout: float = 0.0
    norm_eps: float = 1e-5
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "context", "vocab_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}, but must be at least 1")
        for name in ("kv_heads", "ff_width"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}, but must be at least 1 (or 0 for the usual)")
        if self.width % self.heads:
            near = self.width // self.heads * self.heads or self.heads
            raise UserError(
                f"width {self.width} is not divisible by {self.heads} heads; use a width of {near} or {near + self.heads}"
            )
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.heads % self.kv_heads:
            fits = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise UserError(f"kv_heads {self.kv_heads} does not divide {self.heads} heads; use one of {fits}")
        if self.ff_width == 0:
            usual = 4 * self.width if self.activation == "gelu" else -(-8 * self.width // 3 // 64) * 64
            object.__setattr__(self, "ff_width", usual)
        if self.positions == "rope" and self.head_width % 2:
            raise UserError(
                f"rope turns pairs, but the head width {self.width}/{self.heads} = {self.head_width} is odd; change width or heads"
            )
        for name, choices in (("norm", Norm), ("positions", Positions), ("activation", Activation)):
            allowed = choices.__args__  # type: ignore[attr-defined]
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} {getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"dropout {self.dropout} is outside 0 ≤ dropout < 1")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def matmul_parameters(self) -> int:
        """Weights that take part in matrix products, the output head included and embeddings not (facts: N of 6N)."""
        kv_width = self.kv_heads * self.head_width
        attention = 2 * self.width * self.width + 2 * self.width * kv_width  # q and output, k and v
        feed_forward = (2 if self.activation == "gelu" else 3) * self.width * self.ff_width
        return self.layers * (attention + feed_forward) + self.vocab_size * self.width

    def parameters(self) -> int:
        """All parameters, each shared one counted once."""
        norm_vectors = 2 if self.norm == "layernorm" and self.bias else 1
        norms = (2 * self.layers + 1) * norm_vectors * self.width
        biases = 0
        if self.bias:
            kv_width = self.kv_heads * self.head_width
            up = self.ff_width if self.activation == "gelu" else 2 * self.ff_width
            biases = self.layers * (2 * self.width + 2 * kv_width + up + self.width)
        embedding = 0 if self.tied else self.vocab_size * self.width
        positions = self.context * self.width if self.positions == "learned" else 0
        return self.matmul_parameters() + norms + biases + embedding + positions

    def to_dict(self) -> dict[str, int | float | str | bool]:
        return dataclasses.asdict(self)


_LLAMA = dict(norm="rmsnorm", positions="rope", activation="swiglu", tied=False)

# layers, heads, width, context as the project's users know them; a preset without a vocabulary takes the corpus's
PRESETS: dict[str, dict] = {
    "tiny": dict(layers=2, heads=2, width=64, context=64),
    "baby": dict(layers=6, heads=6, width=384, context=256),
    "gpt2": dict(layers=12, heads=12, width=768, context=256),
    "big": dict(layers=24, heads=16, width=2048, context=256),
    "gpt2-124m": dict(layers=12, heads=12, width=768, context=1024, vocab_size=50_304),
    "4b": dict(
        layers=32,
        heads=24,
        kv_heads=8,
        width=3072,
        ff_width=8192,
        context=4096,
        vocab_size=128_256,
        rope_base=500_000.0,
        **_LLAMA,
    ),
}


def preset(size: str, **overrides: object) -> GPTConfig:
    """The configuration of a named size; ``overrides`` that are None are left at the preset's value.

    Raises:
        UserError: unknown size, or a shape that cannot be built.
    """
    if size not in PRESETS:
        raise UserError(f"model size {size!r} is not one of {', '.join(PRESETS)}")
    fields = {**PRESETS[size], **{k: v for k, v in overrides.items() if v is not None}}
    return GPTConfig(**fields)


def check_recompute_blocks(mode: str, blocks: int | None, layers: int) -> None:
    """``blocks``: of how many of ``layers`` blocks activations are recomputed; None: of all.

    Raises:
        UserError: blocks that the model does not have, or of which nothing would be recomputed.
    """
    if blocks is None:
        return
    if mode == "none":
        raise UserError(
            f"recompute_blocks is {blocks}, but recompute is none; give recompute selective or full, or leave recompute_blocks out"
        )
    if not 1 <= blocks <= layers:
        raise UserError(
            f"recompute_blocks is {blocks}, but must be at least 1 and at most the model's {layers} layers; leave it out for all"
        )


def describe_recompute(mode: str, blocks: int | None, layers: int | None = None) -> str:
    if blocks is None:
        return mode
    count = f"{blocks} of {layers}" if layers else f"{blocks}"
    return f"{mode} in {count} block" + ("" if (layers or blocks) == 1 else "s")
