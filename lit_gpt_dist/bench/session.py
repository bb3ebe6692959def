"""Carries a list of rounds through, with a progress display, and sums up. Ctrl+C ends it cleanly."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from lit_gpt_dist.bench.case import Case
from lit_gpt_dist.bench.runner import Runner, interleaved, is_about, mistake_in, time_left
from lit_gpt_dist.errors import UserError


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
        self._mistaken: set[Case] = set()  # cases that `fit` refuses: further rounds would end alike
        self._last_mistake: tuple[Case, str] | None = None  # of the latest run, if that was one
        self._progress = Progress(
            TextColumn("[bold]{task.completed:.0f}/{task.total:.0f}[/]"),
            BarColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
        )

    def run_all(self, cases: Sequence[Case], rounds: int) -> None:
        """All rounds of all cases, interleaved. A case that is a user's mistake is run once.

        Raises:
            UserError: the mistake is one of all cases.
        """
        order = interleaved(cases, rounds)
        with self._progress as progress:
            task = progress.add_task("", total=len(order), left="")
            for done, (case, number) in enumerate(order):
                left = time_left(self._seconds, [pair for pair in order[done:] if self._is_to_run(*pair)])
                progress.update(task, description=escape(f"{case.name}, round {number + 1}"), left=_left(left))
                if case not in self._mistaken:
                    if self._has_time_for(case, number):
                        self.one(case, number)
                    else:
                        self.left_out += 1
                progress.update(task, completed=done + 1)

    def _is_to_run(self, case: Case, number: int) -> bool:
        return case not in self._mistaken and self.runner.known(case, number) is None

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
            self._stop_if_all_are_mistaken(case, line)
            self._seconds.setdefault(case, []).append(time.monotonic() - began)
            self.console.print(
                f"{_outcome(line)}  {escape(case.name)}, round {number + 1} ({line['seconds']:.1f} s)", soft_wrap=True
            )
            if line["status"] == "failed":
                self.console.print(f"  {escape(line['error'].splitlines()[-1])}", soft_wrap=True)
        self.results.append(line)
        return line

    def _stop_if_all_are_mistaken(self, case: Case, line: dict[str, Any]) -> None:
        """What `fit` refuses for an option that all cases share, it refuses for all: the rest need not start."""
        mistake, before = mistake_in(line), self._last_mistake
        self._last_mistake = (case, mistake) if mistake else None
        if mistake is None:
            return
        self._mistaken.add(case)
        shared = not self.results and is_about(mistake, self.runner.setting.fit_options)
        if shared or (before is not None and before[0] != case and before[1] == mistake):
            raise UserError(mistake)


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
