"""Which tensor of a Hugging Face folder is which part of which tensor of the GPT. Names and shapes only, no files.

One table serves both directions. GPT-2 keeps linear weights as (in, out), so they are transposed. Llama keeps query, key
and value apart; its rotary embedding turns the pairs (i, i + D/2), as the GPT's does, so nothing is permuted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import GPTConfig

DESCRIPTION_FILE = "lit_gpt_dist.json"  # beside a Hugging Face folder's own files: configuration, vocabulary, origin


@dataclass(frozen=True)
class Piece:
    """One tensor of the folder: ``rows`` of the GPT's tensor ``ours``, transposed or not; None takes all rows."""

    theirs: str
    ours: str
    transposed: bool = False
    rows: tuple[int, int] | None = None


def layout_of(config: GPTConfig) -> str:
    """``gpt2`` or ``llama``. Raises UserError for a shape that neither can hold."""
    if (config.norm, config.positions, config.activation) == ("rmsnorm", "rope", "swiglu"):
        return "llama"
    if (config.norm, config.positions, config.activation) == ("layernorm", "learned", "gelu"):
        if config.kv_heads == config.heads:
            return "gpt2"
        raise UserError(
            f"a GPT-2 folder has as many key/value heads as heads, but this model has {config.kv_heads} of {config.heads}; "
            "export it with --format safetensors"
        )
    raise UserError(
        f"no Hugging Face layout has {config.norm} with {config.positions} positions and {config.activation}: GPT-2's has "
        "layernorm, learned and gelu, Llama's rmsnorm, rope and swiglu; export it with --format safetensors"
    )


def pieces(config: GPTConfig) -> list[Piece]:
    """Every tensor of the folder in order, biases included where the GPT has them."""
    table = list(_gpt2(config) if layout_of(config) == "gpt2" else _llama(config))
    if not config.tied:
        table.append(Piece("lm_head.weight", "head.weight"))
    return table


def _gpt2(config: GPTConfig) -> Iterator[Piece]:
    yield Piece("transformer.wte.weight", "embedding.weight")
    yield Piece("transformer.wpe.weight", "positions.weight")
    for layer in range(config.layers):
        theirs, ours = f"transformer.h.{layer}", f"blocks.{layer}"
        for their_part, our_part, linear in (
            ("ln_1", "attention_norm", False),
            ("attn.c_attn", "attention.query_key_value", True),
            ("attn.c_proj", "attention.output", True),
            ("ln_2", "feed_forward_norm", False),
            ("mlp.c_fc", "feed_forward.up", True),
            ("mlp.c_proj", "feed_forward.down", True),
        ):
            yield Piece(f"{theirs}.{their_part}.weight", f"{ours}.{our_part}.weight", transposed=linear)
            yield Piece(f"{theirs}.{their_part}.bias", f"{ours}.{our_part}.bias")
    yield Piece("transformer.ln_f.weight", "norm.weight")
    yield Piece("transformer.ln_f.bias", "norm.bias")


