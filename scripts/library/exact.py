"""`exact=True` in scripts: models and networks that run so, and reasons for those that cannot."""

import dataclasses
import re
from typing import Any

import jax

import jaxspec
from jaxspec.models.exact import resolve_exact

FORMS = {"off": (False,), "on": (True,), "both": (False, True)}
"""Values of the option --exact."""


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
    platform = jax.default_backend()
    execution = resolve_exact(lm.execution.resolve(), True, dtype, lm.config, platform)
    return dataclasses.replace(lm, execution=execution)
