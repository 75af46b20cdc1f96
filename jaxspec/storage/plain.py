"""Converts the values of dataclasses to plain JSON, and back with type checks."""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Converts lists, tuples and numbers to JSON values; a non-finite number, such as a log-probability, becomes
    None."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return list(map(plain, value)) if isinstance(value, (list, tuple)) else value


def typed(value: Any, hint: Any, name: str) -> Any:
    """Checks that a JSON value has the type `hint`, and converts it to tuples and dataclasses.

    None instead of a float becomes minus infinity.

    Args:
        value: a result of `json.loads`.
        hint: the expected type: a scalar type, list, tuple or dataclass, or an optional one of these.
        name: name of the value, for the message.

    Raises:
        ValueError: the value has another type.
    """
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        (item,) = (part for part in inner if part is not type(None))
        return typed(value, item, name)
    if kind is float and value is None:
        return -math.inf
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if kind is list and isinstance(value, list):
        return [typed(item, inner[0], name) for item in value]
    if kind is tuple and isinstance(value, list) and (inner[1:] == (...,) or len(inner) == len(value)):
        each: Iterator[Any] = iter(inner[:1] * len(value) if inner[1:] == (...,) else inner)
        return tuple(typed(item, next(each), name) for item in value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        return kind(**{f.name: typed(value[f.name], hints[f.name], f.name) for f in dataclasses.fields(kind)})
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise ValueError(f"{name} is {value!r:.40}, expected {getattr(hint, '__name__', hint)}")
