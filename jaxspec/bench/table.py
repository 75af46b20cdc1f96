"""Prints tables that fit the width of the terminal."""

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

COLUMN_GAP = 2
MAX_LABEL_WIDTH = 26
"""The greatest width of a column of labels; longer labels are wrapped."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that `rich` prints.

    If the terminal is too narrow for all columns, the remaining columns follow below, next to the same labels. Headings
    and labels are wrapped between words. Figures are neither wrapped nor cut.

    Attributes:
        title: the line above the table; no line if it is empty.
        headings: the headings of the columns.
        rows: the cells of each row.
        labels: the number of columns, from the left, that label the row.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int = 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, "bold")
        for number, columns in enumerate(self._parts(options.max_width)):
            if number:
                yield Text()
            for line in self._lines(console, columns, "-" if options.ascii_only else "─"):
                yield Text(line, no_wrap=True, overflow="ignore")

    def _width(self, column: int) -> int:
        widest = max(cell_len(row[column]) for row in self.rows)
        word = max(map(cell_len, self.headings[column].split()))
        return max(min(word, MAX_LABEL_WIDTH), min(widest, MAX_LABEL_WIDTH) if column < self.labels else widest)

    def _parts(self, most: int) -> Iterator[list[int]]:
        """Yields the columns of each part; a column that is too wide for the terminal has a part of its own."""
        labels = list(range(self.labels))
        part, taken = labels, sum(self._width(column) + COLUMN_GAP for column in labels) - COLUMN_GAP
        room = most - taken
        for column in range(self.labels, len(self.headings)):
            width = COLUMN_GAP + self._width(column)
            if width > room and len(part) > len(labels):
                yield part
                part, room = labels, most - taken
            part, room = [*part, column], room - width
        yield part

    def _lines(self, console: Console, columns: list[int], rule: str) -> Iterator[str]:
        widths = [self._width(column) for column in columns]

        def row(cells: list[list[str]], above: bool = False) -> Iterator[str]:
            """Yields the lines of a row; with `above`, cells with fewer lines are aligned to the last one."""
            height = max(map(len, cells))
            for line in range(height):
                shown = []
                for column, width, cell in zip(columns, widths, cells):
                    place = line - (height - len(cell) if above else 0)
                    text = cell[place] if 0 <= place < len(cell) else ""
                    blank = " " * (width - cell_len(text))
                    shown.append(text + blank if column < self.labels else blank + text)
                yield (" " * COLUMN_GAP).join(shown).rstrip()

        headings = [textwrap.wrap(self.headings[c], width) for c, width in zip(columns, widths)]
        yield from row(headings, above=True)
        yield rule * (sum(widths) + COLUMN_GAP * (len(widths) - 1))
        for cells in self.rows:
            yield from row([self._cell(console, column, cells[column]) for column in columns])

    def _cell(self, console: Console, column: int, text: str) -> list[str]:
        """Returns the lines of a cell: one for a figure, as many as needed for a label."""
        if column >= self.labels:
            return [text]
        return [line.plain.rstrip() for line in Text(text).wrap(console, self._width(column))]
