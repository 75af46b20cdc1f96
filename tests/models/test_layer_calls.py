"""Tests a network on the Pallas calls of a layer as plain operations: bits by windows, trees and batches, and texts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import pallas, toys
from helpers.toys import decoder, generate, lively, texts
from jaxspec.core.records import KV, Cache, Window
from jaxspec.core.topology import chain, dynamic
from jaxspec.decode.state import Weights
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.errors import InvalidConfig
from jaxspec.models.config import ModelConfig
from jaxspec.models.execution import Execution
from jaxspec.models.quantized import quantize
from jaxspec.models.transformer import TransformerLM

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16
)
PALLAS = Execution(attention="pallas", platform="gpu", products="pallas")
ON_TPU = dataclasses.replace(PALLAS, platform="tpu")
FOR_TPU = dataclasses.replace(
    CONFIG, hidden_size=256, intermediate_size=384, num_heads=2, num_kv_heads=1, head_dim=128, num_layers=2
)
START = 70  # tokens in the cache before the text, so that attention reads more than one group of tokens


@pytest.fixture(autouse=True)
def as_plain_operations(monkeypatch):
    pallas.interpret(monkeypatch)


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads tokens after a random cache of `START` tokens; `read` returns logits and the new keys and values."""

    lm: TransformerLM
    params: Any
    kv: KV

    @classmethod
    def make(cls, config: ModelConfig, kind: str = "bfloat16", execution: Execution = PALLAS) -> "Reader":
        lm = TransformerLM(config, "bfloat16", execution=execution)
        params = lm.init_params(jax.random.key(0))
        shape = lm.init_cache(1, 256).stores.keys.shape
        kv = KV(*(jax.random.normal(jax.random.key(i), shape).astype(jnp.bfloat16) for i in (1, 2)))
        return cls(lm, quantize(params) if kind == "int8" else params, kv)

    def read(self, tokens, kv: KV, length, mask, positions) -> tuple[np.ndarray, KV]:
        """Reads windows `[B, T]`."""
        window = Window(jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(mask))
        features, new = self.lm.apply(self.params, window, Cache(kv, jnp.asarray(length)))
        return np.asarray(self.lm.head(self.params, features)), new

    def chain(self, text: np.ndarray, width: int) -> tuple[np.ndarray, KV]:
        """Reads a text in windows of `width` tokens; returns its logits and the cache."""
        logits, kv = [], self.kv
        for start in range(0, len(text), width):
            tokens = text[None, start : start + width]
            count, length = tokens.shape[1], START + start
            mask, positions = np.tri(count, dtype=bool)[None], length + np.arange(count)[None]
            some, new = self.read(tokens, kv, [length], mask, positions)
            kv = KV(*(a.at[:, :, :, length : length + count].set(b) for a, b in zip(kv, new)))
            logits.append(some[0])
        return np.concatenate(logits), kv


def check_windows(reader: Reader, widths, rows: int) -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(0, reader.lm.vocab, 12)
    logits, kv = reader.chain(text, 1)
    assert np.isfinite(logits).all()
    for width in widths:
        some, other = reader.chain(text, width)
        np.testing.assert_array_equal(some, logits, err_msg=f"windows of {width}")
        for a, b in zip(other, kv):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32), err_msg=str(width))

    # A tree: a wrong child of the root, and the true chain after it.
    parents, own = [-1, 0, 0, 2, 3], [0, 2, 3, 4]
    tokens, mask = np.array([text[0], text[1] + 1, *text[1:4]]) % reader.lm.vocab, np.eye(5, dtype=bool)
    for node, parent in enumerate(parents[1:], 1):
        mask[node] |= mask[parent]
    tree = tokens[None], mask[None], (START + mask.sum(-1) - 1)[None]
    some, new = reader.read(tree[0], reader.kv, [START], *tree[1:])
    np.testing.assert_array_equal(some[0, own], logits[:4])
    for a, b in zip(new, kv):
        np.testing.assert_array_equal(
            np.asarray(a[:, :, :, jnp.asarray(own)], np.float32), np.asarray(b[:, :, :, START : START + 4], np.float32)
        )

    # A batch, whose first row is the text.
    lengths = [START, 20, 133][:rows]
    several = np.concatenate([text[None, :5], rng.integers(0, reader.lm.vocab, (rows - 1, 5))])
    positions = np.asarray(lengths)[:, None] + np.arange(5)
    caches = KV(*(jnp.concatenate([a] + [a[:, :, ::-1] * 0.5] * (rows - 1), 1) for a in reader.kv))
    some, _ = reader.read(several, caches, lengths, np.tri(5, dtype=bool)[None].repeat(rows, 0), positions)
    np.testing.assert_array_equal(some[0], logits[:5])


