"""Checks of settings that have one value, or one for each row."""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.errors import InvalidConfig, shown

FLOATS = "iuf"
"""The kinds of NumPy's dtypes whose values are converted to float32."""
Limits = tuple[Any, Callable[[np.ndarray], Any], str]
"""The dtype of a setting, a function that tells which values are valid, and a description of them for messages."""


def check_setting(name: str, given: Any, limits: Limits, batch: int | None = None) -> np.ndarray | Array:
    """Returns the checked values of a setting: one value, or one per row. Only the shape of traced values is checked.

    Args:
        name: the name of the setting, for messages.
        given: the setting.
        limits: the values that are valid.
        batch: the number of rows; None if it is not known.

    Raises:
        InvalidConfig: a value is not valid, or there is not one value per row.
    """
    dtype, valid, expected = limits
    if isinstance(given, jax.core.Tracer):
        value = jnp.asarray(given, dtype)
    else:
        value = as_array(given)
        if value.dtype.kind not in ("iu" if dtype is np.int32 else FLOATS) or not np.all(valid(value)):
            raise InvalidConfig(f"{name} must be {expected}, got {shown(given)}")
        if value.ndim > 1:
            raise InvalidConfig(f"{name} must be one value, or one for each row; got shape {value.shape}")
        value = value.astype(dtype)
    if batch is not None and value.shape not in ((), (batch,)):
        raise InvalidConfig(f"{name} must be one value, or one for each of the {batch} rows; got shape {value.shape}")
    return value


def spread_setting(name: str, given: Any, limits: Limits, batch: int) -> Array:
    """Returns the checked value of a setting for each row; see `check_setting`."""
    return broadcast(check_setting(name, given, limits, batch), (batch,))


def broadcast(value: Any, shape: tuple[int, ...]) -> Array:
    """Broadcasts a value, with NumPy if possible: NumPy compiles nothing, but it cannot read traced values."""
    module = jnp if isinstance(value, jax.core.Tracer) else np
    return jnp.asarray(module.broadcast_to(value, shape))


def is_abstract(value: Any) -> bool:
    """Returns whether a value cannot be read: traced, a shape without data, or on devices of other processes."""
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        return not value.is_fully_addressable
    return isinstance(value, (jax.core.Tracer, jax.ShapeDtypeStruct))


def as_array(value: Any) -> np.ndarray:
    """Returns the value as an array; an array of objects if it is not one (ragged lists, deleted arrays)."""
    try:
        array = np.asarray(value)
    except Exception:
        return np.asarray(None)
    return array.astype(np.float32) if jnp.issubdtype(array.dtype, jnp.bfloat16) else array
