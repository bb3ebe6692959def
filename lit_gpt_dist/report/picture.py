"""What every picture of the report shares: style, palette, and saving as PNG and SVG.

Readable in print and by the colour-blind: the palette of Okabe and Ito (2008), and every line has its own marker and
stroke besides its colour.
"""

import io
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure

matplotlib.use("Agg")

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito, without yellow
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STROKES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
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


def line_style(index: int) -> dict[str, Any]:
    """Colour, marker and stroke of the n-th line; the three together repeat only after 35 lines."""
    return dict(
        color=COLOURS[index % len(COLOURS)],
        marker=MARKERS[index % len(MARKERS)],
        linestyle=STROKES[index % len(STROKES)],
        markerfacecolor="white",
    )


@dataclass(frozen=True)
class Picture:
    name: str  # file name without suffix
    title: str
    figure: Figure

    def png(self, dots_per_inch: int = 160) -> bytes:
        return self._save("png", dpi=dots_per_inch)

    def svg(self) -> bytes:
        return self._save("svg", metadata={"Date": None})

    def _save(self, form: str, **options: Any) -> bytes:
        out = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(out, format=form, **options)
        return out.getvalue()
