"""Where a template runs: jinja2's sandbox, which guards attributes, and a budget for time and memory.

A template is a program by whoever made the checkpoint. It reaches no file and no attribute, and every turn of
a loop, call, filter and growing string is charged. What remains possible is one large step, not a long run.
"""

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

BUDGET = 1 << 26  # a step costs STEP and the size of what it makes: 260,000 steps, or 64 MB of text
STEP = 256
MAX_INT = 10_000  # as an argument: ranges, widths, indents, precisions
_HUGE_FORMAT = re.compile(r"\d{5}|%[^a-zA-Z]*\*|\{[^{}]*\{")  # a width of 5 digits, or one given by a value


class Refused(Exception):
    """The template called `raise_exception`: an unknown role, say, or two answers in a row."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment chat templates are written for, with every step charged to one budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self):
        extensions = ["jinja2.ext.loopcontrols", _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.begin()
        own = {"tojson": _to_json, "_spent": lambda value: value, "_join": _join}
        self.filters = {name: self._charged(f) for name, f in (self.filters | own).items()}
        self.filters["_turns"] = self._turns
        self.globals |= {"raise_exception": _raise, "strftime_now": _now}
        del self.globals["lipsum"]

    def begin(self, size: int = 0) -> None:
        """A new budget, for messages of `size` characters."""
        self._budget = BUDGET + 64 * size

    def spend(self, size: int = 0) -> None:
        """Charges one step that makes something of `size`."""
        self._budget -= STEP + size
        if self._budget < 0:
            raise SecurityError("it takes more steps or memory than a chat template may")

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # str.format comes wrapped by the sandbox
        owner = getattr(method, "__self__", None)
        self._check(getattr(method, "__name__", ""), (owner, *args), kwargs)
        result = super().call(context, obj, *args, **kwargs)
        self.spend(_size(result))
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [_size(v) if _sized(v) else max(v, 0) if isinstance(v, int) else 1 for v in (left, right)]
        if operator == "**":
            self._check("**", (left, right), {})
            sizes = [0, 0]
        elif operator == "%" and isinstance(left, str):
            self._check("format", (left, right), {})
        grows = _sized(left) or _sized(right)
        self.spend((sizes[0] * sizes[1] if operator == "*" else sum(sizes)) if grows else 0)
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Meter().visit(super()._parse(source, name, filename))

    def _charged(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._check(function.__name__.removeprefix("do_"), args, kwargs)
            self.spend(sum(map(_size, args)))
            result = function(*args, **kwargs)
            self.spend(_size(result))
            return result

        return run

    def _turns(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend()
            yield item

    def _check(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuses, before it runs, a call that makes something huge in one step."""
        values = (*args, *kwargs.values())
        if any(isinstance(v, int) and abs(v) > MAX_INT for v in values):
            raise SecurityError(f"{name}: a number above {MAX_INT}")
        texts = [v for v in values if isinstance(v, str)]
        if name.startswith("format") and texts and _HUGE_FORMAT.search(texts[0]):
            raise SecurityError(f"{name}: a format that may be huge")
        if name == "replace" and len(texts) > 2:
            self.spend(texts[0].count(texts[1]) * len(texts[2]))
        if name in ("join", "_join"):
            lists = [v for v in values if isinstance(v, list | tuple)]
            self.spend(sum(_size(v) for items in lists for v in items))


class _Meter(NodeTransformer):
    """Puts a charge on what the sandbox does not see: loops, `~`, comparisons, blocks kept in a variable."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_turns", node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_join", node)

    def visit_Operand(self, node: nodes.Operand) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filter(node.expr, "_spent", node)
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = _filter(node.filter, "_spent", node)
        return node


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it changes nothing."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filter(node: nodes.Node | None, name: str, place: nodes.Node) -> Any:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=place.lineno)


def _sized(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple | dict | range)


def _size(value: Any) -> int:
    return len(value) if _sized(value) else 0


def _join(values: list[Any]) -> str:
    return "".join(map(str, values))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: without jinja2's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise Refused(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
