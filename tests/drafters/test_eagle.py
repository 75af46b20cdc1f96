"""Tests the drafter "eagle": its cache, a head that knows the target, texts under trees and rules, and refusals."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from cases import TREES
from helpers import toys
from helpers.tiers import with_slow
from helpers.toys import RAGGED
from jaxspec.core.networks import with_taps
from jaxspec.core.records import Advance, Window
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import branching, chain, dynamic
from jaxspec.decode.state import Weights
from jaxspec.drafters.eagle import Eagle
from jaxspec.drafters.none import NoDraft
from jaxspec.errors import InvalidConfig, MissingDraft, ShapeMismatch
from jaxspec.heads.eagle_config import EagleConfig
from jaxspec.heads.network import DraftHeads, init_cache, init_params, make_network
from jaxspec.heads.network import init_params as medusa_params
from jaxspec.models.config import ModelConfig
from jaxspec.models.functional import FunctionLM
from jaxspec.models.rope import Rope
from jaxspec.rules.coupled import Coupled
from jaxspec.schedules.confidence import Confidence

V = 13
TARGET = toys.transformer(vocab_size=V, num_layers=4)
PARAMS = toys.lively(TARGET.init_params(jax.random.key(0)), 2.0)
MODEL = jaxspec.Model(TARGET, PARAMS)
LAYER = dataclasses.replace(TARGET.config, num_layers=1, rope=Rope(500.0))
TWO = dataclasses.replace(LAYER, num_layers=2, qk_norm=True, qkv_bias=True)
CONFIGS = {
    "1": EagleConfig(LAYER, 1, fc_bias=True),
    "3": EagleConfig(LAYER),
    "3.1": EagleConfig(LAYER, taps=(1, 4), draft_vocab_size=7, fc_norm=True, norm_output=True, own_projection=True),
    "3, two layers": EagleConfig(TWO, norm_before_fc=True, norm_before_residual=True, own_embedding=True, fc_bias=True),
    "3, the target's rows": EagleConfig(LAYER, taps=(2,), draft_vocab_size=7),
}
IDS = np.arange(0, V, 2)


@functools.cache
def heads(name: str) -> DraftHeads:
    """With norms and biases that are not those of a beginning."""
    config = CONFIGS[name]
    params = init_params(config, key=jax.random.key(1), tokens=IDS if config.draft_vocab_size else None)
    rng = np.random.default_rng(2)

    def stir(leaf):
        return leaf + 0.2 * jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) if leaf.ndim == 1 else leaf

    return DraftHeads(
        config, {key: leaf if key == "tokens" else jax.tree.map(stir, leaf) for key, leaf in params.items()}
    )


def built(name: str, tree) -> tuple[Eagle, Any]:
    return Eagle.build(jaxspec.DrafterInputs(MODEL, tree=tree, heads=heads(name)))


@functools.partial(jax.jit, static_argnums=0)
def fresh_pass(drafter: Eagle, params, texts):
    """The states, keys and values of whole texts, read at once: row t has the target's state at t."""
    target, config, (batch, size) = with_taps(TARGET, drafter.needs.taps), drafter.config, texts.shape
    mask = jnp.broadcast_to(jnp.tri(size - 1, dtype=bool), (batch, size - 1, size - 1))
    places = jnp.broadcast_to(jnp.arange(size - 1), (batch, size - 1))
    features, _ = target.apply(PARAMS, Window(texts[:, :-1], places, mask), target.init_cache(batch, 0))
    head, window = make_network(config, params), Window(texts[:, 1:], places, mask)
    table = params["embed"] if config.own_embedding else PARAMS["embed"]
    return head(head.fuse(features), table[window.tokens], window, init_cache(config, batch, 0, "float32"))


