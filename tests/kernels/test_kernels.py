"""Tests of the CPU kernels: equal to XLA's operations up to rounding, and to the bit whatever the other rows."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.tiers import with_slow
from jaxspec.core.cache import storage_dtype
from jaxspec.core.records import KV
from jaxspec.kernels import calls, library
from jaxspec.models.attention import attend
from jaxspec.models.execution import Execution
from jaxspec.models.layers import rotation, split_heads
from jaxspec.models.packed import Packed
from jaxspec.models.quantized import Quantized
from jaxspec.models.rope import Rope
from jaxspec.models.rows import Fused, Gate, Norm, rms_norm

pytestmark = [pytest.mark.quick, pytest.mark.skipif(not library.kernels_available(), reason=library.describe_kernels())]

KERNELS = Execution(kernels=True)
KINDS = ("float32", "bfloat16", "int8")
SIZES = [(16, 4), (1, 1), (33, 37), (100, 576), (577, 1536), (49, 33), (2048, 65)]  # O, I
ROWS = 200


def packed(rng: np.random.Generator, outputs: int, inputs: int, kind: str) -> Packed:
    matrix = rng.normal(size=(outputs, inputs)).astype(np.float32)
    held = Quantized.quantize(matrix, True) if kind == "int8" else np.asarray(jnp.asarray(matrix, kind))
    one = jax.tree.map(jnp.asarray, Packed.pack(held))
    jax.tree.map(np.testing.assert_array_equal, one.unpack(), held)
    return one


def reference(x, matrix: Packed):
    """The product that the kernel computes, with XLA's own operations."""
    whole = matrix.unpack()
    if not isinstance(whole, Quantized):
        return jnp.matmul(x.astype(whole.dtype), whole.T, preferred_element_type=jnp.float32, precision="highest")
    pad = -x.shape[1] % 32
    blocks = jnp.pad(x, ((0, 0), (0, pad))).reshape(len(x), -1, 32)
    weights = jnp.pad(whole.values, ((0, 0), (0, pad))).reshape(whole.shape[0], -1, 32).astype(jnp.int32)
    most = jnp.abs(blocks).max(-1, keepdims=True)
    rounded = jnp.rint(blocks * jnp.where(most > 0, 127 / most, 0)).astype(jnp.int32)
    sums = jnp.einsum("nbi,obi->nbo", rounded, weights).astype(jnp.float32)
    return (sums * (most / 127)).sum(1) * whole.scale


@jax.jit
def product(x, matrix):
    return matrix.product(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), with_slow(SIZES, SIZES[::2]))
def test_products_are_those_of_xla_and_no_row_depends_on_another(outputs, inputs, kind):
    rng = np.random.default_rng(outputs)
    matrix = packed(rng, outputs, inputs, kind)
    x = jnp.asarray(rng.normal(size=(ROWS, inputs)) * rng.choice([1e-3, 1, 1e3], (ROWS, 1)), jnp.float32)
    whole = product(x, matrix)
    scale = jnp.abs(reference(jnp.abs(x), jax.tree.map(jnp.abs, matrix) if kind != "int8" else matrix)).max(-1) + 1e-30
    assert float((jnp.abs(whole - reference(x, matrix)).max(-1) / scale).max()) < 3e-6
    for count in (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 33, 64):
        np.testing.assert_array_equal(product(x[3 : 3 + count], matrix), whole[3 : 3 + count])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_packed_table_are_those_of_the_matrix(kind):
    matrix = packed(np.random.default_rng(0), 45, 37, kind)
    tokens = jnp.asarray([[0, 44, 15], [16, 17, 3]])
    np.testing.assert_array_equal(matrix[tokens].astype(jnp.float32), matrix.astype(jnp.float32)[tokens])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("width", [37, 64])
def test_a_bad_number_spoils_its_own_row_alone(kind, bad, width):
    matrix = packed(np.random.default_rng(1), 40, width, kind)
    x = np.ones((5, width), np.float32)
    good = product(jnp.asarray(x), matrix)
    x[2, 5] = bad
    out = np.asarray(product(jnp.asarray(x), matrix))
    assert not np.isfinite(out[2]).any()
    np.testing.assert_array_equal(np.delete(out, 2, 0), np.delete(good, 2, 0))


def test_a_row_of_zeros_gives_zeros():
    for kind in KINDS:
        assert not np.asarray(product(jnp.zeros((3, 37)), packed(np.random.default_rng(1), 40, 37, kind))).any()


