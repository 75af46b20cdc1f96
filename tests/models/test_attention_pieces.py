"""Tests attention in pieces for GPUs as plain operations: bits of a query, values at borders of pieces, and heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.products import ROW_COUNTS, normal
from helpers.tiers import with_slow
from jaxspec.core.records import KV
from jaxspec.models import attention_pieces, layers
from jaxspec.models.attention import attend, side_by_side
from jaxspec.models.attention_pieces import PIECE_SLOTS, ProjectedHeads
from jaxspec.models.products_pallas import padded_rows
from jaxspec.models.rope import Rope
from jaxspec.models.rows import Norm

HEADS, GROUPS, WIDTH, SCALE, EPSILON = 2, 2, 16, 0.25, 1e-5
PIECE = 64


def stores(rng: np.random.Generator, batch: int, slots: int, dtype: str = "float32") -> KV:
    parts = (normal(rng, 1, batch, HEADS, slots, WIDTH).astype(dtype) for _ in range(2))
    return KV(*(part if dtype == "float32" else jax.lax.bitcast_convert_type(part, jnp.uint16) for part in parts))


@functools.partial(jax.jit, static_argnames=("dtype", "epsilon", "piece"))
def run(projected, positions, prefix, length, past, mask, norms=(None, None), *, dtype, epsilon=0.0, piece=PIECE):
    """Rows `[B T, J]`, keys and values of the kernels."""
    rows = padded_rows(positions.size)
    turns = layers.rotation(positions, Rope(), WIDTH)
    given = jnp.pad(projected, ((0, rows - len(projected)), (0, 0)))
    out, new = attention_pieces.attend_rows(
        ProjectedHeads(given, turns, norms), prefix, jnp.zeros(1, jnp.int32), length, past, mask, SCALE, None,
        HEADS, dtype, rows, epsilon, piece=piece, interpret=True,
    )  # fmt: skip
    return out[: positions.size], new


@pytest.mark.parametrize("length", with_slow([7 * 32 + 30, 3 * PIECE + 31], (3 * PIECE + 31,)))
def test_bits_of_a_query_depend_neither_on_the_number_of_rows_nor_on_the_capacity(length):
    """Siblings after a text of three pieces and more, in windows that begin or end with any of them."""
    rng, most = np.random.default_rng(length), 48
    projected, prefix = normal(rng, most, (GROUPS + 2) * HEADS * WIDTH), stores(rng, 1, 6 * PIECE, "bfloat16")

    def read(first: int, count: int, prefix: KV, batch: int = 1) -> np.ndarray:
        """Rows and entries of one text of several, side by side."""
        given = jnp.concatenate([projected[::-1][:count]] * (batch - 1) + [projected[first : first + count]])
        kv = KV(*(jnp.concatenate([part[:, :, :, ::-1]] * (batch - 1) + [part], 1) for part in prefix))
        positions = jnp.full((batch, count), length, jnp.int32)
        lengths = jnp.full(batch, length, jnp.int32).at[: batch - 1].set(40)
        mask = jnp.eye(count, dtype=bool)[None].repeat(batch, 0)
        out, new = run(given, positions, kv, lengths, None, mask, dtype="bfloat16")
        entries = [jnp.moveaxis(part[-1], 1, 0).reshape(count, -1) for part in new]
        return np.concatenate([np.asarray(a, np.float32) for a in (out[-count:], *entries)], 1)

    together = read(0, most, prefix)
    assert np.isfinite(together).all()
    counts = [count for count in ROW_COUNTS if count < most] if length % PIECE == 31 else [1, 17]
    for count in counts:
        for first in (0, most - count):
            np.testing.assert_array_equal(read(first, count, prefix), together[first : first + count], str(count))
    larger = KV(*(jnp.pad(part, ((0, 0),) * 3 + ((0, 5 * PIECE), (0, 0)), constant_values=7) for part in prefix))
    np.testing.assert_array_equal(read(3, 5, larger), together[3:8], "capacity")
    np.testing.assert_array_equal(read(3, 5, prefix, 2), together[3:8], "batch")


@pytest.mark.parametrize(
    ("piece", "windowed"), with_slow([(PIECE, False), (PIECE_SLOTS, True)], ((PIECE_SLOTS, True),))
)
def test_values_around_the_borders_of_pieces_are_those_of_xla(piece, windowed):
    rng, tokens = np.random.default_rng(piece), 3
    borders = [piece * count + near + more for count in (1, 2) for near in (0, 32, 63) for more in (-1, 0, 1)]
    length = jnp.asarray([0, 1, 40, *borders], jnp.int32)
    prefix = stores(rng, len(length), 3 * piece + 64)
    queries = normal(rng, len(length), HEADS, GROUPS, tokens, WIDTH)
    window = KV(*(normal(rng, len(length), HEADS, tokens, WIDTH) for _ in range(2)))
    mask = jnp.tril(jnp.ones((len(length), tokens, tokens), bool))
    first = length[:, None] + jnp.arange(tokens) - piece - 20 if windowed else None
    given = queries, prefix, 0, length, window, mask
    ours = attention_pieces.attend_heads(*given, SCALE, first, piece=piece, interpret=True)
    np.testing.assert_allclose(ours, attend(*given, None, SCALE, first), rtol=0, atol=5e-6)


@pytest.mark.parametrize(("norms", "before"), [((True, True), 0), ((True, False), 3)])
def test_heads_are_normed_and_rotated_as_by_xla(norms, before):
    rng, batch, tokens = np.random.default_rng(before), 2, 5
    projected = normal(rng, batch * tokens, (GROUPS + 2) * HEADS * WIDTH)
    positions = jnp.asarray(rng.integers(0, 500, (batch, tokens)), jnp.int32)
    scales = tuple(normal(rng, WIDTH) if there else None for there in norms)
    prefix, length = stores(rng, batch, 256), jnp.asarray([200, 3], jnp.int32)
    past = KV(*(normal(rng, batch, HEADS, before, WIDTH) for _ in range(2))) if before else None
    mask = jnp.concatenate([jnp.ones((tokens, before), bool), jnp.tril(jnp.ones((tokens, tokens), bool))], 1)
    mask = mask[None].repeat(batch, 0)
    got, new = run(projected, positions, prefix, length, past, mask, scales, dtype="float32", epsilon=EPSILON)
    queries, expected = layers.split_heads(
        projected.reshape(batch, tokens, -1), layers.rotation(positions, Rope(), WIDTH), HEADS, WIDTH, "float32",
        [None if scale is None else Norm(scale, EPSILON) for scale in scales],
    )  # fmt: skip
    for ours, theirs in zip(new, expected):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    seen = expected if past is None else KV(*(jnp.concatenate(pair, 2) for pair in zip(past, expected)))
    mixed = side_by_side(attend(queries, prefix, 0, length, seen, mask, None, SCALE))
    np.testing.assert_allclose(got.reshape(mixed.shape), mixed, rtol=0, atol=1e-5)


def test_a_part_of_a_head_is_rotated():
    rng, rope = np.random.default_rng(4), Rope(width=12)
    projected = normal(rng, 16, 3 * WIDTH)
    turns = layers.rotation(jnp.arange(16)[None] * 7, rope, WIDTH)
    prefix = KV(*(jnp.zeros((1, 1, 1, 64, WIDTH)) for _ in range(2)))
    _, new = attention_pieces.attend_rows(
        ProjectedHeads(projected, turns), prefix, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), None,
        jnp.eye(16, dtype=bool)[None], SCALE, None, 1, "float32", 16, interpret=True,
    )  # fmt: skip
    _, expected = layers.split_heads(projected[None], turns, 1, WIDTH, "float32", (None, None))
    for ours, theirs in zip(new, expected):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