@pytest.mark.parametrize("name", with_slow(CONFIGS, CONFIGS.keys() - {"3.1"}))
def test_after_every_round_the_cache_is_that_of_a_fresh_pass(name):
    """Prompts of one token and of several chunks, rounds, a further turn, and finished rows."""
    drafter, params = built(name, RAGGED)
    decoder, weights = toys.decoder(TARGET, drafter), Weights(PARAMS, params)
    prompts = [[1], [2, 3, 4, 5, 6, 7, 8, 9, 1], [5, 6, 7, 8]]
    asked = toys.request(prompts, [14, 12, 2], vocab=V, temperature=[0.0, 0.9, 0.5])

    def check(state):
        states, entries = fresh_pass(drafter, params, state.tokens[:, :64])  # what follows a text changes nothing
        for row, length in enumerate(state.length.tolist()):
            assert int(state.draft.cache.length[row]) == length - 1
            if length > 1:
                np.testing.assert_allclose(state.draft.hidden[row], states[row, length - 2], atol=2e-5)
                for found, expected in zip(state.draft.cache.stores, entries):
                    found, expected = (np.asarray(a)[:, row, :, : length - 1] for a in (found, expected))
                    np.testing.assert_allclose(found, expected, atol=2e-5)

    state = toys.start(decoder, weights, asked, 64)
    check(state)
    for _ in range(3):
        state = toys.step(decoder, weights, state)
    check(state)
    state = toys.run(decoder, weights, state)
    check(state)
    more = toys.request([[3, 3], [], [1, 2, 3, 4, 5, 6]], [5, 5, 5], vocab=V)
    state = toys.run(decoder, weights, toys.extend(decoder, weights, state, more))
    check(state)


@pytest.mark.parametrize("name", ["1", "3.1"])
def test_an_extension_of_some_rows_is_that_of_each(name):
    drafter, params = built(name, chain(2))
    rng = np.random.default_rng(0)
    width = 64 * (1 + len(drafter.needs.taps))
    tokens, features = rng.integers(0, V, (2, 5)), rng.normal(size=(2, 5, width)).astype(np.float32)
    absorb = jax.jit(drafter.absorb)
    start = jnp.array([0, 0])

    def advance(first, last, count):
        part = jnp.asarray(tokens[:, first:last], jnp.int32), jnp.asarray(features[:, first:last])
        return Advance(*part, count, None, jnp.asarray(tokens, jnp.int32), start + first, PARAMS)

    once = absorb(params, drafter.init(params, 2, 64), advance(0, 5, jnp.array([5, 3])))
    state = drafter.init(params, 2, 64)
    for at in range(5):
        state = absorb(params, state, advance(at, at + 1, jnp.array([1, int(at < 3)])))
    np.testing.assert_array_equal(once.cache.length, [4, 2])
    np.testing.assert_array_equal(state.cache.length, once.cache.length)
    np.testing.assert_allclose(state.hidden, once.hidden, atol=1e-5)
    for a, b in zip(state.cache.stores, once.cache.stores):
        for row, count in enumerate((4, 2)):
            np.testing.assert_allclose(a[:, row, :, :count], b[:, row, :, :count], atol=1e-5)


# Heads that know the target.


@dataclasses.dataclass(frozen=True)
class Recurrent(FunctionLM):
    """A target whose feature is `A` times the one before plus the token's embedding; its taps are its features."""

    taps: tuple[int, ...] = ()
    depth: int = 1

    def apply(self, params, window, cache, past=None):
        features, new = super().apply(params, window, cache, past)
        return jnp.concatenate([features] * (1 + len(self.taps)), -1), new

    def head(self, params, features):
        return features[..., :WIDTH] @ params["out"].T

    def embedding(self, params):
        return params["embed"]

    def unembedding(self, params):
        return params["out"]


WIDTH = 16


def read_text(params, tokens, lengths):
    def step(feature, at):
        token, index = at
        new = feature @ params["again"].T + params["embed"][token]
        return jnp.where((index < lengths)[:, None], new, feature), None

    places = jnp.arange(tokens.shape[1])
    return jax.lax.scan(step, jnp.zeros((len(tokens), WIDTH)), (tokens.T, places))[0]


def known(version: int) -> tuple[jaxspec.Model, DraftHeads]:
    """A target, and a head that computes the target's next feature."""
    rng = np.random.default_rng(3)
    embed = rng.normal(size=(V, WIDTH))
    embed = jnp.asarray(embed / np.sqrt(np.mean(embed**2, 1, keepdims=True)), jnp.float32)
    again = jnp.asarray(0.2 * rng.normal(size=(WIDTH, WIDTH)) * (version == 1), jnp.float32)
    params = {"embed": embed, "again": again, "out": jnp.asarray(rng.normal(size=(V, WIDTH)), jnp.float32)}
    layer = ModelConfig(V, WIDTH, 8, 1, 2, 2, 8, norm_eps=1e-12, qkv_bias=version == 3)
    config = EagleConfig(layer, version, taps=None if version == 1 else (1,), norm_before_residual=version == 3)
    weights = jax.tree.map(jnp.zeros_like, init_params(config, key=jax.random.key(0)))
    block, one = weights["layers"][0], jnp.eye(WIDTH)
    if version == 1:
        weights["fc"] = jnp.concatenate([one, again.T])  # the feature after a token: its embedding, and A times f
    else:  # a row attends to itself alone, where its score is far above that of all others, and takes the embedding
        block["attn_norm"], weights["norm"] = jnp.ones(WIDTH), jnp.ones(WIDTH)
        block["qkv"] = block["qkv"].at[:WIDTH, 2 * WIDTH :].set(one)
        block["qkv_bias"] = block["qkv_bias"].at[: 2 * WIDTH].set(30.0)
        block["out"] = one
    return jaxspec.Model(Recurrent(read_text, V), params), DraftHeads(config, weights)


