"""Tests that the loss and attention, computed a few positions at a time, are those of all positions at once."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers import trainees
from helpers.tiers import with_slow
from jaxspec.core.records import KV
from jaxspec.models import attention, query_chunks
from jaxspec.train import chunks, losses
from jaxspec.train.batch import Batch, draw_anchors
from jaxspec.train.eagle import attend_to_rows_and_chain
from jaxspec.train.packing import Text, pack_texts
from jaxspec.train.step import Trainable, compute_features, init_state, train_step

KINDS = {
    "medusa, kl": jaxspec.MedusaSettings(heads=3, projection="own", loss="kl"),
    "medusa2": jaxspec.MedusaSettings(heads=2, inputs="hidden", medusa2=True, cache_features=False),
    "eagle1": jaxspec.Eagle1Settings(),
    "eagle3": jaxspec.Eagle3Settings(depth=3, loss="lk-alpha", draft_vocab=len(range(0, trainees.LM.vocab, 2))),
    "eagle3, own": jaxspec.Eagle3Settings(depth=2, own_projection=True),
    "dspark": jaxspec.DSparkSettings(block=3, layers=1, anchors=7, markov_rank=4, confidence=0.5),
    "pard": jaxspec.PardSettings(depth=3, start="draft"),
}
LM, IDS = trainees.LM, np.arange(0, trainees.LM.vocab, 2)
ROWS, LENGTH = 2, 30


@functools.cache
def rows() -> Batch:
    """Texts in two rows, whose length no chunk divides."""
    rng = np.random.default_rng(0)
    texts = [Text(rng.integers(0, LM.vocab, n).astype(np.int32), np.arange(n) >= 3) for n in (17, 12, 26)]
    packed, _ = pack_texts(texts, LENGTH)
    assert packed.tokens.shape == (ROWS, LENGTH)
    tokens, segments, mask = map(jnp.asarray, packed)
    return Batch(tokens, segments, mask, jnp.zeros((ROWS, LENGTH, 0)), jax.random.split(jax.random.key(3), ROWS))


@functools.cache
def inputs(name: str) -> tuple:
    """The trainee, its parameters with noise, the target's tables, and rows with features."""
    settings, target = KINDS[name], trainees.target()
    trainee = settings.trainee(target, target if settings.trains_model else None)
    ids = IDS if name == "eagle3" else None
    rng = np.random.default_rng(1)
    params = target.params if settings.trains_model else trainee.init_params(target, ids)
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), params)
    frozen = losses.freeze(trainee, LM, target.params, ids, losses.needs_laws(settings, trainee))
    batch = rows()
    if trainee.blocks is not None:
        batch = batch._replace(anchors=draw_anchors(batch, trainee.blocks.anchors))
    features = jax.jit(functools.partial(compute_features, trainee.network(LM)))
    batch = batch._replace(features=features(target.params, batch.tokens, batch.segments))
    return settings, trainee, params, frozen, batch


def found(name: str) -> tuple:
    """The weighted loss, the sums, and the gradients of the heads, and of the projection where it is trained."""
    settings, trainee, params, frozen, batch = inputs(name)

    def loss(params, rows):
        weights = 0.1 * 0.8 ** jnp.arange(trainee.drafted)
        return losses.weigh_losses(settings, trainee, params, frozen._replace(rows=rows), batch, weights)

    gradients = (0, 1) if trainee.joint is not None else 0
    return jax.jit(jax.value_and_grad(loss, argnums=gradients, has_aux=True))(params, frozen.rows)


@pytest.mark.parametrize("name", with_slow(KINDS, KINDS.keys() - {"medusa, kl", "medusa2"}))
def test_chunks_change_neither_losses_nor_gradients(name, monkeypatch):
    """Chunks of 7 positions of each row, and attention of 8 queries at once, to the rounding of float32."""
    whole = found(name)
    monkeypatch.setattr(chunks, "POSITIONS_AT_ONCE", 7 * ROWS)
    monkeypatch.setattr(query_chunks, "QUERIES_AT_ONCE", 8)
    jax.clear_caches()  # a checkpointed function keeps its trace
    parts = found(name)
    jax.clear_caches()
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        scale = float(np.abs(one).max())
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6 * scale)


