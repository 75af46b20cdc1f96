"""Int8 weights: quantization, products, and every guarantee for a quantized model; matrices stored `[out, in]`."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxspec
from helpers.narrow import instance, not_none
from helpers.toys import lively, noisy, transformer
from jaxspec.backend.cpu import FUSED_COLUMNS, STREAMED_ROWS, WEIGHTS_FIRST_ROWS
from jaxspec.checkpoints import base
from jaxspec.cli import options
from jaxspec.cli.inspect_model import memory_section
from jaxspec.core.records import Window
from jaxspec.errors import InvalidConfig
from jaxspec.generation.drafting import Drafting
from jaxspec.generation.fingerprint import weights
from jaxspec.models import out_major
from jaxspec.models.out_major import OutMajor, quantize, to_in_out
from jaxspec.models.transformer import TransformerLM, look_up, matmul

RNG = np.random.default_rng(0)
MATRIX = RNG.normal(size=(48, 80)).astype(np.float32) * np.exp(RNG.normal(size=80)).astype(np.float32)
LM = transformer()
FLOATS = lively(LM.init_params(jax.random.key(0)))
TARGET = jaxspec.Model(LM, quantize(FLOATS))
PROMPTS = [RNG.integers(0, 61, n).tolist() for n in (1, 9, 30)]


def floats(params):
    """The rounded weights as a float model has them."""

    def of(path, leaf):
        matrix = leaf.astype(jnp.float32) if isinstance(leaf, OutMajor) else leaf
        turned = isinstance(leaf, OutMajor) and path[-1].key not in ("embed", "head")
        return matrix.T if turned else matrix

    return jax.tree_util.tree_map_with_path(of, params, is_leaf=lambda leaf: isinstance(leaf, OutMajor))


def test_every_output_is_rounded_to_127_steps_of_its_largest():
    got = OutMajor.quantize(MATRIX)
    assert got.values.dtype == np.int8
    assert got.shape == (80, 48)
    np.testing.assert_allclose(got.scale, abs(MATRIX).max(0) / 127, rtol=1e-6)
    assert (abs(got.values).max(1) == 127).all()
    assert (abs(np.asarray(got.astype(jnp.float32)).T - MATRIX) <= got.scale / 2 * 1.001).all()
    table = OutMajor.quantize(MATRIX, transposed=True)  # an output a row already
    assert table.shape == MATRIX.shape
    assert (abs(table.values).max(1) == 127).all()


def test_host_and_device_round_alike():
    for a, b in zip(
        jax.tree.leaves(OutMajor.quantize(MATRIX)), jax.tree.leaves(OutMajor.quantize(jnp.asarray(MATRIX)))
    ):
        np.testing.assert_array_equal(a, b)


def test_an_output_of_zeros_stays_zero():
    got = OutMajor.quantize(np.zeros((8, 3), np.float32))
    assert not got.values.any()
    assert not np.asarray(got.astype(jnp.float32)).any()


@pytest.mark.parametrize("rows", [1, 2, STREAMED_ROWS["int8"], STREAMED_ROWS["int8"] + 1])
def test_a_product_is_that_of_the_rounded_matrix(rows):
    weight = jax.tree.map(jnp.asarray, OutMajor.quantize(MATRIX))
    x = RNG.normal(size=(1, rows, 48)).astype(np.float32)
    rounded = np.asarray(weight.values, np.float64) * np.asarray(weight.scale, np.float64)[:, None]
    exact = x.astype(np.float64) @ rounded.T
    np.testing.assert_allclose(jax.jit(matmul)(x, weight), exact, rtol=2e-6, atol=2e-5)


def test_off_the_cpu_only_the_activations_are_bfloat16():
    weight, x = OutMajor.quantize(MATRIX), RNG.normal(size=(3, 48)).astype(ml_dtypes.bfloat16)
    exact = x.astype(np.float64) @ weight.values.T.astype(np.float64)
    np.testing.assert_allclose(out_major._elsewhere(jnp.asarray(x), weight.values), exact, rtol=1e-5, atol=1e-3)


def test_a_row_has_the_same_bits_at_every_width():
    weight, x = (
        jax.tree.map(jnp.asarray, OutMajor.quantize(MATRIX)),
        RNG.normal(size=(1, STREAMED_ROWS["int8"], 48)).astype(np.float32),
    )
    all_at_once = np.asarray(jax.jit(matmul)(x, weight))
    for width in range(1, STREAMED_ROWS["int8"]):
        np.testing.assert_array_equal(jax.jit(matmul)(x[:, :width], weight), all_at_once[:, :width])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_of_floats_is_that_of_the_matrix(dtype):
    """For every number of rows, and the first ones have the same bits at each width that reads them one by one."""
    held = jnp.asarray(MATRIX, dtype)
    x = RNG.normal(size=(1, WEIGHTS_FIRST_ROWS + 1, 48)).astype(np.float32)
    exact = np.asarray(jnp.asarray(x, dtype), np.float64) @ np.asarray(held, np.float64)
    few = STREAMED_ROWS[held.dtype.name]
    for rows in (1, 2, 3, 5, 9, 17, WEIGHTS_FIRST_ROWS, WEIGHTS_FIRST_ROWS + 1):
        got = jax.jit(matmul)(x[:, :rows], OutMajor(held.T))
        np.testing.assert_allclose(got, exact[:, :rows], rtol=2e-6, atol=2e-4)
        np.testing.assert_array_equal(jax.jit(matmul, static_argnums=2)(x[:, :rows], held.T, True), got)
        if rows <= few:
            np.testing.assert_array_equal(got, jax.jit(matmul)(x[:, :few], OutMajor(held.T))[:, :rows])


def test_some_rows_of_float32_are_the_second_factor():
    """Padded to what the libraries have kernels for; XLA:CPU would lay the weights anew, were they the second."""
    for rows, full in ((3, 4), (9, 16), (33, 48)):
        text = jax.jit(matmul).lower(jnp.ones((1, rows, 96)), OutMajor(jnp.ones((320, 96)))).compile().as_text()
        products = [line for line in not_none(text).splitlines() if " dot(" in line]
        assert products
        assert all(f"f32[320,{full}]" in line for line in products)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_the_rows_of_a_vmap_are_rows_like_others(kind):
    """The bits are those of one call with all of them; matrices may be mapped, too."""
    weight = OutMajor.quantize(MATRIX) if kind == "int8" else OutMajor(jnp.asarray(MATRIX.T, kind))
    weight = jax.tree.map(jnp.asarray, weight)
    x = jnp.asarray(RNG.normal(size=(2, 3, 1, 2, 48)), jnp.float32)
    at_once = jax.jit(matmul)(x.reshape(1, 12, 48), weight)
    got = jax.jit(jax.vmap(jax.vmap(matmul, (0, None)), (0, None)))(x, weight)
    np.testing.assert_array_equal(got.reshape(1, 12, -1), at_once)
    several = jax.tree.map(lambda a: jnp.stack([a, -a if a.ndim > 1 else a]), weight)
    for axis, rows in ((0, x[:, 0]), (None, x[0, 0])):
        got = jax.jit(jax.vmap(matmul, (axis, 0)))(rows, several)
        wanted = [(-1) ** i * matmul(rows[i] if axis == 0 else rows, weight) for i in range(2)]
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_product_has_a_gradient(kind, rows):
    """That of the product of the two matrices, by the floats among them."""
    weight = OutMajor.quantize(MATRIX) if kind == "int8" else OutMajor(jnp.asarray(MATRIX.T, kind))
    weight = jax.tree.map(jnp.asarray, weight)
    x = jnp.asarray(RNG.normal(size=(1, rows, 48)), "bfloat16").astype(jnp.float32)
    pull = jax.jit(jax.grad(lambda x: (matmul(x, weight) ** 2).sum()))
    dense = weight.astype(jnp.float32)
    exact = jax.grad(lambda x, w: ((x @ w.T) ** 2).sum(), (0, 1))(x, dense)
    close = {"rtol": 2e-2 if kind == "bfloat16" else 1e-4, "atol": 2 if kind == "bfloat16" else 1e-2}
    np.testing.assert_allclose(pull(x), exact[0], **close)
    if kind != "int8":
        got = jax.grad(lambda w: (matmul(x, OutMajor(w)) ** 2).sum())(weight.values)
        np.testing.assert_allclose(got.astype(jnp.float32), exact[1], **close)


def test_a_model_is_the_same_in_either_layout(tmp_path, monkeypatch):
    path = jaxspec.save(jaxspec.Model(LM, FLOATS), tmp_path / "model")
    for dtype, avx512, default in (("float32", None, False), ("float32", True, True), ("bfloat16", False, True)):
        monkeypatch.setattr("jaxspec.backend.cpu.has_avx512", lambda avx512=avx512: avx512)
        turned, plain = (jaxspec.load(path, dtype=dtype, weight_layout=layout) for layout in ("out_in", "in_out"))
        assert isinstance(turned.params["layers"][0]["qkv"], OutMajor)
        chex.assert_trees_all_equal(to_in_out(turned.params), plain.params)
        assert isinstance(jaxspec.load(path, dtype=dtype).params["layers"][0]["qkv"], OutMajor) == default
        assert turned.bytes == plain.bytes
        assert weights(turned.params) == weights(plain.params)  # a file of texts is resumed
        assert weights(noisy(turned.params, 1, 1e-3)) != weights(plain.params)
        if dtype == "float32":
            outputs = (jaxspec.generate(m, PROMPTS, max_new_tokens=24, tree=4) for m in (turned, plain))
            texts = [[row.tokens for row in output] for output in outputs]
            assert texts[0] == texts[1]
        # In bfloat16 another order of sums may part texts where two tokens are close; the logits stay.
        tokens = jnp.asarray([PROMPTS[2]])
        window = Window(tokens, jnp.arange(30)[None], jnp.tri(30)[None] > 0)
        one, other = (
            m.lm.head(m.params, m.lm.apply(m.params, window, m.lm.init_cache(1, 256))[0]) for m in (turned, plain)
        )
        np.testing.assert_allclose(one, other, atol=(1e-5 if dtype == "float32" else 0.02) * float(jnp.ptp(one)))


def test_an_embedding_is_looked_up_in_bytes():
    table = jax.tree.map(jnp.asarray, OutMajor.quantize(MATRIX, transposed=True))
    tokens = jnp.asarray([[3, 0], [47, 3]])
    np.testing.assert_array_equal(look_up(table, tokens), table.astype(jnp.float32)[tokens])


@pytest.mark.parametrize("kind", ["int8", "bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_long_row_is_multiplied_in_parts(kind, rows):
    """XLA:CPU would write the whole matrix anew, in float32 and turned, for a row of 16 KB and more."""
    inputs = 2 * FUSED_COLUMNS + 100
    matrix = RNG.normal(size=(inputs, 512)).astype(np.float32)
    weight = OutMajor.quantize(matrix) if kind == "int8" else OutMajor(jnp.asarray(matrix.T, kind))
    weight = jax.tree.map(jnp.asarray, weight)
    x = np.asarray(jnp.asarray(RNG.normal(size=(1, rows, inputs)), "bfloat16"), np.float32)
    exact = x.astype(np.float64) @ np.asarray(weight.astype(jnp.float32), np.float64).T
    compiled = jax.jit(matmul).lower(x, weight).compile()
    got = compiled(x, weight)
    np.testing.assert_allclose(got, exact, rtol=2e-6, atol=2e-3)
    if rows <= STREAMED_ROWS[kind]:
        np.testing.assert_array_equal(jax.jit(matmul)(x[:, :1], weight), got[:, :1])
    assert not_none(compiled.memory_analysis()).temp_size_in_bytes < matrix.size / 4


@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
@pytest.mark.parametrize("few", [True, False])
def test_a_loop_keeps_no_copy_of_the_weights(kind, few):
    """A matrix of 16 MB in float32 is read as the 4 or 8 MB it is: the loop's own memory is a fraction of that."""
    weight = OutMajor(jnp.ones((8192, 512), kind), jnp.ones(8192) if kind == "int8" else None)
    rows = 1 if few else STREAMED_ROWS[kind] + 1

    def loop(x, weight):
        return jax.lax.fori_loop(0, 9, lambda _, x: matmul(x, weight)[..., :512] * 1e-3, x)

    compiled = jax.jit(loop).lower(jnp.ones((1, rows, 512)), weight).compile()
    assert not_none(compiled.memory_analysis()).temp_size_in_bytes < 8192 * 512


