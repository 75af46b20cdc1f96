"""Tests the drafter "medusa": heads on any tree, under any rule, and refusals."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers import toys
from helpers.narrow import instance
from helpers.tiers import with_slow
from jaxspec.core import noise
from jaxspec.core.draw import Draw, Noise
from jaxspec.core.noise import RoundNoise
from jaxspec.core.records import Advance, Context
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import branching, chain, dynamic, from_paths
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Weights
from jaxspec.drafters.medusa import Medusa
from jaxspec.errors import InvalidConfig, MissingDraft, ShapeMismatch
from jaxspec.heads.medusa_config import HeadsConfig
from jaxspec.heads.network import DraftHeads, flatten, init_params, unflatten
from jaxspec.registry import find
from jaxspec.schedules.confidence import Confidence

TARGET = toys.transformer()
PARAMS = toys.lively(TARGET.init_params(jax.random.key(0)))
NO_CACHE: Any = None  # heads read none
PROJECTION = instance(jax.Array, TARGET.unembedding(PARAMS))
MODEL = jaxspec.Model(TARGET, PARAMS)
IDS = np.arange(0, 60, 3)
LENGTH = jnp.array([3, 4])
KEYS = jax.random.split(jax.random.key(0), 2)
CONFIGS = {
    "hidden": HeadsConfig(64, 61, 3),
    "hidden, own, reduced": HeadsConfig(64, 61, 3, 2, projection="own", draft_vocab_size=20),
    "hidden, single": HeadsConfig(64, 61, 3, projection="single"),
    "path": HeadsConfig(64, 61, 3, 2, inputs="path"),
    "path, reduced": HeadsConfig(64, 61, 3, inputs="path", bias=False, draft_vocab_size=20),
    "recurrent": HeadsConfig(64, 61, 2, 2, inputs="recurrent"),  # the tests' trees are deeper: run on
    "recurrent, reduced": HeadsConfig(64, 61, 3, inputs="recurrent", bias=False, draft_vocab_size=20),
}


@functools.cache
def heads(name: str) -> DraftHeads:
    """With noise on every block."""
    config = CONFIGS[name]
    params = init_params(config, PROJECTION, IDS if config.draft_vocab_size else None)
    rng, much = np.random.default_rng(1), 0.05 if config.inputs == "recurrent" else 0.3
    noisy = {
        key: leaf if key == "tokens" else leaf + much * jnp.asarray(rng.normal(size=leaf.shape), jnp.float32)
        for key, leaf in flatten(params).items()
    }
    return DraftHeads(config, unflatten(noisy))


def by_hand(name: str, feature: np.ndarray, path: list[int]) -> np.ndarray:
    """The logits of the node at the end of a path (the root first), over the whole vocabulary, in numpy."""
    config, params = CONFIGS[name], {k: np.asarray(v, np.float64) for k, v in flatten(heads(name).params).items()}
    table, embed = (np.asarray(a, np.float64) for a in (PROJECTION, PARAMS["embed"]))
    head, x = len(path) - 1, feature.astype(np.float64)
    read, words = x, [embed[token] / np.sqrt(np.mean(embed[token] ** 2)) for token in path]
    if config.inputs == "path":
        read = np.concatenate([x, *words])
    for word in words if config.inputs == "recurrent" else ():
        read = np.concatenate([x, word])
        for layer in range(config.num_layers):
            inner = (read if layer == 0 else x) @ params[f"network.{layer}.up"] + params.get(f"network.{layer}.bias", 0)
            x = x + inner / (1 + np.exp(-inner)) @ params[f"network.{layer}.down"]
    for layer in range(config.num_layers if config.inputs != "recurrent" else 0):
        inner = (read if layer == 0 else x) @ params[f"blocks.{head}.{layer}.kernel"]
        inner = inner + params.get(f"blocks.{head}.{layer}.bias", 0)
        x = x + inner / (1 + np.exp(-inner))
    ids = IDS if config.draft_vocab_size else np.arange(61)
    rows = {"shared": lambda: table[ids], "single": lambda: params["projections.0"]}
    rows = rows.get(config.projection, lambda: params[f"projections.{head}"])()
    logits = np.full(61, -np.inf)
    logits[ids] = rows @ x
    return logits


@functools.cache
def drawn(nodes: int, ids: int) -> tuple[np.ndarray, np.ndarray]:
    """The noise that positions share with the target, and that of each node."""
    shared = noise.draw_gumbel(KEYS, LENGTH[:, None] + jnp.arange(3), 61)
    return np.asarray(shared), np.asarray(noise.draw_fresh(KEYS, LENGTH, jnp.arange(nodes), ids))


def proposed(name: str, tree, kind: Noise):
    """What heads propose below two random texts, which they were told of; the texts, their last features, and T."""
    drafter, params = Medusa.build(jaxspec.core.drafter.DrafterInputs(MODEL, tree=tree, heads=heads(name)))
    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.normal(size=(2, 4, 64)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 61, (2, 8)), jnp.int32)
    length, count = LENGTH, LENGTH
    state = drafter.init(params, 2, 8)
    state = drafter.absorb(params, state, Advance(tokens[:, :4], features, count, None, tokens, jnp.zeros(2, int)))
    still = drafter.absorb(params, state, Advance(tokens[:, :4], features, 0 * count, None, tokens, length))
    np.testing.assert_array_equal(state.feature, still.feature)
    temperature = 0.7 if kind is not Noise.NONE else 0.0
    keys, sampling = KEYS, Sampling(temperature=temperature).rows(2, 61)
    context = Context(tokens, length, NO_CACHE, PARAMS)

    @jax.jit
    def propose(params, state, context, keys, sampling):
        return drafter.propose(
            params,
            state,
            context,
            Draw(kind, RoundNoise(keys, context.length, jnp.asarray(temperature > 0), 61), sampling),
        )[0]

    proposal = propose(params, state, context, keys, sampling)
    last = np.asarray(features)[np.arange(2), np.asarray(count) - 1]
    return proposal, np.asarray(tokens)[np.arange(2), np.asarray(length) - 1], last, temperature


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", with_slow(Noise, (Noise.NONE, Noise.SHARED)))
def test_proposals_are_those_computed_by_hand(name, kind):
    """Every node's children are the likeliest of its head's law under the noise of the rule; and so is the law."""
    tree = from_paths([(0, 0, 0), (0, 1), (1, 0), (2,)])
    proposal, roots, features, temperature = proposed(name, tree, kind)
    ids = IDS if CONFIGS[name].draft_vocab_size else np.arange(61)
    shared, own = drawn(tree.shape.nodes, ids.size)
    fresh = np.full((*own.shape[:2], 61), 0.0)
    fresh[..., ids] = own
    for row in range(2):
        for node in range(tree.shape.nodes):
            below = [child for child in tree.tree.children[node] if child >= 0]
            if not below:
                continue
            path = [int(proposal.tokens[row, at]) for at in tree.tree.paths[node] if at >= 0]
            path[0] = int(roots[row])
            score = by_hand(name, features[row], path) / (temperature or 1)
            if kind is Noise.FRESH:
                law = score - np.logaddexp.reduce(score)
                np.testing.assert_allclose(proposal.law[row, node], law, atol=1e-4)
            depth = len(path) - 1
            extra = {Noise.SHARED: shared[row, depth], Noise.FRESH: fresh[row, node], Noise.NONE: 0}[kind]
            wanted = np.argsort(-(score + extra), kind="stable")[: len(below)]
            assert [int(proposal.tokens[row, child]) for child in below] == wanted.tolist()


@pytest.mark.parametrize("name", ["hidden, own, reduced", "path", "path, reduced", "recurrent"])
@pytest.mark.parametrize("kind", with_slow([Noise.SHARED, Noise.NONE], (Noise.NONE,)))
def test_dynamic_trees_are_eagle2s(name, kind):
    tree = dynamic(3, 3, 9)
    proposal, roots, features, temperature = proposed(name, tree, kind)
    shared = drawn(1, 61)[0]
    for row in range(2):

        def log_share(text, row=row):
            score = by_hand(name, features[row], [int(roots[row]), *text]) / (temperature or 1)
            return toys.log_softmax(score + (shared[row, len(text)] if kind is Noise.SHARED else 0))

        parents, nodes = toys.eagle2(log_share, tree.beam, tree.depth, tree.nodes)
        assert proposal.tree.parents[row].tolist() == parents
        assert proposal.tokens[row, 1:].tolist() == [text[-1] for text in nodes[1:]]
    assert len({tuple(row) for row in proposal.tree.parents.tolist()}) == 2, "rows have trees of their own"


@pytest.mark.parametrize(
    ("name", "tree"),
    with_slow(
        [("hidden", branching(3, 2, 1)), ("path, reduced", branching(3, 2, 1)), ("recurrent", dynamic(3, 5, 8))],
        ("hidden", "path, reduced"),
    ),
)
def test_text_is_that_of_plain_decoding(name, tree):
    prompts, key = [[1, 2, 3], [4, 5, 6, 7, 8]], jax.random.key(3)
    for temperature in (0.0, 0.8):
        options = {"key": key, "sampling": Sampling(temperature=temperature), "max_new_tokens": 24}
        options |= {"tree": tree, "width_matched": True}
        plain = jaxspec.generate(MODEL, prompts, drafter="none", **options)
        drafted = jaxspec.generate(MODEL, prompts, drafter="medusa", heads=heads(name), **options)
        assert [row.tokens for row in drafted] == [row.tokens for row in plain]
        assert drafted.stats.drafted > 0
        assert drafted.stats.accepted > 0


@pytest.mark.parametrize(("threshold", "levels"), [(0.0, [0, 1, 2]), (1.0, [0])])
def test_what_stands_below_a_doubt_is_not_computed(threshold, levels):
    ran = []

    class Noted(Medusa):
        def _project(self, params, context, head, features):
            jax.debug.callback(lambda: ran.append(head))
            return super()._project(params, context, head, features)

    drafter, params = Noted.build(jaxspec.core.drafter.DrafterInputs(MODEL, tree=chain(3), heads=heads("recurrent")))
    schedule = Confidence(threshold=threshold)
    draw = Draw(
        Noise.NONE, RoundNoise(KEYS, LENGTH, jnp.asarray(False), 61), Sampling().rows(2, 61),
        limit=jnp.array([3, 3]), stop_after=schedule.stop_after,
    )  # fmt: skip
    context = Context(jnp.ones((2, 8), jnp.int32), LENGTH, NO_CACHE, PARAMS)
    proposal, _ = jax.jit(lambda params, state: drafter.propose(params, state, context, draw))(
        params, drafter.init(params, 2, 8)
    )
    assert ((proposal.tokens[:, 1:] >= 0).sum(-1) == (3 if threshold == 0 else 0)).all()
    jax.effects_barrier()
    assert ran == levels


@pytest.mark.slow
def test_a_rule_that_weighs_the_law_takes_them():
    out = jaxspec.generate(
        MODEL, [[1, 2, 3]], key=jax.random.key(0), drafter="medusa", heads=heads("path"), rule="traversal",
        tree=branching(2, 1), sampling=Sampling(temperature=1.0), max_new_tokens=8,
    )  # fmt: skip
    assert len(out[0].tokens) == 8
    assert out.stats.drafted > 0


def test_heads_untrained_are_the_targets_own():
    """Every head starts as the target's: it drafts again what the target said last time."""
    config = HeadsConfig(64, 61, 2)
    drafter, params = Medusa.build(
        jaxspec.core.drafter.DrafterInputs(MODEL, tree=chain(2), heads=DraftHeads(config, init_params(config)))
    )
    feature = jnp.asarray(np.random.default_rng(0).normal(size=(1, 64)), jnp.float32)
    draw = Draw(
        Noise.NONE,
        RoundNoise(jax.random.split(jax.random.key(0), 1), jnp.array([1]), jnp.asarray(False), 61),
        Sampling().rows(1, 61),
    )
    context = Context(jnp.zeros((1, 4), jnp.int32), jnp.array([1]), NO_CACHE, PARAMS)
    proposal, _ = drafter.propose(params, drafter.init(params, 1, 4)._replace(feature=feature), context, draw)
    own = int(TARGET.head(PARAMS, feature[None])[0, 0].argmax())
    assert proposal.tokens[0, 1:].tolist() == [own, own]


