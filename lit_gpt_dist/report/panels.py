"""Decides which cases share a panel of a scaling picture, and which are worth one. Draws nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lit_gpt_dist.report.names import describe_size
from lit_gpt_dist.report.results import Run
from lit_gpt_dist.report.statistics import Case, describe_options, has_usual_bucket, is_compiled, model, strategy_order

MOST_BATCHES = 3  # in a panel: more lines of one strategy cannot be told apart


@dataclass
class Group:
    """Cases of one model and one batch: per card (weak scaling) or in all (strong scaling)."""

    weak: bool
    lines: dict[str, list[Case]] = field(default_factory=dict)  # strategy: cases by cards

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
    def batch(self) -> str:
        run = self.cases[0].first
        return f"{run.micro} × {run.accum}" if self.weak else str(run.global_batch)

    @property
    def comparable(self) -> bool:
        """Whether it shows what more cards give: against one card, or along a strategy's line."""
        worlds = {case.first.world for case in self.cases}
        return len(worlds) > 1 and (1 in worlds or any(len(points) > 1 for points in self.lines.values()))

    @property
    def one_card(self) -> Case | None:
        """The base of the ideal: ``single``, or the fastest strategy on one card where that was not run."""
        alone = [case for case in self.cases if case.first.world == 1]
        return min(alone, key=lambda c: (c.first.mode != "single", -(c.tok_s or 0)), default=None)


@dataclass(frozen=True)
class Panel:
    """Groups of one model, options and device, which differ in their batch only."""

    groups: list[Group]

    @property
    def cases(self) -> list[Case]:
        return [case for group in self.groups for case in group.cases]

    @property
    def weak(self) -> bool:
        return self.groups[0].weak

    @property
    def first(self) -> Run:
        return self.cases[0].first

    @property
    def worlds(self) -> list[int]:
        return sorted({case.first.world for case in self.cases})

    @property
    def setting(self) -> str:
        """Model and options in words."""
        context = [f"context {self.first.context}"] if self.first.context else []
        options = {case.options for case in self.cases}
        return ", ".join(
            [describe_size(self.first), *context, _common(self.first) if len(options) > 1 else options.pop()]
        )


def arrange(cases: Sequence[Case]) -> list[Panel]:
    """Panels in the order of the cases, weak scaling before strong."""
    panels = []
    for members in _by_setting(cases):
        worth = _worth_showing(_groups(members))
        for weak in (True, False):
            kind = [group for group in worth if group.weak is weak]
            panels += [Panel(kind[i : i + MOST_BATCHES]) for i in range(0, len(kind), MOST_BATCHES)]
    return panels


def _by_setting(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases by what a panel must hold equal.

    How a run was compiled counts only where a strategy was measured with several ways: left to ``auto``, each strategy has
    its own, and they would never meet in a panel.
    """
    alike: dict[tuple, list[Case]] = {}
    for case in drawable(cases):
        alike.setdefault((model(case.first), case.first.device, _common(case.first)), []).append(case)
    found: dict[tuple, list[Case]] = {}
    for setting, members in alike.items():
        switched = len({(c.first.mode, c.first.compile) for c in members}) > len({c.first.mode for c in members})
        for case in members:
            found.setdefault((*setting, case.first.compile if switched else None), []).append(case)
    return list(found.values())


def _common(run: Run) -> str:
    """The options in words, without the way in which the run was compiled, and the bucket, units or overlap that go with it."""
    if not is_compiled(run):
        return describe_options(run)
    bucket = None if has_usual_bucket(run) else run.bucket_cap_mb
    return describe_options(
        replace(run, compile="yes", bucket_cap_mb=bucket, record={**run.record, "units": None, "overlap": None})
    )


def drawable(cases: Sequence[Case]) -> list[Case]:
    """Measured ones; a variant is held against its base in a table of its own."""
    return [case for case in cases if case.tok_s and not case.first.variant]


def _groups(cases: Sequence[Case]) -> list[Group]:
    groups: dict[tuple, Group] = {}
    for case in sorted(cases, key=lambda c: strategy_order(c.first.mode)):
        run = case.first
        groups.setdefault((True, run.micro, run.accum), Group(weak=True)).add(case)
        groups.setdefault((False, run.global_batch), Group(weak=False)).add(case)
    return list(groups.values())


def _worth_showing(groups: Sequence[Group]) -> list[Group]:
    """Comparable groups, the largest first, as long as they show a case that the others do not.

    A weak matrix also has cases that happen to share a global batch, and the reverse: nobody asked for those pictures.
    """
    shown: set[int] = set()
    kept = []
    for group in sorted(groups, key=lambda g: (-len(g.cases), not g.weak)):
        cases = {id(case) for case in group.cases}
        if group.comparable and not cases <= shown:
            shown |= cases
            kept.append(group)
    return [group for group in groups if group in kept]


def left_out(cases: Sequence[Case], panels: Sequence[Panel]) -> list[str]:
    """What no panel shows, in words: model and batch, and the numbers of cards."""
    shown = {id(case) for panel in panels for case in panel.cases}
    worlds: dict[str, set[int]] = {}
    for case in drawable(cases):
        if id(case) not in shown:
            run = case.first
            batch = f"{describe_size(run)}, {describe_options(run)}, {run.micro} × {run.accum}"
            worlds.setdefault(batch, set()).add(run.world)
    return [f"{batch} on {', '.join(map(str, sorted(numbers)))}" for batch, numbers in worlds.items()]
