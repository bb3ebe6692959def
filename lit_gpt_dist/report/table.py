"""A table of text cells, and its forms: Markdown, CSV, HTML, terminal. Knows nothing of what is in it."""

import csv
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.markup import escape
from rich.table import Table as TerminalTable

NONE = "–"  # not known, or nothing to compare with


@dataclass(frozen=True)
class Table:
    title: str
    headers: list[str]
    rows: list[list[str]]
    notes: tuple[str, ...] = ()
    telling_apart: tuple[str, ...] = ()  # columns that people see only where their values differ

    def without_empty_columns(self) -> "Table":
        """A column in which nothing is known says nothing, nor one that tells no rows apart: people do not see it."""
        needed = [2 if header in self.telling_apart else 1 for header in self.headers]
        return self._with([h for h, least in zip(self.headers, needed, strict=True) if len(self._known(h)) >= least])

    def _known(self, header: str) -> set[str]:
        place = self.headers.index(header)
        return {row[place] for row in self.rows} - {NONE, ""}

    def _with(self, headers: list[str]) -> "Table":
        places = [self.headers.index(h) for h in headers]
        return replace(self, headers=headers, rows=[[row[i] for i in places] for row in self.rows])

    def markdown(self) -> str:
        if not self.rows:
            return "\n\n".join([f"## {self.title}", *self.notes, ""])

        def escaped(cell: str) -> str:  # a message such as "in <module>" is text, not a tag
            return cell.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")

        cells = [[escaped(cell) for cell in row] for row in [self.headers, *self.rows]]
        ruler = ["---" if i == 0 else "---:" for i in range(len(self.headers))]
        lines = ["| " + " | ".join(row) + " |" for row in [cells[0], ruler, *cells[1:]]]
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
        vital = [h for h in self.headers if h in ("context", *self.telling_apart) and len(self._known(h)) > 1]
        for header in (*(h for h in _FIRST_TO_GO if h not in vital), *vital):
            widths = [max(len(row[self.headers.index(h)]) for row in [self.headers, *self.rows]) + 3 for h in kept]
            if sum(widths) + 1 <= width:
                break
            kept = [h for h in kept if h != header]
        left_out = [h for h in self.headers if h not in kept]
        note = (f"Too narrow here for: {', '.join(left_out)}.",) if left_out else ()
        return replace(self._with(kept), notes=(*self.notes, *note))


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


def to_csv(table: Table) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.headers)
    writer.writerows([["" if cell == NONE else cell for cell in row] for row in table.rows])
    return out.getvalue()
