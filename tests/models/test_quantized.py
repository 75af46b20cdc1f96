"""Tests int8 weights: quantization, products, and every guarantee for a quantized model."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxspec
from helpers.narrow import instance, not_none
from helpers.tiers import with_slow
from helpers.toys import lively, noisy, transformer
from jaxspec.checkpoints import base
from jaxspec.cli import options
from jaxspec.cli.inspect_model import memory_section
from jaxspec.errors import InvalidConfig
from jaxspec.models import quantized
from jaxspec.models.layers import look_up, matmul
from jaxspec.models.quantized import Quantized, quantize
from jaxspec.models.transformer import TransformerLM

RNG = np.random.default_rng(0)
MATRIX = RNG.normal(size=(48, 80)).astype(np.float32) * np.exp(RNG.normal(size=80)).astype(np.float32)
LM = transformer()
FLOATS = lively(LM.init_params(jax.random.key(0)))
TARGET = jaxspec.Model(LM, quantize(FLOATS))
PROMPTS = [RNG.integers(0, 61, n).tolist() for n in (1, 9, 30)]


def floats(params):
    """The rounded weights as a float model has them."""

    def of(path, leaf):
        matrix = leaf.astype(jnp.float32) if isinstance(leaf, Quantized) else leaf
        turned = isinstance(leaf, Quantized) and path[-1].key not in ("embed", "head")
        return matrix.T if turned else matrix

    return jax.tree_util.tree_map_with_path(of, params, is_leaf=lambda leaf: isinstance(leaf, Quantized))


def test_every_output_is_rounded_to_127_steps_of_its_largest():
    got = Quantized.quantize(MATRIX)
    assert got.values.dtype == np.int8
    assert got.shape == (80, 48)
    np.testing.assert_allclose(got.scale, abs(MATRIX).max(0) / 127, rtol=1e-6)
    assert (abs(got.values).max(1) == 127).all()
    assert (abs(np.asarray(got.astype(jnp.float32)).T - MATRIX) <= got.scale / 2 * 1.001).all()
    table = Quantized.quantize(MATRIX, transposed=True)  # an output a row already
    assert table.shape == MATRIX.shape
    assert (abs(table.values).max(1) == 127).all()


def test_host_and_device_round_alike():
    for a, b in zip(
        jax.tree.leaves(Quantized.quantize(MATRIX)), jax.tree.leaves(Quantized.quantize(jnp.asarray(MATRIX)))
    ):
        np.testing.assert_array_equal(a, b)


def test_an_output_of_zeros_stays_zero():
    got = Quantized.quantize(np.zeros((8, 3), np.float32))
    assert not got.values.any()
    assert not np.asarray(got.astype(jnp.float32)).any()


@pytest.mark.parametrize("rows", [1, 2, 13])
def test_a_product_is_that_of_the_rounded_matrix(rows):
    weight = jax.tree.map(jnp.asarray, Quantized.quantize(MATRIX))
    x = RNG.normal(size=(1, rows, 48)).astype(np.float32)
    rounded = np.asarray(weight.values, np.float64) * np.asarray(weight.scale, np.float64)[:, None]
    exact = x.astype(np.float64) @ rounded.T
    np.testing.assert_allclose(jax.jit(matmul)(x, weight), exact, rtol=2e-6, atol=2e-5)


def test_off_the_cpu_only_the_activations_are_bfloat16():
    weight, x = Quantized.quantize(MATRIX), RNG.normal(size=(3, 48)).astype(ml_dtypes.bfloat16)
    exact = x.astype(np.float64) @ weight.values.T.astype(np.float64)
    np.testing.assert_allclose(quantized._elsewhere(jnp.asarray(x), weight.values), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_of_floats_is_that_of_the_matrix(dtype):
    held, x = jnp.asarray(MATRIX, dtype), RNG.normal(size=(1, 9, 48)).astype(np.float32)
    exact = np.asarray(jnp.asarray(x, dtype), np.float64) @ np.asarray(held, np.float64)
    for rows in (1, 2, 9):
        for matrix, transposed in ((held, False), (held.T, True)):
            got = jax.jit(matmul, static_argnums=2)(x[:, :rows], matrix, transposed)
            np.testing.assert_allclose(got, exact[:, :rows], rtol=2e-6, atol=2e-4)


def test_a_product_has_a_gradient_and_can_be_mapped():
    weight = jax.tree.map(jnp.asarray, Quantized.quantize(MATRIX))
    x = jnp.asarray(RNG.normal(size=(3, 1, 2, 48)), jnp.float32)
    got = jax.jit(jax.grad(lambda x: (matmul(x, weight) ** 2).sum()))(x[0])
    exact = jax.grad(lambda x: ((x @ weight.astype(jnp.float32).T) ** 2).sum())(x[0])
    np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-2)
    at_once = matmul(x.reshape(1, 6, 48), weight)
    np.testing.assert_allclose(jax.vmap(matmul, (0, None))(x, weight).reshape(1, 6, -1), at_once, rtol=1e-6, atol=1e-4)
    several = jax.tree.map(lambda a: jnp.stack([a, -a if a.ndim > 1 else a]), weight)
    mapped = jax.vmap(matmul, (None, 0))(x[0], several)
    np.testing.assert_allclose(mapped, [matmul(x[0], weight), -matmul(x[0], weight)], rtol=1e-5, atol=1e-3)


def test_rows_that_are_read_with_their_tiles_are_the_same():
    values = jnp.asarray(np.random.default_rng(0).integers(-127, 128, (96, 8)), jnp.int8)
    rows = jnp.asarray([[0, 31, 32], [63, 64, 95]])
    np.testing.assert_array_equal(quantized._rows_of_tiles(values, rows), values[rows])


@pytest.mark.parametrize(("vocab", "tokens", "by_tiles"), [(96, 3, True), (80, 3, False), (96, 4, False)])
def test_a_tpu_reads_few_rows_with_their_tiles(vocab, tokens, by_tiles):
    """It gathers rows alone where their tiles are more than the table, or the table is not made of whole tiles."""
    table = Quantized(jnp.zeros((vocab, 8), jnp.int8), jnp.ones(vocab))
    traced = jax.jit(look_up).trace(table, jnp.zeros((1, tokens), jnp.int32))
    assert (f"{tokens}x32x8xi8>" in traced.lower(lowering_platforms=("tpu",)).as_text()) == by_tiles


def test_an_embedding_is_looked_up_in_bytes():
    table = jax.tree.map(jnp.asarray, Quantized.quantize(MATRIX, transposed=True))
    tokens = jnp.asarray([[3, 0], [47, 3]])
    np.testing.assert_array_equal(look_up(table, tokens), table.astype(jnp.float32)[tokens])


@pytest.mark.parametrize("rows", [1, 8])
def test_a_loop_keeps_no_copy_of_the_weights(rows):
    """Ten matrices of 4 MB are read as int8: the loop needs room for one of them in float32, not for all."""
    weights = [Quantized(jnp.ones((8192, 512), jnp.int8), jnp.ones(8192)) for _ in range(10)]

    def loop(x, weights):
        def step(_, x):
            for weight in weights:
                x = matmul(x, weight)[..., :512] * 1e-3
            return x

        return jax.lax.fori_loop(0, 9, step, x)

    compiled = jax.jit(loop).lower(jnp.ones((1, rows, 512)), weights).compile()
    assert not_none(compiled.memory_analysis()).temp_size_in_bytes < 3 * 4 * 8192 * 512


def test_the_model_is_that_of_the_rounded_weights():
    rounded = jaxspec.Model(LM, floats(TARGET.params))
    a, b = (jaxspec.generate(model, PROMPTS, drafter="none", max_new_tokens=30) for model in (TARGET, rounded))
    assert [row.tokens for row in a] == [row.tokens for row in b]
    assert TARGET.bytes < 0.35 * rounded.bytes  # vectors and scales are much of a toy


NEAR = jaxspec.Model(LM, noisy(FLOATS, 1, 0.1))
MODEL: dict[str, Any] = {"drafter": "model", "tree": jaxspec.branching(2, 1)}
WAYS: dict[str, dict[str, Any]] = {
    "prompt-lookup": {"drafter": "prompt-lookup", "tree": 3},
    "rounded draft": MODEL | {"draft": jaxspec.Model(LM, quantize(NEAR.params))},
    "draft": MODEL | {"draft": NEAR},
    "early-exit": {"drafter": "early-exit", "drafter_options": {"exit_layers": 2}},
}


def write(**options):
    sampling, key = jaxspec.Sampling(temperature=[0.0, 0.9, 0.9]), jax.random.key(3)
    out = jaxspec.generate(TARGET, PROMPTS, max_new_tokens=24, sampling=sampling, key=key, **options)
    return [row.tokens for row in out], out.stats.accepted


@pytest.fixture(scope="module")
def plain():
    return write(drafter="none")[0]


@pytest.mark.parametrize("way", with_slow(WAYS, WAYS.keys() - {"prompt-lookup"}))
def test_text_is_plain_decodings_with_any_drafter(way, plain):
    text, accepted = write(**WAYS[way])
    assert text == plain
    assert accepted > 10 or "draft" not in way


@pytest.mark.slow
def test_it_drafts_for_the_model_it_was_rounded_from():
    target = jaxspec.Model(LM, FLOATS)
    out = jaxspec.generate(target, PROMPTS, max_new_tokens=40, drafter="model", draft=TARGET, tree=jaxspec.chain(3))
    assert out.stats.acceptance_rate > 0.8


def test_a_checkpoint_is_rounded_as_it_is_read(tmp_path):
    path = jaxspec.save(jaxspec.Model(LM, FLOATS), tmp_path / "model")
    read = jaxspec.load(path, dtype="int8", kernels=False)
    expected = quantize(FLOATS)
    chex.assert_trees_all_equal(read.params, expected)
    assert instance(TransformerLM, read.lm).dtype == "bfloat16"
    assert read.bytes == TARGET.bytes
    assert memory_section(LM.config, "int8", 1, 64)["parameters_bytes"] == TARGET.bytes
    with pytest.raises(InvalidConfig, match="float32, bfloat16, int8, file, got 'int4'"):
        jaxspec.load(path, dtype="int4")
    with pytest.raises(InvalidConfig, match="int8"):
        jaxspec.save(TARGET, tmp_path / "other")


def test_the_command_line_knows_the_same_kinds():
    assert options.MODEL_DTYPES == base.WEIGHT_DTYPES
