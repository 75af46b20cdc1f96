"""The fenced blocks of the documentation's pages."""

import re
from typing import NamedTuple

from helpers.paths import ROOT


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    fences = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, text[: match.start()].count("\n") + 2, match[1], match[2]) for match in fences]
