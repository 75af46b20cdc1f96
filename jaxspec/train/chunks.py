"""Sums over many positions, computed a few positions at a time.

A loss over a vocabulary needs the logits of a position only while it computes the loss of that position. The logits of
all positions would be the largest arrays of a training step.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.models.query_chunks import join_axis, split_axis

POSITIONS_AT_ONCE = 512
"""Number of positions of each device whose logits exist at once. TPUs and GPUs need a few hundred rows to multiply
for about as long as they read a matrix."""

Judge = Callable[[Any, Any, Any, Any], tuple[jax.Array, Any]]
"""A function from learned parameters, states `[B, A, ...]`, data `[B, A, ...]` and constants to a sum over positions,
and to values of each position `[B, A]`."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sum_in_chunks(
    judge: Judge, size: int, learned: Any, states: Any, data: Any, constants: Any
) -> tuple[jax.Array, Any]:
    """Returns the sum and the values of `judge` over all positions, computed for `size` positions of a row at a time.

    The sum has gradients with respect to `learned` and `states`; the values have none. The gradients are computed
    together with the sum, while the logits of a chunk exist. A backward pass therefore neither keeps nor recomputes
    logits. The gradient of a state depends on its own position only, and takes the memory of the state.

    Args:
        judge: the function.
        size: number of positions of a chunk.
        learned: parameters of `judge`.
        states: arrays `[B, A, ...]`.
        data: arrays `[B, A, ...]` without a gradient. They are padded with 0 at the end, which must add 0 to the sum.
        constants: arrays that all chunks share, without a gradient.
    """

    def add(total: jax.Array, chunk: Any) -> tuple[jax.Array, Any]:
        value, outputs = judge(learned, chunk[0], chunk[1], constants)
        return total + value, outputs

    return _scan(add, jnp.float32(0), size, (states, data))


def _sum_with_gradients(
    judge: Judge, size: int, learned: Any, states: Any, data: Any, constants: Any
) -> tuple[tuple[jax.Array, Any], tuple[Any, Any]]:
    compute = jax.value_and_grad(judge, argnums=(0, 1), has_aux=True)

    def add(total: tuple, chunk: Any) -> tuple[tuple, Any]:
        (value, outputs), (of_learned, of_states) = compute(learned, *chunk, constants)
        of_learned = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), of_learned)
        return jax.tree.map(jnp.add, total, (value, of_learned)), (outputs, of_states)

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), learned)
    (total, of_learned), (outputs, of_states) = _scan(add, (jnp.float32(0), zeros), size, (states, data))
    return (total, outputs), (jax.tree.map(lambda g, leaf: g.astype(leaf.dtype), of_learned, learned), of_states)


def _scale_gradients(judge: Judge, size: int, gradients: tuple, cotangents: tuple) -> tuple[Any, Any, None, None]:
    scaled = jax.tree.map(lambda leaf: (leaf * cotangents[0]).astype(leaf.dtype), gradients)
    return *scaled, None, None


sum_in_chunks.defvjp(_sum_with_gradients, _scale_gradients)


def _scan(step: Callable, total: Any, size: int, rows: Any) -> tuple[Any, Any]:
    """Returns the total of `step` over the chunks of rows `[B, A, ...]`, and its outputs `[B, A, ...]`."""
    length = jax.tree.leaves(rows)[0].shape[1]
    if length <= size:
        return step(total, rows)
    total, outputs = lax.scan(step, total, jax.tree.map(lambda leaf: split_axis(leaf, 1, size), rows))
    return total, jax.tree.map(lambda leaf: join_axis(leaf, 1, length), outputs)
