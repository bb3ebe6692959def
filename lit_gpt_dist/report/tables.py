"""Builds the report's tables as text cells, and writes them as Markdown, CSV, HTML and in the terminal."""

import csv
import html
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table as TerminalTable

from lit_gpt_dist.report.curves import Comparison, Verdict
from lit_gpt_dist.report.results import OK, OUT_OF_MEMORY
from lit_gpt_dist.report.statistics import Ablation, Bases, Case, Scaling, describe_options

NONE = "–"  # not known, or nothing to compare with


@dataclass(frozen=True)
class Table:
    title: str
    headers: list[str]
    rows: list[list[str]]
    notes: tuple[str, ...] = ()

    def without_empty_columns(self) -> "Table":
        """A column in which nothing is known says nothing: it is left out wherever people read."""
        kept = [i for i in range(len(self.headers)) if any(row[i] not in (NONE, "") for row in self.rows)]
        return Table(self.title, [self.headers[i] for i in kept], [[r[i] for i in kept] for r in self.rows], self.notes)

    def markdown(self) -> str:
        escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in [self.headers, *self.rows]]
        ruler = ["---" if i == 0 else "---:" for i in range(len(self.headers))]
        lines = ["| " + " | ".join(row) + " |" for row in [escaped[0], ruler, *escaped[1:]]]
        notes = [f"\n{note}" for note in self.notes]
        return "\n".join([f"## {self.title}", "", *lines, *notes, ""])

    def html(self) -> str:
        def row(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "\n".join(row(cells, "td") for cells in self.rows)
        notes = "".join(f"<p class=note>{html.escape(note)}</p>" for note in self.notes)
        head = row(self.headers, "th")
        return f"<h2>{html.escape(self.title)}</h2><div class=wide><table><thead>{head}</thead><tbody>{body}</tbody></table></div>{notes}"

    def terminal(self) -> TerminalTable:
        table = TerminalTable(title=self.title, title_justify="left")
        for i, header in enumerate(self.headers):
            table.add_column(header, justify="left" if i == 0 else "right", overflow="fold")
        for cells in self.rows:
            table.add_row(*map(escape, cells))
        return table

    def narrowed_to(self, width: int) -> "Table":
        """Leaves out the least important columns until the table fits a terminal of ``width`` characters."""
        kept = self.headers
        for header in _FIRST_TO_GO:
            widths = [max(len(row[self.headers.index(h)]) for row in [self.headers, *self.rows]) + 3 for h in kept]
            if sum(widths) + 1 <= width:
                break
            kept = [h for h in kept if h != header]
        left_out = [h for h in self.headers if h not in kept]
        places = [self.headers.index(h) for h in kept]
        note = (f"Too narrow here for: {', '.join(left_out)}.",) if left_out else ()
        return Table(self.title, kept, [[row[i] for i in places] for row in self.rows], (*self.notes, *note))


# columns that a narrow terminal loses, in this order; the written pages have all
_FIRST_TO_GO = (
    *("context", "rounds", "MFU half att.", "step ms", "runs", "host GiB", "reference", "comm. share", "plan GiB"),
    *("steps", "spread", "global batch", "without the switch", "extra ms a step", "beyond tolerance at"),
    *("plan tok/s", "MFU", "peak GiB", "options"),
)


def number(value: float | None, form: str = ",.0f", scale: float = 1, unit: str = "") -> str:
    return NONE if value is None else f"{value * scale:{form}}{unit}"


def percent(value: float | None, form: str = ".1f") -> str:
    return number(value, form, 100, "%")


def rate(value: float | None) -> str:
    """Tokens per second in three or four figures: more would be noise."""
    if value is None:
        return NONE
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e4 else f"{value:,.0f}"


@dataclass(frozen=True)
class Row:
    case: Case
    scaling: Scaling
    planned_tok_s: float | None = None
    planned_gib: float | None = None


_COLUMNS: list[tuple[str, Callable[[Row], str]]] = [
    ("size", lambda r: _size(r.case)),
    ("mode", lambda r: r.case.first.mode),
    ("cards", lambda r: str(r.case.first.world)),
    ("micro × acc", lambda r: f"{r.case.first.micro} × {r.case.first.accum}"),
    ("global batch", lambda r: str(r.case.first.global_batch)),
    ("context", lambda r: number(r.case.first.context, "d")),
    ("options", lambda r: r.case.options),
    ("tok/s", lambda r: _speed(r.case)),
    ("spread", lambda r: percent(r.case.spread)),
    ("step ms", lambda r: number(r.case.median(lambda run: run.step_ms), ".2f")),
    ("eff. weak", lambda r: percent(r.scaling.weak_efficiency)),
    ("eff. strong", lambda r: percent(r.scaling.strong_efficiency)),
    ("speed-up", lambda r: number(r.scaling.speed_up, ".2f", unit="×")),
    ("MFU", lambda r: percent(r.case.median(lambda run: run.mfu))),
    ("MFU half att.", lambda r: percent(r.case.median(lambda run: run.mfu_half_attention))),
    ("peak GiB", lambda r: number(r.case.median(lambda run: run.mem_gib), ".2f")),
    ("host GiB", lambda r: number(r.case.median(lambda run: run.host_gib), ".2f")),
    ("comm. share", lambda r: _communication(r)),
    ("plan tok/s", lambda r: _against_plan(rate(r.planned_tok_s), r.case.tok_s, r.planned_tok_s)),
    (
        "plan GiB",
        lambda r: _against_plan(number(r.planned_gib, ".2f"), r.case.median(lambda run: run.mem_gib), r.planned_gib),
    ),
    ("rounds", lambda r: str(len(r.case.measured)) if r.case.measured else NONE),
]

_NOTES = {
    "spread": "Spread: (largest − smallest) ÷ median of tokens/s over the rounds; tok/s is the median.",
    "eff. weak": "Weak: tok/s ÷ (cards × tok/s of one card with the same micro-batch and accumulation).",
    "eff. strong": "Strong: the same against the fastest one-card run of the same global batch; speed-up prefers this base.",
    "comm. share": "Communication: of a step's time; with ≤, what the step needs beyond the one-card step of weak scaling.",
    "MFU": "MFU counts 6N + 12·L·h·s (full attention), “half att.” 6N + 6·L·h·s (causal), over the dense peak of all cards.",
    "plan tok/s": "Plan: what the planner predicts; in brackets, measured ÷ predicted.",
}


def _size(case: Case) -> str:
    run = case.first
    shape = ", ".join(f"{name} {value}" for name, value in run.shape.items())
    return f"{run.size} ({shape})" if shape else run.size


def _communication(row: Row) -> str:
    measured = row.case.median(lambda run: run.communication_share)
    if measured is not None:
        return percent(measured)
    beyond = row.scaling.beyond_one_card
    return NONE if beyond is None else f"≤ {percent(beyond)}"


def _speed(case: Case) -> str:
    if case.status == OK:
        return rate(case.tok_s)
    return "OOM" if case.status == OUT_OF_MEMORY else "failed"


def _against_plan(text: str, measured: float | None, planned: float | None) -> str:
    return f"{text} ({measured / planned:.2f})" if measured and planned else text


def speed_table(cases: Sequence[Case], planned: Mapping[int, tuple[float | None, float | None]] | None = None) -> Table:
    """The main table. ``planned`` maps a case's position to the planner's (tokens/s, GiB per card)."""
    bases = Bases(cases)
    rows = [Row(case, bases.scaling(case), *(planned or {}).get(i, (None, None))) for i, case in enumerate(cases)]
    cells = [[column(row) for _, column in _COLUMNS] for row in rows]
    table = Table("Speed, scaling and memory", [header for header, _ in _COLUMNS], cells)
    shown = table.without_empty_columns().headers
    return Table(table.title, table.headers, cells, tuple(note for header, note in _NOTES.items() if header in shown))


def curve_table(comparisons: Sequence[Comparison], at_most: int | None = None) -> Table:
    """Verdicts. Rounds that agree share a row; beyond ``at_most`` rows only the runs to worry about are listed."""
    notes = [
        ", ".join(f"{count} × {verdict}" for verdict, count in Counter(c.verdict for c in comparisons).items()) + "."
    ]
    notes.append("Several runs of one tag with one verdict share a row, which shows the largest difference among them.")
    groups: dict[tuple, list[Comparison]] = {}
    for c in comparisons:
        groups.setdefault(
            (*_curve_place(c), c.verdict, c.curve.seams, c.cause[:30], c.reference and c.reference.run.tag), []
        ).append(c)
    rows = list(groups.values())
    if at_most is not None and len(rows) > at_most:
        worry = [group for group in rows if group[0].verdict is Verdict.DIFFERENT][:at_most]
        notes.append(f"{len(worry)} of {len(rows)} rows are listed here; --out writes all.")
        rows = worry
    return Table("One curve?", _CURVE_HEADERS, [_curve_row(group) for group in rows], tuple(notes))


_CURVE_HEADERS = ["run", "mode", "cards", "micro × acc", "global batch", "options", "runs", "steps", "max |Δloss|"]
_CURVE_HEADERS += ["beyond tolerance at", "verdict", "reference", "likely cause"]


def _curve_place(comparison: Comparison) -> list[str]:
    run = comparison.curve.run
    return [
        run.tag,
        run.mode,
        str(run.world),
        f"{run.micro} × {run.accum}",
        str(run.global_batch),
        describe_options(run),
    ]


def _curve_row(group: Sequence[Comparison]) -> list[str]:
    worst = max(group, key=lambda c: c.max_difference or 0)
    steps = f"{worst.curve.steps[0]}–{worst.curve.last_step}"
    if worst.curve.seams:
        steps += f" (resumed after {', '.join(map(str, worst.curve.seams))})"
    beyond = NONE
    if worst.max_difference is not None:
        beyond = f"step {worst.first_beyond}" if worst.first_beyond else "never"
        beyond += f" (> {worst.tolerance:.0e})"
    judged = [steps, number(worst.max_difference, ".2e"), beyond, str(worst.verdict)]
    reference = worst.reference.run.tag if worst.reference else NONE
    return [*_curve_place(worst), str(len(group)), *judged, reference, worst.cause or NONE]


def curve_lines(comparisons: Sequence[Comparison]) -> Table:
    """Every run on its own row, for the CSV."""
    return Table("One curve?", _CURVE_HEADERS, [_curve_row([c]) for c in comparisons])


def ablation_table(found: Sequence[Ablation]) -> Table:
    headers = [
        "size",
        "mode",
        "cards",
        "micro × acc",
        "switched",
        "tok/s",
        "without the switch",
        "change",
        "extra ms a step",
    ]
    headers += ["bytes factor expected", "time factor measured"]
    rows = []
    for ablation in found:
        run = ablation.case.first
        place = [_size(ablation.case), run.mode, str(run.world), f"{run.micro} × {run.accum}", run.variant]
        speeds = [
            _speed(ablation.case),
            _speed(ablation.base),
            percent(ablation.change, "+.1f"),
            number(ablation.extra_ms, "+.2f"),
        ]
        rows.append(
            [
                *place,
                *speeds,
                number(ablation.expected_factor, ".2f", unit="×"),
                number(ablation.measured_factor, ".2f", unit="×"),
            ]
        )
    notes = (
        "Expected: bytes a card sends per step when every micro-batch reduces over those when only the last does (DDP: the accumulation).",
        "Measured: (step with the switch − one-card step) ÷ (step without − one-card step): time, with what is hidden behind compute left out.",
    )
    table = Table("Ablations", headers, rows)
    factors = any(ablation.expected_factor for ablation in found)
    return Table(table.title, headers, rows, notes if factors else ())


def failure_table(cases: Sequence[Case]) -> Table:
    """What did not run, with the end of its message."""
    rows = [
        [
            run.case or run.tag,
            run.mode,
            str(run.world),
            "OOM" if run.status == OUT_OF_MEMORY else "failed",
            (run.error or NONE).strip(),
        ]
        for case in cases
        for run in case.runs
        if run.status != OK
    ]
    return Table("What did not run", ["case", "mode", "cards", "result", "last words"], rows)


def to_csv(table: Table) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.headers)
    writer.writerows([["" if cell == NONE else cell for cell in row] for row in table.rows])
    return out.getvalue()
