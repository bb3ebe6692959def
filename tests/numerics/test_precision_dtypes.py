"""Which precision what is computed in: recorded while a run trains, not read from its options."""

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from helpers.training import Run, build, losses, seen_by
from torch import nn
from torch.distributed.tensor import DTensor

from lit_gpt_dist.model import gpt

# The function that FSDP2 reduces through has another name from torch 2.13 on
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
ONE = Run(steps=2, precision="bf16-mixed", model=dict(size="tiny", context=32, positions="rope", norm="rmsnorm"))


class Dtypes(pl.Callback):
    """dtypes of the first block's parts in forward, and of what the optimizer keeps."""

    def __init__(self) -> None:
        self.seen: dict[str, set[torch.dtype]] = {}

    def note(self, what: str, dtype: torch.dtype) -> None:
        self.seen.setdefault(what, set()).add(dtype)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        block = module.model.blocks[0]
        block.feed_forward.up.register_forward_hook(self._watch("matmul"))
        block.attention_norm.register_forward_hook(self._watch("norm"))

    def _watch(self, what: str) -> Any:
        def hook(layer: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
            self.note(what, output.dtype)
            self.note(f"{what} weight", layer.weight.dtype)  # type: ignore[arg-type,union-attr]

        return hook

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        for parameter in module.model.parameters():
            state = trainer.optimizers[0].state[parameter]
            for what, tensor in (("stored", parameter), ("gradient", parameter.grad), ("moment", state["exp_avg"])):
                self.note(what, (tensor.to_local() if isinstance(tensor, DTensor) else tensor).dtype)


def dtypes(run: Run) -> dict[str, set[torch.dtype]]:
    seen = Dtypes()
    trainer, module, data = build(run, seen)

    def reduction(*_: Any, **keywords: Any) -> None:
        seen.note("reduction", next(v for k, v in keywords.items() if k.startswith("input")).dtype)

    def phases(_: Any, pair: tuple) -> None:
        seen.note("phases", pair[0].dtype)

    def loss(wide: torch.Tensor, *_: Any) -> None:
        seen.note("loss", wide.dtype)

    with (
        seen_by(reduction, dist, REDUCE_SCATTER),
        seen_by(phases, gpt, "rotate"),
        seen_by(loss, gpt.F, "cross_entropy"),
    ):
        trainer.fit(module, datamodule=data)
    return seen.seen


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_bf16_mixed_on_one_device_computes_in_bf16_from_weights_stored_in_fp32(recompute: str) -> None:
    seen = dtypes(replace(ONE, recompute=recompute))
    assert seen["matmul"] == seen["norm"] == {BF16}, "all activations, as under fsdp2"
    assert seen["matmul weight"] == seen["norm weight"] == {FP32}, "copies are cast: the weights stay as they are"
    assert seen["loss"] == seen["phases"] == {FP32}
    assert seen["stored"] == seen["gradient"] == seen["moment"] == {FP32}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_bf16_mixed_under_fsdp2_gathers_bf16_and_reduces_and_stores_fp32(recompute: str) -> None:
    for seen in on_ranks(2, dtypes, ONE.on("fsdp2", 2, recompute=recompute)):
        assert seen["matmul"] == seen["matmul weight"] == {BF16}
        assert seen["norm weight"] == {BF16}, "the policy gathers a unit whole; there is no autocast on top"
        assert seen["loss"] == seen["phases"] == seen["reduction"] == {FP32}
        assert seen["stored"] == seen["gradient"] == seen["moment"] == {FP32}


def test_64_true_computes_everything_in_fp64() -> None:
    seen = dtypes(replace(ONE, precision="64-true"))
    assert all(found == {FP64} for found in seen.values()), seen


def test_bf16_mixed_stays_near_the_fp32_curve_on_one_device_and_on_shards() -> None:
    """8 bits of mantissa: 2⁻⁸ of a loss near 5 is 0.02; averaged over 512 tokens far less."""
    reference = losses(replace(ONE, precision="32-true", steps=8))
    run = replace(ONE, steps=8)
    for curve in (losses(run), on_ranks(2, losses, run.on("fsdp2", 2))[0]):
        assert curve == pytest.approx(reference, abs=1e-2)


def test_phases_are_fp32_under_16_bits_and_tell_far_positions_apart() -> None:
    config = gpt.GPTConfig(width=32, heads=2, context=4096, positions="rope")
    cosine, sine = gpt.rotary_phases(torch.arange(4000, 4002), config, BF16)
    assert cosine.dtype == sine.dtype == FP32
    assert float((sine[0] - sine[1]).abs().max()) > 0.1, "bf16 rounds 4000 and 4001 to the same number"
