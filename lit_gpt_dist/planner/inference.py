"""Memory of generating text: weights and the key/value cache. Knows nothing of training."""

from typing import NamedTuple

from lit_gpt_dist.model.config import GPTConfig


def cache_bytes_per_token(config: GPTConfig, element_bytes: float = 2) -> float:
    """Keys and values of all layers for one token: 2·L·kv_heads·head width elements."""
    return 2 * config.layers * config.kv_heads * config.head_width * element_bytes


class InferencePlan(NamedTuple):
    """Bytes for one way of holding the weights."""

    bits: int
    weights_bytes: float
    cache_bytes: float
    total_bytes: float
    cards: int | None  # how many cards hold it, each a share; None: the card's memory is not known
    largest_batch: int | None  # sequences of the whole context that one card holds; 0: not even the weights fit


QUANTISED_GROUP = 128  # values that share a 16-bit scale, as GPTQ and AWQ have it by default


def weight_bytes(config: GPTConfig, bits: int) -> float:
    """Weights at 16 or 32 bits, or matrix weights quantised to 8 or 4 bits in groups with one 16-bit scale each."""
    if bits >= 16:
        return config.parameters() * bits / 8
    layers = config.matmul_parameters() - config.vocab_size * config.width  # embedding and head stay at 16 bits
    return layers * (bits / 8 + 2 / QUANTISED_GROUP) + (config.parameters() - layers) * 2.0


def plan_inference(config: GPTConfig, batch: int, context: int, bits: int, usable_bytes: float | None) -> InferencePlan:
    """What ``batch`` sequences of ``context`` tokens need; the cache is 16-bit whatever the weights are."""
    weights = weight_bytes(config, bits)
    per_sequence = cache_bytes_per_token(config) * context
    total = weights + batch * per_sequence
    cards = largest = None
    if usable_bytes is not None:
        cards = max(1, int(-(-total // usable_bytes)))
        largest = max(0, int((usable_bytes - weights) // per_sequence))
    return InferencePlan(bits, weights, batch * per_sequence, total, cards, largest)
