"""`lit-gpt-dist report`: reads results, prints what they say, and writes pages and pictures."""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from lit_gpt_dist.arguments import ToolParser
from lit_gpt_dist.errors import EXIT_OK, UserError
from lit_gpt_dist.report.ablations import ablations
from lit_gpt_dist.report.compare import compare_all
from lit_gpt_dist.report.curves import Comparison, join_curves
from lit_gpt_dist.report.facts import environment_of
from lit_gpt_dist.report.plan import predictions
from lit_gpt_dist.report.results import Damage, Run, read_results, suspicious, without_superseded
from lit_gpt_dist.report.statistics import Bases, Case, group_cases
from lit_gpt_dist.report.table import NONE, Table, to_csv
from lit_gpt_dist.report.tables import ablation_table, curve_lines, curve_table, failure_table, speed_table

if TYPE_CHECKING:
    from lit_gpt_dist.report.page import Page

FORMATS = ("md", "csv", "html", "png", "svg")
_MOST_TERMINAL_ROWS = 60  # a screen or two; the written pages have all rows
_MOST_MESSAGES = 20


def _parser() -> ToolParser:
    parser = ToolParser(
        prog="lit-gpt-dist report", description="Table, loss-curve comparison and pictures from results.jsonl files."
    )
    parser.add_argument("results", nargs="+", metavar="results.jsonl", help="files that `fit` or `bench` wrote")
    parser.add_argument("--out", metavar="DIR", help="write report.md, report.html, *.csv and pictures/ there")
    parser.add_argument("--format", default=",".join(FORMATS), help="what --out writes, separated by commas")
    parser.add_argument(
        "--markdown", metavar="FILE", help="write one Markdown page, its pictures in a folder of the same name"
    )
    parser.add_argument("--tensorboard", metavar="DIR", help="write the pictures as images of a TensorBoard run")
    parser.add_argument("--reference", metavar="TAG", help="hold every curve against the run with this tag")
    parser.add_argument(
        "--link", help="for the planner's column: nvlink, pcie3, pcie4, pcie5, or GB/s of bus bandwidth"
    )
    parser.add_argument("--calibration", metavar="FILE", help="for the same: rates that `doctor --measure` wrote")
    parser.add_argument("--title", default="Measured results", help="title of the pages")
    return parser


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    formats = [form.strip() for form in options.format.split(",") if form.strip()]
    for form in formats:
        if form not in FORMATS:
            raise UserError(
                f"format {form!r} is not one of {', '.join(FORMATS)}; name some of them, separated by commas"
            )
    runs, damaged = read_results(options.results)
    if not runs:
        raise UserError(
            f"no usable line in {', '.join(options.results)}{f' ({damaged[0]})' if damaged else ''}; run `fit` or `bench` first"
        )
    report = build(runs, options.reference, options.link, options.calibration and Path(options.calibration))
    written: list[Path] = []
    if options.out or options.markdown or options.tensorboard:  # first: `... | head` ends the printing, not the writing
        written = _write(report, options, formats, environment_of(options.results, runs))
    console = make_console()
    _print(console, report, damaged)
    for path in written:
        console.print(f"wrote {_plain(path)}", soft_wrap=True)
    return EXIT_OK


def make_console() -> Console:
    """A pipe or a log file has no width of its own: 200 characters hold every column."""
    known = sys.stdout.isatty() or os.environ.get("COLUMNS")
    return Console(width=None if known else 200)


@dataclass
class Report:
    cases: list[Case]
    comparisons: list[Comparison]
    speed: Table
    curves: Table
    others: list[Table]  # only those that have rows
    remarks: list[str]

    @property
    def tables(self) -> list[Table]:
        return [self.speed, self.curves, *self.others]


def build(
    runs: list[Run], reference_tag: str | None = None, link: str | None = None, calibration: Path | None = None
) -> Report:
    """Everything but pictures and files."""
    runs = without_superseded(runs)
    curves = join_curves(runs)
    if reference_tag is not None and all(curve.run.tag != reference_tag for curve in curves):
        tags = ", ".join(sorted({curve.run.tag for curve in curves})[:8]) or "none here"
        raise UserError(f"no run with losses is tagged {reference_tag!r}; use one of {tags}")
    cases = group_cases(runs)
    comparisons = compare_all(curves, reference_tag)
    others = [ablation_table(ablations(cases, Bases(cases))), failure_table(cases)]
    remarks = [f"{run.source} ({run.tag}): {why}" for run in runs if (why := suspicious(run))]
    speed = speed_table(cases, predictions(cases, link, calibration))
    return Report(cases, comparisons, speed, curve_table(comparisons), [t for t in others if t.rows], remarks)


