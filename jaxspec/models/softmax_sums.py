"""Sums of a softmax over parts of a text, for the Pallas kernels of attention, and the boundary between these parts.

The text of a query is summed in the order of positions, in two parts. With G = `GROUP_TOKENS`, all tokens but the last
G to 2 G - 1 are read in blocks of slots, with a running maximum and sum. The last tokens are added one after the other,
whether they are in the cache or in the window. The boundary between the parts depends only on the position of the
query, and every product has the same shape.
"""

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxspec.errors import InvalidConfig

GROUP_TOKENS = 32
"""The part of a text that is summed token by token begins at a multiple of this number of slots. One product also reads
this number of tokens of the window."""
MAX_MASK_ELEMENTS = 2**18
"""The largest product of the number of queries of a head and the number of tokens in the window. The limit exists
because a TPU holds the mask in its on-chip memory."""
LOWEST_SCORE = -1e30  # finite, because -inf - -inf is not a number

SoftmaxSums = tuple[
    Array, Array, Array
]  # the maximum, the sum of weights, the weighted sum of values: [R, 1], [R, 1], [R, K]
TokenGroup = tuple[
    Array, Callable, Array
]  # scores of GROUP tokens, a token's value by its number, what each query sees


def limits(
    length: Int[Array, "B"],
    mask: Bool[Array, "B T W"],
    first_seen: Int[Array, "B T"] | None,
    groups: int,
    size: int,
) -> tuple[Int[Array, "B 4"], Int[Array, "B R W"], Int[Array, "B R 2"]]:
    """Returns what each row and each query sees of the text; `size` is the number of slots in a block.

    Returns:
        For each row: the first block that is read, the block after the last one, the length of the text, and the first
        group of the cache that is summed token by token. For each query: which tokens of the window it sees, then the
        first slot that it sees and the slot at which the tokens begin that are summed one by one.
    """
    if (most := int((MAX_MASK_ELEMENTS / groups) ** 0.5)) < mask.shape[-1]:
        raise InvalidConfig(f"attention='pallas' reads at most {most} tokens at once, got {mask.shape[-1]}; use 'xla'")
    first = jnp.zeros(mask.shape[:2], jnp.int32) if first_seen is None else jnp.maximum(first_seen, 0)
    position = jnp.maximum(length[:, None], first) + mask.sum(-1) - 1
    near = jnp.maximum(position // GROUP_TOKENS - 1, 0) * GROUP_TOKENS
    begin = first.min(1) // size
    end = jnp.maximum(-(-jnp.minimum(near.max(1), length) // size), begin + 1)
    spans = jnp.stack([begin, end, length, jnp.maximum(length // GROUP_TOKENS - 1, 0)], -1).astype(jnp.int32)
    each = jnp.tile(jnp.stack([first, near], -1), (1, groups, 1)).astype(jnp.int32)
    return spans, jnp.tile(mask, (1, groups, 1)).astype(jnp.int32), each


def pad(values: Array, multiple: int, axis: int) -> Array:
    sizes = [(0, -values.shape[axis] % multiple if i == axis else 0) for i in range(values.ndim)]
    return jnp.pad(values, sizes)


def nothing(rows: int, width: int) -> SoftmaxSums:
    return jnp.full((rows, 1), LOWEST_SCORE), jnp.zeros((rows, 1)), jnp.zeros((rows, width))


def cached(limits: Sequence[Array], start: Array, count: int, length: Array, before: bool) -> Array:
    """Returns which of the `count` slots from `start` on each query sees.

    A query sees slots before its near part if `before` is True, and slots in its near part otherwise. The near part
    consists of the last tokens, which are added one after the other.
    """
    first, near = limits
    slots = start + lax.broadcasted_iota(jnp.int32, (first.shape[0], count), 1)
    part = slots < near if before else slots >= near
    return part & (slots >= first) & (slots < length)


def dot(a: Array, b: Array, transposed: bool = False) -> Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contracted = ((1,), (1 if transposed else 0,))
    return lax.dot_general(a, b, (contracted, ((), ())), precision, jnp.float32)


def join(sums: SoftmaxSums, queries: Array, keys: Array, values: Array, seen: Array) -> SoftmaxSums:
    """Adds a block of slots."""
    top, total, mixed = sums
    scores = jnp.where(seen, dot(queries, keys, transposed=True), LOWEST_SCORE)
    new = jnp.maximum(top, scores.max(-1, keepdims=True))
    weights, fade = jnp.where(seen, jnp.exp(scores - new), 0.0), jnp.exp(top - new)
    mixed = mixed * fade + dot(weights.astype(values.dtype), values)
    return new, total * fade + weights.sum(-1, keepdims=True), mixed


def own_scores(queries: Array, keys: Array, values: Array) -> Array:
    """Returns the scores of the window's tokens; NaN for tokens whose value is not finite, because 0 x inf is NaN."""
    return dot(queries, keys, transposed=True) + dot(jnp.zeros_like(queries), values, transposed=True)


def add_tokens(sums: SoftmaxSums, parts: Sequence[TokenGroup]) -> SoftmaxSums:
    """Adds the last tokens of each query's text one after the other."""
    top, total, mixed = sums
    scores = [jnp.where(seen, score, LOWEST_SCORE) for score, _, seen in parts]
    new = functools.reduce(jnp.maximum, (score.max(-1, keepdims=True) for score in scores), top)
    fade = jnp.exp(top - new)
    total, mixed = total * fade, mixed * fade
    for score, (_, value, seen) in zip(scores, parts):
        weights = jnp.where(seen, jnp.exp(score - new), 0.0)
        columns = lax.broadcasted_iota(jnp.int32, weights.shape, 1)

        def add(i: Array, sums: tuple[Array, Array], weights=weights, columns=columns, value=value):
            weight = jnp.where(columns == i, weights, 0.0).sum(-1, keepdims=True)
            entry = value(i).astype(jnp.float32)
            entry = jnp.where(jnp.abs(entry) < jnp.inf, entry, 0.0)  # for queries that do not see the token
            return sums[0] + weight, sums[1] + weight * entry

        total, mixed = lax.fori_loop(0, GROUP_TOKENS, add, (total, mixed))
    return new, total, mixed