@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
def test_what_is_multiplied_is_made_once(kind):
    """Not anew for every output, inside the product."""
    weight = OutMajor(jnp.ones((512, 512), kind), jnp.ones(512) if kind == "int8" else None)

    def loop(x, weight):
        return jax.lax.fori_loop(0, 9, lambda _, x: matmul(jnp.sin(x), weight) * 1e-3, x)

    text = jax.jit(loop).lower(jnp.ones((1, 1, 512)), weight).compile().as_text()
    computations = [part for part in not_none(text).split("\n\n") if " sine(" in part or " dot(" in part]
    assert len(computations) > 1
    assert not any(" sine(" in part and " dot(" in part for part in computations)


def test_the_model_is_that_of_the_rounded_weights():
    rounded = jaxspec.Model(LM, floats(TARGET.params))
    a, b = (jaxspec.generate(model, PROMPTS, max_new_tokens=30) for model in (TARGET, rounded))
    assert [row.tokens for row in a] == [row.tokens for row in b]
    assert TARGET.bytes < 0.35 * rounded.bytes  # vectors and scales are much of a toy


def test_text_is_plain_decodings_with_any_drafter():
    def write(**options):
        sampling, key = jaxspec.Sampling(temperature=[0.0, 0.9, 0.9]), jax.random.key(3)
        out = jaxspec.generate(TARGET, PROMPTS, max_new_tokens=24, sampling=sampling, key=key, **options)
        return [row.tokens for row in out], out.stats.accepted

    plain, _ = write()
    near = jaxspec.Model(LM, noisy(FLOATS, 1, 0.1))
    for draft in (near, dataclasses.replace(near, params=quantize(near.params))):
        text, accepted = write(drafter="model", draft=draft, tree=jaxspec.branching(2, 1))
        assert text == plain
        assert accepted > 10
    assert write(drafter="prompt-lookup")[0] == plain
    assert write(drafter="early-exit", drafter_options={"exit_layers": 2})[0] == plain


