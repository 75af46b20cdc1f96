"""Laws `[*b, V]` of target and draft: what is asked of them, and sums over them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.core.checks import whole
from jaxspec.errors import InvalidConfig, ShapeMismatch


def check(target: Array, draft: Array, children: int) -> None:
    whole("children", children)
    if target.shape != draft.shape or not target.ndim:
        raise ShapeMismatch(f"target and draft must be laws [*b, V] of one shape, got {target.shape} and {draft.shape}")
    if children > target.shape[-1]:
        raise InvalidConfig(f"{children} children of a vocabulary of {target.shape[-1]} tokens")


def batched(one: Callable[..., Array], *laws: Array, key: Array | None = None) -> Array:
    """A function of laws `[V]` on `[*b, V]`, with a key for each."""
    flat: list[Array] = [law.reshape(-1, law.shape[-1]) for law in laws]
    if key is not None:
        flat.append(jax.random.split(key, flat[0].shape[0]))
    found = jax.vmap(one)(*flat)
    return found.reshape(*laws[0].shape[:-1], -1)


def ratio(target: Array, draft: Array) -> Array:
    """target/draft, infinite where nothing is drafted."""
    return jnp.where(draft > 0, target / jnp.where(draft > 0, draft, 1.0), jnp.inf)


def after(values: Float[Array, "*b n"]) -> Float[Array, "*b n"]:
    """The sum of what comes after each."""
    sums = jnp.flip(jnp.cumsum(jnp.flip(values, -1), -1), -1)
    return jnp.concatenate([sums[..., 1:], jnp.zeros_like(sums[..., :1])], -1)


def from_none(values: Float[Array, "*b n"]) -> Float[Array, "*b n1"]:
    """The sums of the first 0, 1, ... values."""
    return jnp.concatenate([jnp.zeros_like(values[..., :1]), jnp.cumsum(values, -1)], -1)


def normal(weights: Float[Array, "V"]) -> Float[Array, "V"]:
    """The law of weights; zeros where there are none."""
    total = weights.sum()
    return weights / jnp.where(total > 0, total, 1.0)
