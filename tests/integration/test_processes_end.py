"""However one rank ends, all end, the cause is on the screen once, and nothing lives on."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from helpers.commands import COMMAND, SMALL, gone_within, run, started, torchrun

TESTS = str(Path(__file__).parents[1])
PATIENCE_SECONDS = 30  # within which every process must be gone
LAUNCHERS = {"own": COMMAND, "torchrun": [*torchrun(2), "-m", "lit_gpt_dist"]}


def two_ranks(launcher: str, text: Path, folder: Path, *options: str) -> list[str]:
    """A run of two ranks; ``folder`` in its arguments makes its processes easy to find."""
    return [
        *LAUNCHERS[launcher], "fit", *SMALL, "--data.corpus", str(text), "--trainer.max_steps", "200",
        "--trainer.strategy", "ddp", "--trainer.devices", "2", "--trainer.default_root_dir", str(folder), *options,
    ]  # fmt: skip


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_exception_on_rank_1_ends_the_run_and_is_told_once(launcher: str, text: Path, tmp_path: Path) -> None:
    fault = ["--trainer.callbacks+=helpers.faults.RaiseAt", "--trainer.callbacks.rank", "1"]
    began = time.monotonic()
    ended = run(*two_ranks(launcher, text, tmp_path, *fault), PYTHONPATH=TESTS)
    assert ended.code != 0
    assert time.monotonic() - began < 90, "a collective's timeout was waited for"
    assert ended.text.count("RuntimeError: planted fault: the disk of this rank is on fire") == 1, ended.text
    ours = [line for line in ended.err.splitlines() if line.startswith("error")]
    assert ours[0] == "error on rank 1:", "the rank with the fault tells it, traceback and all"
    assert len(ours) <= 2, "the other one says in a line that it lost its partner"
    assert ended.err.count("in run_rank") == 1, "one traceback through our code"
    assert gone_within(PATIENCE_SECONDS, str(tmp_path)), "a process lives on"


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("killed", [0, 1])
def test_kill_9_of_either_rank_leaves_no_orphan(launcher: str, killed: int, text: Path, tmp_path: Path) -> None:
    linger = ["--trainer.callbacks+=helpers.faults.Linger", "--trainer.callbacks.folder", str(tmp_path)]
    with started(*two_ranks(launcher, text, tmp_path, *linger), PYTHONPATH=TESTS) as process:
        pids = [wait_for(tmp_path / f"pid-{rank}") for rank in range(2)]
        os.kill(pids[killed], signal.SIGKILL)
        assert process.wait(timeout=60) != 0
        assert gone_within(PATIENCE_SECONDS, str(tmp_path)), "a process lives on"


def test_a_rank_whose_parent_ended_while_it_was_importing_ends_too() -> None:
    program = "import time; from lit_gpt_dist.runs import run_rank; run_rank(lambda: time.sleep(60), list)"
    ended = run(sys.executable, "-c", program, LOCAL_RANK="1", LIT_GPT_DIST_PARENT="1234567", timeout_seconds=50)
    assert ended.code == 1, ended.text


def wait_for(file: Path, seconds: float = 90) -> int:
    deadline = time.monotonic() + seconds
    while not file.exists() or not file.read_text():
        assert time.monotonic() < deadline, f"{file.name} never came"
        time.sleep(0.1)
    return int(file.read_text())
