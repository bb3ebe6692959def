"""Measures cases one after another, each in a fresh process, and writes down what came of it."""

import json
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_gpt_dist.bench.case import Case, Setting, case_hash, fit_arguments
from lit_gpt_dist.bench.ledger import Ledger
from lit_gpt_dist.bench.machine import Clocks
from lit_gpt_dist.bench.process import Ended, run
from lit_gpt_dist.errors import EXIT_USER_ERROR


@dataclass
class Runner:
    """Runs cases below ``root`` and keeps their lines in ``root/results.jsonl``.

    ``fit`` is the command that trains; its options are appended.
    """

    root: Path
    fit: Sequence[str]
    setting: Setting
    environment: dict[str, str]
    timeout_seconds: float
    ledger: Ledger = field(init=False)
    clocks: Clocks = field(default_factory=Clocks)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.root / "results.jsonl")

    def known(self, case: Case, number: int) -> dict[str, Any] | None:
        """The line of a round that was run before. Running out of memory counts for all rounds."""
        key = case_hash(case, self.setting)
        found = self.ledger.finished(key, number)
        if found is None and self.ledger.out_of_memory(key):
            return self.line(case, number) | {"status": "oom", "error": "ran out of memory in another round"}
        return found

    def measure(self, case: Case, number: int) -> dict[str, Any]:
        """Runs one round and returns its line, which is in the file by then."""
        folder = self.root / case.name / f"round-{number}"
        if folder.exists():  # what an interrupted call left
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        command = [*self.fit, *fit_arguments(case, self.setting, str(folder), tag=case.name)]
        ended = run(command, folder / "output.txt", self.environment, self.timeout_seconds, self.clocks.sample)
        line = self.line(case, number) | {"command": shlex.join(command), "seconds": round(ended.seconds, 2)}
        clocks = self.clocks.take()
        line |= {"sm_clock_mhz": clocks} if clocks else {}
        line |= self._outcome(ended, folder)
        self.ledger.append(line)
        return line

    def line(self, case: Case, number: int) -> dict[str, Any]:
        """What is known before a run: who it is."""
        identity = {"case": case.name, "case_hash": case_hash(case, self.setting), "round": number, "tag": case.name}
        shape = dict(case.shape)
        given = {"variant": case.variant, "shape": shape, "memory_fraction": self.setting.memory_fraction}
        batch = {"micro": case.micro, "accum": case.accumulate, "global_batch": case.global_batch}
        options = {
            "precision": case.precision,
            "recompute": case.recompute_kind,
            "recompute_blocks": case.recompute_blocks,
            "compile": case.compile,
            "context": case.context,
        }
        place = {"mode": case.strategy, "size": case.size, "world": case.devices}
        return {k: v for k, v in (identity | place | batch | options | given).items() if v not in (None, {}, "")}

    def _outcome(self, ended: Ended, folder: Path) -> dict[str, Any]:
        measured = _last_line(folder / "results.jsonl")
        if ended.code == 0 and measured is not None:
            # `fit`'s own command line would name the folder of one round; what it measured wins over what was asked for
            return {name: value for name, value in measured.items() if name not in ("tag", "command")} | {
                "status": "ok"
            }
        if ended.out_of_memory:
            return {"status": "oom", "error": ended.last_words()}
        if ended.code is None:
            return {"status": "failed", "error": f"no end after {self.timeout_seconds:g} s; {ended.last_words()}"}
        why = f"exit code {ended.code}" if ended.code else "it wrote no result"
        return {"status": "failed", "exit_code": ended.code, "error": f"{why}: {ended.last_words()}"}


def _last_line(path: Path) -> dict[str, Any] | None:
    try:
        lines = path.read_text().strip().splitlines()
        found = json.loads(lines[-1]) if lines else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def mistake_in(line: dict[str, Any]) -> str | None:
    """What `fit` said of a user's mistake, which no repetition mends; None where the line is of anything else."""
    if line.get("exit_code") != EXIT_USER_ERROR:
        return None
    said = [words.rpartition("error: ")[2] for words in line["error"].splitlines() if "error: " in words]
    return said[-1] if said else line["error"]


def is_about(mistake: str, options: Sequence[str]) -> bool:
    """Whether a mistake names one of the options, as ``optim.lr`` or as ``lr``."""
    names = [word.removeprefix("--").partition("=")[0].rpartition(".")[2] for word in options if word.startswith("--")]
    return any(re.search(rf"\b{re.escape(name)}\b", mistake) for name in names if name)


def interleaved(cases: Sequence[Case], rounds: int) -> list[tuple[Case, int]]:
    """Every case once, then every case again: a machine that drifts hurts all alike. Odd rounds go backwards, so that
    no case always follows the same one."""
    return [
        (case, number) for number in range(rounds) for case in (cases if number % 2 == 0 else list(reversed(cases)))
    ]


def time_left(seconds_by_case: dict[Case, list[float]], remaining: Sequence[tuple[Case, int]]) -> float | None:
    """Seconds that the remaining rounds should take: as long as their case took, else the mean of all; None at first."""
    every = [seconds for several in seconds_by_case.values() for seconds in several]
    if not every:
        return None
    mean = sum(every) / len(every)
    return sum(sum(own) / len(own) if (own := seconds_by_case.get(case)) else mean for case, _ in remaining)
