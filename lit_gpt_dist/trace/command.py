"""``lit-gpt-dist trace FOLDER``: what traced steps were spent on, per rank; and who was missing where a run hung."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from lit_gpt_dist.arguments import ToolParser
from lit_gpt_dist.errors import EXIT_OK, UserError
from lit_gpt_dist.trace.flight import describe, read_dumps
from lit_gpt_dist.trace.kineto import RankTrace, read_trace
from lit_gpt_dist.trace.overlap import RankReport, reports
from lit_gpt_dist.trace.picture import draw
from lit_gpt_dist.trace.verdict import verdict

MIB = 2**20
PICTURE = "timeline.png"


def parser() -> ToolParser:
    options = ToolParser(prog="lit-gpt-dist trace", description=__doc__)
    options.add_argument("folder", help="a run's folder, or one with traces or flight-recorder dumps")
    options.add_argument("--picture", help=f"where to draw the timeline; by default {PICTURE} beside the traces")
    return options


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    folder = Path(options.folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give a run's folder, as fit names it at its start")
    traces = find_traces(folder)
    dumps = find_dumps(folder)
    if not traces and not dumps:
        raise UserError(f"{folder} holds no traces; run fit with --profile 3 to write some")
    console = Console(highlight=False)
    if dumps:
        for line in describe(dumps):
            console.print(line, soft_wrap=True, markup=False)
    if traces:
        show(console, traces, Path(options.picture) if options.picture else trace_folder(folder) / PICTURE)
    return EXIT_OK


def trace_folder(folder: Path) -> Path:
    return folder / "trace" if (folder / "trace").is_dir() else folder


def find_traces(folder: Path) -> list[RankTrace]:
    """One a rank, in the order of the ranks."""
    place = trace_folder(folder)
    paths = [
        path for path in place.iterdir() if path.name.endswith((".json.gz", ".json")) and not is_dump(folder, path)
    ]
    return sorted((read_trace(path) for path in paths), key=lambda trace: trace.rank)


def is_dump(folder: Path, path: Path) -> bool:
    """A JSON beside the traces that is none: of the flight recorder."""
    return path.parent.name == "flight" or (folder / "flight") == path.parent


def find_dumps(folder: Path) -> dict[int, dict]:
    for place in (folder / "flight", folder):
        if place.is_dir() and place.name == "flight":
            return read_dumps(place)
    return {}


def show(console: Console, traces: list[RankTrace], picture: Path) -> None:
    found = reports(traces)
    console.print(shares_table(found))
    console.print(collectives_table(found))
    for line in verdict(found):
        console.print(line, soft_wrap=True, markup=False)
    draw(traces, picture)
    console.print(f"timeline: {picture}", soft_wrap=True, markup=False)


def shares_table(found: list[RankReport]) -> Table:
    table = Table(title=f"{found[0].steps} steps, shares of their time", title_justify="left")
    for name in ("rank", "step ms", "compute", "communication", "hidden", "exposed", "data", "idle"):
        table.add_column(name, justify="right")
    for report in found:
        parts = (report.compute, report.communication, report.hidden, report.exposed, report.data, report.idle)
        table.add_row(str(report.rank), f"{report.step_ms:.2f}", *(f"{report.share(part):.1%}" for part in parts))
    return table


def collectives_table(found: list[RankReport]) -> Table:
    buckets = ", ".join(f"{report.buckets:g}" for report in found)
    table = Table(title=f"collectives per step; gradient buckets by rank: {buckets}", title_justify="left")
    for name in ("rank", "kind", "number", "MiB", "smallest", "median", "largest"):
        table.add_column(name, justify="right")
    for report in found:
        for name, kind in report.kinds.items():
            sizes = (kind.total_bytes_per_step, kind.smallest, kind.median, kind.largest)
            table.add_row(str(report.rank), name, f"{kind.per_step:g}", *(mebibytes(size) for size in sizes))
    return table


def mebibytes(size: float | None) -> str:
    return "not told" if size is None else f"{size / MIB:.3g}"
