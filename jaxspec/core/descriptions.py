"""Descriptions of the fields of dataclasses: the `Attributes:` section of a class's docstring is the one place of each.

From it the documentation of functions that take the fields as keywords and the help of the command line are made. This
module does not import JAX.
"""

import ast
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import re
from typing import Any, NamedTuple


class Field(NamedTuple):
    """A field of a dataclass, as its source has it."""

    description: str
    default: Any  # None if it is not a literal


def parse_attributes(docstring: str | None) -> dict[str, str]:
    """Returns the descriptions of the `Attributes:` section by name, each on one line."""
    text = inspect.cleandoc(docstring or "") + "\n"
    section = re.search(r"^Attributes:\n((?: {4}.*\n)*)", text, re.MULTILINE)
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section[1] if section else "", re.MULTILINE)
    return {name: " ".join(description.split()) for name, description in found}


def describe_fields(kind: type) -> dict[str, str]:
    """Returns the descriptions of the fields of a dataclass by name, those of its base classes first."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        found |= parse_attributes(vars(base).get("__doc__"))
    return found


@functools.cache
def read_fields(module: str, name: str) -> dict[str, Field]:
    """Reads the fields of a dataclass from its source, without those of its base classes.

    The module is not imported: `jaxspec generate --help` describes options whose types would import JAX, and is quick.

    Args:
        module: the full name of the module.
        name: the name of the class.
    """
    spec = importlib.util.find_spec(module)
    source = spec.loader.get_source(module) if spec and isinstance(spec.loader, importlib.abc.InspectLoader) else None
    if source is None:  # installed without sources
        kind = getattr(importlib.import_module(module), name)
        described = parse_attributes(kind.__doc__)
        return {field.name: Field(described[field.name], field.default) for field in dataclasses.fields(kind)
                if field.name in described}  # fmt: skip
    node = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    described, fields = parse_attributes(ast.get_docstring(node)), {}
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            default = line.value.value if isinstance(line.value, ast.Constant) else None
            fields[line.target.id] = Field(described[line.target.id], default)
    return fields
