"""A loop of your own with Lightning Fabric on this project's model, windows and parallel functions; on any number of devices.

`python -m benchmarks.fabric_loop --corpus TEXT --devices 2 --strategy fsdp2` trains and prints the loss.
"""

import sys
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy

from benchmarks.job import Batches, Job
from lit_gpt_dist.arguments import ToolParser
from lit_gpt_dist.data.corpus import load_corpus
from lit_gpt_dist.model.config import PRESETS, preset
from lit_gpt_dist.model.gpt import GPT
from lit_gpt_dist.model.init import initialize
from lit_gpt_dist.optim.config import LEARNING_RATES
from lit_gpt_dist.optim.groups import make_adamw
from lit_gpt_dist.parallel import fsdp2
from lit_gpt_dist.parallel.clip import clip_by_global_norm
from lit_gpt_dist.parallel.compile import compile_model, resolve_compile


def make_fabric(accelerator: str, devices: int, strategy: str, precision: str) -> Fabric:
    """``strategy``: auto (one device), ddp, or fsdp2 with this project's precision policy, block by block."""
    if strategy != "fsdp2":
        return Fabric(accelerator=accelerator, devices=devices, strategy=strategy, precision=precision)  # type: ignore[arg-type]

    def parallelize(model: torch.nn.Module, mesh: torch.distributed.device_mesh.DeviceMesh) -> torch.nn.Module:
        assert isinstance(model, GPT)
        fsdp2.shard(model, mesh["data_parallel"], fsdp2.precision_policy(precision))
        return model

    sharded = ModelParallelStrategy(parallelize, data_parallel_size=devices, tensor_parallel_size=1)
    return Fabric(accelerator=accelerator, devices=devices, strategy=sharded)  # the policy casts, not Fabric


class FabricLoop:
    """Recompute, compile, shard, initialise, train: the order of ``GPTModule.configure_model``."""

    def __init__(self, fabric: Fabric, job: Job) -> None:
        self.fabric, self.job, self.step = fabric, job, 0
        self.batches = Batches(job, fabric.device, fabric.global_rank, fabric.world_size)
        sharded = isinstance(fabric.strategy, ModelParallelStrategy)
        with fabric.init_module(empty_init=sharded):  # sharded: on the meta device
            model = GPT(job.config)
        compile_model(model, resolve_compile("auto", fabric.device, by_block=sharded))
        self.model = fabric.setup_module(model)
        initialize(model, job.seed, assign=fsdp2.assign_shard)
        self.optimizer: Any = fabric.setup_optimizers(
            make_adamw(model, job.lr, job.optim, job.optim.fused, fabric.device)
        )
        self.loss = torch.zeros((), device=fabric.device)  # of this rank's last step

    def run(self, steps: int) -> None:
        """Takes so many optimizer steps; does not wait for the device."""
        for _ in range(steps):
            windows = self.batches.windows(self.step)  # (accumulate, micro, context + 1)
            self.loss = torch.zeros((), device=self.fabric.device)
            for index, micro in enumerate(windows):
                with self.fabric.no_backward_sync(self.model, enabled=index < len(windows) - 1):
                    loss = self.model(micro[:, :-1], micro[:, 1:]) / len(windows)
                    self.fabric.backward(loss)
                self.loss += loss.detach()
            clip_by_global_norm(self.model.parameters(), self.job.clip)  # after the reduction: the norm is global
            for group in self.optimizer.param_groups:
                group["lr"] = self.job.lr_at(self.step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1


def main(argv: list[str]) -> int:
    parser = ToolParser(prog="python -m benchmarks.fabric_loop", description="Train a GPT in a Fabric loop.")
    parser.add_argument("--corpus", required=True, help="a text, or a prepared folder")
    parser.add_argument("--size", default="tiny", choices=sorted(PRESETS), help="preset of the model")
    parser.add_argument("--micro", type=int, default=16, help="windows a device forwards at once")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a rank in a step")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--accelerator", default="auto", help="cpu or gpu")
    parser.add_argument("--devices", type=int, default=1, help="processes, one a device")
    parser.add_argument("--strategy", default="auto", choices=["auto", "ddp", "fsdp2"], help="auto: one device, or ddp")
    parser.add_argument("--precision", default="32-true", help="32-true or bf16-mixed")
    options = parser.parse_args(argv)
    fabric = make_fabric(options.accelerator, options.devices, options.strategy, options.precision)
    fabric.launch()
    corpus = load_corpus(options.corpus)
    config = preset(options.size, vocab_size=PRESETS[options.size].get("vocab_size", corpus.vocabulary.size))
    train, _ = corpus.split(0.1, config.context)
    rate = LEARNING_RATES[options.size]
    job = Job(config, train, options.micro, options.accumulate, options.precision, rate, options.steps)
    loop = FabricLoop(fabric, job)
    for _ in range(10):
        loop.run(max(1, options.steps // 10))
        loss: Any = fabric.all_reduce(loop.loss, reduce_op="mean")
        fabric.print(f"step {loop.step:6d}  loss {float(loss):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
