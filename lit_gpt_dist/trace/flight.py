"""Reads flight-recorder dumps (which collectives each rank started and finished) and says who is missing.

Both forms: the JSON that a run leaves in ``flight/`` when nothing moves, and the pickle that NCCL's own watchdog writes.
A pickle is read without importing or calling anything: one that names a class is refused.
"""

import json
import pickle
import re
from pathlib import Path
from typing import Any

from lit_gpt_dist.callbacks.position import (
    UNKNOWN,
    Position,
    last_collective,
    started_collectives,
    unfinished_collectives,
    who_is_missing,
)
from lit_gpt_dist.errors import UserError

NAME = re.compile(r"(?:nccl-)?rank-(\d+)(?:\.json)?$")


class PlainUnpickler(pickle.Unpickler):
    """Numbers, strings, lists and dictionaries only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_dumps(folder: Path) -> dict[int, dict[str, Any]]:
    """The dump of each rank; where both forms are there, the JSON, which was written first.

    Raises:
        UserError: a file that is none.
    """
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.suffix == ".json"):
        match = NAME.fullmatch(path.name)
        if match and path.stat().st_size:
            found[int(match[1])] = read_dump(path)
    return found


def read_dump(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".json":
            dump = json.loads(path.read_text(encoding="utf-8"))
        else:
            with path.open("rb") as file:
                dump = PlainUnpickler(file).load()
    except (OSError, ValueError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:
        raise UserError(f"{path} is not a flight recorder's dump ({error}); leave it out of the folder") from error
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise UserError(f"{path} is not a flight recorder's dump (it has no entries); leave it out of the folder")
    return dump


def describe(dumps: dict[int, dict[str, Any]]) -> list[str]:
    """A line a rank, and who is missing."""
    positions = [
        Position(
            rank,
            int(dump.get("step", 0)),
            str(dump.get("phase", UNKNOWN)),
            started_collectives(dump),
            unfinished_collectives(dump),
            last_collective(dump),
        )
        for rank, dump in sorted(dumps.items())
    ]
    lines = []
    for position in positions:
        counts = ", ".join(f"{count} of {group}" for group, count in sorted(position.started.items()))
        lines.append(f"rank {position.rank}: started {counts or 'nothing'}; last: {position.collective or 'none'}")
    return [*lines, who_is_missing(positions, max(max(dumps) + 1, ranks_of(dumps)))]


def ranks_of(dumps: dict[int, dict[str, Any]]) -> int:
    """World size: the largest group that a dump knows."""
    sizes = [0]
    for dump in dumps.values():
        for group in (dump.get("pg_config") or {}).values():
            ranks = group.get("ranks", "[]")
            sizes.append(len(json.loads(ranks) if isinstance(ranks, str) else ranks))
    return max(sizes)
