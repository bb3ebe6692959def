"""A table for a terminal that leaves out columns rather than cut what is in them. Knows nothing of its content."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as TerminalTable
from rich.text import Text

BORDER = 3  # characters beside a cell: a space on each side and a line


@dataclass(frozen=True)
class Table:
    """Cells may hold rich's markup. ``first_to_go``: headers that a narrow terminal loses, in this order; no two are alike."""

    title: str
    headers: tuple[str, ...]
    rows: list[list[str]]
    first_to_go: tuple[str, ...] = ()
    left: tuple[str, ...] = ()  # headers of columns of words; the rest are numbers and stand to the right

    def width_of(self, header: str) -> int:
        place = self.headers.index(header)
        return max(len(header), *(Text.from_markup(row[place]).cell_len for row in self.rows)) + BORDER

    def fitting(self, width: int) -> tuple[str, ...]:
        """Headers that are shown whole in so many characters."""
        kept = self.headers
        for header in self.first_to_go:
            if sum(map(self.width_of, kept)) + 1 <= width:
                break
            kept = tuple(name for name in kept if name != header)
        return kept

    def print_to(self, console: Console) -> None:
        """The title, the table and the names of what is not shown; nothing where there are no rows."""
        if not self.rows:
            return
        kept = self.fitting(console.width)
        table = TerminalTable()
        for header in kept:
            table.add_column(header, justify="left" if header in self.left else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*(row[self.headers.index(header)] for header in kept))
        console.print(f"[italic]{self.title}[/]")
        console.print(table)
        if left_out := [header for header in self.headers if header not in kept]:
            console.print(f"[dim]Too narrow here for: {', '.join(left_out)}.[/]", highlight=False)
