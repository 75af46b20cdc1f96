"""Sums over many positions, computed a few positions at a time.

A loss over a vocabulary needs the logits of a position only while it computes the loss of that position. The logits of
all positions would be the largest arrays of a training step.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.models.query_chunks import join_axis, split_axis

POSITIONS_AT_ONCE = 512
"""Number of positions of each device whose logits exist at once. TPUs and GPUs need a few hundred rows to multiply
for about as long as they read a matrix."""


class Judge(Protocol):
    """The loss of some positions in several steps, static and hashable; see `sum_in_chunks`."""

    def prepare(self, data: list[Any], constants: Any) -> list[Any]:
        """Returns what the steps share or have in advance, without gradients: one value for each step."""
        ...

    def judge(
        self, i: int, learned: Any, states: Any, data: Any, prepared: Any, constants: Any
    ) -> tuple[jax.Array, Any]:
        """Returns the sum of step `i` over positions `[B, A]`, and values of each position."""
        ...


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sum_in_chunks(
    judge: Judge, size: int, learned: Any, states: list[Any], data: list[Any], constants: Any
) -> tuple[jax.Array, list[Any]]:
    """Returns the sum and the values of several steps over all positions, `size` positions of a row at a time.

    The sum has gradients with respect to `learned` and `states`; the values have none. The gradients of a step are
    computed together with its sum, while its logits exist, and before the next step begins. A backward pass therefore
    neither keeps nor recomputes logits. The gradient of a state depends on its own position only, and takes the memory
    of the state.

    Args:
        judge: the steps.
        size: number of positions of a chunk.
        learned: parameters of the steps.
        states: for each step, arrays `[B, A, ...]`.
        data: for each step, arrays `[B, A, ...]` without a gradient. They are padded with 0 at the end, which must add
            0 to the sum.
        constants: arrays that all chunks share, without a gradient.
    """

    def add(total: jax.Array, chunk: Any) -> tuple[jax.Array, Any]:
        outputs: list[Any] = []
        for i, (state, datum, prepared) in enumerate(_steps(judge, chunk, constants)):
            state, total = lax.optimization_barrier((state, total))  # one step after the other
            value, output = judge.judge(i, learned, state, datum, prepared, constants)
            total, outputs = total + value, [*outputs, output]
        return total, outputs

    return _scan(add, jnp.float32(0), size, (states, data))


def _sum_with_gradients(
    judge: Judge, size: int, learned: Any, states: list[Any], data: list[Any], constants: Any
) -> tuple[tuple[jax.Array, Any], tuple[Any, Any]]:
    def add(total: tuple, chunk: Any) -> tuple[tuple, Any]:
        outputs, of_states = [], []
        for i, (state, datum, prepared) in enumerate(_steps(judge, chunk, constants)):
            state, total = lax.optimization_barrier((state, total))  # one step after the other
            compute = jax.value_and_grad(functools.partial(judge.judge, i), argnums=(0, 1), has_aux=True)
            (value, output), (of_learned, of_state) = compute(learned, state, datum, prepared, constants)
            of_learned = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), of_learned)
            total = jax.tree.map(jnp.add, total, (value, of_learned))
            outputs.append(output)
            of_states.append(of_state)
        return total, (outputs, of_states)

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), learned)
    (total, of_learned), (outputs, of_states) = _scan(add, (jnp.float32(0), zeros), size, (states, data))
    return (total, outputs), (jax.tree.map(lambda g, leaf: g.astype(leaf.dtype), of_learned, learned), of_states)


def _steps(judge: Judge, chunk: tuple[list[Any], list[Any]], constants: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Returns the states, the data and the prepared value of each step of a chunk."""
    states, data = chunk
    return zip(states, data, judge.prepare(data, constants), strict=True)


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
