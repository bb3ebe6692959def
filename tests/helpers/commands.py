"""Runs commands as a user types them, each with a deadline, and leaves no process behind however they end."""

import contextlib
import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from helpers.ranks import PRELOADED
from lit_gpt_dist.cli import main

COMMAND = [sys.executable, "-m", "lit_gpt_dist"]
# a training that takes seconds: small windows, no text at the end, on the CPU also where there is a GPU
SMALL = [
    "--trainer.accelerator", "cpu", "--model.size", "tiny", "--model.context", "32", "--data.micro_batch", "4",
    "--data.val_windows", "16", "--sample_tokens", "0", "--trainer.max_steps", "4",
]  # fmt: skip
LAUNCHER = re.compile(r"^(LOCAL_|GROUP_|ROLE_|TORCHELASTIC_|SLURM_|RANK$|WORLD_SIZE$|MASTER_|NODE_RANK$|LIT_GPT_DIST_)")


@dataclass
class Ended:
    """What a command left: its exit code and everything it printed."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


def here(*arguments: str) -> Ended:
    """The command inside this process: quick, for what takes one process only."""
    out, err = io.StringIO(), io.StringIO()
    os.environ.pop("LIT_GPT_DIST_RUN", None)  # a run of the same test may have left its name
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["lit-gpt-dist", *arguments]),
    ):
        try:
            code = main(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())


def forked(*arguments: str, cwd: Path | None = None, timeout_seconds: float = 120, **environment: str) -> Ended:
    """The command in a process of its own that has imported the libraries already: for what takes one process only, and must
    not share this one's folder, threads or terminal."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("out", "err")]
        process = context.Process(
            target=_command_main, args=(arguments, cwd or Path.cwd(), clean_environment(**environment), *paths)
        )
        process.start()
        process.join(timeout_seconds)
        ended = process.exitcode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # its own group: whatever it started, too
        process.join()
        out, err = (path.read_text() if path.exists() else "" for path in paths)
    assert ended is not None, f"no end within {timeout_seconds} s: {arguments}\n{out}{err}"
    return Ended(ended, out, err)


def _command_main(arguments: tuple[str, ...], cwd: Path, environment: dict[str, str], out: Path, err: Path) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for stream, path in ((sys.stdout, out), (sys.stderr, err)):
        stream.flush()
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
    sys.argv = ["lit-gpt-dist", *arguments]
    sys.exit(main(list(arguments)))


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without what a launcher above may have put there."""
    kept = {name: value for name, value in os.environ.items() if not LAUNCHER.match(name)}
    return kept | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"} | extra


@contextlib.contextmanager
def started(*command: str, cwd: Path | None = None, **environment: str) -> Iterator[subprocess.Popen]:
    """A command in a process group of its own, all of which is gone afterwards."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=clean_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run(*command: str, timeout_seconds: float = 120, cwd: Path | None = None, **environment: str) -> Ended:
    """A command in processes of its own, to its end."""
    with started(*command, cwd=cwd, **environment) as process:
        out, err = process.communicate(timeout=timeout_seconds)
        return Ended(process.returncode, out, err)


def torchrun(ranks: int) -> list[str]:
    """torch's launcher on a port that it finds itself."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def results(root: Path) -> list[dict]:
    """The lines of ``results.jsonl``, one a run."""
    return [json.loads(line) for line in (root / "results.jsonl").read_text().splitlines()]


def alive_with(marker: str) -> list[int]:
    """Processes whose command line holds ``marker``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if marker in words and state != "Z" and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def gone_within(seconds: float, marker: str) -> bool:
    deadline = time.monotonic() + seconds
    while alive_with(marker):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
