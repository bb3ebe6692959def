"""A compiled model follows the eager one's curve, and compiles nothing more once it has warmed up."""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.ranks import on_ranks
from helpers.training import Run, build, losses

import lit_gpt_dist.module
from lit_gpt_dist import recorded
from lit_gpt_dist.callbacks import compiling
from lit_gpt_dist.callbacks.recorder import StepRecorder
from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import GPTConfig
from lit_gpt_dist.model.gpt import GPT
from lit_gpt_dist.model.init import initialize
from lit_gpt_dist.parallel.compile import compile_model
from lit_gpt_dist.parallel.recompute import set_recompute
from lit_gpt_dist.planner.activations import saved_bytes, widths

SMALL = dict(size="tiny", context=32)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")


@needs_compiler
@pytest.mark.parametrize("mode", ["model", "blocks"])
def test_a_compiled_run_follows_the_eager_curve_without_compiling_again(mode: str) -> None:
    torch._dynamo.reset()
    eager = losses(Run(steps=8))
    torch._dynamo.utils.counters.clear()
    recorder = StepRecorder()
    trainer, module, data = build(Run(steps=8, val_every=4, model=SMALL | {"compile": mode}), recorder)
    trainer.fit(module, datamodule=data)
    gaps = [abs(a - b) for a, b in zip(eager, recorder.losses, strict=True)]
    print(f"{mode}: worst difference {max(gaps):.1e}")
    assert max(gaps) <= 1e-5, "other kernels round otherwise in fp32, and no more than that"
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # what is before the blocks, one for both blocks, what is behind (there are no phases); validation runs eagerly
    assert graphs == {"model": 1, "blocks": 3}[mode]


def compiled_whole(run: Run) -> tuple[list[float], int]:
    """The curve, and the graphs that were compiled."""
    torch._dynamo.utils.counters.clear()
    return losses(run), torch._dynamo.utils.counters["stats"]["unique_graphs"]


@needs_compiler
def test_a_model_gathered_at_once_is_compiled_whole_and_follows_the_eager_curve() -> None:
    one = Run(steps=6, micro_batch=8, model=SMALL)
    at_once = one.on("fsdp2", 2, strategy_options=dict(units="model"), model=SMALL | dict(compile="model"))
    eager = losses(one)
    for found, graphs in on_ranks(2, compiled_whole, at_once):
        assert max(abs(a - b) for a, b in zip(eager, found, strict=True)) <= 1e-5
        assert graphs == 1, "nothing comes between"


@needs_compiler
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_in_bf16_a_run_is_the_same_whatever_is_compiled(positions: str) -> None:
    """Compiled whole or by block, to the last bit; as the compiler rounds by default, three steps part by 1e-5 to 6e-4."""
    shape = SMALL | dict(layers=1, positions=positions)
    run = Run(
        steps=4,
        precision="bf16-mixed",
        trainer=dict(deterministic=True),
        model=shape,
        optim=dict(lr=3e-3, warmup_steps=2),
    )
    found = []
    try:
        for mode in ("model", "blocks"):
            torch._dynamo.reset()
            found.append(losses(replace(run, model=run.model | dict(compile=mode))))
    finally:
        torch.use_deterministic_algorithms(False)
    assert found[0] == found[1]


@needs_compiler
def test_in_bf16_weights_gathered_in_bf16_give_the_curve_of_weights_rounded_on_the_way() -> None:
    """To the last bit; as the compiler rounds by default, they part by 1e-5 before any update."""
    run = Run(steps=3, precision="bf16-mixed", model=SMALL | dict(layers=1, compile="model"))
    gathered = run.on("fsdp2", 1, strategy_options=dict(units="model"))
    assert on_ranks(1, losses, gathered) == [losses(run)]


@needs_compiler
def test_selective_recomputation_keeps_what_is_planned_in_a_compiled_model_too() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = GPTConfig(layers=1, heads=2, width=64, context=64, vocab_size=8)
    model = GPT(config)
    model.compute_dtype = torch.bfloat16
    initialize(model, 0, lambda parameter, value: parameter.data.copy_(value))
    set_recompute(model, "selective")
    compile_model(model, "model")
    tokens = torch.randint(0, config.vocab_size, (16, config.context))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, tokens.clone())
    found = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)
    weights = 2 * config.parameters()  # casts may be kept or not
    planned = saved_bytes(config, 16, config.context, widths("bf16-mixed"), recompute="selective")
    print(f"kept {found:,} bytes, planned {planned:,.0f}")
    assert planned * 0.95 <= found <= planned * 1.05 + weights
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "the compiler follows what is kept"