def _llama(config: GPTConfig) -> Iterator[Piece]:
    queries = config.heads * config.head_width
    keys = config.kv_heads * config.head_width
    splits = {"q": (0, queries), "k": (queries, queries + keys), "v": (queries + keys, queries + 2 * keys)}
    kinds = ("weight", "bias") if config.bias else ("weight",)
    yield Piece("model.embed_tokens.weight", "embedding.weight")
    for layer in range(config.layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        yield Piece(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight")
        yield Piece(f"{theirs}.post_attention_layernorm.weight", f"{ours}.feed_forward_norm.weight")
        for kind in kinds:
            for name, rows in splits.items():
                yield Piece(
                    f"{theirs}.self_attn.{name}_proj.{kind}", f"{ours}.attention.query_key_value.{kind}", rows=rows
                )
            yield Piece(f"{theirs}.self_attn.o_proj.{kind}", f"{ours}.attention.output.{kind}")
            for part in ("gate", "up", "down"):
                yield Piece(f"{theirs}.mlp.{part}_proj.{kind}", f"{ours}.feed_forward.{part}.{kind}")
    yield Piece("model.norm.weight", "norm.weight")


def piece_shape(piece: Piece, config: GPTConfig, ours: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Shape of the folder's tensor; a bias that the GPT lacks has its weight's rows."""
    shape = ours.get(piece.ours) or ours[piece.ours.replace(".bias", ".weight")][:1]
    if piece.rows is not None:
        shape = (piece.rows[1] - piece.rows[0], *shape[1:])
    return shape[::-1] if piece.transposed else shape


def to_hf_config(config: GPTConfig, dtype: str) -> dict[str, Any]:
    """``config.json`` of the folder."""
    common = {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if layout_of(config) == "gpt2":
        return common | {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": "gelu_new",  # the tanh form
            "n_layer": config.layers,
            "n_head": config.heads,
            "n_embd": config.width,
            "n_inner": config.ff_width,
            "n_positions": config.context,
            "layer_norm_epsilon": config.norm_eps,
            "attn_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "resid_pdrop": config.dropout,
        }
    return common | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_size": config.width,
        "intermediate_size": config.ff_width,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,  # where transformers before 5 looks
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "attention_dropout": config.dropout,
    }


def from_hf_config(document: dict[str, Any]) -> GPTConfig:
    """The GPT that computes what the folder's model computes. Raises UserError where there is none."""
    kind = document.get("model_type")
    if kind not in ("gpt2", "llama"):
        raise UserError(f"a folder of model type {kind!r} cannot be imported; gpt2 and llama can")
    try:
        return _from_gpt2(document) if kind == "gpt2" else _from_llama(document)
    except KeyError as error:
        raise UserError(f"config.json of the {kind} folder lacks {error}; give a folder of save_pretrained") from error


def _from_gpt2(document: dict[str, Any]) -> GPTConfig:
    _need(document, "activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    _need(document, "scale_attn_weights", (True,), True)
    _need(document, "scale_attn_by_inverse_layer_idx", (False,), False)
    return GPTConfig(
        layers=document["n_layer"],
        heads=document["n_head"],
        width=document["n_embd"],
        context=document["n_positions"],
        vocab_size=document["vocab_size"],
        ff_width=document.get("n_inner") or 4 * document["n_embd"],
        norm_eps=document.get("layer_norm_epsilon", 1e-5),
        tied=document.get("tie_word_embeddings", True),
        bias=True,
    )


def _from_llama(document: dict[str, Any]) -> GPTConfig:
    _need(document, "hidden_act", ("silu",), "silu")
    rope = document.get("rope_parameters") or {}
    scaling = document.get("rope_scaling") or rope
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise UserError(f"the folder's rotary embedding is scaled ({kind}), which this model does not do; use another")
    heads, width = document["num_attention_heads"], document["hidden_size"]
    if document.get("head_dim") not in (None, width // heads):
        raise UserError(f"head_dim {document['head_dim']} is not width {width} / {heads} heads, which this model needs")
    return GPTConfig(
        layers=document["num_hidden_layers"],
        heads=heads,
        kv_heads=document.get("num_key_value_heads") or heads,
        width=width,
        context=document["max_position_embeddings"],
        vocab_size=document["vocab_size"],
        ff_width=document["intermediate_size"],
        norm="rmsnorm",
        positions="rope",
        activation="swiglu",
        norm_eps=document.get("rms_norm_eps", 1e-6),
        rope_base=float(rope.get("rope_theta", document.get("rope_theta", 10_000.0))),
        tied=document.get("tie_word_embeddings", False),
        bias=bool(document.get("attention_bias") or document.get("mlp_bias")),
    )


def _need(document: dict[str, Any], field: str, allowed: tuple, default: Any) -> None:
    if document.get(field, default) not in allowed:
        choices = " or ".join(map(str, allowed))
        raise UserError(f"{field} of the folder is {document[field]}, but this model computes {choices}; use another")
