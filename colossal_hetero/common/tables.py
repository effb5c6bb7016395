"""Tables for people: narrow enough for 80 columns where possible, and never cut off."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

MAX_WORD = 16  # characters from which a word may be broken

# Titles are Texts, because in a plain string rich reads the brackets of a unit as markup.


def word_column(title: str, ratio: int | None = None) -> Column:
    return Column(Text(title), overflow="fold", min_width=len(title), ratio=ratio)


def number_column(title: str) -> Column:
    return Column(Text(title), justify="right", no_wrap=True)


def make_table(
    columns: Sequence[Column],
    lines: Sequence[Sequence[str] | None],
    styles: Mapping[int, str] | None = None,
    title: str | None = None,
) -> Table:
    """A table with the cells of each row, None for a line between two; ``styles`` are by the number of a row."""
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False, padding=0, title=title, title_justify="left")
    for index, cells in enumerate(lines):
        if cells is None:
            table.add_section()
            continue
        for column, cell in zip(table.columns, cells, strict=True):
            if not column.no_wrap:
                longest = max(map(len, cell.split()), default=0)
                column.min_width = max(column.min_width or 0, min(longest, MAX_WORD))
        table.add_row(*map(Text, cells), style=(styles or {}).get(index))
    return table


class ReportConsole(Console):
    """A console of 140 characters width if the output is not a terminal. What needs more width than there is has it:
    its lines go on in the next line of the terminal, where rich would leave out columns."""

    def __init__(self) -> None:
        super().__init__(highlight=False)
        if not self.is_terminal:
            self.width = 140

    def print(self, *objects: Any, **options: Any) -> None:
        unbounded = self.options.update(max_width=1000)
        least = [Measurement.get(self, unbounded, each).minimum for each in objects if not isinstance(each, str)]
        before = self.width
        self.width = max([before, *least])
        super().print(*objects, **options)
        self.width = before
