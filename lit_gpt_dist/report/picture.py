"""What every picture of the report shares: one look for each strategy, style, and saving as PNG and SVG.

Readable in print and by the colour-blind: the palette of Okabe and Ito (2008), and every strategy has its own marker and
stroke besides its colour.
"""

import io
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from lit_gpt_dist.report.statistics import STRATEGIES, strategy_order

matplotlib.use("Agg")

# Okabe and Ito, without yellow
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
STROKES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
FILLS = ("none", "full", "left", "top")  # of the markers: tells lines of one strategy apart
FILL_SIGNS = ("○", "●", "◐", "◓")
STYLE: Any = {  # a dict of matplotlib settings; its keys are a Literal that only stubs know
    "font.size": 9,
    "axes.grid": True,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "path",  # no font needed where it is read
    "svg.hashsalt": "lit_gpt_dist",  # the same numbers give the same file
}

Look = dict[str, Any]  # matplotlib's options of a line


def strategy_looks(strategies: Iterable[str]) -> dict[str, Look]:
    """Colour, marker and stroke of every strategy. Those of a known one never change; unknown ones follow by name.

    Give it all strategies of a report at once, so that its pictures agree. The three together repeat after 280.
    """
    names = sorted({*STRATEGIES, *strategies}, key=strategy_order)
    return {name: _look(place) for place, name in enumerate(names)}


def _look(place: int) -> Look:
    return dict(
        color=COLOURS[place % len(COLOURS)],
        marker=MARKERS[place % len(MARKERS)],
        linestyle=STROKES[place % len(STROKES)],
        markerfacecolor="white",
    )


def filled(look: Look, place: int) -> Look:
    """The same look with the n-th filling of its marker."""
    fill = FILLS[place % len(FILLS)]
    if fill == "none":  # white rather than see-through: the line does not cross the marker
        return look
    return look | dict(fillstyle=fill, markerfacecolor=look["color"], markerfacecoloralt="white")


def literal(text: str) -> str:
    """Text of a results file must not be read as a formula: a single $ would be an error."""
    return text.replace("$", r"\$")


@dataclass(frozen=True)
class Picture:
    name: str  # file name without suffix
    title: str
    figure: Figure
    note: str = ""  # what the picture leaves out; stands under it

    def png(self, dots_per_inch: int = 160) -> bytes:
        return self._save("png", dpi=dots_per_inch)

    @cached_property
    def svg(self) -> bytes:
        return self._save("svg", metadata={"Date": None})

    def _save(self, form: str, **options: Any) -> bytes:
        out = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(out, format=form, **options)
        self.figure.set_layout_engine(
            "none"
        )  # what the first drawing found stays: finding it takes a third of the time
        return out.getvalue()
