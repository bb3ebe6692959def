"""Options of `bench` from a YAML file and the command line, checked and typed. Runs nothing."""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import yaml

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.model.config import Recompute


def _numbers(kind: type) -> Callable[[str, Any], list]:
    def read(name: str, value: Any) -> list:
        return [_one(name, item, kind) for item in _words(value)]

    return read


def _texts(name: str, value: Any) -> list[str]:
    return [str(item).lower() if isinstance(item, bool) else str(item) for item in _words(value)]


def _words(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def _one(name: str, value: Any, kind: type) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError):
        what = "a whole number" if kind is int else "a number"
        raise UserError(f"{name} {value!r} is not {what}; separate several by commas") from None


def _single(kind: type) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else _one(name, value, kind)


def _recompute(name: str, value: Any) -> list[str]:
    """Kinds, each with or without a number of blocks: selective:6. Whether a model has so many, `fit` says."""
    found = _texts(name, value)
    for one in found:
        kind, given, blocks = one.partition(":")
        if kind not in get_args(Recompute):
            raise UserError(f"{name} {one} is not one of {', '.join(get_args(Recompute))}")
        if given and (kind == "none" or not blocks.isdecimal() or int(blocks) < 1):
            raise UserError(
                f"{name} {one} names no blocks to recompute; give a number of at least 1, as in selective:6 or full:6"
            )
    return found


# name: (how it is read, default)
OPTIONS: dict[str, tuple[Callable[[str, Any], Any], Any]] = {
    "sizes": (_texts, ["tiny"]),
    "strategies": (_texts, ["single", "ddp", "fsdp2"]),
    "devices": (_numbers(int), [1]),
    "micro": (_numbers(int), [16]),
    "accumulate": (_numbers(int), [1]),
    "precision": (_texts, [None]),
    "recompute": (_recompute, ["none"]),
    "compile": (_texts, [None]),
    "bucket_cap_mb": (_numbers(float), [None]),
    "context": (_numbers(int), [None]),
    "scaling": (_texts, ["weak"]),
    "global_batch": (_single(int), None),
    "ablation": (_texts, []),
    "find": (_single(str), None),
    "steps": (_single(int), 20),
    "rounds": (_single(int), 3),
    "accelerator": (_single(str), "auto"),
    "corpus": (_single(str), None),
    "seed": (_single(int), None),
    "memory_fraction": (_single(float), None),
    "timeout": (_single(float), 900.0),
    "time_limit": (_single(float), None),
    "root": (_single(str), "logs/bench"),
    "dry_run": (lambda name, value: bool(value), False),
}


def merged_options(given: dict[str, Any]) -> dict[str, Any]:
    """Defaults, then the file named by ``config``, then the command line.

    Raises:
        UserError: a file that cannot be read, an unknown name, or a value of the wrong kind.
    """
    path = given.pop("config", None)
    chosen = {**(_read(Path(path)) if path else {}), **given}
    if "global_batch" in chosen and "scaling" not in chosen:
        chosen["scaling"] = "strong"  # a global batch is given to be held
    options = {name: default for name, (_, default) in OPTIONS.items()}
    options |= {name: OPTIONS[name][0](name, value) for name, value in chosen.items()}
    for name in ("steps", "rounds"):
        if options[name] < 1:
            raise UserError(f"{name} {options[name]} is below 1; give at least 1")
    if options["find"] not in (None, "fastest", "largest"):
        raise UserError(f"find {options['find']!r} is not one of fastest, largest")
    return options


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(
            f"{path} cannot be read as YAML ({' '.join(str(error).split())}); see configs/bench for examples"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a mapping of options to values; see configs/bench for examples")
    for name in content:
        if name not in OPTIONS:
            near = difflib.get_close_matches(str(name), list(OPTIONS), n=1)
            raise UserError(f"{path}: unknown option {name}" + (f"; did you mean {near[0]}?" if near else ""))
    return content
