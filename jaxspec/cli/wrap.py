"""Wraps text between words, including text that arrives in pieces."""

import re
import shutil
import unicodedata
from collections.abc import Callable

from rich.cells import cell_len

_PARTS = re.compile(r"(\x1b\[[0-9;]*[A-Za-z])|(\n)|([ \t]+)|(.)", re.DOTALL)  # colour, newline, spaces, other
_JOINER = "\u200d"
_OPENING, _CLOSING = ("Ps", "Pi"), ("Pe", "Pf", "Po")
_TAB = 8


def terminal_width() -> int:
    """Returns the width of the terminal."""
    return shutil.get_terminal_size().columns


def wrap(text: str, width: int) -> list[str]:
    """Returns the lines of a text; words wider than a line stay whole, so that they can be copied."""
    wrapper = Wrapper(lambda: width)
    return (wrapper.feed(text) + wrapper.end()).split("\n")


class Wrapper:
    """Wraps a text that arrives in pieces; `feed` and `end` return the text that can be written.

    A word is held back until its end arrives. Scripts of wide characters have no spaces: a line may end after any
    character, but not before closing punctuation. Colours have no width.
    """

    def __init__(self, width: Callable[[], int] = terminal_width):
        """Begins a text; `width` is called for every word, since the size of a terminal may change."""
        self._width = width
        self._column, self._spaces, self._word, self._last = 0, "", "", ""

    def feed(self, piece: str) -> str:
        """Takes the next piece of the text, and returns the text that can be written."""
        written = ""
        for colour, end, spaces, other in _PARTS.findall(piece):
            if end:
                written += self.end() + end
                self._column = 0
            elif spaces:
                written += self._put()
                self._spaces += spaces
            elif colour:
                self._word += colour
            else:
                if _may_part(self._last, other):
                    written += self._put()
                self._word += other
            self._last = self._last if colour else spaces or other
        return written

    def end(self) -> str:
        """Ends the text or a line of it, and returns the rest."""
        written = self._put()
        spaces, self._spaces = self._spaces, ""
        if self._column + self._room(spaces) > self._width():
            return written
        self._column += self._room(spaces)
        return written + spaces

    def _put(self) -> str:
        """Returns the word that was held back, on this line or the next."""
        word, self._word = self._word, ""
        cells = cell_len(re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", word))
        if not cells:
            return word
        width = max(self._width(), 1)
        spaces, self._spaces = self._spaces, ""
        if self._column and self._column + self._room(spaces) + cells > width:
            spaces, self._column = "\n", cells
        else:
            self._column += self._room(spaces) + cells
        self._column = (self._column - 1) % width + 1  # the terminal itself breaks a word that is too wide
        return spaces + word

    def _room(self, spaces: str) -> int:
        at = self._column
        for space in spaces:
            at += _TAB - at % _TAB if space == "\t" else 1
        return at - self._column


def _may_part(before: str, after: str) -> bool:
    """Returns whether a line may end between two adjacent characters."""
    if not before or before.isspace() or before == _JOINER or not cell_len(after):
        return False
    if unicodedata.category(before[-1]) in _OPENING or unicodedata.category(after) in _CLOSING:
        return False
    return cell_len(before) > 1 or cell_len(after) > 1
