"""Reads one rank's trace as ``torch.profiler`` exports it (Chrome's trace format). Knows nothing of verdicts.

On a GPU, kernels tell: NCCL's are communication, with their sizes; all others and copies are compute. On a CPU, operators on
any thread are compute, and gloo's ranges on its own threads are communication, whose sizes it does not tell.
"""

import gzip
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_gpt_dist.errors import UserError
from lit_gpt_dist.trace.intervals import Interval

DATA = "lit_gpt_dist.data"
STEP = "lit_gpt_dist.step"
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
DTYPE_BYTES = {
    "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8, "Byte": 1, "Char": 1, "Bool": 1,
}  # fmt: skip
KINDS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "sendrecv": "all-to-all",  # NCCL's kernel for one; in a replay its name is all there is
    "broadcast": "broadcast",
}
RANK = re.compile(r"rank-?_?(\d+)")


@dataclass(frozen=True)
class Collective:
    """One piece of communication. Times in µs."""

    kind: str
    begin: float
    end: float
    bytes: int | None  # of the larger buffer (facts: what nccl-tests counts); None where the trace does not tell


@dataclass(frozen=True)
class RankTrace:
    """What one rank did, in µs on its own clock."""

    rank: int
    backend: str  # cuda or cpu
    steps: list[Interval]
    compute: list[Interval]
    collectives: list[Collective]
    data: list[Interval]


def read_trace(path: Path) -> RankTrace:
    """Raises UserError where the file is no trace of torch.profiler."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            document = json.load(file)
        events = document["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise UserError(
            f"{path} is not a trace of torch.profiler ({error}); give a folder that fit --profile wrote"
        ) from error
    rank = document.get("distributedInfo", {}).get("rank")
    if rank is None:
        found = RANK.search(path.name)
        rank = int(found[1]) if found else 0
    return parse(events, int(rank))


def parse(events: list[dict[str, Any]], rank: int) -> RankTrace:
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    on_gpu = any(event.get("cat") == "kernel" for event in spans)
    annotations = [event for event in spans if event.get("cat") == "user_annotation"]
    steps = [interval(event) for event in annotations if str(event["name"]).startswith("ProfilerStep#")]
    compute, collectives = device_work(spans) if on_gpu else host_work(spans)
    return RankTrace(
        rank=rank,
        backend="cuda" if on_gpu else "cpu",
        steps=sorted(steps),
        compute=compute,
        collectives=sorted(collectives, key=lambda collective: collective.begin),
        data=sorted(interval(event) for event in annotations if event["name"] == DATA),
    )


def interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def device_work(spans: list[dict[str, Any]]) -> tuple[list[Interval], list[Collective]]:
    compute, collectives = [], []
    for event in spans:
        if event.get("cat") not in DEVICE_CATEGORIES:
            continue
        name = str(event["name"])
        if event["cat"] == "kernel" and name.lower().startswith("nccl"):
            arguments = event.get("args", {})
            kind = kind_of(str(arguments.get("Collective name", name)))  # a generic kernel's name does not tell
            collectives.append(Collective(kind, *interval(event), message_bytes(arguments)))
        else:
            compute.append(interval(event))
    return compute, collectives


def kind_of(name: str) -> str:
    """all-reduce, ... from a kernel's or a range's name."""
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((kind for word, kind in KINDS.items() if word in plain), "other")


def message_bytes(arguments: dict[str, Any]) -> int | None:
    """Bytes of the larger buffer, from what PyTorch attaches to NCCL's kernels."""
    width = DTYPE_BYTES.get(str(arguments.get("dtype")))
    counts = [arguments.get(name) for name in ("In msg nelems", "Out msg nelems")]
    known = [int(count) for count in counts if count is not None]
    return max(known) * width if width and known else None


def host_work(spans: list[dict[str, Any]]) -> tuple[list[Interval], list[Collective]]:
    """Operators, and gloo's ranges that were started within a step (others are the run's own agreements)."""
    compute = [interval(event) for event in spans if str(event["name"]).startswith("aten::")]
    ranges = sorted((e for e in spans if str(e["name"]).startswith("gloo:")), key=lambda event: event["ts"])
    launches = sorted((e for e in spans if str(e["name"]).startswith("c10d::")), key=lambda event: event["ts"])
    within = [interval(event) for event in spans if event["name"] == STEP]
    if not launches:
        return compute, [Collective(kind_of(event["name"]), *interval(event), None) for event in ranges]
    collectives, used = [], set()
    for launch in launches:
        kind = LAUNCHED.get(str(launch["name"]))
        match = next((r for r in ranges if id(r) not in used and r["name"] == kind and r["ts"] >= launch["ts"]), None)
        if match is None:
            continue
        used.add(id(match))
        inside = not within or any(begin <= launch["ts"] <= end for begin, end in within)
        if inside:
            collectives.append(Collective(launched_kind(launch["name"]), *interval(match), None))
    return compute, collectives


# gloo carries out a reduce-scatter as an all-reduce, and says so
LAUNCHED = {
    "c10d::allreduce_": "gloo:all_reduce",
    "c10d::_reduce_scatter_base_": "gloo:all_reduce",
    "c10d::_allgather_base_": "gloo:all_gather",
    "c10d::allgather_": "gloo:all_gather",
    "c10d::broadcast_": "gloo:broadcast",
    "c10d::alltoall_base_": "gloo:all_to_all",
}


def launched_kind(name: str) -> str:
    return kind_of(name.replace("_base_", ""))
