"""Bytes of training state, by formula. Numbers in, numbers out; knows nothing of devices, links or time.

Ψ is the number of parameters, N the number of ranks that share the state. Two conventions live here side by side:

* the literature's mixed precision, 16 bytes a parameter: 2 weights + 2 gradients + 12 optimizer (Rajbhandari et al. 2019);
* this project's fp32-master training, also 16: 4 weights + 4 gradients + 8 Adam moments, and 16-bit copies while they are used.
"""

from typing import NamedTuple

from lit_gpt_dist.errors import UserError

ADAM_K = 12.0  # bytes a parameter of fp32 master weights and two fp32 moments: K of Rajbhandari et al. 2019
MIXED_ADAM_BYTES = 16.0  # 2 weights + 2 gradients + 4 master + 4 + 4 moments

ACTIVATION_SHARE = 0.3  # of a card kept for activations in `largest_model`; a rule of thumb, facts: 70% for the state


class StateBytes(NamedTuple):
    """Bytes a parameter that one rank holds before any sharding."""

    weights: float
    gradients: float
    optimizer: float


def mixed_adam_state_bytes(parameters: float) -> float:
    """State of mixed-precision Adam: 16·Ψ bytes (Rajbhandari et al. 2019, section 3.1)."""
    return MIXED_ADAM_BYTES * parameters


def zero_state_bytes(parameters: float, ranks: int, stage: int, optimizer_bytes: float = ADAM_K) -> float:
    """State on one rank under ZeRO stage 0–3, 2-byte weights and gradients (Rajbhandari et al. 2019, figure 1).

    0: (4 + K)·Ψ; 1: 4Ψ + KΨ/N; 2: 2Ψ + (2 + K)Ψ/N; 3: (4 + K)Ψ/N.
    """
    whole, shared = {
        0: (4 + optimizer_bytes, 0.0),
        1: (4.0, optimizer_bytes),
        2: (2.0, 2 + optimizer_bytes),
        3: (0.0, 4 + optimizer_bytes),
    }[stage]
    return parameters * (whole + shared / ranks)


def master_state_bytes(parameters: float, shards: int = 1) -> float:
    """State of this project's fp32-master AdamW: 16·Ψ, divided by N under FSDP2, gathered units not counted."""
    return 16.0 * parameters / shards


def largest_model_parameters(
    memory_bytes: float, whole_bytes: float, shared_bytes: float = 0.0, ranks: int = 1
) -> float:
    """Parameters whose state alone fills a card: memory / (whole + shared / N) (facts: 80/(2 + 10/8))."""
    return memory_bytes / (whole_bytes + shared_bytes / ranks)


def largest_ddp_model_parameters(memory_bytes: float, activation_share: float = ACTIVATION_SHARE) -> float:
    """Parameters under DDP when ``activation_share`` of the card stays free for activations: 0.7 · memory / 16."""
    return (1.0 - activation_share) * memory_bytes / MIXED_ADAM_BYTES


# Optimizer state, in values a parameter; their width is the parameter's under torch.optim, 1 byte under 8-bit Adam,
# whose blocks of 256 values add one fp32 scale each (Dettmers et al. 2021, section 2.2).
MOMENTS = {"adamw": 2, "sgd": 1, "adam8bit": 2}
EIGHT_BIT_BYTES = 1.0 + 4.0 / 256.0


def state_bytes_per_parameter(precision: str, optimizer: str) -> StateBytes:
    """Bytes a parameter of this project's training: fp32 everywhere, except under pure bf16 (``bf16-true``).

    ``sgd`` is SGD with momentum. torch's optimizers keep their state in the parameter's own type.
    """
    if optimizer not in MOMENTS:
        raise UserError(f"optimizer {optimizer!r} is not one of {', '.join(MOMENTS)}")
    width = 2.0 if precision == "bf16-true" else 4.0
    moment = EIGHT_BIT_BYTES if optimizer == "adam8bit" else width
    return StateBytes(weights=width, gradients=width, optimizer=MOMENTS[optimizer] * moment)
