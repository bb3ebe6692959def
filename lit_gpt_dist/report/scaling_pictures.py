"""Draws tokens/s, efficiency and memory against the number of cards. Knows panels; reads no files."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from lit_gpt_dist.report.panels import Group, Panel, arrange, left_out
from lit_gpt_dist.report.picture import FILL_SIGNS, STYLE, Look, Picture, filled, literal
from lit_gpt_dist.report.statistics import Bases, Case

MOST_PANELS = 8  # a printed page
_MOST_LEFT_OUT = 8
_IDEAL: Any = dict(color="#707070", linewidth=1, linestyle=(0, (2, 2)), zorder=1)
_MARKER: Any = dict(markersize=5, linewidth=1.2)
_HEADING_LETTERS = 46  # as wide as a panel
_WIDTH = 0.7  # of the distance between two numbers of cards: what the points of one number may take
_TICKS = (1, 1.5, 2, 3, 4, 6, 8)  # times a power of ten

Value = Callable[[Case, Panel], float | None]


def draw_scaling(cases: Sequence[Case], looks: Mapping[str, Look]) -> list[Picture]:
    """Every picture for which there is data. ``looks`` has every strategy of the cases."""
    panels = arrange(cases)[:MOST_PANELS]
    drawn = [
        _picture(panels, looks, "tokens_per_second", "Tokens per second", lambda case, _: case.tok_s, _finish_speed),
        _picture(panels, looks, "efficiency", "Scaling efficiency", _efficiency(Bases(cases)), _finish_efficiency),
        _picture(panels, looks, "memory", "Peak memory", _memory, _finish_memory),
    ]
    note = _note(left_out(cases, panels))
    return [Picture(picture.name, picture.title, picture.figure, note) for picture in drawn if picture is not None]


def _note(unseen: Sequence[str]) -> str:
    more = [f"{len(unseen) - _MOST_LEFT_OUT} more"] if len(unseen) > _MOST_LEFT_OUT else []
    return f"Only in the table: {'; '.join([*unseen[:_MOST_LEFT_OUT], *more])}." if unseen else ""


def _efficiency(bases: Bases) -> Value:
    def value(case: Case, panel: Panel) -> float | None:
        scaling = bases.scaling(case)
        return scaling.weak_efficiency if panel.weak else scaling.strong_efficiency

    return value


def _memory(case: Case, panel: Panel) -> float | None:
    return case.median(lambda run: run.mem_gib if _on_cards(panel) else run.host_gib)


def _on_cards(panel: Panel) -> bool:
    return any(run.mem_gib is not None for case in panel.cases for run in case.measured)


class _Places:
    """Where points stand on the axis of cards: side by side where several belong to one number of cards."""

    def __init__(self, panel: Panel, strategies: Sequence[str]) -> None:
        slots = [(id(group), name) for group in panel.groups for name in strategies if name in group.lines]
        nearest = min((math.log2(b / a) for a, b in pairwise(panel.worlds)), default=1.0)
        self._slot = min(0.11, _WIDTH * nearest / len(slots))
        self._offsets = {slot: (i - (len(slots) - 1) / 2) * self._slot for i, slot in enumerate(slots)}

    def of(self, group: Group, strategy: str, world: int) -> float:
        return math.log2(world) + self._offsets[id(group), strategy]

    def span(self, group: Group, world: int) -> tuple[float, float]:
        """From the left of the group's first point to the right of its last."""
        places = [self.of(group, strategy, world) for strategy in group.lines]
        return min(places) - self._slot / 2, max(places) + self._slot / 2


Finish = Callable[[Any, Panel, _Places, Mapping[str, Look]], None]


def _picture(
    panels: Sequence[Panel], looks: Mapping[str, Look], name: str, title: str, value: Value, finish: Finish
) -> Picture | None:
    """One axis a panel in which anything is known, one line a strategy and batch. ``finish`` adds what is special."""
    shown = [panel for panel in panels if any(value(case, panel) is not None for case in panel.cases)]
    if not shown:
        return None
    with matplotlib.rc_context(STYLE):
        figure, axes = _grid(len(shown), share_y=finish is _finish_efficiency)
        for axis, panel in zip(axes, shown, strict=True):
            places = _Places(panel, list(looks))
            _draw_lines(axis, panel, places, looks, value)
            finish(axis, panel, places, looks)
            axis.set_title(_heading(panel, shown), fontsize=8)
            _card_axis(axis, panel)
        _legend(figure, shown, looks, with_ideal=finish is not _finish_memory)
        figure.suptitle(title, fontsize=11)
    return Picture(name, title, figure)


def _draw_lines(axis: Any, panel: Panel, places: _Places, looks: Mapping[str, Look], value: Value) -> None:
    for number, group in enumerate(panel.groups):
        for strategy, points in group.lines.items():
            known = [
                (places.of(group, strategy, case.first.world), v)
                for case in points
                if (v := value(case, panel)) is not None
            ]
            if known:
                xs, ys = zip(*known, strict=True)
                look = filled(looks[strategy], number) | _MARKER
                axis.plot(xs, ys, **look | dict(marker=""))
                axis.plot(xs, ys, **look | dict(linestyle="", zorder=3))  # no line crosses another's marker


