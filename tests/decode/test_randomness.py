"""Tests the three streams of a row's key: distinct, never drawn from twice, and what happens when they are mixed."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.toys import request
from jaxspec.core import noise as noises
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import branching, chain
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Weights
from jaxspec.drafters.model import ModelDraft
from jaxspec.registry import find
from jaxspec.testing import TableLM, g_test, joint_law, model_law, sample_texts

V = 4
LM = TableLM(V)
WEIGHTS = Weights(*({"table": LM.init_params(jax.random.key(i), 1.5)["table"]} for i in range(2)))


def test_no_two_places_share_a_number(seed):
    """Over rows, streams, rounds, positions and nodes: 11,280 first values, all different but for rounding."""

    @jax.jit
    def everything(keys):
        position = noises.draw_gumbel(keys, jnp.broadcast_to(jnp.arange(900), (8, 900)), 2)[..., 0]
        each, roots = jnp.repeat(keys, 30), jnp.tile(jnp.arange(30), 8)
        fresh = noises.draw_fresh(each, roots, jnp.arange(16), 2)[..., 0]
        return position, fresh, -jnp.log(-jnp.log(noises.draw_uniform(each, roots)))

    values = np.concatenate([np.asarray(a).ravel() for a in everything(jax.random.split(jax.random.key(seed), 8))])
    assert values.size == 8 * (900 + 30 * 16 + 30)
    # Of so many float32 values some two dozen pairs are equal by chance; a stream used twice would make thousands.
    assert len(np.unique(values)) > values.size - 100


def test_streams_are_independent():
    """The number that ends a walk, the noise of the drafts and that of the token: no correlation over 20,000 rows."""

    @jax.jit
    def columns(keys):
        roots = jnp.full(keys.shape, 7)
        uniform = jnp.stack([noises.draw_uniform(keys, roots), noises.draw_uniform(keys, roots + 1)], axis=1)
        fresh = noises.draw_fresh(keys, roots, jnp.arange(2), 2)[..., 0]
        return jnp.concatenate(
            [uniform, fresh, noises.draw_gumbel(keys, roots[:, None] + jnp.arange(2), 2)[..., 0]], axis=1
        )

    values = np.asarray(columns(jax.random.split(jax.random.key(1), 20_000)))
    off = np.corrcoef(values.T) - np.eye(6)
    assert np.abs(off).max() < 4.5 / np.sqrt(20_000)


def watched(monkeypatch, seen):
    """Lets the streams report what is drawn from them: (stream, row's key, place)."""

    def report(stream, *places):
        key, *places = (np.asarray(p) for p in places)
        for row in range(len(key)):
            for place in np.reshape(np.stack(places, -1)[row], (-1, len(places))):
                seen[(stream, int(key[row, 1]), *place.tolist())] += 1

    def noting(stream, function):
        def drawn(keys, roots, *rest):
            raw = jax.random.key_data(keys)
            if stream == "fresh":
                shape = (*roots.shape, rest[0].shape[0])
                places = jnp.broadcast_to(roots[:, None], shape), jnp.broadcast_to(rest[0], shape)
            else:
                places = (roots,)
            jax.debug.callback(lambda *a: report(stream, *a), raw, *places)
            return function(keys, roots, *rest)

        return drawn

    for name in ("draw_gumbel", "draw_fresh", "draw_uniform"):
        monkeypatch.setattr(noises, name, noting(name.removeprefix("draw_"), getattr(noises, name)))


@pytest.mark.parametrize("name", ["coupled", "rejection", "deterministic"])
def test_every_place_is_drawn_from_once(name, monkeypatch):
    """What a checker of key reuse misses: one array used twice, or a key folded with a constant.

    Under a weighing rule every place of every stream is drawn from once in a whole decode. The coupled rule draws the
    noise of a position as often as it looks at it, from one stream: that is what it rests on.
    """
    seen, topology = collections.Counter(), branching(2, 1)
    watched(monkeypatch, seen)
    decoder = Decoder(LM, ModelDraft(LM, topology), find("rule", name)(), chunk=2, width_matched=True)
    asked = request([[3, 1]] * 2, 6, vocab=V, temperature=1.0)
    generate = jax.jit(lambda weights, asked: decoder.generate(weights, asked, 64))
    result = jax.block_until_ready(generate(WEIGHTS, asked))
    jax.effects_barrier()
    rounds = int((np.asarray(result.log.emitted) > 0).sum(1).max())
    assert rounds >= 3
    spare = topology.shape.nodes  # where a level is padded, and what is drawn is dropped
    seen = {place: times for place, times in seen.items() if place[0] != "fresh" or place[-1] != spare}
    # A row that has finished stands still, and computes on.
    going = np.asarray(result.length).min()
    used = {place: times for place, times in seen.items() if place[2] < going - 1}
    streams = {place[0] for place in used}
    if name == "coupled":
        assert streams == {"gumbel"}
        assert max(used.values()) > 1
    else:
        assert streams == {"gumbel", "uniform"} | ({"fresh"} if name == "rejection" else set())
        assert set(used.values()) == {1}


FRESH = noises.draw_fresh


def position_noise(keys, roots, nodes, vocab, wanted=True):
    """What the drafter of a weighing rule must not see: on a chain node n draws the token at root + n."""
    return noises.draw_gumbel(keys, roots[:, None] + nodes, vocab, wanted)


def same_noise_everywhere(keys, roots, nodes, vocab, wanted=True):
    """A key folded with a constant: the nodes of a round draw with one array."""
    return FRESH(keys, roots, jnp.zeros_like(nodes), vocab, wanted)


@pytest.mark.parametrize("wrong", [None, position_noise, same_noise_everywhere], ids=["right", "mixed", "constant"])
@pytest.mark.slow
def test_mixed_streams_bias_the_text(wrong, monkeypatch):
    """A rejection rule whose drafts are drawn with the noise of the token after them, or all with one array."""
    if wrong is not None:
        monkeypatch.setattr(noises, "draw_fresh", wrong)
    # A decoder of its own for each: what was compiled for an equal one would be used again.
    decoder = Decoder(LM, ModelDraft(LM, chain(2), ), find("rule", "rejection")(), width_matched=True,
                      chunk=2 + [None, position_noise, same_noise_everywhere].index(wrong))  # fmt: skip
    sampling = Sampling(temperature=1.0)
    texts = sample_texts(decoder, WEIGHTS, [3, 1], 3, sampling, samples=32_000, batch=8000)
    found = g_test(texts.counts, joint_law(model_law(LM, WEIGHTS.target, [3, 1], sampling), 3))
    assert found.p > 1e-3 if wrong is None else found.p < 1e-9


@pytest.mark.parametrize("name", ["coupled", "rejection"])
def test_no_key_is_consumed_twice(name):
    """JAX's own checker on a round: tracing fails where one key is drawn from twice."""
    decoder = Decoder(LM, ModelDraft(LM, chain(2)), find("rule", name)(), chunk=2, width_matched=True)
    asked = request([[3, 1]], 4, vocab=V, temperature=1.0)
    with jax.debug_key_reuse(True):
        state = jax.jit(decoder.init, static_argnums=2)(WEIGHTS, asked, 64)
        state = jax.jit(decoder.step)(WEIGHTS, state)
        assert int(state.length[0]) > 2

        @jax.jit
        def twice(key):
            return jax.random.normal(key), jax.random.normal(key)

        with pytest.raises(jax.errors.KeyReuseError):
            twice(jax.random.key(0))
