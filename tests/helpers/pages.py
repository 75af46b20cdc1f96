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
    """Returns the blocks of a page in their order, without directives of the site such as ```{toctree}."""
    text = (ROOT / page).read_text()
    fences = re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    found = [Block(page, text[: match.start()].count("\n") + 2, match[1], match[2]) for match in fences]
    return [block for block in found if not block.language.startswith("{")]
