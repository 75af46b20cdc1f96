"""The format of the report of `jaxspec inspect`: tensors by type and name, shortened values, lines."""

import collections
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.amounts import size
from jaxspec.cli.wrap import wrap

if TYPE_CHECKING:
    from jaxspec.checkpoints.base import StoredTensor

VERBATIM_SECTIONS = ("settings", "stored", "tensors", "head_tensors")
"""Sections whose entries have names from the file."""
MAX_ITEMS, MAX_CHARACTERS = 8, 88  # items of a list and characters of a text; the JSON has all of them


def count_types(stored: Iterable["StoredTensor"]) -> dict[str, Any]:
    """Returns the number and the bytes of the tensors of each type, in descending order of bytes."""
    tensors, total = collections.Counter(), collections.Counter()
    for tensor in stored:
        tensors[tensor.type] += 1
        total[tensor.type] += tensor.bytes
    return {kind: {"tensors": tensors[kind], "bytes": size} for kind, size in total.most_common()}


def group_tensors(stored: Mapping[str, "StoredTensor"]) -> dict[str, Any]:
    """Returns types and shapes by name; layers are grouped under one name, in which N stands for their number."""
    kinds = collections.Counter(
        (re.sub(r"(^|\.)\d+(?=\.)", r"\1N", name), t.type, t.shape) for name, t in stored.items()
    )
    table: dict[str, Any] = {}
    for (name, kind, shape), count in kinds.items():
        table.setdefault(name, []).append(f"{kind} {'x'.join(map(str, shape))}, {count} of them")
    return table


def shorten(value: Any) -> Any:
    """Returns a setting for JSON: long lists become their length, and numbers that are not finite become text."""
    if isinstance(value, Mapping):
        return {str(key): shorten(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shorten(item) for item in value] if len(value) <= MAX_ITEMS else f"{len(value)} items"
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def format_lines(report: Mapping[str, Any], width: int) -> Iterator[str]:
    """Yields the lines of the report: entries are wrapped to `width`, and the entries of sections are indented."""
    for key, value in report.items():
        if isinstance(value, Mapping):
            label = _printable if key in VERBATIM_SECTIONS else _label
            labels = [f"  {label(name)}" for name in value]
            column = min(max(map(len, labels), default=0) + 2, width // 2)
            yield f"\n{_label(key)}"
            for shown, (name, item) in zip(labels, value.items()):
                yield from _entry(shown, _shown(name, item), column, width)
        else:
            yield from _entry(_label(key), _shown(key, value), 14, width)


def _entry(label: str, value: str, column: int, width: int) -> Iterator[str]:
    """Yields a label and its wrapped value, at `column`, or below the label if either is too wide."""
    first, *more = wrap(value, width - column)
    if len(label) + 2 <= column and max(map(len, [first, *more])) <= width - column:
        yield f"{label:<{column}}{first}".rstrip()
    else:
        yield label
        column, more = 4, wrap(value, width - 4)
    yield from (" " * column + line for line in more)


def _label(key: str) -> str:
    return _printable(key.removesuffix("_bytes").replace("_", " "))


def _shown(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{_label(name)} {_shown(name, item)}" for name, item in value.items()) or "none"
    if isinstance(value, list):
        more = f", and {len(value) - MAX_ITEMS} more" if len(value) > MAX_ITEMS else ""
        return ", ".join(_shown("", item) for item in value[:MAX_ITEMS]) + more if value else "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, int) and key.endswith("bytes"):
        return size(value)
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return _printable(value if len(value) <= MAX_CHARACTERS else value[: MAX_CHARACTERS - 1] + "…")


def _printable(text: str) -> str:
    """Escapes characters that could control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
