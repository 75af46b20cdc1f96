"""What scripts know of `exact=True`: whether this version of jaxspec has it, and networks that run so."""

import dataclasses
import importlib
import inspect
import re
from typing import Any

import jax

import jaxspec

FORMS = {"off": (False,), "on": (True,), "both": (False, True)}
"""Values of the option --exact."""


def why_unavailable() -> str | None:
    """Returns why models cannot be loaded with `exact=True` in this version; None if they can."""
    if "exact" in inspect.signature(jaxspec.load).parameters:
        return None
    return "jaxspec.load has no argument exact in this version"


def describe(error: Exception) -> str:
    """Returns an error as one line of a record, without folders of the machine."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"(?<![\w.:/-])(/[^\s'\"/]+)+/", "", text)[:300]


def load(source: Any, exact: bool, **options: Any) -> jaxspec.Model:
    """Loads a model, with `exact=True` or with the library's default."""
    if exact:
        options["exact"] = True
    return jaxspec.load(source, **options)


def apply(lm: Any, dtype: str) -> Any:
    """Returns the network as `jaxspec.load(..., exact=True)` makes it for matrices of this type.

    Raises:
        InvalidConfig: this machine cannot promise the same bits.
    """
    module = importlib.import_module("jaxspec.models.exact")
    platform = jax.default_backend()
    execution = module.resolve_exact(lm.execution.resolve(), True, dtype, lm.config.head_dim, platform)
    return dataclasses.replace(lm, execution=execution)


def options(lm: Any) -> dict[str, Any]:
    """Returns the options of the compiler that programs of an exact network need, besides those of every loop."""
    return dict(lm.compiler_options) if lm.execution.exact else {}
