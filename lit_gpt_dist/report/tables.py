"""Builds the report's tables: speed, curves, ablations, and what did not run."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lit_gpt_dist.report.ablations import Ablation
from lit_gpt_dist.report.curves import Comparison, Verdict
from lit_gpt_dist.report.names import corpus_names, describe_size
from lit_gpt_dist.report.results import OK, OUT_OF_MEMORY, Run
from lit_gpt_dist.report.statistics import Bases, Case, Scaling, describe_options
from lit_gpt_dist.report.table import NONE, Table, number, percent, rate


@dataclass(frozen=True)
class Row:
    case: Case
    scaling: Scaling
    planned_tok_s: float | None = None
    planned_gib: float | None = None
    corpora: str = NONE  # of all its rounds


_COLUMNS: list[tuple[str, Callable[[Row], str]]] = [
    ("size", lambda r: describe_size(r.case.first)),
    ("mode", lambda r: r.case.first.mode),
    ("cards", lambda r: str(r.case.first.world)),
    ("micro × acc", lambda r: f"{r.case.first.micro} × {r.case.first.accum}"),
    ("global batch", lambda r: str(r.case.first.global_batch)),
    ("context", lambda r: number(r.case.first.context, "d")),
    ("vocabulary", lambda r: number(r.case.first.vocab, "d")),
    ("corpus", lambda r: r.corpora),
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
    names = corpus_names(run for case in cases for run in case.runs)
    rows = [
        Row(case, bases.scaling(case), *(planned or {}).get(i, (None, None)), _corpora(case, names))
        for i, case in enumerate(cases)
    ]
    cells = [[column(row) for _, column in _COLUMNS] for row in rows]
    headers = [header for header, _ in _COLUMNS]
    table = Table("Speed, scaling and memory", headers, cells, telling_apart=("vocabulary", "corpus"))
    shown = table.without_empty_columns().headers
    return replace(table, notes=tuple(note for header, note in _NOTES.items() if header in shown))


def _corpora(case: Case, names: Mapping[str, str]) -> str:
    """Rounds of one case may have been fed different texts: speed does not depend on them."""
    return ", ".join(dict.fromkeys(names[run.corpus_hash] for run in case.runs if run.corpus_hash)) or NONE


def curve_table(comparisons: Sequence[Comparison], at_most: int | None = None) -> Table:
    """Verdicts. Rounds that agree share a row; beyond ``at_most`` rows only the runs to worry about are listed."""
    if not comparisons:
        return Table("One curve?", _CURVE_HEADERS, [], ("No run has losses.",))
    counts = Counter(c.verdict for c in comparisons).items()
    notes = [", ".join(f"{count} × {verdict}" for verdict, count in counts) + "."]
    notes.append("Several runs of one tag with one verdict share a row, which shows the largest difference among them.")
    names = corpus_names(c.curve.run for c in comparisons)
    groups: dict[tuple, list[Comparison]] = {}
    for c in comparisons:
        groups.setdefault(
            (*_curve_place(c, names), c.verdict, c.curve.seams, c.cause[:30], c.reference and c.reference.run.tag), []
        ).append(c)
    rows = list(groups.values())
    if at_most is not None and len(rows) > at_most:
        worry = [group for group in rows if group[0].verdict is Verdict.DIFFERENT][:at_most]
        notes.append(f"{len(worry)} of {len(rows)} rows are listed here; --out writes all.")
        rows = worry
    cells = [_curve_row(group, names) for group in rows]
    return Table("One curve?", _CURVE_HEADERS, cells, tuple(notes), _CURVE_FACTS)


_CURVE_FACTS = ("size", "context", "vocabulary", "corpus", "seed")  # one experiment has one of each
_CURVE_HEADERS = ["run", "mode", "cards", "micro × acc", "global batch", *_CURVE_FACTS, "options", "runs", "steps"]
_CURVE_HEADERS += ["max |Δloss|", "beyond tolerance at", "verdict", "reference", "likely cause"]


def _curve_facts(run: Run, names: Mapping[str, str]) -> list[str]:
    numbers = [number(value, "d") for value in (run.context, run.vocab)]
    corpus = names[run.corpus_hash] if run.corpus_hash else NONE
    return [describe_size(run), *numbers, corpus, number(run.seed, "d")]


def _curve_place(comparison: Comparison, names: Mapping[str, str]) -> list[str]:
    run = comparison.curve.run
    return [
        run.tag,
        run.mode,
        str(run.world),
        f"{run.micro} × {run.accum}",
        str(run.global_batch),
        *_curve_facts(run, names),
        describe_options(run),
    ]


def _curve_row(group: Sequence[Comparison], names: Mapping[str, str]) -> list[str]:
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
    return [*_curve_place(worst, names), str(len(group)), *judged, reference, worst.cause or NONE]


def curve_lines(comparisons: Sequence[Comparison]) -> Table:
    """Every run on its own row, for the CSV."""
    names = corpus_names(c.curve.run for c in comparisons)
    return Table("One curve?", _CURVE_HEADERS, [_curve_row([c], names) for c in comparisons])


_ABLATION_FACTS = ("context", "vocabulary", "options")
_ABLATION_HEADERS = ["size", "mode", "cards", "micro × acc", *_ABLATION_FACTS, "switched", "tok/s"]
_ABLATION_HEADERS += [
    "without the switch",
    "change",
    "larger spread",
    "extra ms a step",
    "bytes factor expected",
    "time factor measured",
]
_FACTOR_NOTES = (
    "Expected: bytes a card sends per step when every micro-batch reduces, over those when only the last does (DDP: the accumulation).",
    "Measured: (step with the switch − one-card step) ÷ (step without − one-card step): only what compute does not hide.",
)


def ablation_table(found: Sequence[Ablation]) -> Table:
    notes = ["A change smaller than the spread of its rounds says nothing."]
    if any(ablation.expected_factor for ablation in found):
        notes += _FACTOR_NOTES
    rows = [_ablation_row(ablation) for ablation in found]
    return Table("Ablations", _ABLATION_HEADERS, rows, tuple(notes), _ABLATION_FACTS)


def _ablation_row(ablation: Ablation) -> list[str]:
    run = ablation.case.first
    spreads = [case.spread for case in (ablation.case, ablation.base) if case.spread is not None]
    return [
        *(describe_size(run), run.mode, str(run.world), f"{run.micro} × {run.accum}"),
        *(number(run.context, "d"), number(run.vocab, "d"), ablation.base.options, run.variant),
        *(_speed(ablation.case), _speed(ablation.base), percent(ablation.change, "+.1f")),
        *(percent(max(spreads, default=None)), number(ablation.extra_ms, "+.2f")),
        *(number(factor, ".2f", unit="×") for factor in (ablation.expected_factor, ablation.measured_factor)),
    ]


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
