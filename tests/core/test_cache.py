"""Tests the only writer of a cache: which tokens of a path it keeps, where, and what it makes of values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import cache as caches
from jaxspec.core.records import KV

LAYERS, ROWS, HEADS, WIDTH = 2, 3, 2, 4
LENGTH = [5, 0, 7]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("nodes", "count"), [(6, [3, 0, 6]), (6, [1, 1, 1]), (1, [1, 0, 1])])
def test_commit_keeps_the_first_tokens_of_each_path(dtype, nodes, count):
    """Each row's first `count` tokens stand at its length, and no earlier slot and no other row has changed."""
    rng = np.random.default_rng(0)
    empty = caches.empty_cache(LAYERS, ROWS, HEADS, 16, WIDTH, dtype)

    def values(*shape):
        return jnp.asarray(rng.normal(size=(LAYERS, ROWS, HEADS, *shape, WIDTH)), dtype)

    before = KV(*(jax.lax.bitcast_convert_type(values(a.shape[3]), a.dtype) for a in empty.stores))
    path = jnp.asarray(rng.permuted(np.tile(np.arange(7), (ROWS, 1)), axis=1)[:, :nodes])
    window = KV(values(7), values(7).at[1, 0, 1, path[0, 0], 2].set(jnp.nan))
    cache = empty._replace(stores=before, length=jnp.array(LENGTH))
    after = jax.jit(lambda cache, path: caches.append_to_cache(cache, window, path, jnp.array(count)))(cache, path)

    np.testing.assert_array_equal(after.length, np.add(LENGTH, count))
    for old, new, own in zip(before, after.stores, window):
        held, found, own = (np.asarray(caches.as_values(a), np.float32) for a in (old, new, own))
        for row, (start, kept) in enumerate(zip(LENGTH, count)):
            taken = np.nan_to_num(own[:, row][:, :, path[row, :kept]])
            np.testing.assert_array_equal(found[:, row, :, :start], held[:, row, :, :start])
            np.testing.assert_array_equal(found[:, row, :, start : start + kept], taken)
            np.testing.assert_array_equal(found[:, row, :, start + nodes :], held[:, row, :, start + nodes :])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_stacking_and_selecting_move_values_and_gradients(dtype):
    rng = np.random.default_rng(1)
    layers = [jnp.asarray(rng.normal(size=(ROWS, HEADS, 5, WIDTH)), dtype) for _ in range(LAYERS)]
    path = jnp.asarray(rng.integers(-1, 5, (ROWS, 3)))
    weights = jnp.asarray(rng.normal(size=(LAYERS, ROWS, HEADS, 3, WIDTH)), dtype)

    def chosen(layers):
        return caches.select_entries(caches.stack_layers([KV(layer, 2 * layer) for layer in layers]), path)

    def reference(layers):
        taken = jnp.stack(layers)[:, jnp.arange(ROWS)[:, None], :, jnp.maximum(path, 0)]  # [B, M, L, H, K]
        taken = jnp.moveaxis(taken, (0, 1), (1, 3))
        return KV(taken, 2 * taken)

    def loss(layers, function):
        return sum((weights * a).astype(jnp.float32).sum() for a in function(layers))

    jax.tree.map(np.testing.assert_array_equal, jax.jit(chosen)(layers), reference(layers))
    for found, expected in zip(jax.grad(loss)(layers, chosen), jax.grad(loss)(layers, reference)):
        assert np.any(expected)
        np.testing.assert_allclose(
            found.astype(jnp.float32), expected.astype(jnp.float32), rtol=2e-2 if dtype == jnp.bfloat16 else 1e-6
        )
