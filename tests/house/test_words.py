"""Tests of the English of docstrings."""

import ast
import re

import pytest

from helpers.paths import ROOT

pytestmark = pytest.mark.quick

PACKAGE = ROOT / "jaxspec"
NO_VERB = re.compile(r"(What|Of|Whether|Where|How|The|A|An|That|As|For)\b")
AVOIDED = re.compile(r"\b(anew|told)\b", re.IGNORECASE)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(text):
    """Yields every node with a docstring, and the docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTION)) and (doc := ast.get_docstring(node)):
            yield node, doc


def is_property(node):
    return any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list)


def faults(text):
    """Yields a line for every docstring that begins without a verb or has a word to avoid."""
    for node, doc in docstrings(text):
        name = getattr(node, "name", "module")
        if isinstance(node, FUNCTION) and not is_property(node) and NO_VERB.match(doc):
            yield f"{name} begins with no verb: {doc.splitlines()[0]}"
        if word := AVOIDED.search(doc):
            yield f"{name} has {word[0]!r}"


def test_docstrings_are_plain_english():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        found += [f"{place}: {fault}" for fault in faults(path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('def f():\n    """The number."""', 1),
        ('async def f():\n    """Whether it fits."""', 1),
        ('class C:\n    def f(self):\n        """How fast it is, as told."""', 2),
        ('"""Read anew."""', 1),
        ('class C:\n    """A class."""\n\n    @property\n    def f(self):\n        """The number."""', 0),
        ('def f():\n    """Asks for the number."""', 0),
    ],
)
def test_faults_are_seen(text, count):
    assert len(list(faults(text))) == count
