"""`python -m benchmarks.variants`: what single techniques are worth for one optimizer step, without a Trainer around it.

Each variant is built, warmed up and timed in turn in one process; `--profile` lists the kernels of the last one. On a GPU a
step is a replay of a CUDA graph unless the variant says otherwise. Windows are random tokens: only shapes matter.
"""

import gc
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from benchmarks.rounds import Stopwatch
from lit_gpt_dist.arguments import ToolParser
from lit_gpt_dist.callbacks.device import device_name
from lit_gpt_dist.cli import guarded
from lit_gpt_dist.errors import EXIT_OK, UserError
from lit_gpt_dist.model.config import PRESETS, preset
from lit_gpt_dist.model.flops import flops_per_token, model_flops_utilization
from lit_gpt_dist.model.gpt import GPT
from lit_gpt_dist.model.init import initialize
from lit_gpt_dist.optim.config import OptimConfig
from lit_gpt_dist.optim.groups import make_adamw
from lit_gpt_dist.parallel.clip import clip_by_global_norm, clip_in_update
from lit_gpt_dist.parallel.compile import compile_model
from lit_gpt_dist.parallel.graph import StepGraph, make_capturable, on_side_stream
from lit_gpt_dist.planner.hardware import device_by_name

SWITCHES = {
    "autocast": "products in bf16, the rest in fp32 (else: all activations in bf16)",
    "clip": "clipping within the fused update (else: in place, before it)",
    "eager": "not compiled",
    "blocks": "each block compiled alone",
    "pointwise": "the compiler tries more settings for elementwise kernels and reductions",
    "combo": "the compiler joins independent kernels",
    "twopass": "the softmax of the loss reads its logits twice, with one exponential each (else: once, with two)",
    "descent": "the compiler searches settings for each kernel",
    "gemm": "the compiler tries products of its own, with what follows them built in",
    "update": "norm, clipping and AdamW compiled (else: PyTorch's fused AdamW)",
    "flash": "attention through FlashAttention (else: what PyTorch chooses)",
    "cudnn": "attention through cuDNN",
    "launched": "kernels launched one by one (else: a CUDA graph)",
}
COMPILER: dict[str, dict[str, Any]] = {
    "pointwise": {"max_autotune_pointwise": True},
    "combo": {"combo_kernels": True, "benchmark_combo_kernel": True},
    "twopass": {"online_softmax": False},
    "descent": {"coordinate_descent_tuning": True},
    "gemm": {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"},
}
ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class Variant:
    """One optimizer step on random windows, built as the switches say."""

    def __init__(self, switches: set[str], options: Namespace, device: torch.device) -> None:
        self.switches, self.device = switches, device
        self.config = preset(options.size, context=options.context, vocab_size=options.vocab_size)
        with device:
            self.model = GPT(self.config)
        initialize(self.model, 1337)
        if "autocast" not in switches:
            self.model.compute_dtype = torch.bfloat16
        self.forward = self._compiled()
        self.optimizer = make_adamw(self.model, 1e-3, OptimConfig(), None, device)
        self.update = torch.compile(update, dynamic=False) if "update" in switches else None
        if device.type == "cuda":
            make_capturable(self.optimizer, device)
        shape = (1, options.micro, self.config.context + 1)
        self.windows = torch.randint(self.config.vocab_size, shape, device=device)

    def _compiled(self) -> Callable[..., Tensor]:
        if "eager" in self.switches:
            return self.model
        if "blocks" in self.switches:
            compile_model(self.model, "blocks")
            return self.model
        settings = {
            name: value for switch in COMPILER.keys() & self.switches for name, value in COMPILER[switch].items()
        }
        return torch.compile(self.model, dynamic=False, options=settings or None)

    def step(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled="autocast" in self.switches):
            loss = self.forward(windows[0, :, :-1], windows[0, :, 1:])
        loss.backward()
        if self.update is not None:
            return loss.detach(), self.update(*moments(self.optimizer))
        norm = clip_by_global_norm(self.model.parameters(), None if "clip" in self.switches else 1.0)
        if "clip" in self.switches:
            clip_in_update(self.optimizer, norm, 1.0)
        self.optimizer.step()
        return loss.detach(), norm

    def ready(self) -> Callable[[], object]:
        """Warms up; one call then is one step."""
        if self.device.type != "cuda":
            self.step(self.windows)
            return lambda: self.step(self.windows)
        with on_side_stream(self.device):
            for _ in range(3):
                self.step(self.windows)
        if "launched" in self.switches:
            return lambda: self.step(self.windows)
        self.recorded = StepGraph(
            lambda windows: torch.stack(self.step(windows)), self.windows
        )  # holds the memory that its replays read
        return self.recorded.graph.replay


def moments(optimizer: Optimizer) -> tuple[list[list[Tensor]], ...]:
    """Per group: parameters, gradients, first and second moments, step counts."""
    groups = [group["params"] for group in optimizer.param_groups]
    for parameter in (p for group in groups for p in group if not optimizer.state[p]):
        zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {**zeros, "step": torch.zeros((), device=parameter.device)}
    held = [
        [[optimizer.state[p][name] for p in group] for group in groups] for name in ("exp_avg", "exp_avg_sq", "step")
    ]
    return (groups, [[p.grad for p in group] for group in groups], *held)


@torch.no_grad()
def update(
    parameters: list[list[Tensor]],
    gradients: list[list[Tensor]],
    first: list[list[Tensor]],
    second: list[list[Tensor]],
    steps: list[list[Tensor]],
) -> Tensor:
    """The norm before clipping, after an update with gradients clipped to 1 on their way."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm([g for group in gradients for g in group])))
    scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
    for group, decay in zip(range(len(parameters)), (0.1, 0.0), strict=False):
        adamw(
            parameters[group], list(torch._foreach_mul(gradients[group], scale)), first[group], second[group], [], steps[group],
            foreach=True, capturable=True, amsgrad=False, beta1=0.9, beta2=0.95, lr=1e-3, weight_decay=decay,
            eps=1e-8, maximize=False,
        )  # fmt: skip
    return norm


def time_steps(step: Callable[[], object], steps: int, device: torch.device, rounds: int = 5) -> list[float]:
    """Milliseconds a step, of several rounds after one that is left out; the device has nothing left to do at both ends."""
    watch, found = Stopwatch(device), []
    for _ in range(rounds + 1):
        watch.start()
        for _ in range(steps):
            step()
        found.append(1000 * watch.stop()[0] / steps)
    return found[1:]


def attention(switches: set[str]) -> AbstractContextManager[Any]:
    chosen = [backend for name, backend in ATTENTION.items() if name in switches]
    return sdpa_kernel(chosen) if chosen else nullcontext()


def kernels(step: Callable[[], object], repeats: int = 3) -> list[tuple[float, float, str]]:
    """(microseconds a step, calls a step, name), longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    rows = [(e.self_device_time_total / repeats, e.count / repeats, e.key) for e in profile.key_averages()]
    return sorted(rows, reverse=True)


def parse(argv: list[str]) -> Namespace:
    switches = ", ".join(f"{name}: {what}" for name, what in SWITCHES.items())
    parser = ToolParser(
        prog="python -m benchmarks.variants", description=f"Time variants of a step. Switches: {switches}."
    )
    parser.add_argument(
        "variants", nargs="*", default=["autocast", "plain", "clip"], help="switches joined by +, or plain"
    )
    parser.add_argument("--size", default="baby", choices=sorted(PRESETS), help="preset of the model")
    parser.add_argument("--micro", type=int, default=16, help="windows of a step")
    parser.add_argument("--context", type=int, help="tokens of a window (default: the preset's)")
    parser.add_argument("--vocab_size", type=int, help="rows of the embedding (default: the preset's, else 160)")
    parser.add_argument("--steps", type=int, default=50, help="steps of a round")
    parser.add_argument("--profile", type=int, default=0, help="so many kernels of each variant, by time")
    options = parser.parse_args(argv)
    options.vocab_size = options.vocab_size or PRESETS[options.size].get("vocab_size", 160)
    for variant in options.variants:
        for name in set(variant.split("+")) - {"plain"} - SWITCHES.keys():
            raise UserError(f"switch {name!r} is not one of plain, {', '.join(SWITCHES)}")
    return options


def report(variant: Variant, name: str, milliseconds: list[float], micro: int) -> str:
    median = statistics.median(milliseconds)
    rate = micro * variant.config.context / median * 1000
    flops, peak = flops_per_token(variant.config).palm, device_by_name(device_name(variant.device)).peak_flops
    used = f", {model_flops_utilization(flops, rate, peak, 1):.1%} MFU" if peak else ""
    spread = (max(milliseconds) - min(milliseconds)) / median
    return f"{name}: {median:.3f} ms a step (spread {spread:.1%}), {rate:,.0f} tokens/s{used}"


def main(argv: list[str]) -> int:
    options = parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    print(
        f"{options.size}, {options.micro} windows, vocabulary {options.vocab_size}, {device_name(device)}, torch {torch.__version__}"
    )
    for name in options.variants:
        torch.compiler.reset()
        switches = set(name.split("+"))
        with attention(switches):
            variant = Variant(switches, options, device)
            step = variant.ready()
            print(report(variant, name, time_steps(step, options.steps, device), options.micro), flush=True)
            if options.profile and device.type == "cuda":
                rows = kernels(step)
                print(f"  {sum(row[1] for row in rows):.0f} kernels, {sum(row[0] for row in rows):.0f} µs")
                for microseconds, calls, kernel in rows[: options.profile]:
                    print(f"  {microseconds:9.1f} µs {calls:5.0f} × {kernel[:100]}")
        del variant, step
        gc.collect()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:]))
