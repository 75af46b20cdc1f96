"""The filters, tests and functions that chat templates may use, each with its cost."""

import datetime
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.sandbox import safe_range
from jinja2.tests import TESTS as JINJA_TESTS
from jinja2.utils import Namespace

from jaxspec.text.budget import BUDGET, ESCAPED, PIECE, Budget, Stream, bounded, contents, data, length

STEP = 128  # units of a call, filter, test, comparison or operator, besides its work on the arguments
MAX_INDENT = 16
MAX_DIGITS = 30  # decimal places of `round`
MAX_DATE = 200  # characters of a date format

_COMPARISONS = {"eq": "eq == equalto", "ne": "ne !=", "lt": "lt < lessthan", "lteq": "le <=", "in": "in"}
_COMPARISONS |= {"gt": "gt > greaterthan", "gteq": "ge >="}
_CHECKS = """boolean callable defined false float integer iterable mapping none number sameas sequence string true
undefined"""


class RaisedByTemplate(Exception):
    """The template called `raise_exception`, for an unknown role or two answers in a row, for example."""


# --- costs: each function charges a filter before it runs, and returns the value to pass to it ---------------


def _free(budget: Budget, value: Any, *_: Any, **__: Any) -> Any:
    return value


def _text(budget: Budget, value: Any) -> str:
    return budget.text(value)


def _escaped(budget: Budget, value: Any) -> str:
    value = budget.text(value)
    budget.spend(ESCAPED * len(value))
    return value


def _number(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> Any:
    budget.weigh([value, *args, *kwargs.values()])
    return value


def _rounded(budget: Budget, value: Any, precision: int = 0, *_: Any, **__: Any) -> Any:
    if abs(precision) > MAX_DIGITS:
        raise SecurityError(f"more than {MAX_DIGITS} digits")
    return value


def _items(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Charges a new list; arguments may name attributes, which are split at their dots."""
    budget.spend(PIECE * sum(map(length, (data(value), *args, *kwargs.values()))))
    return value


def _ordered(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> Any:
    budget.order(value)
    return _items(budget, value, *args, **kwargs)


def _summed(budget: Budget, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise SecurityError("only numbers can be summed")
    return _items(budget, value, attribute)


def _joined(budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> Any:
    _items(budget, value, attribute)
    budget.join(value if isinstance(value, str) else contents(value), budget.text(d))
    return value


def _like(method: str) -> Callable[..., Any]:
    """Returns the cost function of a filter that works like a str method."""

    def charge(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            if contents(argument):
                raise TypeError(f"{type(argument).__name__!r} object is not a string")
        value = budget.text(value)
        budget.method(method, value, args, kwargs)
        return value

    return charge


def _indented(budget: Budget, value: Any, width: Any = 4, *_: Any, **__: Any) -> Any:
    size = length(width) or int(width or 0)
    if size > MAX_INDENT:
        raise SecurityError(f"an indent above {MAX_INDENT}")
    value = budget.text(value)
    budget.method("splitlines", value, (), {})
    budget.spend(2 * ESCAPED * len(value) * (1 + max(size, 0)))
    return value


_COSTS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(["abs", "count", "d", "default", "first", "last", "length"], _free),
    **dict.fromkeys(["items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr"], _items),
    **dict.fromkeys(["dictsort", "max", "min", "sort", "unique"], _ordered),
    **dict.fromkeys(["safe", "string"], _text),
    **dict.fromkeys(["e", "escape"], _escaped),
    **dict.fromkeys(["float", "int"], _number),
    **{name: _like(name) for name in ("capitalize", "lower", "replace", "upper")},
    "title": _like("splitlines"),  # splits into words
    "trim": _like("strip"),
    "indent": _indented,
    "join": _joined,
    "round": _rounded,
    "sum": _summed,
}


def _charged(function: Callable[..., Any], charge: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a filter so that it is charged before it runs."""
    first = int(hasattr(function, "jinja_pass_arg"))  # index of the value: a context may precede it

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        budget = BUDGET.get()
        budget.spend(STEP)
        value = charge(budget, *args[first:], **kwargs)
        return settled(budget, function(*args[:first], value, *args[first + 1 :], **kwargs))

    return run


def settled(budget: Budget, value: Any) -> Any:
    """Checks the result of a filter or call: exhausts iterators, and rejects huge integers."""
    if isinstance(value, Iterator) and not isinstance(value, Stream):
        items = []
        for item in value:
            budget.spend(PIECE)
            items.append(item)
        return Stream(items)
    return bounded(value)


# --- tests and functions ------------------------------------------------------------------------------------


def _compare(operator: str, left: Any, right: Any) -> bool:
    return BUDGET.get().compare([left, right], (operator,))


def _numeric(test: Callable[..., bool]) -> Callable[..., bool]:
    def run(*values: Any) -> bool:
        if not all(isinstance(value, int | float) for value in values):  # '%9999999d' % 2 would make a string
            raise TypeError(f"{test.__name__}: not a number")
        return test(*values)

    return run


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Formats a value as JSON, without jinja2's HTML escapes, as templates expect."""
    apart = sum(map(len, separators or ()))
    if apart > MAX_INDENT or not (indent is None or (isinstance(indent, int) and indent <= MAX_INDENT)):
        raise SecurityError(f"tojson: an indent or separators above {MAX_INDENT}")
    budget = BUDGET.get()
    budget.spend(STEP)
    budget.weigh(value, ESCAPED * (2 if ensure_ascii else 1), apart + max(indent or 0, 0))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    """Raises `RaisedByTemplate`."""
    raise RaisedByTemplate(message)


def strftime_now(form: str) -> str:
    """Formats the current date and time."""
    if len(form) > MAX_DATE:
        raise SecurityError(f"a date format of more than {MAX_DATE} characters")
    return datetime.datetime.now().strftime(form)


FILTERS = {name: _charged(JINJA_FILTERS[name], charge) for name, charge in _COSTS.items()} | {"tojson": to_json}
TESTS = (
    {name: JINJA_TESTS[name] for name in _CHECKS.split()}
    | {name: _numeric(JINJA_TESTS[name]) for name in ("divisibleby", "even", "odd")}
    | {name: functools.partial(_compare, key) for key, names in _COMPARISONS.items() for name in names.split()}
)
GLOBALS = {
    "dict": dict,
    "namespace": Namespace,
    "raise_exception": raise_exception,
    "range": safe_range,
    "strftime_now": strftime_now,
}
