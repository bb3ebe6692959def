"""Runs one command in its own session, with a time limit, and leaves no process behind. Knows nothing of training."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CHILD = Path(__file__).with_name("child.py")
AFTER_OUT_OF_MEMORY_SECONDS = 20.0
_OUT_OF_MEMORY = (
    "OutOfMemoryError",
    "CUDA out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "MemoryError",
)


@dataclass(frozen=True)
class Ended:
    """How a command ended. ``code`` is None where the time limit ended it; negative is the signal."""

    code: int | None
    seconds: float
    output: Path

    def last_words(self, lines: int = 8, characters: int = 800) -> str:
        text = [line.rstrip() for line in _read(self.output).splitlines() if line.strip()]
        return "\n".join(text[-lines:])[-characters:]

    @property
    def out_of_memory(self) -> bool:
        """By what it printed, or because it was killed: that is how the kernel takes memory back."""
        if self.code == 0:
            return False
        text = _read(self.output)
        killed = self.code == -signal.SIGKILL or f"exit code -{signal.SIGKILL.value}" in text
        return killed or _tells_of_memory(text)


def _tells_of_memory(text: str) -> bool:
    return any(words in text for words in _OUT_OF_MEMORY)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def run(
    command: Sequence[str],
    output: Path,
    environment: Mapping[str, str],
    timeout_seconds: float,
    while_waiting: Callable[[], None] = lambda: None,
) -> Ended:
    """Runs ``command`` to its end; its output goes to a file. ``while_waiting`` is called a few times a second.

    Any exception, Ctrl+C among them, ends the command and everything it started before it is passed on.
    """
    began = time.monotonic()
    with output.open("wb") as file:
        words = [sys.executable, "-I", str(CHILD), str(os.getpid()), *command]
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            code = _wait(process, output, began + timeout_seconds, while_waiting)
        finally:
            end_session(process)
    return Ended(code, time.monotonic() - began, output)


def _wait(process: subprocess.Popen, output: Path, deadline: float, while_waiting: Callable[[], None]) -> int | None:
    """The exit code, or None at the deadline. Once memory has run out on one rank, the others may wait for it for ever:
    they are given little time."""
    told = False
    while time.monotonic() < deadline:
        try:
            return process.wait(timeout=0.25)
        except subprocess.TimeoutExpired:
            while_waiting()
        if not told and _tells_of_memory(_read(output)):
            told, deadline = True, min(deadline, time.monotonic() + AFTER_OUT_OF_MEMORY_SECONDS)
    return None


def end_session(process: subprocess.Popen, patience_seconds: float = 10) -> None:
    """Ends the process and whatever is left of its session (its ranks), gently first."""
    for signal_number, patience in ((signal.SIGTERM, patience_seconds), (signal.SIGKILL, patience_seconds)):
        try:
            os.killpg(process.pid, signal_number)
        except ProcessLookupError:  # nobody left
            break
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and _alive(process):
            time.sleep(0.05)
    process.wait()


def _alive(process: subprocess.Popen) -> bool:
    process.poll()  # a zombie of ours counts as a member until it is reaped
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