@pytest.mark.parametrize(
    ("version", "shape"),
    with_slow([(3, "dynamic"), (3, "chain"), (1, "dynamic"), (1, "chain")], [(3, "chain"), 1]),
)
def test_a_head_that_knows_the_target_is_accepted_whole(version, shape):
    tree = {"chain": chain(4), "dynamic": dynamic(3, 4, 12)}[shape]
    model, head = known(version)
    options: dict[str, Any] = {
        "key": jax.random.key(0), "sampling": Sampling(temperature=[0.0, 0.8]), "max_new_tokens": 25,
    }  # fmt: skip
    found = jaxspec.generate(model, [[1, 2], [3, 4, 5]], drafter="eagle", heads=head, tree=tree, **options)
    assert found.stats.tokens_per_round == 5
    plain = jaxspec.generate(model, [[1, 2], [3, 4, 5]], drafter="none", **options)
    assert [row.tokens for row in found] == [row.tokens for row in plain]


# Texts.


@pytest.mark.parametrize(
    ("name", "tree"),
    with_slow(
        [
            ("1", "chain-4"),
            ("3", "ragged"),
            ("3.1", "dynamic"),
            ("3, two layers", "dynamic"),
            ("3, the target's rows", "wide"),
        ],
        ("1", "3", "3, two layers", "3, the target's rows"),
    ),
)
def test_text_is_that_of_plain_decoding(name, tree):
    """Greedy and sampled rows, with a vmapped decoder, too."""
    drafter, params = built(name, TREES[tree])
    asked = toys.request([[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]], 24, vocab=V, temperature=[0.0, 0.7, 1.2])
    plain = toys.decoder(TARGET, NoDraft(TREES[tree]), width_matched=True)
    decoder = toys.decoder(TARGET, drafter, width_matched=True)
    expected = toys.generate(plain, Weights(PARAMS), asked, 64)
    found = toys.generate(decoder, Weights(PARAMS, params), asked, 64)
    assert toys.texts(found) == toys.texts(expected)
    assert np.asarray(found.log.accepted).sum() > 0


@pytest.mark.slow
def test_under_vmap_it_is_the_batch():
    drafter, params = built("3.1", chain(3))
    decoder = toys.decoder(TARGET, drafter)
    asked = toys.request([[1, 2, 3], [4, 5, 6, 7, 8, 9]], 16, vocab=V, temperature=[0.0, 0.7])
    weights = Weights(PARAMS, params)
    mapped = jax.jit(jax.vmap(lambda one: decoder.generate(weights, one, 64)))(asked)
    assert toys.texts(mapped) == toys.texts(toys.generate(decoder, weights, asked, 64))


@pytest.mark.parametrize(
    ("rule", "tree", "schedule"),
    [
        ("deterministic", dynamic(3, 3, 9), None),
        ("traversal", RAGGED, None),
        ("coupled", chain(4), Confidence(threshold=0.3)),
    ],
)
@pytest.mark.slow
def test_rules_and_schedules(rule, tree, schedule):
    """Greedy text is plain decoding's under every rule; what stands below a doubt is not drafted."""
    common: dict[str, Any] = {
        "max_new_tokens": 16,
        "sampling": Sampling(temperature=[0.0, 1.0]),
        "key": jax.random.key(1),
    }
    found = jaxspec.generate(
        MODEL, [[1, 2, 3], [4, 5]], drafter="eagle", heads=heads("3"), rule=rule, tree=tree, schedule=schedule, **common
    )
    plain = jaxspec.generate(MODEL, [[1, 2, 3], [4, 5]], drafter="none", **common)
    assert found[0].tokens == plain[0].tokens
    assert (found[1].tokens == plain[1].tokens) >= (rule == "coupled")
    assert found.stats.drafted > 0
    assert (found.stats.drafted < 4 * found.stats.rounds) == (schedule is not None) or tree != chain(4)


