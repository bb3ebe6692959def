"""The comparison as a whole command, and the Fabric loop that the docs show, on one process and on two ranks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import on_ranks

from benchmarks.fabric_loop import FabricLoop, make_fabric
from benchmarks.job import Job
from benchmarks.plain_loop import PlainLoop
from lit_gpt_dist.data.corpus import load_corpus
from lit_gpt_dist.model.config import preset

ROOT = Path(__file__).parents[2]
STEPS = 6


def small_job(accumulate: int, micro: int = 4) -> Job:
    corpus = load_corpus(str(ROOT / "LICENSE"), "byte")
    config = preset("tiny", context=16, vocab_size=256)
    return Job(config, corpus.split(0.1, 16)[0], micro, accumulate, "32-true", 1e-3, 20)


def plain_losses(job: Job) -> list[float]:
    loop = PlainLoop(job, torch.device("cpu"))
    return losses(loop)


def losses(loop: Any) -> list[float]:
    found = []
    for _ in range(STEPS):
        loop.run(1)
        found.append(float(loop.loss))
    return found


def fabric_losses(strategy: str, accumulate: int, ranks: int) -> list[float]:
    """Mean over the ranks of each step's loss."""
    fabric = make_fabric("cpu", ranks, strategy, "32-true")
    fabric.launch()
    loop = FabricLoop(fabric, small_job(accumulate))
    found = []
    for _ in range(STEPS):
        loop.run(1)
        loss: Any = fabric.all_reduce(loop.loss, reduce_op="mean")
        found.append(float(loss))
    return found


def test_the_contenders_do_the_same_work(tmp_path: Path):
    out = tmp_path / "numbers.json"
    command = [sys.executable, "-m", "benchmarks.compare", "--size", "tiny", "--context", "16", "--micro", "4"]
    command += ["--accumulate", "2", "--accelerator", "cpu", "--corpus", str(ROOT / "LICENSE"), "--steps", "6"]
    command += ["--rounds", "2", "--without", "compiled", "--out", str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stderr
    assert "× eager" in ended.stdout
    rows = json.loads(out.read_text())["contenders"]
    assert set(rows) == {"trainer", "bare", "eager", "fabric"}
    assert all(len(row["round_step_ms"]) == 2 for row in rows.values())
    loss = rows["trainer"]["loss_after_first_round"]
    # the same sums in another order, fp32, six steps
    assert rows["eager"]["loss_after_first_round"] == pytest.approx(loss, abs=1e-5)
    assert rows["fabric"]["loss_after_first_round"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_fabric_loop_on_two_ranks_follows_the_plain_loop(strategy: str):
    reference = plain_losses(small_job(accumulate=4))  # 16 windows a step, as 2 ranks × 4 × 2
    for of_rank in on_ranks(2, fabric_losses, strategy, 2, 2):
        assert of_rank == pytest.approx(reference, abs=1e-5)  # fp32: the same sums in another order
