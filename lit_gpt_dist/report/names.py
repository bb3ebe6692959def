"""Puts what a run is into words: its model, its corpus. Knows the presets; compares and draws nothing."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import PRESETS, preset
from lit_gpt_dist.report.results import Run

DECIDING = ("width", "heads", "activation")  # fields that others follow from
OWN_FIELDS = ("context", "vocab_size", "dropout")  # of the result line; a shape may have them too


def describe_size(run: Run) -> str:
    shape = ", ".join(f"{name} {value}" for name, value in unusual_shape(run).items())
    return f"{run.size} ({shape})" if shape else run.size


def unusual_shape(run: Run) -> dict[str, Any]:
    """Fields of the model's shape that are not the preset's. The widths that follow from others count where they do not."""
    shape = {name: value for name, value in run.shape.items() if name not in OWN_FIELDS}
    deciding = (shape.get(name) for name in DECIDING)
    usual = _usual(run.size, *(value if isinstance(value, int | str) else None for value in deciding))
    return {name: value for name, value in shape.items() if name not in usual or usual[name] != value}


@cache  # asked for every line of a file, which holds few shapes
def _usual(size: str, *deciding_values: Any) -> Mapping[str, Any]:
    if size not in PRESETS:
        return {}
    plain = preset(size).to_dict()
    named = zip(DECIDING, deciding_values, strict=True)
    deciding = {name: value for name, value in named if value is not None}
    try:
        followed = preset(size, **deciding).to_dict()
    except (UserError, TypeError):  # a shape that this version cannot build
        return plain
    return plain | {name: followed[name] for name in ("kv_heads", "ff_width")}


def corpus_names(runs: Iterable[Run]) -> dict[str, str]:
    """A name for every corpus hash: the file's, and the hash with it where two corpora are called alike."""
    named = {run.corpus_hash: Path(run.corpus).name if run.corpus else "" for run in runs if run.corpus_hash}
    names = list(named.values())
    return {
        digest: name if name and names.count(name) == 1 else f"{name} {digest[:8]}".strip()
        for digest, name in named.items()
    }