def test_logits_and_entries_depend_neither_on_the_window_nor_on_other_rows():
    check_windows(Reader.make(dataclasses.replace(CONFIG, num_layers=2)), (3,), 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_logits_and_entries_of_four_layers_depend_neither_on_the_window_nor_on_other_rows(kind):
    check_windows(Reader.make(CONFIG, kind), (2, 3, 8, 12), 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_logits_and_entries_on_a_tpu_depend_neither_on_the_window_nor_on_other_rows(kind):
    check_windows(Reader.make(FOR_TPU, kind, ON_TPU), (2, 3, 8, 12), 3)


@pytest.mark.slow
def test_families_depend_neither_on_the_window_nor_on_other_rows():
    biased = dataclasses.replace(CONFIG, num_layers=1, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True)
    gemma = dataclasses.replace(CONFIG, num_layers=2, post_norms=True, activation="gelu_tanh", tie_embeddings=False)
    for config in (biased, gemma):
        check_windows(Reader.make(config), (3,), 2)
        sizes = {name: getattr(FOR_TPU, name) for name in ("hidden_size", "intermediate_size", "head_dim")}
        check_windows(Reader.make(dataclasses.replace(config, **sizes), execution=ON_TPU), (3,), 2)


FAMILIES = {
    "llama": {},
    "qwen": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "qk_norm": True},
    "gemma": {"post_norms": True, "activation": "gelu_tanh", "tie_embeddings": False, "embed_scale": 8.0},
}


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_xla_but_for_rounding(family, platform):
    config, execution = (CONFIG, PALLAS) if platform == "gpu" else (FOR_TPU, ON_TPU)
    config = dataclasses.replace(config, num_layers=1, **FAMILIES[family])
    by_kernels = Reader.make(config, execution=execution)
    by_xla = Reader.make(config, execution=Execution(platform=platform))
    text = np.arange(7) * 5 % 64
    ours, expected = (reader.chain(text, 7)[0] for reader in (by_kernels, by_xla))
    assert np.abs(ours - expected).max() < 0.03 * np.abs(expected).max()


def equations(jaxpr):
    """All equations of a program, those of its loops and calls included, and those of kernels left out."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name == "pallas_call":
            continue
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_nothing_between_embedding_and_logits_sums_but_the_kernels(platform):
    """XLA sums in an order that depends on the shapes, so it may round, move and add rows, but never sum over them."""
    config, execution = (CONFIG, PALLAS) if platform == "gpu" else (FOR_TPU, ON_TPU)
    lm = TransformerLM(dataclasses.replace(config, num_layers=2), "bfloat16", execution=execution, taps=(1,))
    params = jax.eval_shape(lambda: lm.init_params(jax.random.key(0)))
    cache = jax.eval_shape(lambda: lm.init_cache(1, 256))
    window = Window(jnp.zeros((1, 5), jnp.int32), jnp.zeros((1, 5), jnp.int32), jnp.ones((1, 5, 5), bool))

    def run(params, cache):
        features, new = lm.apply(params, window, cache)
        return lm.head(params, features), new

    found = list(equations(jax.make_jaxpr(run)(params, cache).jaxpr))
    kernels = [equation.params["name"] for equation in found if equation.primitive.name == "pallas_call"]
    attention = ["attend_pieces", "join_pieces"] if platform == "gpu" else ["rotate_heads", "attend"]
    layer = ["multiply", *attention, "multiply_add", "multiply_gated", "multiply_add"]
    assert kernels == [*(["prepare"] if platform == "gpu" else []), *layer * 2, "normalize", "multiply"]
    sums = ("dot_general", "reduce_sum", "reduce_max", "cumsum", "conv_general_dilated", "reduce_precision", "rsqrt")
    for equation in found:
        floats = any(jnp.issubdtype(out.aval.dtype, jnp.floating) for out in equation.outvars)
        assert not (floats and equation.primitive.name in sums), equation.primitive.name


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_devices_that_share_layers_exchange_numbers_only_by_gathers(platform):
    """Collectives that add have an order that the hardware chooses."""
    config = CONFIG if platform == "gpu" else dataclasses.replace(FOR_TPU, num_kv_heads=2, intermediate_size=512)
    execution = Execution(platform=platform, products="pallas", exact=True, shards=2)
    lm = TransformerLM(dataclasses.replace(config, num_layers=2), "bfloat16", execution=execution)
    params = jax.eval_shape(lambda: quantize(lm.init_params(jax.random.key(0))))
    cache = jax.eval_shape(lambda: lm.init_cache(1, 256))
    window = Window(jnp.zeros((1, 5), jnp.int32), jnp.zeros((1, 5), jnp.int32), jnp.ones((1, 5, 5), bool))

    def run(params, cache):
        features, new = lm.apply(params, window, cache)
        return lm.head(params, features), new

    mesh: Any = jax.sharding.AbstractMesh((1, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), axis_names={"data"}, check_vma=False)
    program = jax.make_jaxpr(mapped)(params, cache)
    logits, keys, values = program.out_avals
    assert logits.shape == (1, 5, config.vocab_size)
    assert keys.shape == values.shape == (2, 1, config.num_kv_heads, 5, config.head_dim)
    found = list(equations(program.jaxpr))
    kernels = [equation.params["name"] for equation in found if equation.primitive.name == "pallas_call"]
    attention = ["attend_pieces", "join_pieces"] if platform == "gpu" else ["rotate_heads", "attend"]
    add = ["multiply_segments", "add_shares"]
    layer = ["multiply", *attention, *add, "multiply_gated", *add]
    assert kernels == [*(["prepare"] if platform == "gpu" else []), *layer * 2, "normalize", "multiply"]
    assert sum(equation.primitive.name == "all_gather" for equation in found) == 2 * 2 + 2
    others = {"psum", "psum_invariant", "psum2", "psum_scatter", "reduce_scatter", "all_to_all", "ppermute", "pmax"}
    assert not others & {equation.primitive.name for equation in found}


@pytest.mark.slow
def test_texts_are_those_of_plain_decoding():
    config = dataclasses.replace(CONFIG, num_layers=2, tie_embeddings=False)
    target = TransformerLM(config, "bfloat16", execution=PALLAS)
    weights = Weights(lively(target.init_params(jax.random.key(0))))
    asked = toys.request([[1, 2, 3, 1, 2], [5, 6] * 4], 16, vocab=target.vocab, temperature=[0.0, 1.0])
    run = functools.partial(generate, weights=weights, request=asked, capacity=256)
    plain = texts(run(decoder(target, NoDraft())))
    for tree in (chain(3), dynamic(2, 3, 6)):
        assert texts(run(decoder(target, PromptLookup(tree, min_match=1)))) == plain


def test_products_need_attention_in_pallas_and_one_device():
    with pytest.raises(InvalidConfig, match="products='pallas' needs attention='pallas', got 'xla'"):
        Execution(products="pallas")
    with pytest.raises(InvalidConfig, match="products must be one of xla, pallas, got 'cuda'"):
        Execution(products="cuda")
    with pytest.raises(InvalidConfig, match="layers split over 2"):
        Execution(attention="pallas", products="pallas", shards=2)
    assert PALLAS.of_head().products == "xla"
