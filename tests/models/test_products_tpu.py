"""Tests the fixed-order products in Pallas for TPUs as plain operations: bits by rows, the order of sums, values."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.products import ROW_COUNTS, exact_tiles, normal, stored
from helpers.tiers import with_slow
from jaxspec.errors import InvalidConfig
from jaxspec.models import layers
from jaxspec.models import products_tpu as products
from jaxspec.models.packed import Packed
from jaxspec.models.products_pallas import add_in_tree, padded_rows
from jaxspec.models.products_tpu import segment_count
from jaxspec.models.quantized import Quantized
from jaxspec.models.rope import Rope
from jaxspec.models.rows import Norm

EPSILON = 1e-5
HIDDEN, UNITS, KEYS, GROUPS, WIDTH, VOCAB = 256, 384, 1, 2, 128, 200
multiply, multiply_gated, multiply_add, multiply_segments, add_shares, normalize, rotate_heads = (
    functools.partial(getattr(products, name), interpret=True)
    for name in (
        "multiply",
        "multiply_gated",
        "multiply_add",
        "multiply_segments",
        "add_shares",
        "normalize",
        "rotate_heads",
    )
)


@functools.cache
def layer(kind: str):
    """All calls of a layer but attention, and those around the layers, as one compiled function."""
    rng, heads = np.random.default_rng(0), GROUPS * KEYS * WIDTH

    def matrix(inputs: int, outputs: int, table: bool = False):
        shape = (outputs, inputs) if table else (inputs, outputs)
        return stored(normal(rng, *shape, scale=inputs**-0.5), kind, table)

    qkv, out = matrix(HIDDEN, heads + 2 * KEYS * WIDTH), matrix(heads, HIDDEN)
    gate_up, down, table = matrix(HIDDEN, 2 * UNITS), matrix(UNITS, HIDDEN), matrix(HIDDEN, VOCAB, True)
    first, second, of_heads = (Norm(1 + normal(rng, size, scale=0.1), EPSILON) for size in (HIDDEN, HIDDEN, WIDTH))

    @jax.jit
    def run(x, mixed, rotation):
        projected = multiply(x, qkv, first)
        rotated = rotate_heads(projected, rotation, KEYS, WIDTH, "bfloat16", (of_heads, of_heads))
        middle = multiply_add(mixed, out, x)
        last = multiply_add(multiply_gated(middle, gate_up, "silu", second), down, middle)
        features = normalize(last, first)
        logits = multiply(features, table, transposed=True)
        return jnp.concatenate([projected, rotated.astype(jnp.float32), middle, last, features, logits], axis=1)

    return run


def run_layer(kind: str, x, mixed, positions) -> np.ndarray:
    """The results of all calls for these rows, side by side."""
    count, rows = len(x), padded_rows(len(x))
    x, mixed = (jnp.pad(part, ((0, rows - count), (0, 0))) for part in (x, mixed))
    positions = jnp.pad(positions, (0, rows - count))[None]
    return np.asarray(layer(kind)(x, mixed, layers.rotation(positions, Rope(), WIDTH)))[:count]


EVERY = [("bfloat16", ROW_COUNTS), ("int8", ROW_COUNTS)]


@pytest.mark.parametrize(("kind", "counts"), with_slow([("bfloat16", (1, 16, 17)), *EVERY], EVERY))
def test_bits_of_a_row_depend_neither_on_the_number_of_rows_nor_on_its_place(kind, counts):
    rng = np.random.default_rng(1)
    x, mixed = normal(rng, 128, HIDDEN), normal(rng, 128, GROUPS * KEYS * WIDTH)
    positions = jnp.arange(128)
    together = run_layer(kind, x, mixed, positions)
    assert np.isfinite(together).all()
    for count in counts:
        first, last = slice(0, count), slice(128 - count, 128)
        for rows in (first, last):
            alone = run_layer(kind, x[rows], mixed[rows], positions[rows])
            np.testing.assert_array_equal(alone, together[rows], err_msg=f"{count} rows")


def test_a_row_that_is_not_finite_spoils_no_other_row():
    rng = np.random.default_rng(2)
    x, mixed, positions = normal(rng, 16, HIDDEN), normal(rng, 16, GROUPS * KEYS * WIDTH), jnp.arange(16)
    good = run_layer("bfloat16", x, mixed, positions)
    bad = run_layer("bfloat16", x.at[3, 5].set(jnp.nan).at[7, 0].set(jnp.inf), mixed, positions)
    others = [row for row in range(16) if row not in (3, 7)]
    np.testing.assert_array_equal(bad[others], good[others])
    assert np.isnan(bad[3, -VOCAB:]).all()


@pytest.mark.parametrize("rows", [16, 64, 192])
def test_sums_are_chains_over_blocks_and_trees_over_segments(rows):
    """The order of the sums is that of a loop in float32; blocks of outputs and groups of rows do not change it."""
    rng = np.random.default_rng(3)

    def chain(x, weight, block: int):
        total = np.zeros((rows, weight.shape[1]), np.float32)
        for start in range(0, len(weight), block):
            total = total + np.float32(x[:, start : start + block] @ weight[start : start + block])
        return total

    inputs, outputs = 8 * 640, 1100  # two blocks of outputs, the second of which is not full
    segments, part = segment_count(inputs), inputs // 8
    assert segments == 8
    x, weight = exact_tiles(rng, rows, inputs, outputs, 640)
    x_array, weight_array = jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)
    parts = [chain(x[:, i * part : (i + 1) * part], weight[i * part : (i + 1) * part], 640) for i in range(8)]
    got = multiply_add(x_array, weight_array, jnp.zeros((rows, outputs)))
    np.testing.assert_array_equal(got, add_in_tree(parts))
    assert (functools.reduce(operator.add, parts) != got).any()

    x, weight = exact_tiles(rng, rows, inputs, outputs, 1024)
    got = multiply(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16))
    np.testing.assert_array_equal(got, chain(x, weight, 1024))


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_values_are_those_of_xla_but_for_the_rounding_of_rows(kind):
    rng = np.random.default_rng(4)
    x, residual, norm = normal(rng, 48, 384), normal(rng, 48, 256), Norm(1 + normal(rng, 384, scale=0.1), EPSILON)
    bias, table = normal(rng, 256), normal(rng, 200, 384, scale=384**-0.5)
    weight = stored(table[:128].T.repeat(2, 1), kind)
    plain = weight.values.T * weight.scale if isinstance(weight, Quantized) else weight.astype(jnp.float32)
    rounded = x.astype(jnp.bfloat16).astype(jnp.float32)
    normed = norm(x).astype(jnp.bfloat16).astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        expected = normed @ plain + bias
        gate, up = jnp.split(expected, 2, axis=1)
        pairs = [
            (multiply(x, weight, norm, bias=bias), expected),
            (multiply_add(x, weight, residual, bias=bias), residual + (rounded @ plain + bias)),
            (multiply_add(x, weight, None), rounded @ plain),
            (multiply_gated(x, weight, "gelu_tanh", norm, bias=bias), jax.nn.gelu(gate, approximate=True) * up),
        ]
    for ours, theirs in pairs:
        np.testing.assert_allclose(np.asarray(ours, np.float32), theirs, rtol=0.01, atol=0.02)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_several_devices_have_the_bits_of_one(kind):
    rng = np.random.default_rng(6)
    rows, inputs, outputs, devices = 32, 1024, 200, 4
    x, weight = normal(rng, rows, inputs).astype(jnp.bfloat16), stored(normal(rng, inputs, outputs), kind)
    if kind == "int8":  # powers of two, because XLA:CPU may round a product and a sum once
        weight = Quantized(weight.values, jnp.exp2(jnp.round(jnp.log2(weight.scale))))
    residual, bias = normal(rng, rows, outputs), normal(rng, outputs)
    shares = []
    for at in np.split(np.arange(inputs), devices):
        own = Quantized(weight.values[:, at], weight.scale) if kind == "int8" else weight[at]
        shares.append(multiply_segments(x[:, at], own, segment_count(inputs) // devices))
    output_scale = weight.scale if kind == "int8" else None
    for before in (residual, None):
        one = multiply_add(x, weight, before, bias=bias)
        np.testing.assert_array_equal(add_shares(jnp.stack(shares), before, output_scale=output_scale, bias=bias), one)
    assert (functools.reduce(operator.add, shares) != add_in_tree(shares)).any()


def test_norms_and_heads_are_those_of_xla():
    rng = np.random.default_rng(5)
    x, norm = normal(rng, 16, 384), Norm(normal(rng, 384), EPSILON)
    np.testing.assert_allclose(normalize(x, norm), norm(x), rtol=1e-5, atol=1e-6)
    for batch, tokens, groups, rope in ((1, 5, 3, Rope()), (3, 2, 1, Rope(width=40))):
        rows = padded_rows(batch * tokens)
        projected = normal(rng, rows, (groups + 2) * 2 * WIDTH)
        turns = layers.rotation(jnp.asarray(rng.integers(0, 500, (batch, tokens))), rope, WIDTH)
        norms = Norm(normal(rng, WIDTH), EPSILON), None if groups == 1 else Norm(normal(rng, WIDTH), EPSILON)
        got = rotate_heads(projected, turns, 2, WIDTH, "float32", norms)[: batch * tokens]
        given = projected[: batch * tokens].reshape(batch, tokens, -1)
        queries, new = layers.split_heads(given, turns, 2, WIDTH, "float32", norms)
        parts = queries.reshape(batch, 2 * groups, tokens, WIDTH), *new
        expected = jnp.concatenate(parts, 1).swapaxes(1, 2).reshape(batch * tokens, -1)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_what_there_is_no_kernel_for_is_refused():
    x = jnp.zeros((16, 128))
    with pytest.raises(InvalidConfig, match="multiplies bfloat16 and int8 weights, got float32; use 'xla'"):
        multiply(x, jnp.zeros((128, 128)))
    with pytest.raises(InvalidConfig, match="multiplies bfloat16 and int8 weights, got Packed; use 'xla'"):
        multiply(x, Packed.pack(jnp.zeros((128, 128))))
    with pytest.raises(InvalidConfig, match="on a TPU needs a multiple of 128 inputs, got 64; use 'xla'"):
        multiply(x[:, :64], jnp.zeros((64, 128), jnp.bfloat16))
    with pytest.raises(InvalidConfig, match="on a TPU needs a multiple of 128 outputs, got 96; use 'xla'"):
        multiply_gated(x, jnp.zeros((128, 192), jnp.bfloat16), "silu")
