"""Regular expressions of JSON strings: any text, and the texts that a schema's pattern or format allows.

A pattern describes the text that a string stands for, and the automaton reads the string as JSON writes it. Patterns
are therefore parsed, and every set of characters is written as JSON writes its characters: `"` as `\\"`, for example.
"""

import importlib
import re
from typing import Any

from jaxspec.errors import InvalidConfig, shown

ops: Any = importlib.import_module("re._constants")  # the parser of Python's own regular expressions
parser: Any = importlib.import_module("re._parser")

CHARACTER = r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?:[0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))'
"""One character of a JSON string. Characters past U+FFFF are written as they are, not as two escapes."""

STRING = f'"{CHARACTER}*"'

_SHORT = {0x22: '\\"', 0x5C: r"\\", 0x08: r"\b", 0x0C: r"\f", 0x0A: r"\n", 0x0D: r"\r", 0x09: r"\t"}
_MOST = 0x10FFFF
_CATEGORIES = {
    ops.CATEGORY_DIGIT: [(0x30, 0x39)],
    ops.CATEGORY_SPACE: [(0x09, 0x0D), (0x20, 0x20)],
    ops.CATEGORY_WORD: [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
}
_NEGATIONS = {
    ops.CATEGORY_NOT_DIGIT: ops.CATEGORY_DIGIT,
    ops.CATEGORY_NOT_SPACE: ops.CATEGORY_SPACE,
    ops.CATEGORY_NOT_WORD: ops.CATEGORY_WORD,
}

_MONTH_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:[12][0-9]{{3}}-{_MONTH_DAY})"
_TIME = r"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9]))"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "email": r"[A-Za-z0-9_+-]{1,64}(?:\.[A-Za-z0-9_+-]{1,64}){0,4}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,4}",
}
"""The texts of the formats of JSON schemas that are supported. February has 28 days."""

Ranges = list[tuple[int, int]]


def escape(text: str) -> str:
    """Returns a regular expression of one text, in the syntax of the regex crate."""
    return re.sub(r"([\\.+*?()|\[\]{}^$#&\-~])", r"\\\1", text)


def write_pattern(pattern: Any) -> str:
    """Returns the regular expression of the JSON strings whose text has a match of a pattern, with the quotes.

    Raises:
        InvalidConfig: the pattern is invalid, or it needs a lookaround, a reference, or an anchor inside of it.
    """
    try:
        tree = list(parser.parse(pattern))
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise InvalidConfig(f"the pattern {shown(pattern)} is not a regular expression: {error}") from None
    return f'"{_sequence(tree, pattern, True, True)}"'


def _sequence(items: list[Any], pattern: str, first: bool, last: bool) -> str:
    """Writes items one after another.

    Args:
        items: the parsed items.
        pattern: the pattern, for messages.
        first: whether the items come first in the pattern, so that a text may begin with others unless `^` forbids it.
        last: whether the items come last in the pattern.
    """
    before = after = ""
    if first and items and items[0] == (ops.AT, ops.AT_BEGINNING):
        items, first = items[1:], False
    elif first and not (items and items[0][0] in (ops.BRANCH, ops.SUBPATTERN)):
        before = f"{CHARACTER}*"
    if last and items and items[-1] == (ops.AT, ops.AT_END):
        items, last = items[:-1], False
    elif last and not (items and items[-1][0] in (ops.BRANCH, ops.SUBPATTERN)):
        after = f"{CHARACTER}*"
    middle = [
        _item(kind, value, pattern, first and not before and i == 0, last and not after and i == len(items) - 1)
        for i, (kind, value) in enumerate(items)
    ]
    return before + "".join(middle) + after


def _item(kind: Any, value: Any, pattern: str, first: bool, last: bool) -> str:
    """Writes an item; `first` and `last` tell a group that it begins or ends the pattern."""
    if kind is ops.BRANCH:
        return f"(?:{'|'.join(_sequence(list(branch), pattern, first, last) for branch in value[1])})"
    if kind is ops.SUBPATTERN:
        _, added, removed, inner = value
        if not added and not removed:
            return f"(?:{_sequence(list(inner), pattern, first, last)})"
    elif kind in (ops.MAX_REPEAT, ops.MIN_REPEAT):
        least, most, inner = value
        return f"(?:{_sequence(list(inner), pattern, False, False)}){{{least},{'' if most is ops.MAXREPEAT else most}}}"
    elif kind in (ops.LITERAL, ops.NOT_LITERAL):
        return _characters([(value, value)], kind is ops.NOT_LITERAL)
    elif kind is ops.ANY:
        return _characters([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)], True)
    elif kind is ops.IN:
        negated = value[0][0] is ops.NEGATE
        return _characters([part for entry in value[negated:] for part in _ranges(*entry)], negated)
    name = "an anchor inside of it" if kind is ops.AT else str(kind).lower().replace("_", " ")
    raise InvalidConfig(f"the pattern {shown(pattern)} has {name}, which is not supported in a JSON schema")


def _ranges(kind: Any, value: Any) -> Ranges:
    if kind is ops.LITERAL:
        return [(value, value)]
    if kind is ops.RANGE:
        return [value]
    return _inverted(_CATEGORIES[_NEGATIONS[value]]) if value in _NEGATIONS else _CATEGORIES[value]


def _inverted(ranges: Ranges) -> Ranges:
    """Returns the characters that are not in ranges."""
    gaps, begin = [], 0
    for first, last in sorted(ranges):
        if first > begin:
            gaps.append((begin, first - 1))
        begin = max(begin, last + 1)
    return gaps + ([(begin, _MOST)] if begin <= _MOST else [])


def _characters(ranges: Ranges, negated: bool) -> str:
    """Writes one character out of ranges as JSON writes it."""
    chosen = _inverted(ranges) if negated else ranges
    forbidden = [*range(0x20), 0x22, 0x5C]
    plain = _inverted([*_inverted(chosen), *((code, code) for code in forbidden), (0xD800, 0xDFFF)])
    spans = (rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in plain)
    parts = [f"[{''.join(spans)}]"] if plain else []
    for code in forbidden:
        if any(first <= code <= last for first, last in chosen):
            parts.append(escape(_SHORT.get(code, f"\\u{code:04x}")))
    return f"(?:{'|'.join(parts)})" if parts else r"[^\x{0}-\x{10ffff}]"
