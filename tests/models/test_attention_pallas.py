"""Tests the Pallas kernel of attention as plain operations: values, the order of its sums, what it reads, and texts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers.checkpoints import random_params, tiny_config, write_hf
from helpers.tiers import with_slow
from helpers.toys import decoder, generate, lively, request, texts
from helpers.toys import transformer as toy
from jaxspec.core.cache import storage_dtype
from jaxspec.core.records import KV
from jaxspec.core.sizes import BLOCK_SLOTS
from jaxspec.core.topology import chain, dynamic
from jaxspec.decode.state import Weights
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.errors import InvalidConfig
from jaxspec.models import attention_pallas, attention_pieces
from jaxspec.models.attention import attend
from jaxspec.models.attention_pallas import GROUP_TOKENS, attend_pallas
from jaxspec.models.sharding import check_attention

PLATFORMS = ("tpu", "gpu")
LAYER = 1


@functools.lru_cache
def compiled(platform: str | None):
    """The kernel's form for a platform, or XLA's."""

    def run(queries, prefix, length, window, mask, first):
        if platform is None:
            return attend(queries, prefix, LAYER, length, window, mask, None, queries.shape[-1] ** -0.5, first)
        scale = queries.shape[-1] ** -0.5
        return attend_pallas(queries, prefix, LAYER, length, window, mask, scale, first, platform, interpret=True)

    return jax.jit(run)


def forest(rng, batch: int, tokens: int, before: int) -> np.ndarray:
    """A random mask `[B, T, P + T]`: each token's last ancestor is any token before it, or none."""
    mask = np.zeros((batch, before + tokens, before + tokens), bool)
    for row in mask:
        chain = rng.random() < 0.3
        for node in range(before + tokens):
            parent = node - 1 if chain else rng.integers(-1, node)
            row[node] = row[parent] if parent >= 0 else False
            row[node, node] = True
    return mask[:, before:]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes of a call."""

    batch: int
    heads: int
    groups: int
    tokens: int
    before: int
    width: int
    slots: int
    windowed: bool

    @classmethod
    def draw(cls, rng) -> "Shape":
        batch, heads, groups = (int(n) for n in rng.integers(1, 4, 3))
        tokens, before = int(rng.choice([1, 2, 5, 9, 17, 40])), int(rng.choice([0, 0, 3]))
        slots = 256 * int(rng.integers(1, 5))
        return cls(batch, heads, groups, tokens, before, int(rng.choice([16, 64, 128])), slots, rng.random() < 0.4)


def arguments(rng, shape: Shape, dtype: str = "float32") -> tuple:
    """Random arguments of `attend` from the queries on."""

    def normal(*sizes: int):
        return jnp.asarray(rng.normal(size=sizes), dtype)

    whole = 2, shape.batch, shape.heads, shape.slots, shape.width
    stored = [jax.lax.bitcast_convert_type(normal(*whole), storage_dtype(dtype)) for _ in range(2)]
    window = tuple(normal(shape.batch, shape.heads, shape.before + shape.tokens, shape.width) for _ in range(2))
    mask = forest(rng, shape.batch, shape.tokens, shape.before)
    # Short texts, those around the borders of blocks, and any other.
    length = [rng.choice([rng.integers(0, 5), 64 * rng.integers(0, 5) + rng.integers(-2, 3), rng.integers(shape.slots)])
              for _ in range(shape.batch)]  # fmt: skip
    length = np.clip(length, 0, shape.slots - shape.tokens - shape.before).astype(np.int32)
    first = None
    if shape.windowed:  # wider than the window of tokens, as `sliding_window_mask` demands
        size = shape.tokens + shape.before + rng.integers(0, 200)
        first = jnp.asarray(length[:, None] + mask.sum(-1) - size, jnp.int32)
    queries = normal(shape.batch, shape.heads, shape.groups, shape.tokens, shape.width)
    return queries, KV(*stored), jnp.asarray(length), window, jnp.asarray(mask), first


def check_values(seed: int, draws: int, platforms=PLATFORMS) -> None:
    """Compares both forms with XLA's, to a millionth of the largest value, for one random shape and several texts."""
    rng = np.random.default_rng(seed)
    shape = Shape.draw(rng)
    for _ in range(draws):
        given = arguments(rng, shape)
        expected = compiled(None)(*given)
        for platform in platforms:
            most = 1e-6 * max(float(jnp.abs(a).max()) for a in (given[1].values, given[3][1]))
            np.testing.assert_allclose(compiled(platform)(*given), expected, rtol=0, atol=most, err_msg=str(shape))


