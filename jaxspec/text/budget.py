"""The budget of a chat template: units of about ten nanoseconds or one byte, charged before the work is done.

No operation takes more time or memory than its charge. Values that share parts (`[x, x]` in a loop) cost as much as
copies would, since printing, comparing and hashing them takes as long.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from jinja2 import Undefined
from jinja2.exceptions import SecurityError
from markupsafe import Markup

NODE = 16  # units of a simple step
PIECE = 64  # units of an element of a list that is created or iterated over
ESCAPED = 6  # characters per escaped character: `&#34;` for a quote, a control character in JSON
PRINTED = 10  # characters per printed character: `\U000e0001` in a str inside a printed list
MAX_NESTED = 100  # levels of nested values
MAX_CALLS = 50  # levels of nested macro calls
MAX_INT = 1 << 64

BUDGET: ContextVar["Budget"] = ContextVar("budget")
"""The budget of this thread's current rendering."""

_Views = type({}.keys()) | type({}.values()) | type({}.items())
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
}
_CASES = {"capitalize", "lower", "swapcase", "title", "upper"}
_SPLITS = {"rsplit", "split", "splitlines"}
_SEARCHES = _SPLITS | {"count", "find", "index", "lstrip", "partition", "replace", "rfind", "rindex", "rpartition"}
_SEARCHES |= {"rstrip", "strip"}


class Stream:
    """Items to iterate over once. They replace jinja2's generators, which can overflow the C stack if nested."""

    def __init__(self, items: list[Any]):
        self.items = items
        self._iterator = iter(items)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)


_Data = str | int | float | list | tuple | dict | range | Undefined | Stream | _Views


