"""Tests the fixed-order products in Pallas as plain operations: bits by rows and devices, the order of sums, values."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.products import ROW_COUNTS, exact_tiles, normal, stored
from helpers.tiers import with_slow
from jaxspec.errors import InvalidConfig
from jaxspec.models import products_pallas as products
from jaxspec.models.packed import Packed
from jaxspec.models.products_pallas import padded_rows, segment_count
from jaxspec.models.quantized import Quantized
from jaxspec.models.rows import rms_norm
from scripts.prove import product_shapes

EPSILON = 1e-5
HIDDEN, UNITS, KEYS, GROUPS, WIDTH, VOCAB = 128, 192, 2, 2, 16, 64
multiply, multiply_gated, multiply_add, multiply_segments, add_shares, prepare, normalize = (
    functools.partial(getattr(products, name), interpret=True)
    for name in (
        "multiply",
        "multiply_gated",
        "multiply_add",
        "multiply_segments",
        "add_shares",
        "prepare",
        "normalize",
    )
)


@functools.cache
def parameters(kind: str):
    rng = np.random.default_rng(0)
    shapes = {
        "qkv": (HIDDEN, (GROUPS + 2) * KEYS * WIDTH),
        "out": (GROUPS * KEYS * WIDTH, HIDDEN),
        "gate_up": (HIDDEN, 2 * UNITS),
        "down": (UNITS, HIDDEN),
    }
    weights = {name: stored(normal(rng, *shape, scale=shape[0] ** -0.5), kind) for name, shape in shapes.items()}
    scales = {name: 1 + normal(rng, size, scale=0.1) for name, size in (("a", HIDDEN), ("b", HIDDEN))}
    return weights | scales | {"table": stored(normal(rng, VOCAB, HIDDEN), kind, True)}


@functools.cache
def layer(kind: str):
    """All calls of a layer but attention, and those around the layers, as one compiled function."""
    p = parameters(kind)

    @jax.jit
    def run(x, mixed):
        rows = prepare(x, p["a"])
        projected = multiply(rows, p["qkv"], epsilon=EPSILON)
        middle, rows = multiply_add(mixed, p["out"], x, p["b"])
        gated = multiply_gated(rows, p["gate_up"], "silu", epsilon=EPSILON)
        last, _ = multiply_add(gated, p["down"], middle)
        features = normalize(last, p["a"], EPSILON)
        logits = multiply(features, p["table"], transposed=True)
        return jnp.concatenate([projected, middle, last, features, logits], axis=1)

    return run


def run_layer(kind: str, x, mixed) -> np.ndarray:
    """The results of all calls for these rows, side by side."""
    count, rows = len(x), padded_rows(len(x))
    x, mixed = (jnp.pad(part, ((0, rows - count), (0, 0))) for part in (x, mixed))
    return np.asarray(layer(kind)(x, mixed))[:count]


@pytest.mark.parametrize("kind", with_slow(["bfloat16", "int8"], ("int8",)))
def test_bits_of_a_row_depend_neither_on_the_number_of_rows_nor_on_its_place(kind):
    rng = np.random.default_rng(1)
    x, mixed = normal(rng, 128, HIDDEN), normal(rng, 128, GROUPS * KEYS * WIDTH)
    together = run_layer(kind, x, mixed)
    assert np.isfinite(together).all()
    for count in ROW_COUNTS:
        first, last = slice(0, count), slice(128 - count, 128)
        for rows in (first, last):
            alone = run_layer(kind, x[rows], mixed[rows])
            np.testing.assert_array_equal(alone, together[rows], err_msg=f"{count} rows")


@pytest.mark.parametrize("count", with_slow([1, 17, 70], (1, 70)))
def test_results_without_the_padding_are_the_first_rows(count):
    p, x = parameters("bfloat16"), normal(np.random.default_rng(8), padded_rows(count), HIDDEN)
    few, all_rows = (normalize(x, p["a"], EPSILON, rows) for rows in (count, None))
    assert few.shape == (count, HIDDEN)
    np.testing.assert_array_equal(few, all_rows[:count])
    few, all_rows = (multiply(x, p["table"], transposed=True, count=rows) for rows in (count, None))
    assert few.shape == (count, VOCAB)
    np.testing.assert_array_equal(few, all_rows[:count])


def test_a_row_that_is_not_finite_spoils_no_other_row():
    rng = np.random.default_rng(2)
    x, mixed = normal(rng, 16, HIDDEN), normal(rng, 16, GROUPS * KEYS * WIDTH)
    good = run_layer("bfloat16", x, mixed)
    bad = run_layer("bfloat16", x.at[3, 5].set(jnp.nan).at[7, 0].set(jnp.inf), mixed)
    others = [row for row in range(16) if row not in (3, 7)]
    np.testing.assert_array_equal(bad[others], good[others])
    assert np.isnan(bad[3, -VOCAB:]).all()


@pytest.mark.parametrize("rows", [16, 64])
def test_sums_are_chains_over_tiles_and_trees_over_segments(rows):
    """The order of the sums is that of a loop in float32."""
    rng = np.random.default_rng(3)

    def chain(x, weight, tile: int):
        total = np.zeros((rows, weight.shape[1]), np.float32)
        for start in range(0, len(weight), tile):
            total = total + np.float32(x[:, start : start + tile] @ weight[start : start + tile])
        return total

    inputs, outputs = 8 * 96, 64
    segments, part = segment_count(inputs), inputs // 8
    assert segments == 8
    x, weight = exact_tiles(rng, rows, inputs, outputs, 32)
    x_array, weight_array = jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)
    parts = [chain(x[:, i * part : (i + 1) * part], weight[i * part : (i + 1) * part], 32) for i in range(8)]
    got, _ = multiply_add(x_array, weight_array, jnp.zeros((rows, outputs)))
    np.testing.assert_array_equal(got, products.add_in_tree(parts))
    assert (functools.reduce(operator.add, parts) != got).any()

    x, weight = exact_tiles(rng, rows, inputs, outputs, 128)
    got = multiply(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16))
    np.testing.assert_array_equal(got, chain(x, weight, 128))
    assert (chain(x[:, ::-1], weight[::-1], 128) != got).any()


def test_several_devices_have_the_bits_of_one():
    rng = np.random.default_rng(4)
    rows, inputs, outputs = 32, 512, 64
    x, matrix = normal(rng, rows, inputs).astype(jnp.bfloat16), normal(rng, inputs, outputs)
    for kind in ("bfloat16", "int8"):
        weight = stored(matrix, kind)
        one, _ = multiply_add(x, weight, jnp.zeros((rows, outputs)))
        for devices in (1, 2, 4, 8):
            share, parts = inputs // devices, []
            for start in range(0, inputs, share):
                at = slice(start, start + share)
                own = Quantized(weight.values[:, at], weight.scale) if kind == "int8" else weight[at]
                parts.append(multiply_segments(x[:, at], own, segment_count(inputs) // devices))
            total = products.add_in_tree(parts)
            total = total * weight.scale if kind == "int8" else total
            np.testing.assert_array_equal(total, one, err_msg=f"{devices} devices, {kind}")
            if devices == 8:
                assert (functools.reduce(operator.add, parts) != products.add_in_tree(parts)).any()


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_shares_of_devices_are_added_and_prepared_as_on_one_device(kind):
    rng = np.random.default_rng(5)
    rows, inputs, outputs, devices = 48, 256, 64, 4
    x, weight = normal(rng, rows, inputs).astype(jnp.bfloat16), stored(normal(rng, inputs, outputs), kind)
    if kind == "int8":  # powers of two, because XLA:CPU may round a product and a sum once
        weight = Quantized(weight.values, jnp.exp2(jnp.round(jnp.log2(weight.scale))))
    residual, scale, bias = normal(rng, rows, outputs), normal(rng, outputs), normal(rng, outputs)
    shares = []
    for at in np.split(np.arange(inputs), devices):
        own = Quantized(weight.values[:, at], weight.scale) if kind == "int8" else weight[at]
        shares.append(multiply_segments(x[:, at], own, segment_count(inputs) // devices))
    output_scale = weight.scale if kind == "int8" else None
    for options in ((residual, scale), (None,)):
        one = multiply_add(x, weight, *options, bias=bias)
        other = add_shares(jnp.stack(shares), *options, output_scale=output_scale, bias=bias)
        for ours, expected in zip(jax.tree.leaves(other), jax.tree.leaves(one), strict=True):
            np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize("first", [0, 6])
def test_values_are_those_of_xla_but_for_the_rounding_of_rows(first):
    check_shapes(first, 6)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 25))
def test_values_are_those_of_xla_for_a_thousand_shapes(first):
    check_shapes(first, 25)


def check_shapes(first: int, count: int) -> None:
    for shape, _, wrong in product_shapes.checks(first, count):
        assert not wrong, str(shape)


def test_norms_are_those_of_xla():
    rng = np.random.default_rng(5)
    x, scale = normal(rng, 16, 112), normal(rng, 112)
    np.testing.assert_allclose(normalize(x, scale, EPSILON), rms_norm(x, scale, EPSILON), rtol=1e-5, atol=1e-6)


def test_what_there_is_no_kernel_for_is_refused():
    x = jnp.zeros((16, 64))
    with pytest.raises(InvalidConfig, match="multiplies bfloat16 and int8 weights, got float32; use 'xla'"):
        multiply(x, jnp.zeros((64, 32)))
    with pytest.raises(InvalidConfig, match="multiplies bfloat16 and int8 weights, got Packed; use 'xla'"):
        multiply(x, Packed.pack(jnp.zeros((32, 64))))
    with pytest.raises(InvalidConfig, match="a multiple of 16 outputs, got 40; use 'xla'"):
        multiply(x, jnp.zeros((64, 40), jnp.bfloat16))
    with pytest.raises(InvalidConfig, match="a multiple of 16 inputs, got 40; use 'xla'"):
        multiply(x[:, :40], jnp.zeros((40, 32), jnp.bfloat16))
