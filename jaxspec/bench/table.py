"""Tables that fit the terminal they are printed on."""

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

GAP = 2
LABEL = 26
"""The widest that a label makes its column; longer ones take several lines."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table, to be printed by `rich`.

    Where the terminal is too narrow for all columns, the others follow below, beside the same labels. Headings and
    labels are wrapped between words, figures are neither wrapped nor cut.

    Attributes:
        title: the line above it; none where it is empty.
        headings: of the columns.
        rows: the cells of each row.
        labels: how many columns, counted from the left, say what the row is about.
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
        return max(min(word, LABEL), min(widest, LABEL) if column < self.labels else widest)

    def _parts(self, most: int) -> Iterator[list[int]]:
        """The columns of each part; one that is too wide for any stands alone beside the labels."""
        labels = list(range(self.labels))
        part, taken = labels, sum(self._width(column) + GAP for column in labels) - GAP
        room = most - taken
        for column in range(self.labels, len(self.headings)):
            width = GAP + self._width(column)
            if width > room and len(part) > len(labels):
                yield part
                part, room = labels, most - taken
            part, room = [*part, column], room - width
        yield part

    def _lines(self, console: Console, columns: list[int], rule: str) -> Iterator[str]:
        widths = [self._width(column) for column in columns]

        def row(cells: list[list[str]], above: bool = False) -> Iterator[str]:
            """The lines of cells that have several; `above` says which end they share."""
            height = max(map(len, cells))
            for line in range(height):
                shown = []
                for column, width, cell in zip(columns, widths, cells):
                    place = line - (height - len(cell) if above else 0)
                    text = cell[place] if 0 <= place < len(cell) else ""
                    blank = " " * (width - cell_len(text))
                    shown.append(text + blank if column < self.labels else blank + text)
                yield (" " * GAP).join(shown).rstrip()

        headings = [textwrap.wrap(self.headings[c], width) for c, width in zip(columns, widths)]
        yield from row(headings, above=True)
        yield rule * (sum(widths) + GAP * (len(widths) - 1))
        for cells in self.rows:
            yield from row([self._cell(console, column, cells[column]) for column in columns])

    def _cell(self, console: Console, column: int, text: str) -> list[str]:
        """The lines of a cell: of a label those that it takes, of a figure one."""
        if column >= self.labels:
            return [text]
        return [line.plain.rstrip() for line in Text(text).wrap(console, self._width(column))]
