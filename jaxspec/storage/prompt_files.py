"""Splits plain-text files into prompts."""

import codecs
import re
from collections.abc import Iterator

from jaxspec.errors import InvalidConfig

SPLITS = ("line", "blank", "file")
"""Ways to split a file: one text per line; texts separated by blank lines; the whole file as one text."""


def split_text(data: bytes, split: str = "line") -> Iterator[tuple[int, str]]:
    """Yields the texts of a `.txt` file, each with the number of its first line.

    A byte order mark is skipped. Lines can end with LF, CR LF or CR. A line that contains only white space is blank.
    Leading and trailing line ends of a text are removed; the rest is unchanged.

    Args:
        data: content of the file, in UTF-8.
        split: one of `SPLITS`.

    Raises:
        InvalidConfig: the file is not UTF-8, or `split` is invalid.
    """
    if split not in SPLITS:
        raise InvalidConfig(f"split must be one of {', '.join(SPLITS)}, got {split!r:.40}")
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        what = "UTF-16" if utf16 else f"not UTF-8 (byte {data[error.start]:#04x} at {error.start} cannot be decoded)"
        raise InvalidConfig(f"the file is {what}; save it as UTF-8") from None
    lines = re.split("\r\n|\r|\n", text)
    if split == "file":
        lines = ["\n".join(lines)]
    begin, part = 0, list[str]()
    for number, line in enumerate([*lines, ""], start=1):
        if line.strip():
            begin = begin if part else number
            part.append(line)
        if part and (split != "blank" or not line.strip()):
            yield begin, "\n".join(part).strip("\n")
            part = []
