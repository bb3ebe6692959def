"""Where a rank stands: step, phase, Python stack and how many collectives of each group it has started. Reads only."""

import json
import sys
import threading
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any

STACK_LINES = 6
UNKNOWN = "unknown"
PHASES = (UNKNOWN, "setup", "data", "forward", "backward", "optimizer", "between", "validation", "saving", "end")


@dataclass(frozen=True)
class Position:
    """What a rank says about itself when nothing moves."""

    rank: int
    step: int  # optimizer steps completed
    phase: str
    started: dict[str, int] = field(default_factory=dict)  # collectives by process group
    waiting: dict[str, int] = field(default_factory=dict)  # number of the first one not finished, by process group
    collective: str = ""  # the last one started, as the flight recorder has it
    stack: tuple[str, ...] = ()  # of the main thread, innermost last

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Position":
        fields = json.loads(text)
        return cls(**{**fields, "stack": tuple(fields["stack"])})

    def __str__(self) -> str:
        last = f"; last collective: {self.collective}" if self.collective else ""
        at = "".join(f"\n    {line}" for line in self.stack)
        return f"rank {self.rank} stands in {self.phase} of step {self.step + 1}{last}{at}"


def take_position(rank: int, step: int, phase: str) -> Position:
    """From any thread. Does not communicate."""
    dump = flight_dump()
    started, waiting = started_collectives(dump), unfinished_collectives(dump)
    return Position(
        rank, step, phase, started or sequence_number(), waiting, last_collective(dump), main_thread_stack()
    )


def main_thread_stack() -> tuple[str, ...]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = traceback.extract_stack(frame)[-STACK_LINES:] if frame is not None else []
    return tuple(f"{line.filename}:{line.lineno} in {line.name}" for line in lines)


def flight_dump() -> dict[str, Any]:
    """What PyTorch's flight recorder holds, of NCCL or gloo; empty where this build has none or it recorded nothing."""
    import torch._C as bindings  # here: reading dumps must not wait for torch

    c10d = getattr(bindings, "_distributed_c10d", None)
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        read = getattr(c10d, name, None)
        if read is None:
            continue
        try:
            dump = json.loads(read())
        except (ValueError, RuntimeError, TypeError):
            continue
        if dump.get("entries"):
            return dump
    return {}


def started_collectives(dump: dict[str, Any]) -> dict[str, int]:
    """Number of collectives started by process group, as the recorder has it."""
    counts: dict[str, int] = {}
    for entry in dump.get("entries", []):
        group = group_name(entry)
        if not entry.get("is_p2p"):
            counts[group] = max(counts.get(group, 0), int(entry.get("collective_seq_id", 0)))
    return counts


def sequence_number() -> dict[str, int]:
    """The default group's own count of its collectives: where there is no recorder."""
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return {}
    try:
        default: Any = torch.distributed.distributed_c10d._get_default_group()
        return {"default": int(default._get_sequence_number_for_group())}
    except RuntimeError:
        return {}


def group_name(entry: dict[str, Any]) -> str:
    return "/".join(str(part) for part in entry.get("process_group", ["?"]))


def unfinished_collectives(dump: dict[str, Any]) -> dict[str, int]:
    """By process group the number of the first collective that was started and has not finished."""
    first: dict[str, int] = {}
    for entry in dump.get("entries", []):
        if entry.get("is_p2p") or entry.get("retired") or entry.get("state") == "completed":
            continue
        number = int(entry.get("collective_seq_id", 0))
        first[group_name(entry)] = min(number, first.get(group_name(entry), number))
    return first


def last_collective(dump: dict[str, Any]) -> str:
    """Name, number and sizes of the newest entry."""
    entries = dump.get("entries", [])
    if not entries:
        return ""
    entry = max(entries, key=lambda entry: entry.get("time_created_ns", entry.get("record_id", 0)))
    sizes = " ".join("×".join(map(str, size)) for size in entry.get("input_sizes", []))
    group = entry.get("process_group", ["", ""])[-1]
    return f"{entry.get('profiling_name', '?')} {entry.get('collective_seq_id')} of {group} ({sizes}), {entry.get('state')}"


def who_is_missing(positions: list[Position], ranks: int) -> str:
    """In words: which rank the others wait for. Pure."""
    silent = sorted(set(range(ranks)) - {position.rank for position in positions})
    if silent:
        return f"rank {', '.join(map(str, silent))} did not answer: its process is gone or cannot run"
    awaited = awaited_ranks(positions)
    stalled = [position for position in positions if position.rank in awaited and not position.waiting]
    if stalled:
        return f"rank {named(stalled)} is missing: it {stands(stalled[0])}{awaited[stalled[0].rank]}"
    if awaited and all(position.phase == UNKNOWN for position in positions):
        both = "; ".join(f"rank {rank} {why}" for rank, why in sorted(awaited.items()))
        return f"ranks {', '.join(map(str, sorted(awaited)))} wait for each other: {both}"
    if awaited:  # they wait for each other: who is furthest has left out what the others wait in
        last = max((position for position in positions if position.rank in awaited), key=order)
        return f"rank {last.rank} is missing: it went on to {place(last)}, and {awaited[last.rank]}"
    first, last = min(positions, key=order), max(positions, key=order)
    if order(first) == order(last):
        return f"all ranks stand in {place(first)}, and none waits for another in a recorded collective"
    return f"rank {first.rank} is missing: it stands in {place(first)}, rank {last.rank} in {place(last)}"


def order(position: Position) -> tuple[int, int]:
    return position.step, PHASES.index(position.phase)


def place(position: Position) -> str:
    return f"{position.phase} of step {position.step + 1}"


def stands(position: Position) -> str:
    return "" if position.phase == UNKNOWN else f"stands in {place(position)}, and "


def named(positions: list[Position]) -> str:
    return ", ".join(str(position.rank) for position in positions)


def awaited_ranks(positions: list[Position]) -> dict[int, str]:
    """The ranks that have not started a collective in which another rank waits, and which."""
    awaited: dict[int, str] = {}
    for waiter in positions:
        for group, number in waiter.waiting.items():
            for other in positions:
                started = other.started.get(group, 0)
                if started < number:
                    awaited.setdefault(
                        other.rank,
                        f"has started {started} collectives of group {group} where rank {waiter.rank} waits in number {number}",
                    )
    return awaited