def cuts(run: Run) -> bool:
    """Whether what would be compiled is cut where a bucket of DDP's is full."""
    with torch.compiler.set_stance("force_eager"):
        losses(run)
    return bool(torch._dynamo.config.optimize_ddp)


def test_a_compiled_model_is_cut_at_ddps_buckets_where_there_are_several() -> None:
    run = Run(steps=1, model=SMALL | dict(width=128, compile="model")).on("ddp", 2)  # 1.6 MiB of gradients
    assert on_ranks(2, cuts, run) == [False, False]
    assert on_ranks(2, cuts, replace(run, strategy_options=dict(bucket_cap_mb=1))) == [True, True]
    assert on_ranks(2, cuts, replace(run, model=run.model | dict(compile="blocks"))) == [False, False]


def refusal(run: Run) -> str:
    with pytest.raises(UserError) as caught:
        losses(run)
    return str(caught.value)


def test_buckets_too_small_to_cut_a_compiled_model_are_refused() -> None:
    run = Run(steps=1, model=SMALL | dict(compile="model")).on("ddp", 2, strategy_options=dict(bucket_cap_mb=0.1))
    for told in on_ranks(2, refusal, run):
        assert "bucket_cap_mb 0.1 is below 1" in told
        assert "--model.compile blocks" in told


def test_a_graph_that_cannot_be_recorded_is_refused_with_the_reason() -> None:
    trainer, module, data = build(Run(steps=1, model=SMALL | {"cuda_graph": True}))
    with pytest.raises(UserError, match="cuda_graph true, but the device is not a GPU"):
        trainer.fit(module, datamodule=data)


def test_a_graph_is_recorded_anew_from_wherever_the_run_goes_back_to() -> None:
    trainer, module, data = build(Run(steps=6))
    trainer.fit(module, datamodule=data)
    module.graph_wanted, module.step_graph = True, object()  # type: ignore[assignment]  # as on a GPU, recorded
    assert module.in_graph
    module.arm_graph()
    assert module.step_graph is None, "what was recorded reads moments that a rollback replaces"
    assert not module.in_graph, "the next steps are taken one by one"


def test_nothing_runs_for_the_first_time_while_a_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be compiled there, which a recording does not survive. The graph is played: a CPU has none."""
    seen: list[str] = []

    class PlayedGraph:
        def __init__(self, step: Any, windows: torch.Tensor) -> None:
            seen.append("recorded")
            self.step, self.results = step, step(windows)

        def replay(self, windows: torch.Tensor) -> None:
            self.results = self.step(windows)

    monkeypatch.setattr(lit_gpt_dist.module, "decide_graph", lambda *_: True)
    monkeypatch.setattr(recorded, "StepGraph", PlayedGraph)
    monkeypatch.setattr(recorded, "make_capturable", lambda *_: None)
    monkeypatch.setattr(recorded, "on_side_stream", lambda *_: nullcontext())
    trainer, module, data = build(Run(steps=6))
    results = recorded.step_results
    monkeypatch.setattr(
        lit_gpt_dist.module, "step_results", lambda *parts: seen.append(kinds(parts)) or results(*parts)
    )
    trainer.fit(module, datamodule=data)
    assert seen.count("recorded") == 1
    before, after = seen[: seen.index("recorded")], seen[seen.index("recorded") + 1 :]
    assert set(before) == set(after) == {"4 × torch.float32, torch.float64"}, (
        "of the same types: others would be compiled anew"
    )
    assert module.trainer.global_step == 6


def kinds(parts: tuple[list[torch.Tensor], torch.Tensor]) -> str:
    losses, norm = parts
    (dtype,) = {loss.dtype for loss in losses}
    return f"{len(losses)} × {dtype}, {norm.dtype}"


def test_a_compilation_within_a_recording_touches_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = StepRecorder()
    timer = compiling.CompileTime()
    timer._trainer = SimpleNamespace(callbacks=[recorder])  # type: ignore[assignment]
    for inside, kinds in ((True, set()), (False, {"compile"})):
        monkeypatch.setattr(compiling, "recording", lambda inside=inside: inside)
        timer._start()
        timer._end()
        assert set(recorder.paused_seconds) == kinds