def test_batching_and_differentiation_of_a_product():
    matrix = packed(np.random.default_rng(2), 40, 37, "float32")
    x = jnp.asarray(np.random.default_rng(3).normal(size=(4, 3, 37)), jnp.float32)
    np.testing.assert_array_equal(jax.vmap(matrix.product)(x), product(x.reshape(12, 37), matrix).reshape(4, 3, 40))
    gradient = jax.grad(lambda x: (matrix.product(x) ** 2).sum())(x[0])
    exact = jax.grad(lambda x: (reference(x, matrix) ** 2).sum())(x[0])
    np.testing.assert_allclose(gradient, exact, rtol=1e-4, atol=1e-4)


def test_norms_are_those_of_xla_and_no_row_depends_on_another():
    rng = np.random.default_rng(0)
    for width in (1, 15, 16, 64, 576, 577):
        x, scale = (
            jnp.asarray(rng.normal(size=(40, width)), jnp.float32),
            jnp.asarray(rng.normal(size=width), jnp.float32),
        )
        whole = calls.rms_norm_with_kernel(x, scale, 1e-5)
        np.testing.assert_allclose(whole, rms_norm(x, scale, 1e-5), rtol=1e-5, atol=1e-6)
        for count in (1, 2, 7, 8, 9):
            np.testing.assert_array_equal(
                calls.rms_norm_with_kernel(x[5 : 5 + count], scale, 1e-5), whole[5 : 5 + count]
            )
    assert np.isnan(calls.rms_norm_with_kernel(x.at[0, 3].set(jnp.nan), scale, 1e-5)[0]).all()


BATCH, HEADS, GROUPS, SLOTS = 2, 2, 3, 512