# Refusals.


def test_options_replace_what_the_file_says():
    options = {"rope_theta": 1e6, "taps": "1,3,4"}
    drafter, _ = Eagle.build(jaxspec.DrafterInputs(MODEL, heads=heads("3"), options=options))
    assert drafter.needs.taps == (1, 3, 4)
    assert drafter.config.decoder.rope.theta == 1e6
    assert built("3", chain(2))[0].needs.taps == (1, 2, 2), "by default 2, half of them and all but 3, in order"


def test_what_does_not_fit_is_refused():
    say = functools.partial(jaxspec.generate, MODEL, [[1]], drafter="eagle")
    with pytest.raises(MissingDraft, match="needs EAGLE heads"):
        say()
    medusa = jaxspec.HeadsConfig(64, V, 2)
    other = DraftHeads(medusa, medusa_params(medusa), name="some")
    with pytest.raises(InvalidConfig, match=r"'eagle' cannot use 'some' .2 heads, inputs='hidden'.*drafter 'medusa'"):
        say(heads=other)
    with pytest.raises(InvalidConfig, match=r"'medusa' cannot use .*an EAGLE-3 head of 1 layer.*drafter 'eagle'"):
        jaxspec.generate(MODEL, [[1]], drafter="medusa", heads=heads("3"))
    with pytest.raises(InvalidConfig, match="a tree of at least one drafted token"):
        say(heads=heads("3"), tree=0)
    with pytest.raises(InvalidConfig, match="8 children, but the draft has a vocabulary of only 7"):
        say(heads=heads("3.1"), tree=branching(8))
    with pytest.raises(InvalidConfig, match="dynamic tree keeps only the most likely"):
        say(heads=heads("3"), tree=dynamic(2, 2, 4), rule="rejection")
    for taps in ("1,2", (1, 2), 5, "a,b,c", (0, 1, 2), (1, 2, 5)):
        with pytest.raises(InvalidConfig, match="taps"):
            say(heads=heads("3"), drafter_options={"taps": taps})
    for theta in (0, "x", True, float("nan")):
        with pytest.raises(InvalidConfig, match="rope_theta must be"):
            say(heads=heads("3"), drafter_options={"rope_theta": theta})
    function = jaxspec.Model(jaxspec.FunctionLM(lambda p, t, n: jnp.zeros((t.shape[0], 64)), V), ())
    with pytest.raises(InvalidConfig, match="target's 'embedding', which FunctionLM does not have"):
        jaxspec.generate(function, [[1]], drafter="eagle", heads=heads("3"))
    for change, message in (({"vocab_size": 9}, "a vocabulary of 9"), ({"hidden_size": 32}, "features of 32")):
        config = dataclasses.replace(CONFIGS["3"], decoder=dataclasses.replace(LAYER, **change))
        with pytest.raises(ShapeMismatch, match=message):
            say(heads=DraftHeads(config, init_params(config, key=jax.random.key(0))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version of an EAGLE head must be 1 or 3"),
        ({"version": 1, "taps": (1,)}, "an EAGLE-1 head reads the target's last feature"),
        ({"version": 1, "norm_output": True}, "norm_output of an EAGLE-1 head needs pair_norms"),
        ({"taps": ()}, "at least one tap"),
        ({"taps": (0, 1)}, "taps must be whole numbers from 1"),
        ({"fc_norm": True, "norm_before_fc": True}, "cannot both be true"),
        ({"target_size": 128}, "needs an embedding and a projection of its own"),
        ({"draft_vocab_size": V + 1}, "draft_vocab_size must be a whole number from 1 to 13"),
        ({"fc_bias": 1}, "fc_bias must be true or false"),
        ({"decoder": None}, "decoder must be a ModelConfig"),
        ({"decoder": dataclasses.replace(LAYER, window=4)}, "no sliding-window attention"),
    ],
)
def test_sizes_that_exclude_one_another(changes, message):
    with pytest.raises(InvalidConfig, match=message):
        EagleConfig(**{"decoder": LAYER} | changes)


def test_equal_drafters_compile_once():
    (one, params), (other, _) = built("3.1", chain(2)), built("3.1", chain(2))
    assert one == other
    assert hash(one) == hash(other)
    assert jaxspec.Decoder(TARGET, one, Coupled()) == jaxspec.Decoder(TARGET, other, Coupled())
    assert params["head"].shape == (7, 64)