@pytest.mark.parametrize("seed", with_slow(range(3), (1, 2)))
def test_values_are_those_of_xla(seed):
    check_values(seed, 12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 225))
def test_values_are_those_of_xla_for_a_thousand_shapes(seed):
    check_values(seed, 8)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_bfloat16_is_that_of_xla_but_for_its_rounding(platform):
    rng = np.random.default_rng(0)
    for _ in range(4):
        given = arguments(rng, Shape(2, 2, 2, 5, 0, 32, 512, False), "bfloat16")
        np.testing.assert_allclose(compiled(platform)(*given), compiled(None)(*given), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", with_slow(["float32", "bfloat16"], ("bfloat16",)))
@pytest.mark.parametrize("platform", PLATFORMS)
def test_bits_depend_neither_on_the_width_nor_on_what_is_cached(platform, dtype):
    """A chain of nine in one window, also with other tokens between and in a larger cache, or one token at a time."""
    run, depth, rng = compiled(platform), 9, np.random.default_rng(1)
    sizes = Shape(1, 2, 3, depth, 0, 64, 512, False)
    line = jnp.tril(jnp.ones((1, depth, depth), bool))
    apart = jnp.asarray([2 * i + 1 for i in range(depth)])
    for length in (
        0,
        1,
        GROUP_TOKENS - 5,
        2 * GROUP_TOKENS - 1,
        2 * GROUP_TOKENS,
        5 * GROUP_TOKENS - 3,
        256 - 4,
        256 + GROUP_TOKENS - 4,
        300,
    ):
        queries, prefix, _, window, _, _ = arguments(rng, sizes, dtype)
        lengths = jnp.asarray([length], jnp.int32)
        together = run(queries, prefix, lengths, window, line, None)

        spread = [rng.normal(size=(*a.shape[:-2], 2 * depth + 1, a.shape[-1])) for a in (queries, *window)]
        wide = [jnp.asarray(b, dtype).at[..., apart, :].set(a) for a, b in zip((queries, *window), spread)]
        mask = jnp.eye(2 * depth + 1, dtype=bool).at[apart[:, None], apart].set(line[0])[None]
        larger = KV(*(jnp.pad(a, ((0, 0),) * 3 + ((0, 256), (0, 0))) for a in prefix))
        among = run(wide[0], larger, lengths, (wide[1], wide[2]), mask, None)[..., apart, :]
        np.testing.assert_array_equal(among, together, err_msg=f"width, {length}")

        cached = prefix
        for step in range(depth):
            one = tuple(a[:, :, step : step + 1] for a in window)
            alone = run(queries[..., step : step + 1, :], cached, lengths + step, one, jnp.ones((1, 1, 1), bool), None)
            np.testing.assert_array_equal(alone[..., 0, :], together[..., step, :], err_msg=f"cached, {length}, {step}")
            stored = (jax.lax.bitcast_convert_type(a[:, :, 0], storage_dtype(dtype)) for a in one)
            cached = KV(*(a.at[LAYER, :, :, length + step].set(b) for a, b in zip(cached, stored)))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_only_blocks_of_the_text_are_read(platform):
    """Not a number is what lies before a sliding window's first block, and after the text's last one."""
    size = {"tpu": BLOCK_SLOTS, "gpu": attention_pieces.BLOCK}[platform]
    shape = Shape(2, 1, 2, 5, 0, 64, 1024, True)
    for seed in range(4):
        queries, prefix, length, window, mask, _ = arguments(np.random.default_rng(seed), shape)
        length = jnp.asarray([[3, 300], [600, 17], [255, 256], [700, 700]][seed], jnp.int32)
        first = length[:, None] + mask.sum(-1).astype(jnp.int32) - 150
        begin = jnp.maximum(first.min(1), 0) // size * size
        end = jnp.maximum(-(-length // size) * size, jnp.maximum(length // GROUP_TOKENS + 1, 2) * GROUP_TOKENS)
        slots = jnp.arange(1024)
        unread = ((slots < begin[:, None]) | (slots >= end[:, None]))[None, :, None, :, None]
        poisoned = KV(*(jnp.where(unread, jnp.nan, a) for a in prefix))
        assert bool(unread.any())
        good = compiled(platform)(queries, prefix, length, window, mask, first)
        np.testing.assert_array_equal(compiled(platform)(queries, poisoned, length, window, mask, first), good)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_bad_value_spoils_the_tokens_that_see_it_alone(platform):
    queries, prefix, length, window, mask, _ = arguments(np.random.default_rng(2), Shape(2, 2, 2, 5, 0, 32, 512, False))
    good = compiled(platform)(queries, prefix, length, window, mask, None)
    for part, bad in ((0, jnp.nan), (1, jnp.nan), (1, jnp.inf)):
        spoiled = list(window)
        spoiled[part] = spoiled[part].at[0, 1, 1, 4].set(bad)
        out = np.asarray(compiled(platform)(queries, prefix, length, tuple(spoiled), mask, None))
        sees = np.asarray(mask[0, :, 1])
        assert np.isnan(out[0, 1][:, sees]).all()
        np.testing.assert_array_equal(out[0, 1][:, ~sees], good[0, 1][:, ~sees])
        np.testing.assert_array_equal(out[0, 0], good[0, 0])
        np.testing.assert_array_equal(out[1], good[1])


@pytest.mark.slow
@pytest.mark.parametrize("platform", PLATFORMS)
def test_texts_are_those_of_plain_decoding_and_of_xla(platform, monkeypatch):
    target = toy()
    weights = Weights(lively(target.init_params(jax.random.key(0))))
    asked = request([[1, 2, 3, 1, 2], [5, 6] * 4], 24, vocab=target.vocab, temperature=[0.0, 1.0])

    expected = texts(generate(decoder(target, NoDraft()), weights, asked, 256))
    by_kernel = target.with_execution(attention="pallas", platform=platform)
    form = functools.partial(attend_pallas, interpret=True)
    monkeypatch.setattr(attention_pallas, "attend_pallas", form)
    # Each platform has a capacity of its own, so that nothing traced is used again.
    tree, capacity = {"tpu": (chain(3), 256), "gpu": (dynamic(2, 3, 6), 512)}[platform]
    drafting = decoder(by_kernel, PromptLookup(tree, min_match=1))
    assert texts(generate(drafting, weights, asked, capacity)) == expected


def test_what_there_is_no_kernel_for_is_refused(tmp_path):
    target = toy().with_execution(attention="pallas")
    cache = target.init_cache(1, 256)
    window = jaxspec.Window(jnp.ones((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1, 1), bool))
    with pytest.raises(InvalidConfig, match="for TPUs and GPUs, but the model runs on 'cpu'; use 'xla'"):
        target.apply(target.init_params(jax.random.key(0)), window, cache)
    with pytest.raises(InvalidConfig, match="a multiple of 128 on a TPU, got 64"):
        attention_pallas.check_pallas("tpu", jnp.float32, 64)
    with pytest.raises(InvalidConfig, match="a power of two, at least 16, on a GPU, got 96"):
        attention_pallas.check_pallas("gpu", jnp.float32, 96)
    with pytest.raises(InvalidConfig, match="reads float32 and bfloat16, but the cache holds int32"):
        attention_pallas.check_pallas("gpu", "int32", 64)
    attention_pallas.check_pallas("tpu", jnp.bfloat16, 256)
    attention_pallas.check_pallas("gpu", jnp.bfloat16, 64)
    given = arguments(np.random.default_rng(0), Shape(1, 1, 4, 300, 0, 16, 512, False))
    with pytest.raises(InvalidConfig, match="reads at most 256 tokens at once, got 300"):
        compiled("tpu")(*given)
    with pytest.raises(InvalidConfig, match="attention must be one of xla, pallas, got 'flash'"):
        target.with_execution(attention="flash")
    with pytest.raises(InvalidConfig, match="layers on one device, got layers split over 2"):
        target.with_execution(shards=2)
    mesh: Any = jax.sharding.AbstractMesh((2, 2), ("data", "model"))
    with pytest.raises(InvalidConfig, match="one device, got layers split over 2"):
        check_attention("pallas", mesh)
    config = tiny_config()
    source = write_hf(tmp_path, config, random_params(config))
    with pytest.raises(InvalidConfig, match="for TPUs and GPUs, but the model runs on 'cpu'"):
        jaxspec.load(source, attention="pallas")
    lm: Any = jaxspec.load(source).lm
    assert lm.execution.attention == "xla"