@pytest.mark.parametrize("name", with_slow([name for name in KINDS if name != "medusa2"], KINDS.keys() - {"eagle3"}))
def test_a_step_has_no_logits_of_all_positions(name, monkeypatch):
    """No array of a step, forwards and backwards, has the logits or the scores of all positions."""
    settings, trainee, params, frozen, batch = inputs(name)
    monkeypatch.setattr(chunks, "POSITIONS_AT_ONCE", 3 * ROWS)
    monkeypatch.setattr(query_chunks, "QUERIES_AT_ONCE", 4)
    batch = jax.tree.map(lambda leaf: leaf[None], batch._replace(key=None, anchors=None))
    state = init_state(settings, trainee, Trainable(params))
    jax.clear_caches()
    traced = jax.make_jaxpr(functools.partial(train_step, settings, trainee, LM))(frozen, state, batch)
    jax.clear_caches()
    anchors = LENGTH if trainee.blocks is None else trainee.blocks.anchors or LENGTH
    shapes = shapes_of(traced.jaxpr)
    logits = [shape for shape in shapes if len(shape) > 2 and shape[-1] == len(frozen.rows)]
    assert logits
    assert max(math.prod(shape[:-1]) for shape in logits) < ROWS * anchors
    assert not {shape for shape in shapes if shape[-1:] == (LENGTH,) and LENGTH in shape[-3:-1] and len(shape) > 3}


def shapes_of(jaxpr) -> set[tuple[int, ...]]:
    """The shapes of all arrays of a program."""
    found = {tuple(getattr(var.aval, "shape", ())) for eqn in jaxpr.eqns for var in eqn.outvars}
    for eqn in jaxpr.eqns:
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda leaf: hasattr(leaf, "jaxpr") or hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            found |= shapes_of(inner) if hasattr(inner, "eqns") else set()
    return found


@pytest.mark.parametrize("steps", [1, 3])
def test_attention_to_rows_and_chain_in_chunks(steps, monkeypatch):
    """Also the gradients, and with a last chunk that is padded."""
    rng = np.random.default_rng(0)
    queries = jnp.asarray(rng.normal(size=(2, 2, 3, 11, 8)), jnp.float32)
    seen = KV(*(jnp.asarray(rng.normal(size=(steps + 1, 2, 2, 11, 8)), jnp.float32) for _ in range(2)))
    sees = jnp.asarray(np.tril(np.ones((11, 11), bool)) & (rng.random((2, 11, 11)) < 0.7)) | jnp.eye(11, dtype=bool)

    def mixed(queries, seen):
        out = attend_to_rows_and_chain(queries, seen, steps - 1, sees, 0.3)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

    both = []
    for size in (11, 4):
        monkeypatch.setattr(query_chunks, "QUERIES_AT_ONCE", size)
        jax.clear_caches()
        both.append(jax.jit(jax.value_and_grad(mixed, argnums=(0, 1), has_aux=True))(queries, seen))
    for one, other in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_attention_without_a_cache_in_chunks(window, monkeypatch):
    """As features and rollouts are computed, also with sliding attention and with gradients."""
    rng = np.random.default_rng(0)
    queries = jnp.asarray(rng.normal(size=(2, 2, 2, 13, 8)), jnp.float32)
    keys, values = (jnp.asarray(rng.normal(size=(2, 2, 13, 8)), jnp.float32) for _ in range(2))
    empty = KV(*(jnp.zeros((1, 2, 2, 0, 8)) for _ in range(2)))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((13, 13), bool)), (2, 13, 13))
    first = None
    if window is not None:
        places = jnp.broadcast_to(jnp.arange(13), (2, 13))
        first = places - window + 1
        mask = mask & (places[:, None, :] >= first[:, :, None])

    def mixed(queries, keys, values):
        args = queries, empty, 0, jnp.zeros(2, jnp.int32), (keys, values), mask, None, 0.4, first
        out = attention.attend(*args)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

    both = []
    for size in (13, 5):
        monkeypatch.setattr(query_chunks, "QUERIES_AT_ONCE", size)
        jax.clear_caches()
        both.append(jax.jit(jax.value_and_grad(mixed, argnums=(0, 1, 2), has_aux=True))(queries, keys, values))
    for one, other in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
