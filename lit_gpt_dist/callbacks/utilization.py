"""Model FLOPs utilisation of a running Trainer, in the two counts of ``model/flops.py``. Unknown peaks stay unknown."""

from typing import Any

from lit_gpt_dist.callbacks.device import device_name
from lit_gpt_dist.model.flops import flops_per_token, model_flops_utilization
from lit_gpt_dist.planner.hardware import device_by_name

HALF_PRECISIONS = ("bf16-mixed", "16-mixed")  # the peak known is that of 16-bit products


def utilization(trainer: Any, module: Any, tokens_per_second: float | None) -> dict[str, float | None]:
    """MFU in the PaLM and the half-attention count; None on a device or in a precision whose peak is not known."""
    peak = device_by_name(device_name(module.device)).peak_flops if half_precision(trainer) else None
    if not peak or not tokens_per_second:
        return {"mfu": None, "mfu_half_attention": None}
    flops = flops_per_token(module.config)
    return {
        "mfu": model_flops_utilization(flops.palm, tokens_per_second, peak, trainer.world_size),
        "mfu_half_attention": model_flops_utilization(
            flops.half_attention, tokens_per_second, peak, trainer.world_size
        ),
    }


def half_precision(trainer: Any) -> bool:
    return str(trainer.precision) in HALF_PRECISIONS


def no_mfu_reason(trainer: Any, module: Any) -> str:
    name = device_name(module.device)
    if not device_by_name(name).peak_flops:
        return f"the peak of {name} is not known"
    return f"the peak of {name} is known for 16-bit products, not for {trainer.precision}"
