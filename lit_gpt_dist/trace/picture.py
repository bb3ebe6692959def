"""Draws the timeline of traced ranks: compute, communication (its exposed part apart), data. Matplotlib only."""

from collections.abc import Sequence
from pathlib import Path

from lit_gpt_dist.trace.intervals import Interval, intersect, subtract, union
from lit_gpt_dist.trace.kineto import RankTrace
from lit_gpt_dist.trace.overlap import window_of

SHOWN_STEPS = 2
MAX_RANKS = 8
COLOURS = {
    "compute": "#4c78a8",
    "hidden communication": "#9ecae1",
    "exposed communication": "#e45756",
    "data": "#bab0ac",
}


def lanes(trace: RankTrace, window: Interval) -> dict[str, list[Interval]]:
    """What to draw of one rank, by name."""
    inside = [window]
    compute = intersect(union(trace.compute), inside)
    communication = intersect(union((c.begin, c.end) for c in trace.collectives), inside)
    return {
        "compute": compute,
        "hidden communication": intersect(communication, compute),
        "exposed communication": subtract(communication, compute),
        "data": intersect(union(trace.data), inside),
    }


def shown_window(trace: RankTrace) -> Interval:
    """The first steps: a whole trace would be a grey bar."""
    begin, end = window_of(trace)
    if len(trace.steps) <= SHOWN_STEPS:
        return begin, end
    return begin, begin + (end - begin) * SHOWN_STEPS / len(trace.steps)


def draw(traces: Sequence[RankTrace], path: Path) -> None:
    """One row a rank and lane, in ms from the start of that rank's first traced step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = traces[:MAX_RANKS]
    figure = Figure(figsize=(14, 1.2 + 1.1 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    rows = (("compute", 0.0), ("communication", -0.3), ("data", -0.6))
    ticks, labels = [], []
    for index, trace in enumerate(shown):
        begin, end = shown_window(trace)
        parts = lanes(trace, (begin, end))
        for row, offset in rows:
            names = [name for name in parts if row in name]
            ticks.append(-index + offset)
            labels.append(f"rank {trace.rank} {row}")
            for name in names:
                bars = [((left - begin) / 1000, (right - left) / 1000) for left, right in parts[name]]
                axes.broken_barh(bars, (-index + offset - 0.13, 0.26), color=COLOURS[name], linewidth=0)
        for left, _ in trace.steps:
            if begin <= left <= end:
                axes.plot([(left - begin) / 1000] * 2, [-index - 0.75, -index + 0.15], color="black", linewidth=0.6)
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms (thin lines: the host begins a step)")
    axes.legend(
        handles=[Patch(color=colour, label=name) for name, colour in COLOURS.items()],
        ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False,
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
