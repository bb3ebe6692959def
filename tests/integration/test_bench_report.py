"""`bench` and `report` on real training: one table, one curve, and planted faults that are found."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.commands import forked

REPOSITORY = Path(__file__).parents[2]
PLANTED = Path(__file__).with_name("planted_fit.py")
FIT = [
    "fit",
    "--model.size",
    "tiny",
    "--trainer.accelerator",
    "cpu",
    "--trainer.max_steps",
    "8",
    "--data.global_batch",
    "64",
    "--data.micro_batch",
    "16",
    "--sample_tokens",
    "0",
    "--export",
    "false",
    "--quiet",
    "true",
    "--trainer.logger",
    "false",
    "--trainer.limit_val_batches",
    "0",
    "--checkpoint.save_at_end",
    "false",
    "--trainer.log_every_n_steps",
    "4",
]
BENCH = ["bench", "--accelerator", "cpu", "--global_batch", "64", "--steps", "8", "--timeout", "120"]


@pytest.fixture
def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "220"}


def call(words, cwd):
    return forked(*map(str, words), cwd=cwd, timeout_seconds=200)


def train(environment, root, planted=None, **options):
    words = [*FIT, "--trainer.default_root_dir", str(root)]
    words += [word for name, value in options.items() for word in (f"--{name.replace('__', '.')}", str(value))]
    if not planted:
        assert forked(*words).code == 0
        return
    faults = {"LIT_GPT_DIST_PLANTED": planted, "LIT_GPT_DIST_PLANTED_FACTOR": "4", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, str(PLANTED), *words], env=environment | faults, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(240)
def test_a_matrix_on_cpu_is_one_curve_and_is_not_run_twice(tmp_path, environment):
    words = [*BENCH, "--strategies", "single,fsdp2", "--devices", "1,2", "--rounds", "1", "--root", tmp_path / "b"]
    first = call(words, tmp_path)
    assert first.code == 0, first.out + first.err
    assert "single is one card by definition" in first.out
    lines = [json.loads(line) for line in (tmp_path / "b" / "results.jsonl").read_text().splitlines()]
    assert [(line["mode"], line["world"], line["accum"]) for line in lines] == [
        ("single", 1, 4),
        ("fsdp2", 1, 4),
        ("fsdp2", 2, 2),
    ]
    assert len(json.loads((tmp_path / "b" / "environment.json").read_text())["commands"]) == 1

    again = call(words, tmp_path)
    assert again.code == 0
    assert "3 of them from an earlier call" in again.out
    assert len((tmp_path / "b" / "results.jsonl").read_text().splitlines()) == 3

    report = call(["report", tmp_path / "b" / "results.jsonl", "--out", tmp_path / "out"], tmp_path)
    assert report.code == 0, report.err
    assert "1 × reference, 2 × same curve." in report.out
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.timeout(240)
def test_planted_faults_are_different_runs_with_their_cause(tmp_path, environment):
    train(environment, tmp_path, tag="one", trainer__devices=1, trainer__strategy="single")
    train(environment, tmp_path, "shared", tag="shared", trainer__devices=2, trainer__strategy="ddp")
    train(environment, tmp_path, "undivided", tag="undivided", trainer__devices=1, trainer__strategy="single")
    report = call(["report", tmp_path / "results.jsonl"], tmp_path)
    assert report.code == 0, report.err
    assert "1 × reference, 2 × different run." in report.out
    causes = {line.split()[0]: line for line in report.out.splitlines() if line.startswith(("shared (", "undivided ("))}
    assert "the 2 ranks share data" in causes["shared"]
    assert "the loss is not divided by accumulation" in causes["undivided"]


@pytest.mark.timeout(240)
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_bench_stopped_half_way_leaves_no_process_and_goes_on_later(tmp_path, environment):
    hold = tmp_path / "hold"
    hold.touch()
    words = [
        *BENCH, "--strategies", "single,ddp", "--devices", "1", "--rounds", "1", "--root", str(tmp_path / "b"),
        "--", "--trainer.callbacks+=helpers.faults.Hold", "--trainer.callbacks.file", str(hold),
    ]  # fmt: skip
    python_path = f"{REPOSITORY}:{REPOSITORY / 'tests'}"
    bench = subprocess.Popen(
        [sys.executable, "-m", "lit_gpt_dist", *words],
        **dict(env={**environment, "PYTHONPATH": python_path}, cwd=tmp_path, stdout=subprocess.PIPE, text=True),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell's background jobs ignore
    )
    results = tmp_path / "b" / "results.jsonl"
    try:
        wait_until(lambda: results.exists() and processes_below(tmp_path / "b" / "tiny_ddp_1x16x4"))
        bench.send_signal(signal.SIGINT)
        out, _ = bench.communicate(timeout=60)
    finally:
        bench.kill()
    assert bench.returncode == 130
    assert "the same command goes on" in out
    wait_until(lambda: not processes_below(tmp_path))
    assert [json.loads(line)["mode"] for line in results.read_text().splitlines()] == ["single"]
    hold.unlink()
    again = forked(*words, cwd=tmp_path, timeout_seconds=200, PYTHONPATH=python_path)
    assert again.code == 0, again.out + again.err
    assert "1 of them from an earlier call" in again.out
    assert [json.loads(line)["mode"] for line in results.read_text().splitlines()] == ["single", "ddp"]


def wait_until(condition, patience_seconds=90):
    deadline = time.monotonic() + patience_seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def processes_below(folder):
    """Processes that were told to work in ``folder``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if b"fit" in words and any(str(folder).encode() in word for word in words):
            found.append(int(entry.name))
    return found
