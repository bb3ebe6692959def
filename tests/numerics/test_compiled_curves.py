"""A compiled model follows the eager one's curve, and compiles nothing more once it has warmed up."""

import shutil

import pytest
import torch
from helpers.training import Run, build, losses

from lit_gpt_dist.callbacks.recorder import StepRecorder
from lit_gpt_dist.errors import UserError

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
    # a block's graph serves both blocks; validation runs eagerly
    assert graphs == {"model": 1, "blocks": 2}[mode]


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