def _finish_speed(axis: Any, panel: Panel, places: _Places, looks: Mapping[str, Look]) -> None:
    """What one card times N would be, as a level at every N, and the smallest and largest round of each point."""
    for group in panel.groups:
        for strategy, points in group.lines.items():
            for case in points:
                rates = [run.tok_s for run in case.measured if run.tok_s]
                place = places.of(group, strategy, case.first.world)
                axis.vlines(place, min(rates), max(rates), color=looks[strategy]["color"], linewidth=1)
        if group.one_card is not None:
            one = group.one_card.tok_s or math.nan
            worlds = sorted({case.first.world for case in group.cases})
            left, right = zip(*(places.span(group, world) for world in worlds), strict=True)
            axis.hlines([one * world for world in worlds], left, right, **_IDEAL)
    axis.set_yscale("log")
    _rate_ticks(axis)
    axis.set_ylabel("tokens/s (log scale)")


def _rate_ticks(axis: Any) -> None:
    """Round numbers, closer together than whole powers of ten: a panel often spans a factor of three."""
    low, high = axis.dataLim.y0 / 1.15, axis.dataLim.y1 * 1.15
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**decade for decade in decades for factor in _TICKS]
    inside = [tick for tick in ticks if low <= tick <= high]
    axis.set_ylim(low, high)
    axis.yaxis.set_major_locator(FixedLocator(inside[:: -(-len(inside) // 8)] if inside else [low]))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))


def _short(value: float) -> str:
    return f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k" if value >= 1e3 else f"{value:g}"


def _finish_efficiency(axis: Any, panel: Panel, places: _Places, looks: Mapping[str, Look]) -> None:
    axis.axhline(1, **_IDEAL)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    axis.set_ylabel("tokens/s per {0} ÷\ntokens/s of one {0}".format("process" if panel.first.on_cpu else "card"))
    # the axes of this picture share their limits: room for the points of the lowest, and noise is not blown up
    shared = [own.dataLim for own in axis.figure.axes if own.lines]
    lowest, highest = min(limits.y0 for limits in shared), max(limits.y1 for limits in shared)
    axis.set_ylim(0 if lowest < 0.5 else math.floor(min(lowest, 0.85) * 10 - 0.1) / 10, max(1.04, highest + 0.02))


def _finish_memory(axis: Any, panel: Panel, places: _Places, looks: Mapping[str, Look]) -> None:
    axis.set_ylim(0, axis.dataLim.y1 * 1.1)
    axis.set_ylabel("GiB per card" if _on_cards(panel) else "GiB per process (host)")


def _heading(panel: Panel, shown: Sequence[Panel]) -> str:
    """What the panel holds; vocabulary and device only where others have another."""
    setting = panel.setting
    if panel.first.vocab and len({p.first.vocab for p in shown}) > 1:
        setting += f", vocabulary {panel.first.vocab}"
    if len({p.first.device for p in shown}) > 1:
        setting += f", {panel.first.device}"
    signs = FILL_SIGNS if len(panel.groups) > 1 else ("",)
    batches = [f"{sign} {group.batch}".strip() for sign, group in zip(signs, panel.groups, strict=False)]
    kind = "weak scaling, micro × acc.: " if panel.weak else "strong scaling, global batch: "
    batch = kind + ", ".join(words.replace(" ", "\N{NO-BREAK SPACE}") for words in batches)
    return literal("\n".join([*textwrap.wrap(setting, _HEADING_LETTERS), *textwrap.wrap(batch, _HEADING_LETTERS)]))


def _grid(count: int, share_y: bool, height_inches: float = 2.6) -> tuple[Figure, list[Any]]:
    """Two panels side by side are as wide as a printed page's text."""
    columns = min(count, 2)
    rows = -(-count // columns)
    figure = Figure(figsize=(7.2 if columns == 2 else 4.8, height_inches * rows + 0.7), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(rows, columns, sharey=share_y)).flat)
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def _card_axis(axis: Any, panel: Panel) -> None:
    places = [math.log2(world) for world in panel.worlds]
    axis.set_xticks(places, [str(world) for world in panel.worlds])
    axis.set_xlim(places[0] - 0.5, places[-1] + 0.5)
    axis.grid(visible=False, axis="x")
    axis.set_xlabel("processes" if panel.first.on_cpu else "cards")


def _legend(figure: Figure, panels: Sequence[Panel], looks: Mapping[str, Look], with_ideal: bool) -> None:
    used = {strategy for panel in panels for group in panel.groups for strategy in group.lines}
    handles = [
        Line2D([], [], label=literal(strategy), **look, **_MARKER)
        for strategy, look in looks.items()
        if strategy in used
    ]
    if with_ideal:
        handles.append(Line2D([], [], label="ideal", **_IDEAL))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6), handlelength=3.5)