def text(seed: int, dtype: str, length: list[int], nodes: int, width: int = 20, slots: int = SLOTS):
    """Queries, cache, length, window and mask of a random tree of nodes."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int):
        return jnp.asarray(rng.normal(size=shape), dtype)

    keys, values = (normal(2, BATCH, HEADS, slots, width) for _ in range(2))
    stored = KV(*(jax.lax.bitcast_convert_type(a, storage_dtype(dtype)) for a in (keys, values)))
    window = (normal(BATCH, HEADS, nodes, width), normal(BATCH, HEADS, nodes, width))
    mask = np.zeros((BATCH, nodes, nodes), bool)
    for row in range(BATCH):
        for node in range(nodes):
            if node:
                mask[row, node] = mask[row, rng.integers(node)]
            mask[row, node, node] = True
    queries = normal(BATCH, HEADS, GROUPS, nodes, width)
    return queries, stored, jnp.asarray(length, jnp.int32), window, jnp.asarray(mask)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [[0, 1], [15, 16], [300, 17], [512, 511]])
@pytest.mark.parametrize("size", [None, 7, 100])
def test_attention_is_that_of_xla(dtype, length, size):
    for nodes in (1, 5, 24):
        queries, prefix, lengths, window, mask = text(nodes, dtype, length, nodes)
        first = None
        if size is not None:
            # A token sees itself and the size - 1 tokens before it.
            position = lengths[:, None] + mask.sum(-1) - 1
            first = position - size + 1
            mask &= position[:, None, :] >= first[:, :, None]
        arguments = (queries, prefix, 1, lengths, window, mask, None, 0.3, first)
        expected, found = attend(*arguments), attend(*arguments, execution=KERNELS)
        np.testing.assert_allclose(
            found, expected, rtol=2e-2 if dtype == "bfloat16" else 1e-4, atol=1e-2 if dtype == "bfloat16" else 1e-5
        )


def test_the_longest_texts_are_read_whole():
    arguments = text(0, "float32", [5000, 4097], 3, 64, 5120)
    queries, prefix, lengths, window, mask = arguments
    expected = attend(queries, prefix, 0, lengths, window, mask)
    np.testing.assert_allclose(
        attend(queries, prefix, 0, lengths, window, mask, execution=KERNELS), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [None, 6])
def test_bits_of_attention_do_not_depend_on_what_is_cached(dtype, size):
    for length in (0, 1, 14, 15, 16, 40, 255):
        depth = 9
        queries, prefix, lengths, window, _ = text(length, dtype, [length, length], depth)
        chain = jnp.broadcast_to(jnp.tril(jnp.ones((depth, depth), bool)), (BATCH, depth, depth))
        first = None if size is None else lengths[:, None] + jnp.arange(depth) - size + 1
        seen = chain if size is None else chain & ~jnp.tril(jnp.ones((depth, depth), bool), -size)
        together = attend(queries, prefix, 1, lengths, window, seen, first_seen=first, execution=KERNELS)
        keys, values = (np.array(jax.lax.bitcast_convert_type(a, dtype)) for a in prefix)
        for step in range(depth):
            stored = KV(*(jax.lax.bitcast_convert_type(jnp.asarray(a), storage_dtype(dtype)) for a in (keys, values)))
            one = window[0][:, :, step : step + 1], window[1][:, :, step : step + 1]
            alone = attend(
                queries[..., step : step + 1, :],
                stored,
                1,
                lengths + step,
                one,
                jnp.ones((BATCH, 1, 1), bool),
                first_seen=None if first is None else first[:, step : step + 1],
                execution=KERNELS,
            )
            np.testing.assert_array_equal(alone[..., 0, :], together[..., step, :])
            for cached, new in zip((keys, values), window):
                cached[1, :, :, length + step] = np.asarray(new[:, :, step])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots_past_the_text_are_not_read(dtype):
    queries, prefix, lengths, window, mask = text(3, dtype, [20, 5], 6)
    slots = jnp.arange(prefix.keys.shape[3])[:, None]
    bad = jax.lax.bitcast_convert_type(jnp.asarray(jnp.nan, dtype), prefix.keys.dtype)
    spoiled = KV(*(jnp.where(slots < lengths[:, None, None, None], a, bad) for a in prefix))
    good, found = (attend(queries, kv, 1, lengths, window, mask, execution=KERNELS) for kv in (prefix, spoiled))
    np.testing.assert_array_equal(found, good)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bad_value_spoils_the_tokens_that_see_it_alone(dtype):
    queries, prefix, lengths, window, mask = text(3, dtype, [20, 5], 6)
    good = attend(queries, prefix, 1, lengths, window, mask, execution=KERNELS)
    for part in range(2):
        spoiled = list(window)
        spoiled[part] = spoiled[part].at[0, 1, 2, 4].set(jnp.nan)
        out = np.asarray(attend(queries, prefix, 1, lengths, (spoiled[0], spoiled[1]), mask, execution=KERNELS))
        sees = np.asarray(mask[0, :, 2])
        assert np.isnan(out[0, 1][:, sees]).all()
        np.testing.assert_array_equal(out[0, 1][:, ~sees], good[0, 1][:, ~sees])
        np.testing.assert_array_equal(out[0, 0], good[0, 0])
        np.testing.assert_array_equal(out[1], good[1])


PROGRAM = """
import pytest, sys
from jaxspec.kernels import library
if library.describe_kernels() != sys.argv[1]:
    sys.exit(library.describe_kernels())
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[2:], "-k", "not processor"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("processor", ["AVX2", "AVX-512", "AVX-512 with BF16 and VNNI"])
def test_the_kernels_of_older_processors(processor):
    environment = {**os.environ, "JAXSPEC_KERNELS": processor}
    files = [__file__, os.path.join(os.path.dirname(__file__), "test_blocks.py")]
    words = [sys.executable, "-c", PROGRAM, processor, *files]
    done = subprocess.run(words, env=environment, check=False, timeout=600, stderr=subprocess.PIPE, text=True)
    if "this processor runs no kernels of that name" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("width", "turned", "normed"), [(64, None, False), (20, 10, True), (8, 8, True)])
def test_heads_are_those_of_xla_and_no_token_depends_on_another(dtype, width, turned, normed):
    rope, positions, rng = Rope(width=turned), jnp.arange(80).reshape(2, 40) * 37, np.random.default_rng(0)
    projected = jnp.asarray(rng.normal(size=(2, 40, (3 + 2) * 2 * width)), jnp.float32)
    scales = [jnp.asarray(rng.normal(size=width), jnp.float32) for _ in range(2)]

    def split(tokens: slice, kernels: bool):
        norms = [Norm(scale, 1e-5, kernels) if normed else None for scale in scales]
        turns = rotation(positions[:, tokens], rope, width)
        queries, new = split_heads(projected[:, tokens], turns, 2, width, dtype, norms, Execution(kernels=kernels))
        assert (queries.shape[:3], new.keys.shape[:2]) == ((2, 2, 3), (2, 2))
        assert queries.dtype == new.keys.dtype == new.values.dtype == dtype
        return queries, *new

    got, expected = split(slice(None), True), split(slice(None), False)
    for one, other in zip(got, expected):
        one, other = one.astype(jnp.float32), other.astype(jnp.float32)
        np.testing.assert_allclose(one, other, rtol=1e-2 if dtype == "bfloat16" else 1e-5, atol=1e-5)
    np.testing.assert_array_equal(got[2], expected[2])
    for token in (0, 1, 19, 20, 39):
        for one, alone in zip(got, split(slice(token, token + 1), True)):
            np.testing.assert_array_equal(alone[..., 0, :], one[..., token, :])


