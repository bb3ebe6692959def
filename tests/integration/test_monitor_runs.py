"""Whole runs under watch: what is logged and where, faults that are named, runs that go on from a bad step."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FIT = Path(__file__).with_name("monitored_fit.py")
TEXT = "".join(f"{number} and the one after it is {number + 1}.\n" for number in range(3000))
TWO_RANKS = ("--trainer.devices", "2")


def fit(
    root: Path, *options: str, fault: str = "", config: dict[str, Any] | None = None
) -> subprocess.CompletedProcess:
    """A small run on CPU processes; returns when all of them have ended."""
    root.mkdir(exist_ok=True)
    (root / "text.txt").write_text(TEXT)
    command = [sys.executable, str(FIT), "fit", "--data.corpus", str(root / "text.txt")]
    if config is not None:
        (root / "given.yaml").write_text(json.dumps(config))
        command += ["--config", str(root / "given.yaml")]
    defaults = {
        "--trainer.accelerator": "cpu", "--trainer.default_root_dir": str(root / "runs"), "--tag": "run", "--export": "false",
        "--model.size": "tiny", "--model.layers": "1", "--model.width": "32", "--model.context": "32", "--sample_tokens": "0",
        "--data.micro_batch": "4", "--data.val_windows": "16", "--trainer.log_every_n_steps": "5",
        "--trainer.max_steps": "20", "--trainer.val_check_interval": "10", "--monitor.sample_tokens": "0",
    }  # fmt: skip
    given = dict(zip(options[::2], options[1::2], strict=True))
    for name, value in (defaults | given).items():
        command += [name, value]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LIT_GPT_DIST_FAULT": fault}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


def result(root: Path) -> dict[str, Any]:
    return json.loads((root / "runs" / "results.jsonl").read_text().splitlines()[-1])


def with_timeout(strategy: str, seconds: float) -> dict[str, Any]:
    return {"trainer": {"strategy": {"class_path": f"lit_gpt_dist.parallel.{strategy}", "init_args": {"timeout_seconds": seconds}}}}  # fmt: skip


def test_events_and_csv_hold_the_same_numbers_at_optimizer_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = fit(
        tmp_path, *TWO_RANKS, "--trainer.strategy", "ddp", "--data.global_batch", "32", "--monitor.sample_every", "5",
        "--monitor.sample_tokens", "8", "--profile", "12-13",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    events = EventAccumulator(str(tmp_path / "runs" / "run"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert tags >= {
        "train/loss", "train/lr", "train/tokens", "train/update_ratio", "val/loss", "val/perplexity", "health/grad_norm",
        "speed/tokens_per_second", "speed/tokens_per_second_per_device", "speed/step_ms_p50", "speed/step_ms_p95",
        "speed/step_ms_p99", "speed/goodput", "speed/run_share_validation", "memory/host_gib", "health/slowest_rank_ratio",
        "speed/step_share_data", "speed/step_share_forward", "speed/step_share_backward", "speed/step_share_optimizer",
        "speed/step_share_communication", "val/final_loss", "speed/final_tokens_per_second",
    }  # fmt: skip
    loss = events.Scalars("train/loss")
    assert [point.step for point in loss] == [5, 10, 15, 20]  # optimizer steps, although four micro-batches make one
    assert [point.step for point in events.Scalars("val/loss")] == [10, 20]
    assert [point.value for point in events.Scalars("train/tokens")] == [step * 32 * 32 for step in (5, 10, 15, 20)]
    line = result(tmp_path)
    # TensorBoard keeps 32 bits
    assert [point.value for point in loss] == pytest.approx(
        [line["losses"][step - 1] for step in (5, 10, 15, 20)], rel=1e-6
    )
    shares = [events.Scalars(f"speed/step_share_{phase}")[-1].value for phase in ("data", "forward", "backward", "communication", "optimizer")]  # fmt: skip
    assert sum(shares) == pytest.approx(1, abs=1e-5)
    assert "val/sample/text_summary" in events.Tags()["tensors"]
    assert "custom_scalars__config__" in events.Tags()["tensors"]
    with (tmp_path / "runs" / "run" / "metrics.csv").open() as file:
        rows = {int(row["step"]): row["train/loss"] for row in csv.DictReader(file) if row["train/loss"]}
    assert [float(rows[point.step]) for point in loss] == pytest.approx([point.value for point in loss], rel=1e-6)
    assert sorted(path.name for path in (tmp_path / "runs/run/trace").iterdir()) == ["rank-0.json.gz", "rank-1.json.gz"]
    shown = subprocess.run(
        [sys.executable, "-m", "lit_gpt_dist", "trace", str(tmp_path / "runs" / "run")], capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert "2 steps" in shown.stdout, shown.stderr
    assert "all-reduce" in shown.stdout


def test_nan_on_one_rank_stops_all_at_the_right_step_with_its_batch(tmp_path: Path) -> None:
    import torch

    done = fit(tmp_path, *TWO_RANKS, "--trainer.strategy", "ddp", "--checkpoint.every_n_steps", "3", fault="nan:1:8")
    assert done.returncode == 1
    assert "step 8: gradient norm nan (loss not finite on rank 1)" in done.stderr
    assert done.stderr.count("error:") == 1
    batch = torch.load(tmp_path / "runs" / "run" / "bad-step-00000008.pt", weights_only=True)
    assert batch["step"] == 8
    assert batch["windows"].shape == (8, 33)
    saved = sorted(path.name for path in (tmp_path / "runs" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000003", "step-00000006"]  # step 9 was due, but lies behind the bad step


def test_rollback_goes_back_to_the_checkpoint_and_past_the_data(tmp_path: Path) -> None:
    import math

    done = fit(
        tmp_path, *TWO_RANKS, "--trainer.strategy", "fsdp2", "--checkpoint.every_n_steps", "3", "--monitor.on_bad_step",
        "rollback", fault="nan:1:8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "back to the checkpoint of step 6" in done.stdout
    line = result(tmp_path)
    assert line["steps"] == 20
    assert len(line["losses"]) == 20
    assert all(map(math.isfinite, line["losses"]))
    state = json.loads((tmp_path / "runs" / "checkpoints" / "last" / "state.json").read_text())
    assert '"data_offset": 2' in json.dumps(state)  # step 7, the next one, takes the data of step 9


def test_a_rank_that_leaves_out_a_collective_is_named_within_the_timeout(tmp_path: Path) -> None:
    done = fit(tmp_path, *TWO_RANKS, fault="skip-collective:1:8", config=with_timeout("DDP", 5))
    assert done.returncode not in (0, 2)
    assert "error: rank 1 is missing" in done.stderr
    assert "rank 0 stands in forward of step 8" in done.stderr
    dumps = subprocess.run(
        [sys.executable, "-m", "lit_gpt_dist", "trace", str(tmp_path / "runs" / "run")], capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert "rank 1 is missing" in dumps.stdout


def test_running_out_of_memory_says_what_was_held_and_what_to_do(tmp_path: Path) -> None:
    done = fit(tmp_path, "--trainer.max_steps", "4", fault="oom:0:3")
    assert done.returncode == 1
    assert "held, in GiB: weights" in done.stderr
    assert "1. --data.micro_batch 2" in done.stderr
    assert "2. --model.recompute selective" in done.stderr


def test_quiet_prints_nothing_and_no_watching_still_trains(tmp_path: Path) -> None:
    done = fit(tmp_path, "--quiet", "true", "--monitor.enabled", "false", "--trainer.max_steps", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert len(result(tmp_path)["losses"]) == 4