def _print(console: Console, report: Report, damaged: list[Damage]) -> None:
    _print_table(console, _shortened(report.speed))
    _print_curves(console, curve_table(report.comparisons, at_most=_MOST_TERMINAL_ROWS))
    for table in report.others:
        _print_table(console, _shortened(table))
    messages = [f"[red]damaged line[/] {_plain(damage)}" for damage in damaged]
    messages += [f"[yellow]doubtful numbers[/] {_plain(remark)}" for remark in report.remarks]
    for message in messages[:_MOST_MESSAGES]:
        console.print(message, soft_wrap=True)
    if len(messages) > _MOST_MESSAGES:
        console.print(f"… and {len(messages) - _MOST_MESSAGES} more such lines")


def _print_table(console: Console, table: Table) -> None:
    fitting = table.without_empty_columns().narrowed_to(console.width)
    if fitting.rows:
        console.print(fitting.terminal())
    for note in fitting.notes:
        console.print(f"[dim]{_plain(note)}[/]")


def _print_curves(console: Console, table: Table) -> None:
    """Causes are sentences: they read better under the table than in a narrow column of it."""
    narrow = replace(table, headers=table.headers[:-1], rows=[row[:-1] for row in table.rows])
    _print_table(console, narrow)
    for row in [row for row in table.rows if row[-1] != NONE][:_MOST_MESSAGES]:
        console.print(f"[bold]{_plain(row[0])}[/] ({_plain(row[1])} on {row[2]}): {_plain(row[-1])}", soft_wrap=True)


def _plain(value: object) -> str:
    """Text of a results file must not be read as markup of the terminal."""
    return escape(str(value))


def _shortened(table: Table) -> Table:
    left_out = len(table.rows) - _MOST_TERMINAL_ROWS
    if left_out <= 0:
        return table
    note = f"{left_out} more rows are left out here; --out writes all."
    return replace(table, rows=table.rows[:_MOST_TERMINAL_ROWS], notes=(*table.notes, note))


def _write(report: Report, options: Any, formats: list[str], facts: dict[str, Any]) -> list[Path]:
    """All files asked for; returns them."""
    # matplotlib takes a second to import: only for those who want pictures
    from lit_gpt_dist.report.loss_pictures import draw_losses
    from lit_gpt_dist.report.page import Page, write_pictures, write_tensorboard
    from lit_gpt_dist.report.picture import strategy_looks
    from lit_gpt_dist.report.scaling_pictures import draw_scaling

    looks = strategy_looks(case.first.mode for case in report.cases)
    pictures = [*draw_scaling(report.cases, looks), *draw_losses(report.comparisons, looks)]
    page = Page(options.title, report.tables, pictures, facts, report.remarks)
    written: list[Path] = []
    if options.out:
        written += _write_folder(report, page, Path(options.out), formats)
    if options.markdown:
        path = Path(options.markdown)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_pictures(pictures, path.parent / path.stem, ["png"])
        path.write_text(page.markdown(picture_folder=path.stem))
        written.append(path)
    if options.tensorboard:
        write_tensorboard(pictures, Path(options.tensorboard))
        written.append(Path(options.tensorboard))
    return written


def _write_folder(report: Report, page: "Page", out: Path, formats: list[str]) -> list[Path]:
    from lit_gpt_dist.report.page import write_pictures

    out.mkdir(parents=True, exist_ok=True)
    # the Markdown page shows PNG files
    images = [form for form in ("png", "svg") if form in formats or (form == "png" and "md" in formats)]
    written = write_pictures(page.pictures, out / "pictures", images)
    texts: dict[str, str] = {}
    if "md" in formats:
        texts["report.md"] = page.markdown(picture_folder="pictures")
    if "html" in formats:
        texts["report.html"] = page.html()
    if "csv" in formats:
        texts |= {"speed.csv": to_csv(report.speed), "curves.csv": to_csv(curve_lines(report.comparisons))}
    for name, text in texts.items():
        (out / name).write_text(text)
    return [*written, *(out / name for name in texts)]
