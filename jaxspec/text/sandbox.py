"""The sandbox of chat templates: jinja2's sandbox, restricted to what templates use, with every step charged.

A template is untrusted code that comes with a checkpoint. It has no access to files or attributes. The statements,
filters, tests, methods and globals that it may use are listed here, so that the cost of each is known. Each step is
charged before it is executed: no step takes long or allocates more than its charge, and Ctrl-C works between steps.
That needs neither a process of its own nor a timer, and acceptance of a template does not depend on a clock.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any, cast

import jinja2
from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from jaxspec.text.budget import BUDGET, ESCAPED, MAX_INT, NODE, PRINTED, Budget, bounded, data, length
from jaxspec.text.filters import FILTERS, GLOBALS, STEP, TESTS, settled
from jaxspec.text.filters import RaisedByTemplate as RaisedByTemplate

MAX_DEPTH = 80  # depth of a template's syntax tree; published templates reach 40
MAX_NODES = 5_000  # its nodes; published templates reach 1,500, and compile time grows quadratically
MAX_ARGUMENTS = 100

_NODES = """Add And Assign AssignBlock Break Call CallBlock Compare Concat CondExpr Const Continue Dict Div Filter
FilterBlock FloorDiv For Getattr Getitem If Keyword List Macro Mod Mul NSRef Name Neg Not Operand Or Output Pair Pos Pow
Slice Sub Template TemplateData Test Tuple With"""
_ALLOWED = {getattr(nodes, name) for name in _NODES.split()}
_COSTLY = (nodes.BinExpr, nodes.Call, nodes.Compare, nodes.Filter, nodes.Test, nodes.Getattr, nodes.Getitem)
_BODIES = ("body", "else_", "elif_")
_STR = """capitalize count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace
istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip
split splitlines startswith strip swapcase title upper"""
_LOOP = "cycle first index index0 last length nextitem previtem revindex revindex0"
_ATTRIBUTES = {str: set(_STR.split()), dict: {"get", "items", "keys", "values"}, LoopContext: set(_LOOP.split())}


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The Jinja environment of chat templates, with every step charged to the budget of a rendering."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self):
        extensions = ["jinja2.ext.loopcontrols", _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        self.filters, self.tests, self.globals = FILTERS | _CHARGES, TESTS, GLOBALS

    @contextlib.contextmanager
    def budget(self, units: int) -> Iterator[None]:
        """Sets the budget of renderings in this context, in units."""
        token = BUDGET.set(Budget(units))
        try:
            yield
        finally:
            BUDGET.reset(token)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, Namespace):
            return not attr.startswith("_")
        return any(isinstance(obj, kind) and attr in names for kind, names in _ATTRIBUTES.items())

    def getitem(self, obj: Any, argument: Any) -> Any:
        budget = BUDGET.get()
        budget.spend(NODE)
        if not isinstance(argument, str | int):
            budget.weigh(argument, PRINTED)  # hashed, and printed if there is no such item
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = BUDGET.get()
        if isinstance(obj, Macro):
            budget.enter()
            try:
                result = super().call(context, obj, *args, **kwargs)
            finally:
                budget.leave()
            budget.spend(STEP + len(result))
            return result
        self._charge_call(budget, obj, args, kwargs)
        return settled(budget, super().call(context, obj, *args, **kwargs))

    def _charge_call(self, budget: Budget, obj: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Charges a call of anything but a macro."""
        owner = getattr(obj, "__self__", None)
        if any(obj is one for one in (dict, Namespace, GLOBALS["raise_exception"])):
            budget.weigh(args, PRINTED)
        elif isinstance(obj, types.BuiltinMethodType | types.MethodType) and isinstance(owner, str):
            own = {key: value for key, value in kwargs.items() if not key.startswith("_")}  # without jinja2's
            budget.method(obj.__name__, owner, args, own)
        elif isinstance(obj, types.BuiltinMethodType) and isinstance(owner, dict):
            budget.weigh(args[:1])
        elif not (
            obj is GLOBALS["range"]
            or obj is GLOBALS["strftime_now"]
            or isinstance(owner, LoopContext)
            or isinstance(obj, jinja2.Undefined)  # raises its own error
        ):
            raise SecurityError(f"a chat template may not call {type(obj).__name__!r} objects")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = BUDGET.get()
        if isinstance(left, int | float) and isinstance(right, int | float):
            if operator == "**" and isinstance(left, int) and left.bit_length() * abs(right) > MAX_INT.bit_length():
                raise SecurityError("an integer above 2**64")
        elif operator == "+" and _size(left) >= 0 and _size(right) >= 0:
            budget.spend((_size(left) + _size(right)) * (ESCAPED if Markup in (type(left), type(right)) else 1))
        elif operator == "*" and (_size(left) >= 0) != (_size(right) >= 0):
            size, times = (left, right) if _size(left) >= 0 else (right, left)
            budget.spend(_size(size) * times if isinstance(times, int) else 0)
        elif not isinstance(left, jinja2.Undefined) and not isinstance(right, jinja2.Undefined):
            kinds = f"{type(left).__name__!r} and {type(right).__name__!r}"
            raise TypeError(f"unsupported operand type(s) for {operator}: {kinds}")
        return bounded(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _check(tree)
        return _Meter().visit(tree)


class _Meter(NodeTransformer):
    """Inserts charges into a template: at the head of each block of statements, and wherever a size is known."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        for field in ("body", "else_"):
            if isinstance(block := getattr(node, field, None), list):
                setattr(node, field, [nodes.ExprStmt(_charge(block, node), lineno=node.lineno), *block])
        for field in ("dyn_args", "dyn_kwargs"):  # of `f(*args, **kwargs)`
            if arguments := getattr(node, field, None):
                setattr(node, field, _filter(arguments, "_spread", node))
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_loop", node)
        if node.test is not None:
            node.test = nodes.And(_charge([node.test], node), node.test, lineno=node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [n if isinstance(n, nodes.TemplateData) else _filter(n, "_text", n) for n in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_join", node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        values = nodes.List([node.expr, *(operand.expr for operand in node.ops)], lineno=node.lineno)
        return _filter(values, "_compare", node, nodes.Const(tuple(operand.op for operand in node.ops)))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_slice", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = node.key if isinstance(node.key, nodes.Const) else _filter(node.key, "_key", node)
        return node


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's messages for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# --- the tree -----------------------------------------------------------------------------------------------


def _check(tree: nodes.Template) -> None:
    """Rejects nodes that no chat template uses and deep nesting, without recursion."""
    count, stack = 0, [(cast(nodes.Node, tree), 0, 1)]
    while stack:
        node, depth, line = stack.pop()
        count, line = count + 1, node.lineno or line
        if depth > MAX_DEPTH:
            raise jinja2.TemplateSyntaxError(f"expressions nested more than {MAX_DEPTH} levels deep", line)
        if count > MAX_NODES:
            raise jinja2.TemplateSyntaxError(f"more than {MAX_NODES} statements and expressions", line)
        if type(node) not in _ALLOWED:
            raise jinja2.TemplateSyntaxError(f"a chat template may not use {type(node).__name__!r}", line)
        if isinstance(node, nodes.For) and node.recursive:
            raise jinja2.TemplateSyntaxError("a chat template may not use 'recursive'", line)
        if isinstance(node, nodes.Const) and isinstance(node.value, int) and abs(node.value) > MAX_INT:
            raise jinja2.TemplateSyntaxError("an integer above 2**64", line)
        stack.extend((child, depth + 1, line) for child in node.iter_child_nodes())


def _cost(node: nodes.Node) -> int:
    """Returns the cost of executing a statement or expression once, without inner blocks and sizes of values."""
    own = NODE + STEP * isinstance(node, _COSTLY)
    if isinstance(node, nodes.TemplateData):
        own += len(node.data)
    tests = [branch.test for branch in getattr(node, "elif_", ())]
    return own + sum(_cost(child) for child in [*node.iter_child_nodes(exclude=_BODIES), *tests])


def _charge(block: list[Any], place: nodes.Node) -> nodes.Filter:
    return _filter(nodes.Const(STEP + sum(map(_cost, block))), "_step", place)


def _filter(node: nodes.Node, name: str, place: nodes.Node, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, list(args), [], None, None, lineno=place.lineno)


# --- the charges --------------------------------------------------------------------------------------------


def _step(units: int) -> bool:
    BUDGET.get().spend(units)
    return True


@pass_context  # prevents constant folding
def _text(_: Any, value: Any) -> str:
    return BUDGET.get().text(value)


def _join(values: list[Any]) -> str:
    return "".join([str(BUDGET.get().text(value)) for value in values])


def _compare(values: list[Any], operators: tuple[str, ...]) -> bool:
    return BUDGET.get().compare(values, operators)


def _slice(value: Any) -> Any:
    BUDGET.get().spend(max(_size(value), 0))  # a slice is no larger than its source
    return value


def _spread(value: Any) -> Any:
    if length(value) > MAX_ARGUMENTS:
        raise SecurityError(f"more than {MAX_ARGUMENTS} arguments")
    return value


def _key(value: Any) -> Any:
    BUDGET.get().weigh(value)
    return value


def _size(value: Any) -> int:
    """Returns the size of a string or list in bytes; -1 for other values."""
    return len(value) if isinstance(value, str) else 8 * len(value) if isinstance(value, list | tuple) else -1


_CHARGES = {"_step": _step, "_text": _text, "_join": _join, "_compare": _compare, "_slice": _slice, "_key": _key}
_CHARGES |= {"_loop": data, "_spread": _spread}
