"""What a run was told, as far as it can change a curve: its saved config.yaml, or else its command line. Judges nothing."""

import functools
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lit_gpt_dist.report.results import Run

_SCHEDULE, _END, _LENGTH = "optim.schedule_steps", "trainer.max_steps", "length of the schedule"
_GROUPS = ("model.", "data.", "optim.")
_OTHERS = (
    *("trainer.gradient_clip_val", "trainer.gradient_clip_algorithm", "trainer.max_epochs"),
    *("trainer.limit_train_batches", "trainer.overfit_batches", _LENGTH),
)
# must not change a curve (that is what the comparison is about), or compared as a field of the result line
_NEUTRAL = (
    *("model.recompute", "model.compile", "model.cuda_graph", "model.context", "data.context", "data.corpus"),
    *("data.global_batch", "data.micro_batch", "data.val_windows", "data.val_micro_batch", "data.on_device"),
    *("data.workers", "data.num_workers", "optim.fused"),
)

Settings = Mapping[str, Any]  # by their dotted names


def differing_settings(run: Run, reference: Run) -> list[str]:
    """Settings that differ and can change a curve, as "optim.lr 0.0003 against 0.001"."""
    mine, other = _config(run), _config(reference)
    unset = "the default"
    if mine is None or other is None or run.config == reference.config:
        mine, other = _options(run.command), _options(reference.command)
        unset = "not given"
    if mine is None or other is None:
        return []

    def words(settings: Settings, name: str) -> str:
        value = settings.get(name)
        return unset if value is None else str(value)

    mine, other = _with_schedule_length(mine), _with_schedule_length(other)
    names = sorted(name for name in mine.keys() | other.keys() if _shapes_a_curve(name))
    return [
        f"{name} {words(mine, name)} against {words(other, name)}"
        for name in names
        if not _equal(mine.get(name), other.get(name))
    ]


def dropout_of(run: Run) -> float:
    """As the line has it, else as the run was told; 0 where nothing is known of any."""
    if run.dropout is not None:
        return run.dropout
    told = (_config(run) or _options(run.command) or {}).get("model.dropout")
    try:
        return float(told)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return 0.0


def _with_schedule_length(settings: Settings) -> Settings:
    """In place of the two options that decide it: where a run ends matters only where its schedule ends there."""
    rest = {name: value for name, value in settings.items() if name not in (_SCHEDULE, _END)}
    return rest | {_LENGTH: settings.get(_SCHEDULE) or settings.get(_END)}


def _shapes_a_curve(name: str) -> bool:
    return (name.startswith(_GROUPS) or name in _OTHERS) and not name.startswith(_NEUTRAL)


def _equal(mine: Any, other: Any) -> bool:
    """1e-3 and 0.001 are one value."""
    if mine == other:
        return True
    try:
        return float(mine) == float(other)
    except (TypeError, ValueError):
        return False


def _config(run: Run) -> Settings | None:
    return _read(run.config) if run.config else None


@functools.cache
def _read(path: str) -> Settings | None:
    """A saved configuration; None where it is gone, as after a clean-up or on another machine."""
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    return dict(_flat(content)) if isinstance(content, dict) else None


def _flat(tree: Mapping[Any, Any], before: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in tree.items():
        name = f"{before}{key}"
        pairs += _flat(value, f"{name}.") if isinstance(value, Mapping) else [(name, value)]
    return pairs


def _options(command: str | None) -> Settings | None:
    if not command:
        return None
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            found[name] = value if equals else following if not following.startswith("--") else "true"
    return found