class Budget:
    """The remaining units of one rendering."""

    def __init__(self, units: int):
        self.left = units
        self._calls = 0

    def spend(self, units: int) -> None:
        """Charges `units`; raises SecurityError if the budget is exhausted."""
        self.left -= max(units, 0)
        if self.left < 0:
            raise SecurityError("it exceeds the time or memory limit of chat templates")

    def enter(self) -> None:
        """Begins a macro call, which `leave` ends."""
        self._calls += 1
        if self._calls > MAX_CALLS:
            raise SecurityError(f"macro calls nested more than {MAX_CALLS} levels deep")

    def leave(self) -> None:
        """Ends a macro call."""
        self._calls -= 1

    def weigh(self, value: Any, factor: int = 1, margin: int = 0) -> None:
        """Charges a value with its contents: `factor` per character, `margin` per value and level of nesting."""
        stack = [(value, 0)]
        while stack:
            value, depth = stack.pop()
            self.spend(PIECE + margin * depth)
            if isinstance(value, str):
                self.spend(factor * len(value))
            elif isinstance(value, range):
                self.spend(len(value))
            elif parts := contents(data(value)):
                if depth == MAX_NESTED:
                    raise SecurityError(f"values nested more than {MAX_NESTED} levels deep")
                self.spend(NODE * len(parts))
                stack.extend((part, depth + 1) for part in parts)

    def text(self, value: Any) -> str:
        """Charges and returns `str(value)`; a str and jinja2's Markup are returned unchanged."""
        if isinstance(value, str):
            self.spend(len(value))
            return value
        self.weigh(value, PRINTED)
        return str(value)

    def join(self, values: Iterable[Any], separator: str = "") -> None:
        """Charges joining the text of `values` with `separator`."""
        for value in values:
            self.spend(PIECE + len(separator))
            self.weigh(value, 1 if isinstance(value, str) else PRINTED)

    def method(self, name: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Charges `text.name(*args, **kwargs)`, a call of a str method."""
        before, arguments = self.left, [*args, *kwargs.values()]
        self.weigh(arguments)
        first = args[0] if args else kwargs.get("sep", kwargs.get("old", kwargs.get("chars")))
        part = first if isinstance(first, str) else ""
        self.spend(len(text) * (3 if name in _CASES else 1))  # 'ΐ'.upper() has three characters
        if name in _SEARCHES:  # worst case: compares all pairs of characters
            self.spend(len(text) * len(part) // 8)
        if name == "replace":
            new = args[1] if len(args) > 1 else kwargs.get("new")
            self.spend(_occurrences(text, part) * (len(new) if isinstance(new, str) else NODE))
        elif name in _SPLITS:
            limits = [n for n in (*args[1:], kwargs.get("maxsplit")) if isinstance(n, int) and n >= 0]
            self.spend(PIECE * (min([_occurrences(text, part), *limits]) + 1))
        elif name == "join":
            self.join(first if isinstance(first, str) else contents(first), text)
        if any(isinstance(value, Markup) for value in (text, *arguments)):
            self.spend(ESCAPED * (before - self.left))

    def order(self, value: Any) -> None:
        """Charges sorting `value`."""
        before = self.left
        self.weigh(value)
        self.spend((before - self.left) * length(value).bit_length())

    def compare(self, values: list[Any], operators: Iterable[str]) -> bool:
        """Charges and evaluates the comparison `values[0] operators[0] values[1] ...`."""
        return all(self._compare(*pair) for pair in zip(operators, values, values[1:]))

    def _compare(self, name: str, left: Any, right: Any) -> bool:
        if name in ("in", "notin"):
            return self._contains(right, left) == (name == "in")
        if name in ("eq", "ne"):
            return self._equal(left, right) == (name == "eq")
        if isinstance(left, str) and isinstance(right, str):
            self.spend(min(len(left), len(right)))
        else:
            self.weigh([left, right])
        return _COMPARISONS[name](left, right)

    def _equal(self, left: Any, right: Any, depth: int = 0) -> bool:
        self.spend(PIECE)
        if isinstance(left, str) and isinstance(right, str):
            self.spend(len(left) if len(left) == len(right) else 0)
            return left == right
        if depth > MAX_NESTED:
            raise SecurityError(f"values nested more than {MAX_NESTED} levels deep")
        if isinstance(left, list | tuple) and isinstance(right, list | tuple):
            return (
                type(left) is type(right)
                and len(left) == len(right)
                and all(a is b or self._equal(a, b, depth + 1) for a, b in zip(left, right))
            )
        if isinstance(left, dict) and isinstance(right, dict):
            return len(left) == len(right) and all(
                self._contains(right, key) and (right[key] is value or self._equal(value, right[key], depth + 1))
                for key, value in left.items()
            )
        if isinstance(left, _Views) or isinstance(right, _Views):
            self.weigh([left, right])
        return left == right

    def _contains(self, values: Any, value: Any) -> bool:
        if isinstance(values, str):
            self.method("find", values, (value,), {})
            return value in values
        if isinstance(values, list | tuple | Stream):
            return any(value is other or self._equal(value, other) for other in values)
        self.weigh(value)
        if not isinstance(values, dict):
            self.weigh(values)
        return value in values


def data(value: Any) -> Any:
    """Returns the value if it is data; raises TypeError for jinja2's own objects, such as `loop`."""
    if value is None or isinstance(value, _Data):
        return value
    raise TypeError(f"{type(value).__name__!r} object cannot be looped over, compared or printed")


def contents(value: Any) -> list[Any]:
    """Returns the values inside a value; [] if there are none."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, Stream):
        return value.items
    return list(value) if isinstance(value, list | tuple | _Views) else []


def length(value: Any) -> int:
    """Returns the number of items of a value; 0 for a value without items."""
    if isinstance(value, Stream):
        return len(value.items)
    return len(value) if isinstance(value, str | list | tuple | dict | range | _Views) else 0


def bounded(value: Any) -> Any:
    """Returns the value; raises SecurityError if it is an integer above 2**64."""
    if isinstance(value, int) and abs(value) > MAX_INT:
        raise SecurityError("an integer above 2**64")
    return value


def _occurrences(text: str, part: str) -> int:
    """Returns an upper bound on the occurrences of `part` in `text`."""
    if isinstance(text, Markup) or not part:  # Markup searches for the escaped part; an empty part matches everywhere
        return len(text) + 1
    return text.count(part)
