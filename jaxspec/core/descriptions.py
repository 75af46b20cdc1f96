"""Descriptions of the fields of dataclasses, each written once, in the `Attributes:` section of the class's docstring.

The documentation of functions that take the fields as keywords, and the help of the command line, are made from this
section. This module does not import JAX.
"""

import ast
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

DataClass = TypeVar("DataClass", bound=type)


class Field(NamedTuple):
    """A field of a dataclass, as its source code declares it."""

    description: str
    default: Any  # None if it is not a literal


def parse_section(docstring: str | None, heading: str = "Attributes") -> dict[str, str]:
    """Returns the descriptions in a section of a docstring by name, each on one line."""
    text = inspect.cleandoc(docstring or "") + "\n"
    section = re.search(rf"^{heading}:\n((?: {{4}}.*\n)*)", text, re.MULTILINE)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section[1] if section else "", re.MULTILINE)
    return {name: " ".join(description.split()) for name, description in entries}


def describe_fields(kind: type) -> dict[str, str]:
    """Returns the descriptions of the fields of a dataclass by name, the fields of its base classes first."""
    descriptions: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        descriptions |= parse_section(vars(base).get("__doc__"))
    return descriptions


def with_section(docstring: str, heading: str, descriptions: Mapping[str, str]) -> str:
    """Returns a docstring with this section after the first paragraphs, in place of any section of the same name."""
    summary, *rest = re.split(r"\n\n(?=[A-Z]\w+:\n)", inspect.cleandoc(docstring))
    lines = [f"{heading}:", *(_wrap(f"{name}: {text}") for name, text in descriptions.items())]
    others = [part for part in rest if not part.startswith(f"{heading}:")]
    return "\n\n".join([summary, "\n".join(lines), *others])


def _wrap(text: str) -> str:
    """Wraps an entry of a section, without breaking lines inside code in backquotes."""
    joined = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(joined, 112, subsequent_indent=" " * 4, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent("\n".join(lines).replace("\0", " "), " " * 4)


def inherit_descriptions(kind: DataClass) -> DataClass:
    """Adds the descriptions of inherited fields to the docstring of a class; a decorator."""
    kind.__doc__ = with_section(kind.__doc__ or "", "Attributes", describe_fields(kind))
    return kind


@functools.cache
def read_fields(module: str, name: str) -> dict[str, Field]:
    """Reads the fields of a dataclass from its source, without the fields of its base classes.

    The module is not imported, so that `jaxspec generate --help` is quick: it describes options whose types would
    import JAX.

    Args:
        module: the full name of the module.
        name: the name of the class.
    """
    spec = importlib.util.find_spec(module)
    source = spec.loader.get_source(module) if spec and isinstance(spec.loader, importlib.abc.InspectLoader) else None
    if source is None:  # installed without sources
        kind = getattr(importlib.import_module(module), name)
        described = parse_section(kind.__doc__)
        return {field.name: Field(described[field.name], field.default) for field in dataclasses.fields(kind)
                if field.name in described}  # fmt: skip
    node = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    described, fields = parse_section(ast.get_docstring(node)), {}
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            default = line.value.value if isinstance(line.value, ast.Constant) else None
            fields[line.target.id] = Field(described[line.target.id], default)
    return fields