def test_what_does_not_fit_is_refused():
    made = heads("hidden")
    say = functools.partial(jaxspec.generate, MODEL, [[1]], drafter="medusa")
    with pytest.raises(MissingDraft, match="needs Medusa heads"):
        say()
    with pytest.raises(InvalidConfig, match="does not take heads"):
        jaxspec.generate(MODEL, [[1]], drafter="none", heads=made)
    with pytest.raises(InvalidConfig, match="depth 1 to 3, got a tree of depth 4"):
        say(heads=made, tree=4)
    own = HeadsConfig(64, 61, 3, inputs="recurrent", projection="own")  # a fourth would have nothing to project by
    with pytest.raises(InvalidConfig, match="depth 1 to 3, got a tree of depth 4"):
        say(heads=DraftHeads(own, init_params(own, PROJECTION)), tree=4)
    with pytest.raises(InvalidConfig, match="depth 1 to inf, got a tree of depth 0"):
        say(heads=heads("recurrent"), tree=from_paths([]))
    with pytest.raises(InvalidConfig, match="21 children, but the heads have a vocabulary of only 20"):
        say(heads=heads("path, reduced"), tree=dynamic(21, 2, 4))
    with pytest.raises(InvalidConfig, match="21 children, but the heads have a vocabulary of only 20"):
        say(heads=heads("path, reduced"), tree=branching(21))
    for name, other in (("features of 32", {"hidden_size": 32}), ("a vocabulary of 9", {"vocab_size": 9})):
        config = dataclasses.replace(made.config, **other)
        with pytest.raises(ShapeMismatch, match=f"heads are for {name}"):
            say(heads=DraftHeads(config, init_params(config)))
    function = jaxspec.Model(jaxspec.FunctionLM(lambda p, t, n: jnp.zeros((t.shape[0], 61)), 61), ())
    with pytest.raises(InvalidConfig, match="target's 'embedding', which FunctionLM does not have"):
        jaxspec.generate(function, [[1]], drafter="medusa", heads=heads("path"))
    for wrong in ({"num_heads": 0}, {"inputs": "all"}, {"draft_vocab_size": 99}, {"inputs": "path", "num_layers": 0},
                  {"inputs": "recurrent", "num_layers": 0}):  # fmt: skip
        with pytest.raises(InvalidConfig):
            dataclasses.replace(made.config, **wrong)


def test_decoding_heads_compile_once_per_configuration():
    drafter, params = Medusa.build(jaxspec.core.drafter.DrafterInputs(MODEL, tree=chain(2), heads=heads("hidden")))
    again, _ = Medusa.build(jaxspec.core.drafter.DrafterInputs(MODEL, tree=chain(2), heads=heads("hidden")))
    assert drafter == again
    assert hash(drafter) == hash(again)
    one, other = (Decoder(TARGET, d, find("rule", "coupled")()) for d in (drafter, again))
    assert one == other
    assert Weights(PARAMS, params) is not None