def test_only_short_copies_are_drafted_without_a_schedule():
    """On a CPU, where each token of a window reads the bytes anew."""
    for params, tree, drafts in ((TARGET.params, None, False), (TARGET.params, 3, True), (FLOATS, None, True)):
        target = jaxspec.Model(LM, params)
        decoder, _ = Drafting(tree=tree).build(target)
        state = decoder.schedule.init(1, decoder.drafter.shape)
        assert (decoder.schedule.limit(state)[0] > 0) == drafts


def test_it_drafts_for_the_model_it_was_rounded_from():
    target = jaxspec.Model(LM, FLOATS)
    out = jaxspec.generate(target, PROMPTS, max_new_tokens=40, drafter="model", draft=TARGET, tree=jaxspec.chain(3))
    assert out.stats.acceptance_rate > 0.8


def test_a_checkpoint_is_rounded_as_it_is_read(tmp_path):
    path = jaxspec.save(jaxspec.Model(LM, FLOATS), tmp_path / "model")
    read = jaxspec.load(path, dtype="int8")
    expected = quantize(FLOATS)
    chex.assert_trees_all_equal(read.params, expected)
    assert instance(TransformerLM, read.lm).dtype == "float32"
    assert read.bytes == TARGET.bytes
    assert memory_section(LM.config, "int8", 1, 64)["parameters_bytes"] == TARGET.bytes
    with pytest.raises(InvalidConfig, match="float32, bfloat16, int8, got 'int4'"):
        jaxspec.load(path, dtype="int4")
    with pytest.raises(InvalidConfig, match="int8"):
        jaxspec.save(TARGET, tmp_path / "other")


def test_the_command_line_knows_the_same_kinds():
    assert options.WEIGHTS == base.WEIGHTS
