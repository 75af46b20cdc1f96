"""Tests that the noise is a pure function of key, position and token, and that its values do not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import noise as noises
from jaxspec.core import threefry

pytestmark = pytest.mark.quick

V = 37
KINDS = ["threefry2x32", "rbg", "unsafe_rbg"]


def drawn(keys, positions, vocab=V, wanted=True):
    return np.asarray(jax.jit(noises.draw_gumbel, static_argnums=2)(keys, jnp.asarray(positions), vocab, wanted))


@pytest.mark.parametrize("kind", KINDS)
def test_noise_is_a_function_of_key_and_position_alone(kind):
    """A row and a position alone, in a batch, permuted, repeated: the same bits. Others: other bits."""
    keys = jax.random.split(jax.random.key(1, impl=kind), 5)
    positions = np.array([[3, 4, 5], [3, 4, 5], [0, 100, 3], [7, 7, 8], [2**20, 1, 2]])
    batch = drawn(keys, positions)
    for row in range(5):
        for at in range(3):
            alone = drawn(keys[row : row + 1], positions[row : row + 1, at : at + 1])
            np.testing.assert_array_equal(alone[0, 0], batch[row, at])
    order = np.array([3, 0, 4, 2, 1])
    np.testing.assert_array_equal(drawn(keys[order], positions[order]), batch[order])
    np.testing.assert_array_equal(batch[3, 0], batch[3, 1])
    different = np.concatenate([batch[:3].reshape(9, V), batch[3, 1:], batch[4]])
    assert len(np.unique(different[:, 0])) == len(different)
    assert len(np.unique(batch[:2, :, 0])) == 6, "rows of different keys got the same noise"


@pytest.mark.parametrize("kind", KINDS)
def test_noise_equals_drawing_one_by_one(kind):
    """Written out with single keys: what a batch, a jit and a map of keys must not change."""
    keys = jax.random.split(jax.random.key(2, impl=kind), 3)
    batch = drawn(keys, [[5, 6]] * 3)
    for row in range(3):
        for at, position in enumerate((5, 6)):
            key = jax.random.fold_in(jax.random.fold_in(keys[row], 0x706F73), position)
            one = jax.random.gumbel(key, (V,), jnp.float32, mode="high")
            np.testing.assert_allclose(batch[row, at], one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 37, 49_152])
def test_random_bits_are_those_of_jax(size):
    key = jax.random.key(2**31 + 5)
    for number in (0, 1, 2**20, 2**31 - 1):
        folded = jax.random.fold_in(key, number)
        data = jax.jit(threefry.fold_in)(jax.random.key_data(key), number)
        np.testing.assert_array_equal(data, jax.random.key_data(folded))
        expected = jax.random.bits(folded, (2, size), jnp.uint32)
        for row in range(2):
            found = jax.jit(threefry.bits, static_argnums=(1, 2))(data, size, row * size)
            np.testing.assert_array_equal(found, expected[row])
        noise = jax.jit(threefry.gumbel, static_argnums=1)(data, size)
        expected = jax.random.gumbel(folded, (size,), jnp.float32, mode="high")
        np.testing.assert_allclose(noise, expected, rtol=1e-6, atol=1e-6)


def test_no_noise_where_none_is_wanted():
    keys = jax.random.split(jax.random.key(0), 2)
    assert not drawn(keys, [[1], [2]], wanted=False).any()
    assert (drawn(keys, [[1], [2]], wanted=True) != 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_of_a_round_is_that_of_its_positions(kind):
    """As many depths as are wanted, to the bit; the rest are zeros."""
    keys, roots = jax.random.split(jax.random.key(4, impl=kind), 3), jnp.array([2, 9, 2])
    places = np.asarray(roots)[:, None] + np.arange(4)
    ahead = jax.jit(noises.draw_ahead, static_argnums=(2, 4))
    for wanted in (0, 1, 4):
        found = np.asarray(ahead(keys, roots, 4, jnp.int32(wanted), V))
        np.testing.assert_array_equal(found[:, :wanted], drawn(keys, places)[:, :wanted])
        assert not found[:, wanted:].any()


def test_noise_is_gumbel_with_a_long_tail():
    """Mean, spread and both tails of 4e6 values; 9 are expected above 13."""
    keys = jax.random.split(jax.random.key(3), 8)
    values = drawn(keys, np.arange(50)[None].repeat(8, 0), 10_000).ravel().astype(np.float64)
    assert np.isfinite(values).all()
    assert abs(values.mean() - np.euler_gamma) < 5 * 1.2825 / np.sqrt(values.size)
    assert abs(values.std() - np.pi / np.sqrt(6)) < 0.005
    for bound in (0.0, 3.0, 10.0, 13.0):
        expected = -np.expm1(-np.exp(-bound)) * values.size
        assert abs((values > bound).sum() - expected) < 5 * np.sqrt(expected)


GOLDEN = [
    [[0.0571164116, 1.0907132626, -1.3977408409], [0.9834152460, 0.8277271390, 1.8639073372]],
    [[0.3313918114, -0.0675846040, 0.3978241086], [0.8786900043, 0.5546584725, 5.4961242676]],
]


def test_version_stands_for_the_noise():
    """The same key means the same text in later releases: who changes these values must raise VERSION."""
    keys = jax.random.split(jax.random.key(7), 2)
    values = drawn(keys, [[0, 1], [5, 1000]], 3)
    assert noises.NOISE_VERSION == 1
    np.testing.assert_allclose(values, GOLDEN, rtol=1e-6)
