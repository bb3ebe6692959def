"""Collects the environment that belongs with the numbers: from `environment.json` beside the results, and from the lines."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lit_gpt_dist.report.results import Run

ENVIRONMENT_FILE = "environment.json"  # written by `bench` beside its results.jsonl


def environment_of(paths: Sequence[str | Path], runs: Iterable[Run]) -> dict[str, Any]:
    """Names and values to print. What the lines say comes first: it holds for every file, also for one without `bench`."""
    runs = list(runs)
    facts: dict[str, Any] = {}
    for name, values in (
        ("device", [run.device for run in runs]),
        ("git revision", [run.git_revision for run in runs]),
        ("corpus", [run.corpus_hash and f"{_name(run.corpus)} (hash {run.corpus_hash[:16]})" for run in runs]),
        ("versions", [", ".join(f"{k} {v}" for k, v in run.versions.items() if v) for run in runs]),
    ):
        distinct = sorted({str(value) for value in values if value and value != "unknown"})
        if distinct:
            facts[name] = "\n".join(distinct)
    for path in sorted({Path(p).parent / ENVIRONMENT_FILE for p in paths}):
        facts.update(_read(path))
    return facts


def _name(corpus: str | None) -> str:
    return Path(corpus).name if corpus else "default"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):  # a results file that `fit` wrote has no such neighbour
        return {}
    return {f"bench {name}": value for name, value in content.items()} if isinstance(content, dict) else {}
