"""From one rank's trace to numbers: compute, communication, what of it is hidden, gaps, and collectives by kind. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from lit_gpt_dist.trace.intervals import Interval, intersect, subtract, total, union
from lit_gpt_dist.trace.kineto import Collective, RankTrace

SCATTERS = ("reduce-scatter", "all-to-all")  # of gradients: parallel/fsdp2.py has both
SMALL_BYTES = 4096  # a norm or a flag, not a gradient bucket


@dataclass(frozen=True)
class Kind:
    """All collectives of one kind. Sizes are None where the trace does not tell them."""

    per_step: float
    total_bytes_per_step: float | None
    smallest: int | None
    median: float | None
    largest: int | None


@dataclass(frozen=True)
class RankReport:
    """One rank's traced steps. Times in µs, shares of the traced time."""

    rank: int
    backend: str
    steps: int
    window: float
    compute: float
    communication: float
    hidden: float
    exposed: float
    idle: float
    data: float  # in ranges where the batch is fetched
    data_gap: float  # of it, with nothing on the device
    buckets: float  # pieces in which gradients are reduced, per step
    waited: float  # of communication, what other ranks' collectives show to be waiting for this one's partners
    kinds: dict[str, Kind] = field(default_factory=dict)

    @property
    def step_ms(self) -> float:
        return self.window / self.steps / 1000

    def share(self, part: float) -> float:
        return part / self.window if self.window else 0.0

    @property
    def hidden_share(self) -> float:
        """Of communication."""
        return self.hidden / self.communication if self.communication else 0.0


def window_of(trace: RankTrace) -> Interval:
    """The traced steps. A device finishes later than the host thinks, so its last work counts."""
    busy = [*trace.compute, *((c.begin, c.end) for c in trace.collectives)]
    if not trace.steps:
        return min(begin for begin, _ in busy), max(end for _, end in busy)
    begin, end = trace.steps[0][0], trace.steps[-1][1]
    if trace.backend == "cuda" and busy:
        return max(begin, min(b for b, _ in busy)), max(end for _, end in busy)
    return begin, end


def analyse(trace: RankTrace, waited: float = 0.0) -> RankReport:
    window = window_of(trace)
    inside = [window]
    compute = intersect(union(trace.compute), inside)
    communication = intersect(union((c.begin, c.end) for c in trace.collectives), inside)
    hidden = total(intersect(compute, communication))
    idle = subtract(inside, union([*compute, *communication]))
    data = intersect(union(trace.data), inside)
    steps = max(1, len(trace.steps))
    return RankReport(
        rank=trace.rank,
        backend=trace.backend,
        steps=steps,
        window=window[1] - window[0],
        compute=total(compute),
        communication=total(communication),
        hidden=hidden,
        exposed=total(communication) - hidden,
        idle=total(idle),
        data=total(data),
        data_gap=total(intersect(idle, data)),
        buckets=gradient_buckets(trace.collectives) / steps,
        waited=waited,
        kinds={kind: summary(trace.collectives, kind, steps) for kind in sorted({c.kind for c in trace.collectives})},
    )


def gradient_buckets(collectives: Sequence[Collective]) -> int:
    """Reduce-scatters, or all-to-alls in their place, under sharding; else all-reduces of more than a few numbers."""
    scattered = sum(collective.kind in SCATTERS for collective in collectives)
    if scattered:
        return scattered
    large = [c for c in collectives if c.kind == "all-reduce" and (c.bytes is None or c.bytes > SMALL_BYTES)]
    return len(large)


def summary(collectives: Sequence[Collective], kind: str, steps: int) -> Kind:
    same = [collective for collective in collectives if collective.kind == kind]
    sizes = [collective.bytes for collective in same if collective.bytes is not None]
    if not sizes:
        return Kind(len(same) / steps, None, None, None, None)
    return Kind(len(same) / steps, sum(sizes) / steps, min(sizes), statistics.median(sizes), max(sizes))


def waiting_times(traces: Sequence[RankTrace]) -> list[float]:
    """µs each rank's collectives took longer than on the rank that came last to them.

    A collective begins on a rank when that rank is there and ends when all are done: the shortest is the transfer itself.
    Zero where the ranks' collectives do not match one to one.
    """
    shapes = {tuple((c.kind, c.bytes) for c in trace.collectives) for trace in traces}
    if len(traces) < 2 or len(shapes) != 1:
        return [0.0] * len(traces)
    durations = [[c.end - c.begin for c in trace.collectives] for trace in traces]
    shortest = [min(column) for column in zip(*durations, strict=True)]
    return [sum(mine) - sum(shortest) for mine in durations]


def reports(traces: Sequence[RankTrace]) -> list[RankReport]:
    return [analyse(trace, waited) for trace, waited in zip(traces, waiting_times(traces), strict=True)]
