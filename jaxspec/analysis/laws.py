"""Checks of laws `[*b, V]`, and sums over their tokens."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxspec.core.checks import whole
from jaxspec.errors import InvalidConfig, ShapeMismatch, shown

AnyArray = Array | np.ndarray


def check_laws(target: AnyArray, draft: AnyArray, children: int) -> int:
    """Checks that both laws are arrays of floats with the same shape and at least `children` tokens.

    Returns:
        `children` as a Python int.

    Raises:
        InvalidConfig: a law is not an array of floats, or `children` is not an integer from 1 to V.
        ShapeMismatch: the laws differ in shape, or are scalars.
    """
    check_floats("target", target)
    check_floats("draft", draft)
    children = whole("children", children)
    if target.shape != draft.shape:
        raise ShapeMismatch(
            f"target and draft must be laws of the same shape [*b, V], got {target.shape} and {draft.shape}"
        )
    if children > target.shape[-1]:
        raise InvalidConfig(f"children must be at most the vocabulary size {target.shape[-1]}, got {children}")
    return children


def check_floats(name: str, values: Any) -> None:
    """Checks that a value is an array of floats with at least one axis.

    Raises:
        InvalidConfig: the value is not an array of floats; the message names the argument.
        ShapeMismatch: the value is a scalar.
    """
    kind = getattr(values, "dtype", None)
    if kind is None or not jnp.issubdtype(kind, jnp.floating):
        raise InvalidConfig(f"{name} must be an array of floats, got {shown(values)}")
    if not values.ndim:
        raise ShapeMismatch(f"{name} must have at least one axis, got a scalar")


def map_positions(function: Callable[..., Array], *laws: AnyArray, key: Array | None = None) -> Array:
    """Applies a function of laws `[V]` to laws `[*b, V]`, with a separate key for each position."""
    flat: list[AnyArray] = [law.reshape(-1, law.shape[-1]) for law in laws]
    if key is not None:
        flat.append(jax.random.split(key, flat[0].shape[0]))
    result = jax.vmap(function)(*flat)
    return result.reshape(*laws[0].shape[:-1], -1)


def ratio(target: AnyArray, draft: AnyArray) -> Array:
    """Returns target / draft, infinite where the draft's probability is 0."""
    return jnp.where(draft > 0, target / jnp.where(draft > 0, draft, 1.0), jnp.inf)


def sums_after(values: Float[Array, "*b n"]) -> Float[Array, "*b n"]:
    """Returns, for each entry, the sum of the entries after it."""
    sums = jnp.flip(jnp.cumsum(jnp.flip(values, -1), -1), -1)
    return jnp.concatenate([sums[..., 1:], jnp.zeros_like(sums[..., :1])], -1)


def prefix_sums(values: Float[Array, "*b n"]) -> Float[Array, "*b n1"]:
    """Returns the sums of the first 0, 1, ..., n entries."""
    return jnp.concatenate([jnp.zeros_like(values[..., :1]), jnp.cumsum(values, -1)], -1)


def normalise(weights: Float[Array, "V"]) -> Float[Array, "V"]:
    """Returns weights divided by their sum; zeros if all are 0."""
    total = weights.sum()
    return weights / jnp.where(total > 0, total, 1.0)
