"""Executes the shapes in annotations: jaxtyping binds the sizes of a call, beartype checks the arrays.

Annotations without an array's shape are pyright's: the library answers a wrong type with errors of its own, and tests
hand it such.
"""

import typing
from collections.abc import Callable
from typing import Any

from beartype import beartype
from jaxtyping import AbstractArray


def check(function: Callable) -> Callable:
    """Returns `function` with the annotations that have an array's shape checked at every call."""
    annotations = function.__annotations__
    try:
        function.__annotations__ = {name: hint for name, hint in annotations.items() if _has_shape(hint)}
        return beartype(function)
    finally:
        function.__annotations__ = annotations


def _has_shape(hint: Any) -> bool:
    return (isinstance(hint, type) and issubclass(hint, AbstractArray)) or any(map(_has_shape, typing.get_args(hint)))
