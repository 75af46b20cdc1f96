"""Tests of products with the blocks of GGUF files: exact where sums are, and to the bit whatever the other rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.blocks import decoded, on_device, raw_blocks
from helpers.tiers import with_slow
from jaxspec.checkpoints.gguf_blocks import read_blocks
from jaxspec.kernels import library
from jaxspec.models.block_kinds import BLOCK_KINDS, Split
from jaxspec.models.blocks import Blocks

pytestmark = pytest.mark.quick
with_kernels = pytest.mark.skipif(not library.kernels_available(), reason=library.describe_kernels())

SIZES = [(1, 1), (16, 1), (33, 2), (100, 3)]  # O, I in units
ROWS = 200


@jax.jit
def product(x, matrix):
    return matrix.product(x)


def random_blocks(rng: np.random.Generator, kind: str, outputs: int, units: int, halves=None):
    """A matrix in blocks, and its weights."""
    raw = raw_blocks(rng, kind, outputs, units * BLOCK_KINDS[kind].unit, halves)
    return on_device(read_blocks(kind, raw)), decoded(kind, raw)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize(("outputs", "units"), with_slow([(45, 3), (2100, 1)], (2100,)))
def test_no_weight_changes(kind, outputs, units):
    rng = np.random.default_rng(outputs)
    small = lambda size: rng.normal(size=size) * rng.choice([1, 1e-4, 1e-7], size)  # noqa: E731 - some subnormal
    matrix, weights = random_blocks(rng, kind, outputs, units, small)
    assert matrix.shape == weights.shape
    assert sum(part.size for part in matrix.parts) == BLOCK_KINDS[kind].bytes(*weights.shape)
    np.testing.assert_array_equal(matrix.unpack(), weights)
    rows = rng.integers(outputs, size=(2, 7))
    np.testing.assert_array_equal(matrix[jnp.asarray(rows)], weights[rows])
    np.testing.assert_array_equal(matrix.take(jnp.asarray(rows[0])).unpack(), weights[rows[0]])


@with_kernels
@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize(("outputs", "units"), SIZES)
def test_products_are_exact_where_sums_are(kind, outputs, units):
    """Scales are powers of two, and rows whole numbers that are not rounded: every sum fits into float32."""
    rng = np.random.default_rng(outputs)
    powers = lambda size: rng.choice([-1, -0.5, 0.5, 1], size)  # noqa: E731
    matrix, weights = random_blocks(rng, kind, outputs, units, powers)
    x = rng.integers(-3, 4, (ROWS, weights.shape[1])).astype(np.float32)
    blocks = x.reshape(ROWS, -1, 32)
    np.put_along_axis(blocks, rng.integers(32, size=(*blocks.shape[:2], 1)), rng.choice([-127, 127]), axis=2)
    x *= rng.choice([0.125, 1, 32], (ROWS, 1)).astype(np.float32)
    expected = x.astype(np.float64) @ weights.T.astype(np.float64)
    np.testing.assert_array_equal(product(jnp.asarray(x), matrix), expected)


@with_kernels
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_the_largest_sums_are_exact(kind):
    """Codes and rows are as large as they can be, with equal and with different signs: no sum overflows."""
    one, shape = BLOCK_KINDS[kind], (32, 3 * BLOCK_KINDS[kind].unit)
    codes = np.where(np.arange(32)[:, None] % 2, 2**one.bits - 1, 0).astype(np.uint8)
    halves = (np.ones((32, 3), np.float16),) * (1 + one.minimum)
    whole = (np.ones((32, 3 * one.factors), one.factor),) * (1 + one.minimum if one.factors else 0)
    matrix = on_device(Blocks.pack(kind, Split(np.broadcast_to(codes, shape), halves, whole)))
    signs = np.random.default_rng(0).choice([-1, 1], (5, shape[1]))
    x = 127 * np.concatenate([np.ones_like(signs[:1]), -np.ones_like(signs[:1]), signs]).astype(np.float32)
    np.testing.assert_array_equal(product(jnp.asarray(x), matrix), x.astype(np.float64) @ matrix.unpack().T)


@with_kernels
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_rows_are_rounded_by_32_and_none_depends_on_another(kind):
    rng = np.random.default_rng(1)
    matrix, weights = random_blocks(rng, kind, 50, 3)
    x = (rng.normal(size=(ROWS, weights.shape[1])) * rng.choice([1e-3, 1, 1e3], (ROWS, 1))).astype(np.float32)
    blocks = x.reshape(ROWS, -1, 32)
    most = abs(blocks).max(-1, keepdims=True)
    rounded = (np.rint(blocks * (127 / most)) * (most / 127).astype(np.float64)).reshape(x.shape)
    whole = product(jnp.asarray(x), matrix)
    scale = (abs(rounded) @ abs(weights.T)).max(-1, keepdims=True)
    np.testing.assert_allclose(whole / scale, rounded @ weights.T.astype(np.float64) / scale, rtol=0, atol=3e-7)
    for count in (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 64):
        np.testing.assert_array_equal(product(x[3 : 3 + count], matrix), whole[3 : 3 + count])


@with_kernels
@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_number_spoils_its_own_row_alone(kind, bad):
    matrix, weights = random_blocks(np.random.default_rng(1), kind, 40, 2)
    x = np.ones((5, weights.shape[1]), np.float32)
    good = product(jnp.asarray(x), matrix)
    x[2, 5] = bad
    out = np.asarray(product(jnp.asarray(x), matrix))
    assert not np.isfinite(out[2]).any()
    np.testing.assert_array_equal(np.delete(out, 2, 0), np.delete(good, 2, 0))


@with_kernels
def test_matrices_of_several_types_one_below_the_other():
    rng = np.random.default_rng(2)
    # The first two are merged; the third begins within sixteen outputs.
    parts = [("Q4_K", 32), ("Q4_K", 20), ("Q4_K", 16), ("Q6_K", 7)]
    found = [random_blocks(rng, kind, outputs, 256 // BLOCK_KINDS[kind].unit) for kind, outputs in parts]
    stack = on_device(Blocks.stack([one for one, _ in found]))
    assert stack.kinds == ("Q4_K", "Q4_K", "Q6_K")
    assert stack.outputs == (52, 16, 7)
    np.testing.assert_array_equal(stack.unpack(), np.concatenate([weights for _, weights in found]))
    np.testing.assert_array_equal(stack[jnp.asarray([60, 74])], stack.unpack()[jnp.asarray([60, 74])])
    x = jnp.asarray(rng.normal(size=(9, 256)), jnp.float32)
    whole = product(x, stack)
    np.testing.assert_array_equal(whole, jnp.concatenate([product(x, one) for one, _ in found], axis=1))
    np.testing.assert_array_equal(jax.vmap(stack.product)(x.reshape(3, 3, 256)), whole.reshape(3, 3, -1))
    gradient = jax.grad(lambda x: (stack.product(x)).sum())(x)
    np.testing.assert_allclose(gradient, np.tile(stack.unpack().sum(0), (9, 1)), rtol=1e-4, atol=1e-3)
