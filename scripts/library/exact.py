"""What scripts know of `exact=True`: whether this version of jaxspec has it, and networks that run so."""

import dataclasses
import inspect
import re
from typing import Any

import jaxspec
from jaxspec.models.execution import Execution

FORMS = {"off": (False,), "on": (True,), "both": (False, True)}
"""Values of the option --exact."""


def why_unavailable() -> str | None:
    """Returns why models cannot be loaded with `exact=True`; None if they can."""
    if "exact" not in inspect.signature(jaxspec.load).parameters:
        return "jaxspec.load has no argument exact in this version"
    if "exact" not in {field.name for field in dataclasses.fields(Execution)}:
        return "jaxspec.models.execution.Execution has no field exact in this version"
    return None


def describe(error: Exception) -> str:
    """Returns an error as one line of a record, without folders of the machine."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"(?<![\w.:/-])(/[^\s'\"/]+)+/", "", text)[:300]


def load(source: Any, exact: bool, **options: Any) -> jaxspec.Model:
    """Loads a model, with `exact=True` or with the library's default."""
    if exact:
        options["exact"] = True
    return jaxspec.load(source, **options)


def apply(lm: Any) -> Any:
    """Returns the network as `jaxspec.load(..., exact=True)` makes it."""
    return lm.with_execution(exact=True)


def options(lm: Any) -> dict[str, Any]:
    """Returns the options of the compiler that an exact network needs, besides those of every loop."""
    return dict(getattr(lm.execution, "compiler_options", None) or {})
