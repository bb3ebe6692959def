"""Carries a list of rounds through, with a progress display, and sums up. Ctrl+C ends it cleanly."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from lit_gpt_dist.bench.case import Case
from lit_gpt_dist.bench.runner import Runner, interleaved, time_left


class Session:
    """One call of `bench`: measures rounds that are not known yet and tells about each."""

    def __init__(self, runner: Runner, console: Console, time_limit_seconds: float | None = None) -> None:
        self.runner = runner
        self.console = console
        self.left_out = 0  # rounds that the time limit left for another call
        self._began = time.monotonic()
        self._limit_seconds = time_limit_seconds
        self.results: list[dict[str, Any]] = []
        self.reused = 0
        self._seconds: dict[Case, list[float]] = {}
        self._progress = Progress(
            TextColumn("[bold]{task.completed:.0f}/{task.total:.0f}[/]"),
            BarColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
        )

    def run_all(self, cases: Sequence[Case], rounds: int) -> None:
        """All rounds of all cases, interleaved."""
        order = interleaved(cases, rounds)
        with self._progress as progress:
            task = progress.add_task("", total=len(order), left="")
            for done, (case, number) in enumerate(order):
                left = time_left(self._seconds, [pair for pair in order[done:] if self.runner.known(*pair) is None])
                progress.update(task, description=escape(f"{case.name}, round {number + 1}"), left=_left(left))
                if self._has_time_for(case, number):
                    self.one(case, number)
                else:
                    self.left_out += 1
                progress.update(task, completed=done + 1)

    def _has_time_for(self, case: Case, number: int) -> bool:
        """Whether the round should end within the time limit, judged by the longest run of the case so far, or of all."""
        if self._limit_seconds is None or self.runner.known(case, number) is not None:
            return True
        every = [seconds for several in self._seconds.values() for seconds in several]
        expected = max(self._seconds.get(case, every), default=0.0)
        return time.monotonic() - self._began + expected < self._limit_seconds

    def one(self, case: Case, number: int = 0) -> dict[str, Any]:
        """One round: from the file if it was run before."""
        line = self.runner.known(case, number)
        if line is not None:
            self.reused += 1
        else:
            began = time.monotonic()
            line = self.runner.measure(case, number)
            self._seconds.setdefault(case, []).append(time.monotonic() - began)
            self.console.print(
                f"{_outcome(line)}  {escape(case.name)}, round {number + 1} ({line['seconds']:.1f} s)", soft_wrap=True
            )
            if line["status"] == "failed":
                self.console.print(f"  {escape(line['error'].splitlines()[-1])}", soft_wrap=True)
        self.results.append(line)
        return line


def _outcome(line: dict[str, Any]) -> str:
    if line["status"] == "oom":
        return "[yellow]OOM[/]"
    if line["status"] == "failed":
        return "[red]failed[/]"
    return f"[green]{line['tok_s']:,.0f} tok/s[/]" if line.get("tok_s") else "[green]ok[/]"


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} left"
