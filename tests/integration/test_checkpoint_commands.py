"""Whole commands: stopped by signals, resumed on another layout, damaged, exported."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers.commands import forked

from lit_gpt_dist.checkpoint import find, open_weights
from lit_gpt_dist.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, EXIT_USER_ERROR
from lit_gpt_dist.model.gpt import GPT

pytestmark = pytest.mark.timeout(400)
TOLERANCE = 1e-6  # fp32, sums of the ranks in another order
PATIENCE_SECONDS = 180


def command(root, text, strategy, ranks, steps, *more):
    return [
        *(sys.executable, "-m", "lit_gpt_dist", "fit", "--model.size", "tiny", "--model.width", "32"),
        *("--model.context", "16", "--data.corpus", str(text), "--data.global_batch", "4"),
        *("--data.micro_batch", str(4 // ranks), "--data.val_fraction", "0", "--optim.schedule_steps", "5000"),
        *("--trainer.accelerator", "cpu", "--trainer.devices", str(ranks), "--trainer.strategy", strategy),
        *("--trainer.max_steps", str(steps), "--trainer.default_root_dir", str(root), "--trainer.logger", "false"),
        *("--checkpoint.every_n_steps", "5", "--export", "false", "--sample_tokens", "0", *more),
    ]


def run(*arguments):
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    return done.returncode, done.stdout + done.stderr


def alone(arguments):
    """As ``run``, for what takes one process."""
    ended = forked(*map(str, arguments[3:]), timeout_seconds=PATIENCE_SECONDS)
    return ended.code, ended.text


def losses(root):
    """Loss by step, over all runs in ``root``."""
    lines = [json.loads(line) for line in (Path(root) / "results.jsonl").read_text().splitlines()]
    return {line["start"] + i + 1: loss for line in lines for i, loss in enumerate(line["losses"])}


def stop_with(root, arguments, *signals):
    """Starts a run, sends the signals to its first process once it has saved, and returns exit code and output."""
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not find.list_checkpoints(root):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for number in signals:
        process.send_signal(number)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert_nobody_left(process.pid)
    return process.returncode, output


def assert_nobody_left(group, patience_seconds=30):
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)
    raise AssertionError("processes of the run were left behind")


def test_stopped_by_slurm_a_run_saves_and_goes_on_as_another_layout(tmp_path, text):
    root = tmp_path / "run"
    code, output = stop_with(root, command(root, text, "ddp", 2, 100_000), signal.SIGUSR1)
    assert code == EXIT_REQUEUE, output
    newest, damaged = find.newest_good(root)
    assert damaged == []
    stopped_at = find.verify(newest).step
    end = stopped_at + 5
    code, output = run(*command(root, text, "fsdp2", 2, end, "--ckpt_path", "last"))
    assert code == 0, output
    code, output = alone(command(tmp_path / "straight", text, "single", 1, end))
    assert code == 0, output
    ours, straight = losses(root), losses(tmp_path / "straight")
    assert sorted(ours) == list(range(1, end + 1))
    assert max(abs(ours[step] - straight[step]) for step in ours) <= TOLERANCE
    check_exports(root, tmp_path, text)


def check_exports(root, tmp_path, text):
    """What fsdp2 saved, as one file and as a folder of transformers: the same logits."""
    export = (sys.executable, "-m", "lit_gpt_dist", "export", str(root))
    assert alone([*export, "--out", str(tmp_path / "w.safetensors")])[0] == 0
    assert alone([*export, "--out", str(tmp_path / "hf"), "--format", "hf"])[0] == 0
    config, vocabulary, tensors = open_weights(tmp_path / "w.safetensors")
    assert json.loads(vocabulary)["kind"] == "char"
    model = GPT(config)
    model.load_state_dict(dict(tensors), strict=False)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model.eval()(tokens), atol=1e-5, rtol=1e-5)


def test_ctrl_c_saves_once_and_leaves_nobody(tmp_path, text):
    code, output = stop_with(tmp_path, command(tmp_path, text, "fsdp2", 2, 100_000), signal.SIGINT)
    assert code == EXIT_INTERRUPTED, output
    assert "Traceback" not in output
    step = find.verify(find.newest_good(tmp_path)[0]).step
    assert max(losses(tmp_path)) == step


def test_sigterm_requeues_a_run_on_one_device(tmp_path, text):
    code, output = stop_with(tmp_path, command(tmp_path, text, "single", 1, 100_000), signal.SIGTERM)
    assert code == EXIT_REQUEUE, output
    assert max(losses(tmp_path)) == find.verify(find.newest_good(tmp_path)[0]).step


def test_damage_is_told_in_one_line_and_the_previous_one_taken(tmp_path, text):
    code, output = alone(command(tmp_path, text, "single", 1, 10))
    assert code == 0, output
    newest = tmp_path / "checkpoints" / "step-00000010"
    part = next(newest.glob("*.distcp"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(bytes(data))
    code, output = alone(command(tmp_path, text, "single", 1, 11, "--ckpt_path", str(newest)))
    assert code == EXIT_USER_ERROR
    assert output.strip().splitlines()[-1].startswith(f"error: checkpoint {newest} is damaged: {part.name} has changed")
    assert "step-00000005" in output
    assert "Traceback" not in output
    code, output = alone(command(tmp_path, text, "single", 1, 11, "--ckpt_path", "last"))
    assert code == 0, output
    assert f"warning: {newest} is damaged" in output
    assert json.loads((tmp_path / "results.jsonl").read_text().splitlines()[-1])["start"] == 5


def test_another_vocabulary_is_refused_on_all_ranks_in_one_line(tmp_path, text):
    code, output = alone(command(tmp_path, text, "single", 1, 5))
    assert code == 0, output
    more = ("--ckpt_path", "last", "--data.tokenizer", "byte", "--model.vocab_size", "256")
    code, output = run(*command(tmp_path, text, "ddp", 2, 6, *more))
    assert code == EXIT_USER_ERROR, output
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "char" in error
    assert "byte, 256 tokens" in error
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "nowhere", "--out", "x"], "error: nowhere does not exist"),
        (["import", "nowhere", "--out", "x"], "error: nowhere has no config.json"),
        (["export", "x", "--out", "y.safetensors", "--format", "hf"], "error: --format hf writes a folder"),
        (["export", "x"], "error: the following arguments are required: --out"),
    ],
)
def test_tools_tell_mistakes_in_one_line(arguments, message, tmp_path, monkeypatch, capfd):
    from lit_gpt_dist import cli

    monkeypatch.chdir(tmp_path)
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == EXIT_USER_ERROR
    error = capfd.readouterr().err.strip()
    assert error.startswith(message)
    assert len(error.splitlines()) == 1
