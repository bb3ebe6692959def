"""Draws tokens/s, efficiency and memory against the number of cards. Knows cases; reads no files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from lit_gpt_dist.report.picture import COLOURS, STYLE, Picture, line_style
from lit_gpt_dist.report.statistics import Bases, Case
from lit_gpt_dist.report.table import rate

MOST_PANELS = 6
_IDEAL = dict(color="#707070", linewidth=1, linestyle=(0, (2, 2)), label="ideal", zorder=1)


@dataclass
class Panel:
    """Cases that belong under one title: the same model and options, and the same batch per card or in all."""

    title: str
    per_card: bool
    lines: dict[str, list[Case]] = field(default_factory=dict)  # mode: cases by cards

    def add(self, case: Case) -> None:
        """The fastest split into micro-batches stands for its number of cards."""
        points = self.lines.setdefault(case.first.mode, [])
        twin = next((p for p in points if p.first.world == case.first.world), None)
        if twin is None or (case.tok_s or 0) > (twin.tok_s or 0):
            points[:] = sorted([*(p for p in points if p is not twin), case], key=lambda c: c.first.world)

    @property
    def cases(self) -> list[Case]:
        return [case for points in self.lines.values() for case in points]

    @property
    def worlds(self) -> list[int]:
        return sorted({case.first.world for case in self.cases})


def group_panels(cases: Sequence[Case]) -> list[Panel]:
    """Panels with at least two numbers of cards; the largest first."""
    panels: dict[tuple, Panel] = {}
    for case in cases:
        run = case.first
        if not case.tok_s or run.variant:
            continue
        model = (run.size, run.params, run.context, case.options, run.device)
        for per_card, batch, words in (
            (True, (run.micro, run.accum), f"{run.micro} × {run.accum} windows a card"),
            (False, (run.global_batch,), f"{run.global_batch} windows in all"),
        ):
            title = f"{run.size}, {words}\n{case.options}"
            panels.setdefault((*model, per_card, *batch), Panel(title, per_card)).add(case)
    return [panel for panel in panels.values() if len(panel.worlds) > 1]


def draw_scaling(cases: Sequence[Case]) -> list[Picture]:
    """Every picture for which there is data: tokens/s, efficiency, memory."""
    panels = sorted(group_panels(cases), key=lambda p: len(p.cases), reverse=True)[:MOST_PANELS]
    if not panels:
        return []
    with matplotlib.rc_context(STYLE):
        drawn = [_draw_speed(panels), _draw_efficiency(panels, Bases(cases)), _draw_memory(panels, cases)]
    return [picture for picture in drawn if picture is not None]


def _draw_speed(panels: Sequence[Panel]) -> Picture | None:
    """With the line that one card times N would be."""

    def draw(axis: Any, panel: Panel) -> bool:
        one = max((case.tok_s or 0 for case in panel.cases if case.first.world == 1), default=0)
        if one:
            axis.plot(panel.worlds, [one * world for world in panel.worlds], **_IDEAL)
        for i, points in enumerate(panel.lines.values()):
            _error_bars(axis, i, points)
        axis.set_yscale("log", base=2)
        _rate_ticks(axis, panel)
        axis.set_ylabel("tokens/s")
        return True

    return _picture(panels, "tokens_per_second", "Tokens per second", lambda _: lambda case: case.tok_s, draw)


def _draw_efficiency(panels: Sequence[Panel], bases: Bases) -> Picture | None:
    def value(panel: Panel) -> Callable[[Case], float | None]:
        if panel.per_card:
            return lambda case: bases.scaling(case).weak_efficiency
        return lambda case: bases.scaling(case).strong_efficiency

    def draw(axis: Any, panel: Panel) -> bool:
        axis.axhline(1, **_IDEAL)
        axis.set_ylim(0, max(1.1, axis.get_ylim()[1]))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
        axis.set_ylabel("tokens/s a card ÷ one card's")
        return any(value(panel)(case) is not None for case in panel.cases)

    return _picture(panels, "efficiency", "Scaling efficiency", value, draw)


def _draw_memory(panels: Sequence[Panel], cases: Sequence[Case]) -> Picture | None:
    on_cards = any(run.mem_gib is not None for case in cases for run in case.measured)

    def memory(case: Case) -> float | None:
        return case.median(lambda run: run.mem_gib if on_cards else run.host_gib)

    def draw(axis: Any, panel: Panel) -> bool:
        axis.set_ylim(0, axis.get_ylim()[1] * 1.1)
        axis.set_ylabel("peak GiB a card" if on_cards else "peak GiB a process (host)")
        return any(memory(case) is not None for case in panel.cases)

    return _picture(panels, "memory", "Peak memory", lambda _: memory, draw)


def _picture(
    panels: Sequence[Panel],
    name: str,
    title: str,
    value: Callable[[Panel], Callable[[Case], float | None]],
    finish: Callable[[Any, Panel], bool],
) -> Picture | None:
    """One axis a panel, one line a mode. ``finish`` draws what is special and says whether the axis shows anything."""
    figure, axes = _grid(len(panels))
    useful = False
    for axis, panel in zip(axes, panels, strict=True):
        for i, (mode, points) in enumerate(panel.lines.items()):
            known = [(case.first.world, v) for case in points if (v := value(panel)(case)) is not None]
            if known:
                axis.plot(*zip(*known, strict=True), label=mode, markersize=5.5, linewidth=1.5, **line_style(i))
        useful |= finish(axis, panel)
        axis.set_title(panel.title, fontsize=8.5)
        _card_ticks(axis, panel.worlds)
        axis.legend()
    figure.suptitle(title, fontsize=11)
    return Picture(name, title, figure) if useful else None


def _grid(count: int, height_inches: float = 3.1) -> tuple[Figure, list[Any]]:
    columns = 2 if count == 4 else min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(max(4.6, 3.5 * columns), height_inches * rows), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(rows, columns)).flat)
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def _card_ticks(axis: Any, worlds: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(worlds, [str(world) for world in worlds])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("cards")
    axis.set_xlim(worlds[0] / 1.15, worlds[-1] * 1.15)


def _error_bars(axis: Any, index: int, points: Sequence[Case]) -> None:
    """Smallest and largest round."""
    for case in points:
        rates = [run.tok_s for run in case.measured if run.tok_s]
        axis.vlines(case.first.world, min(rates), max(rates), color=COLOURS[index % len(COLOURS)], linewidth=1)


def _rate_ticks(axis: Any, panel: Panel) -> None:
    """Ticks that double from the slowest point on: the ideal line is straight and equal distances are equal factors."""
    rates = [case.tok_s or 1 for case in panel.cases]
    step = 10 ** int(np.floor(np.log10(min(rates))))
    first = int(min(rates) / step) * step
    ticks = [first * 2.0**k for k in range(-1, 14) if first * 2.0**k <= max(rates) * 2]
    axis.set_yticks(ticks)
    axis.set_ylim(min(rates) / 1.3, max(*rates, *(line.get_ydata().max() for line in axis.lines)) * 1.3)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: rate(value)))
    axis.yaxis.set_minor_locator(NullLocator())
