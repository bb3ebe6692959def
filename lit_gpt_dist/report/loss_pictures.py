"""Draws loss curves and, under them, how far each is from its reference. Reads no files."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from lit_gpt_dist.report.curves import Comparison, Verdict, band
from lit_gpt_dist.report.picture import STYLE, Picture, line_style

MOST_CURVES = 7  # more lines in one picture cannot be told apart
MOST_PICTURES = 4


def draw_losses(comparisons: Sequence[Comparison]) -> list[Picture]:
    """One picture a reference: the curves, and under them how far each is from the reference."""
    groups: dict[int, list[Comparison]] = {}
    for comparison in comparisons:
        if comparison.reference is not None:
            groups.setdefault(id(comparison.reference), []).append(comparison)
    worth = sorted((g for g in groups.values() if len(g) > 1), key=len, reverse=True)
    with matplotlib.rc_context(STYLE):
        return [_draw_group(group, i) for i, group in enumerate(worth[:MOST_PICTURES])]


def _draw_group(group: list[Comparison], index: int) -> Picture:
    reference = group[0].reference
    assert reference is not None
    figure = Figure(figsize=(7.2, 5.4), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    top.plot(
        reference.steps,
        reference.losses,
        color="#000000",
        linewidth=3.2,
        alpha=0.35,
        label=f"{reference.run.tag} (reference)",
    )
    others = _one_a_tag([c for c in group if c.verdict is not Verdict.REFERENCE])
    shown = sorted(others, key=lambda c: c.verdict is not Verdict.DIFFERENT)[:MOST_CURVES]
    floor = min(band(c.curve.run, reference.run).same for c in shown) / 1e3
    for i, comparison in enumerate(shown):
        _draw_curve(top, bottom, comparison, i, floor)
    widest = max((band(c.curve.run, reference.run) for c in shown), key=lambda b: b.rounding)
    bottom.axhline(widest.same, color="#808080", linewidth=1, linestyle=(0, (2, 2)))
    steps = np.arange(1, reference.last_step + 1)
    bottom.fill_between(
        steps, floor, widest.rounding_at(steps), color="#808080", alpha=0.12, linewidth=0, label="rounding"
    )
    bottom.set_yscale("log")
    bottom.set_ylim(bottom=floor * 0.7)
    top.set_ylabel("training loss")
    bottom.set_ylabel(f"|Δloss|\n(below {floor:.0e}: drawn there)")
    bottom.set_xlabel("optimizer step")
    run = reference.run
    left_out = f" ({len(shown)} of {len(others)} runs drawn)" if len(shown) < len(others) else ""
    title = f"{run.size}, global batch {run.global_batch}, seed {run.seed}: one curve?{left_out}"
    figure.suptitle(title, fontsize=11)
    figure.legend(*top.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return Picture(f"loss_{index + 1}_{run.size}_batch{run.global_batch}", title, figure)


def _one_a_tag(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Rounds of one tag lie on each other: the one farthest from the reference stands for them."""
    worst: dict[tuple, Comparison] = {}
    for comparison in comparisons:
        key = (comparison.curve.run.tag, comparison.curve.run.mode, comparison.curve.run.world, comparison.curve.seams)
        if key not in worst or (comparison.max_difference or 0) > (worst[key].max_difference or 0):
            worst[key] = comparison
    return list(worst.values())


def _draw_curve(top: Any, bottom: Any, comparison: Comparison, index: int, floor: float) -> None:
    run, curve = comparison.curve.run, comparison.curve
    style = line_style(index) | dict(markersize=4.5, linewidth=1.2)
    every = max(1, len(curve.steps) // 8)
    marks = (index * every // 4 % every, every)  # staggered, so that equal curves show all their markers
    name = f"{run.tag}: {run.mode} on {run.world}, {comparison.verdict}"
    top.plot(curve.steps, curve.losses, label=name, markevery=marks, **style)
    size = np.maximum(np.abs(comparison.difference), floor)
    bottom.plot(comparison.steps, size, markevery=marks, **style)
