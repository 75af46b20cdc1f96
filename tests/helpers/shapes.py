"""Executes the shapes in annotations: jaxtyping binds the sizes of a call, beartype checks the arrays.

Annotations without an array's shape are left to pyright: the library answers a wrong type with errors of its own, which
tests ask for.
"""

import contextlib
import typing
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
from beartype import beartype

PACKAGES = (
    "jaxspec.core", "jaxspec.rules", "jaxspec.schedules", "jaxspec.processors", "jaxspec.drafters", "jaxspec.decode",
    "jaxspec.kernels", "jaxspec.models", "jaxspec.heads", "jaxspec.train", "jaxspec.analysis", "jaxspec.testing",
    "jaxspec.tuning.acceptance", "jaxspec.tuning.head_laws", "jaxspec.tuning.mask_laws", "jaxspec.generation.rollout",
    "jaxspec.generation.history", "jaxspec.evaluation.scoring",
)  # fmt: skip
"""The packages and modules whose annotations have shapes."""


def execute() -> None:
    """Checks the shapes at every call of a function of `PACKAGES`; to be called before they are imported."""
    jaxtyping.install_import_hook(PACKAGES, f"{__name__}.check")


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Leaves wrong shapes to the library, for tests of its own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def check(function: Callable) -> Callable:
    """Returns `function` with the annotations that have an array's shape checked at every call."""
    annotations = function.__annotations__
    try:
        function.__annotations__ = {name: hint for name, hint in annotations.items() if _has_shape(hint)}
        return beartype(function)
    finally:
        function.__annotations__ = annotations


def _has_shape(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_has_shape, typing.get_args(hint)))
