"""Draws loss curves and, under them, how far each is from its reference. Reads no files."""

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lit_gpt_dist.report.curves import Comparison, Curve, Verdict, band
from lit_gpt_dist.report.names import corpus_names, describe_size
from lit_gpt_dist.report.picture import STYLE, Look, Picture, filled, literal
from lit_gpt_dist.report.results import Run
from lit_gpt_dist.report.statistics import strategy_order

MOST_CURVES = 7  # more lines in one picture cannot be told apart
MOST_PICTURES = 4
LEGEND_CHARACTERS = 46  # of one line in a legend of two columns
TITLE_CHARACTERS = 80  # of one line of a title, at the width of a picture


def draw_losses(comparisons: Sequence[Comparison], looks: Mapping[str, Look]) -> list[Picture]:
    """One picture a reference: the curves, and under them how far each is from it. ``looks`` has every strategy."""
    groups: dict[int, list[Comparison]] = {}
    for comparison in comparisons:
        if comparison.reference is not None:
            groups.setdefault(id(comparison.reference), []).append(comparison)
    worth = sorted((g for g in groups.values() if len(g) > 1), key=len, reverse=True)
    drawn = worth[:MOST_PICTURES]
    titles = _titles([group[0].reference.run for group in drawn if group[0].reference])
    pictures = [
        _draw_group(group, number, title, looks)
        for number, (group, title) in enumerate(zip(drawn, titles, strict=True), start=1)
    ]
    if len(worth) > MOST_PICTURES:
        more = f"{len(worth) - MOST_PICTURES} more references have curves: their verdicts are in the table."
        pictures[-1] = replace(pictures[-1], note=f"{pictures[-1].note} {more}".strip())
    return pictures


def _titles(references: Sequence[Run]) -> list[str]:
    """Size, batch and seed; context, vocabulary and corpus only where the pictures differ in them."""
    corpora = corpus_names(references)
    titles = [[describe_size(run), f"global batch {run.global_batch}"] for run in references]
    facts: dict[str, list[object]] = {
        "seed": [run.seed for run in references],
        "context": [run.context for run in references],
        "vocabulary": [run.vocab for run in references],
        "corpus": [corpora.get(run.corpus_hash or "") for run in references],
    }
    for name, values in facts.items():
        if name == "seed" or len(set(values)) > 1:
            for title, value in zip(titles, values, strict=True):
                title += [f"{name} {value}"] if value is not None else []
    return [", ".join(title) for title in titles]


def _draw_group(group: list[Comparison], number: int, title: str, looks: Mapping[str, Look]) -> Picture:
    reference = group[0].reference
    assert reference is not None
    others = _one_a_tag([c for c in group if c.verdict is not Verdict.REFERENCE])
    shown = sorted(others, key=lambda c: c.verdict is not Verdict.DIFFERENT)[:MOST_CURVES]
    shown.sort(key=lambda c: (strategy_order(c.curve.run.mode), c.curve.run.world))
    run = reference.run
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 5.6), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        name = _in_legend(f"reference: {run.mode} on {run.world}", run.tag)
        top.plot(reference.steps, reference.losses, color="#000000", linewidth=3.2, alpha=0.35, label=name)
        floor = _draw_bands(bottom, reference, shown)
        of_strategy: Counter[str] = Counter()
        for place, comparison in enumerate(shown):
            strategy = comparison.curve.run.mode
            _draw_curve(top, bottom, comparison, filled(looks[strategy], of_strategy[strategy]), place, floor)
            of_strategy[strategy] += 1
        bottom.set_ylim(bottom=floor * 0.7)  # after everything is drawn: the top is fixed from here on
        top.set_ylabel("training loss")
        bottom.set_xlabel("optimizer step")
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.suptitle(literal("\n".join(textwrap.wrap(f"{title}: one curve?", TITLE_CHARACTERS))), fontsize=11)
        handles = [*top.get_legend_handles_labels()[0], *bottom.get_legend_handles_labels()[0]]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, handlelength=3.5)
    left_out = f"{len(shown)} of {len(others)} runs are drawn." if len(shown) < len(others) else ""
    file_name = re.sub(r"[^\w.-]+", "-", f"loss_{number}_{run.size}_batch{run.global_batch}")
    return Picture(file_name, f"{title}: one curve?", figure, left_out)


def _in_legend(words: str, tag: str) -> str:
    """What half the width of a picture has room for: two lines where one is not enough, a long tag without its middle."""
    if len(tag) + 2 > LEGEND_CHARACTERS:
        half = LEGEND_CHARACTERS // 2 - 2
        tag = f"{tag[:half]}…{tag[-half:]}"
    joint = " " if len(words) + len(tag) + 3 <= LEGEND_CHARACTERS else "\n"
    return literal(f"{words}{joint}({tag})")


def _draw_bands(bottom: Any, reference: Curve, shown: Sequence[Comparison]) -> float:
    """What the verdicts hold a curve to. Returns the smallest difference that is drawn."""
    bands = [band(c.curve.run, reference.run) for c in shown]
    floor = min(limits.same for limits in bands) / 1e3
    widest = max(bands, key=lambda limits: limits.rounding)
    steps = np.arange(1, reference.last_step + 1)
    bottom.axhline(
        widest.same, color="#808080", linewidth=1, linestyle=(0, (2, 2)), label="tolerance of the same curve"
    )
    rounding = widest.rounding_at(steps)
    label = "rounding of this precision"
    bottom.fill_between(steps, floor, rounding, color="#808080", alpha=0.15, linewidth=0, label=label)
    bottom.set_yscale("log")
    bottom.set_ylabel(f"largest |Δloss| so far\n(below {floor:.0e}: drawn there)")
    return floor


def _one_a_tag(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Rounds of one tag lie on each other: the one farthest from the reference stands for them."""
    worst: dict[tuple, Comparison] = {}
    for comparison in comparisons:
        key = (comparison.curve.run.tag, comparison.curve.run.mode, comparison.curve.run.world, comparison.curve.seams)
        if key not in worst or (comparison.max_difference or 0) > (worst[key].max_difference or 0):
            worst[key] = comparison
    return list(worst.values())


def _draw_curve(top: Any, bottom: Any, comparison: Comparison, look: Look, place: int, floor: float) -> None:
    run, curve = comparison.curve.run, comparison.curve
    style = look | dict(markersize=5.5, linewidth=1.2)
    every = max(1, len(curve.steps) // 8)
    marks = (place * every // 4 % every, every)  # staggered, so that equal curves show all their markers
    name = _in_legend(f"{run.mode} on {run.world}: {comparison.verdict}", run.tag)
    top.plot(curve.steps, curve.losses, markevery=marks, **style)
    # the largest so far decides the verdict, and lines that only rise can be told apart where noise could not
    largest = np.maximum.accumulate(np.maximum(np.abs(comparison.difference), floor))
    bottom.plot(comparison.steps, largest, label=name, markevery=marks, **style)