def preparations(rng: np.random.Generator, inputs: int) -> dict:
    scale = jnp.asarray(rng.normal(size=inputs), jnp.float32)
    return {"norm": Norm(scale, 1e-5), "silu": Gate("silu"), "gelu_tanh": Gate("gelu_tanh")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["norm", "silu", "gelu_tanh"])
@pytest.mark.parametrize(("outputs", "inputs"), [(33, 37), (100, 576)])
def test_what_a_product_includes_is_done_as_apart(outputs, inputs, name, kind):
    rng = np.random.default_rng(5)
    matrix, before = packed(rng, outputs, inputs, kind), preparations(rng, inputs)[name]
    wide = inputs if name == "norm" else 2 * inputs
    x = jnp.asarray(rng.normal(size=(20, wide)) * rng.choice([1e-2, 1, 30], (20, 1)), jnp.float32)
    bias, residual = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in (outputs, (20, outputs)))

    @jax.jit
    def fused(x, residual):
        return matrix.product(x, Fused(before, bias, residual))

    whole, rows = fused(x, residual), jnp.asarray(before(x))
    expected = residual + (product(rows, matrix) + bias)
    unit = jnp.abs(reference(jnp.abs(rows), jax.tree.map(jnp.abs, matrix) if kind != "int8" else matrix)).max(-1) + 1.0
    # A value of a row that lies between two numbers of its type may go to the other one.
    tolerance = {"float32": 3e-6, "bfloat16": 1e-3, "int8": 2e-3}[kind]
    assert float((jnp.abs(whole - expected).max(-1) / unit).max()) < tolerance
    for count in (1, 2, 7, 8, 9):
        np.testing.assert_array_equal(fused(x[3 : 3 + count], residual[3 : 3 + count]), whole[3 : 3 + count])
    together = jax.vmap(fused)(x.reshape(4, 5, -1), residual.reshape(4, 5, -1))
    np.testing.assert_array_equal(together.reshape(20, -1), whole)
    np.testing.assert_array_equal(jax.vmap(fused, (0, None))(x.reshape(4, 5, -1), residual[5:10])[1], whole[5:10])


def test_gates_are_those_of_xla():
    unit = jnp.eye(16)
    values = np.concatenate([np.linspace(-110, 110, 3001), [0.0, -0.0, 1e30, -1e30, 1e-30]]).astype(np.float32)
    x = np.ones((len(values), 32), np.float32)
    x[:, 0] = values
    matrix = Packed.pack(unit)
    for name in ("silu", "gelu_tanh"):
        expected = Gate(name)(jnp.asarray(x))[:, 0]
        got = matrix.product(jnp.asarray(x), Fused(Gate(name)))[:, 0]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6 if name == "gelu_tanh" else 1e-35)
        for bad in (np.nan, np.inf):
            x[7, 0] = bad
            assert not np.isfinite(matrix.product(jnp.asarray(x), Fused(Gate(name)))[7, 0])
            x[7, 0] = 0.0


def test_differentiation_of_a_product_with_a_norm_and_sums():
    rng = np.random.default_rng(4)
    matrix, before = packed(rng, 40, 37, "float32"), Norm(jnp.asarray(rng.normal(size=37), jnp.float32), 1e-5)
    x, residual = (jnp.asarray(rng.normal(size=(3, size)), jnp.float32) for size in (37, 40))

    def loss(x, residual, multiply):
        return (multiply(x, Fused(before, None, residual)) ** 2).sum()

    def exact(x, fused):
        return fused.around(lambda rows: reference(rows, matrix), x)

    found = jax.grad(loss, (0, 1))(x, residual, matrix.product)
    for one, other in zip(found, jax.grad(loss, (0, 1))(x, residual, exact)):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)
