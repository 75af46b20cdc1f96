"""Tests the tables of recycled tokens against dictionaries, and what is drafted from them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.narrow import not_none
from helpers.tiers import with_slow
from helpers.toys import decoder, generate, request, texts
from jaxspec import Model
from jaxspec.core.drafter import DrafterInputs
from jaxspec.core.draw import Candidates, Draw, Noise
from jaxspec.core.noise import RoundNoise
from jaxspec.core.records import Advance, Context, Seen
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import branching, chain, dynamic
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Weights
from jaxspec.decode.verify import select_likeliest
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.drafters.recycling import TOKENS_PER_ENTRY, Recycling, Tables
from jaxspec.errors import InvalidConfig
from jaxspec.registry import find
from jaxspec.testing import TableLM, g_test, joint_law, model_law, sample_texts

V, SIZE = 24, 8
LM = TableLM(V)
PARAMS = LM.init_params(jax.random.key(0), 3.0)
SMALL = Recycling(dynamic(3, 3, 6), SIZE)
NOTHING = (-1,) * TOKENS_PER_ENTRY


def tables(drafter, batch):
    """Empty tables."""
    return drafter.init(None, batch, 0)


def read(state, row) -> dict[int, dict]:
    """The entries of a row, as dictionaries."""
    token, ids, probs = (np.asarray(a[row]) for a in state[:3])
    return {
        int(t): {int(i): pytest.approx(float(p), abs=1e-6) for i, p in zip(some, weights) if i >= 0}
        for t, some, weights in zip(token, ids.reshape(-1, TOKENS_PER_ENTRY), probs.reshape(-1, TOKENS_PER_ENTRY))
        if t >= 0
    }


def put(entries: dict, token: int, entry: dict) -> None:
    """A token's entry takes the slot of any other token there."""
    for other in [other for other in entries if other % SIZE == token % SIZE]:
        del entries[other]
    entries[token] = entry


def advance(tokens, count, start, text, seen=None):
    features = jnp.zeros((*tokens.shape, 1))
    text, start = jnp.asarray(text), jnp.asarray(start)
    return Advance(jnp.asarray(tokens), features, jnp.asarray(count), None, text, start, None, seen)


def after_a_round(count, seen):
    none = np.zeros((len(count), 4), int)
    return advance(none, count, np.zeros(len(count), int), none, seen)


def test_a_round_replaces_the_entries_of_its_nodes():
    """Tokens that meet in a slot, tokens that occur twice, nodes without a token, a finished row, logits not finite."""
    rng, rows, nodes = np.random.default_rng(0), 3, 12
    absorb = jax.jit(lambda state, advance: SMALL.absorb(None, state, advance))
    state, entries = tables(SMALL, rows), [{} for _ in range(rows)]
    for _ in range(6):
        tokens = rng.integers(-1, V, (rows, nodes))
        ids = np.stack([[rng.permutation(V)[:TOKENS_PER_ENTRY] for _ in range(nodes)] for _ in range(rows)])
        logits = -np.sort(rng.normal(size=ids.shape))
        logits[:, 3] = np.nan
        count = rng.integers(0, 3, rows) * (np.arange(rows) > 0)
        seen = Seen(jnp.asarray(tokens), jnp.asarray(ids), jnp.asarray(logits, jnp.float32))
        state = absorb(state, after_a_round(count, seen))
        for row in np.flatnonzero(count):
            for node in range(nodes):
                if tokens[row, node] >= 0 and node != 3:
                    law = np.exp(logits[row, node]) / np.exp(logits[row, node]).sum()
                    put(entries[row], int(tokens[row, node]), dict(zip(ids[row, node].tolist(), law)))
        assert [read(state, row) for row in range(rows)] == entries
    assert not entries[0]
    assert len(entries[1]) == SIZE


def test_a_prompt_gives_each_token_half_of_the_weight_of_the_one_before():
    rng, rows, chunk = np.random.default_rng(1), 3, 5
    text = rng.integers(0, 12, (rows, 40))
    absorb = jax.jit(lambda state, advance: SMALL.absorb(None, state, advance))
    state, entries, start = tables(SMALL, rows), [{} for _ in range(rows)], np.zeros(rows, int)
    while start.max() < 30:
        count = rng.integers(0, chunk + 1, rows)
        tokens = np.take_along_axis(text, start[:, None] + np.arange(chunk), 1)
        state = absorb(state, advance(tokens, count, start, text))
        for row in range(rows):
            for at in range(max(start[row], 1), start[row] + count[row]):
                token, follower = int(text[row, at - 1]), int(text[row, at])
                old = {i: p / 2 for i, p in entries[row].get(token, {}).items()}
                entry = {follower: 0.5 + old.pop(follower, 0.0), **old}
                put(entries[row], token, dict(list(entry.items())[:TOKENS_PER_ENTRY]))
        start = start + count
        assert [read(state, row) for row in range(rows)] == entries


def proposed(drafter, state, text, length, kind=Noise.NONE, limit=None, history=None, **sampling):
    batch, sampled = len(length), jnp.asarray(sampling.get("temperature", 0) > 0)
    noise = RoundNoise(jax.random.split(jax.random.key(3), batch), jnp.asarray(length), sampled, V)
    draw = Draw(kind, noise, Sampling(**sampling).rows(batch, V), limit, states=((),) * ("logit_bias" in sampling))
    context = Context(jnp.asarray(text), jnp.asarray(length), None, None, history)  # pyright: ignore
    return jax.device_get(jax.jit(lambda state: drafter.propose(None, state, context, draw)[0])(state))


@pytest.mark.parametrize(("tree", "kind"), [(dynamic(3, 3, 6), Noise.SHARED), (branching(3, 2, 1), Noise.NONE)])
def test_any_table_gives_a_draft(tree, kind, seed):
    """Empty, full and other tables, entries with few tokens, and with ids that the row may not draw, as padding."""
    rng, rows, padding = np.random.default_rng(seed), 36, (V - 2, V - 1)
    token = np.arange(SIZE) + SIZE * rng.integers(0, V // SIZE, (rows, SIZE))
    token = np.where(rng.random((rows, SIZE)) < np.repeat([0, 0.5, 1], rows // 3)[:, None], token, -1)
    ids = rng.permuted(np.tile(np.arange(V), (rows, SIZE + 1, 1)), axis=-1)[..., :TOKENS_PER_ENTRY]
    ids = np.where(rng.random(ids.shape) < 0.2, -1, ids)
    probs = rng.dirichlet(np.ones(TOKENS_PER_ENTRY), (rows, SIZE)).astype(np.float32)
    drafter = Recycling(tree, SIZE)
    kept, shares = (jnp.asarray(a[:, :SIZE].reshape(rows, -1)) for a in (ids, probs))
    state = Tables(jnp.asarray(token), kept, shares, jnp.asarray(ids[:, SIZE]))
    text, length = rng.integers(0, V - 2, (rows, 20)), rng.integers(1, 20, rows)
    limit, bias = rng.integers(0, tree.shape.depth + 1, rows), np.where(np.isin(np.arange(V), padding), -np.inf, 0.0)
    given = {"kind": kind, "limit": jnp.asarray(limit), "logit_bias": jnp.asarray(bias, jnp.float32)}
    found = proposed(drafter, state, text, length, temperature=0.8, **given)
    tokens = np.array(found.tokens)
    parents, depths = (np.broadcast_to(a, tokens.shape) for a in (found.tree.parents, found.tree.depths))
    drafted = (tokens >= 0) & (np.arange(tokens.shape[1]) > 0)
    assert not np.isin(tokens[drafted], padding).any()
    assert (tokens < V).all()
    assert (depths <= limit[:, None])[drafted].all()
    assert (np.take_along_axis(drafted, np.maximum(parents, 0), 1) | (parents == 0))[drafted].all()
    for row in range(rows):
        children = list(zip(parents[row][drafted[row]], tokens[row][drafted[row]]))
        assert len(set(children)) == len(children)
    assert all(some.any() for some in np.split(drafted, 3))


def test_an_empty_table_proposes_nothing():
    text = np.arange(20)[None].repeat(2, 0)
    for drafter in (SMALL, Recycling(branching(2, 1), SIZE)):
        assert (proposed(drafter, tables(drafter, 2), text, [9, 20]).tokens[:, 1:] == -1).all()


def test_another_token_in_the_slot_is_no_entry():
    state = tables(SMALL, 1)
    seen = Seen(
        jnp.array([[3]]), jnp.arange(TOKENS_PER_ENTRY)[None, None] + 10, -2.0 * jnp.arange(TOKENS_PER_ENTRY)[None, None]
    )
    state = SMALL.absorb(None, state, after_a_round([1], seen))._replace(guesses=jnp.full((1, TOKENS_PER_ENTRY), -1))
    assert (proposed(SMALL, state, [[1, 3]], [2]).tokens[:, 1:4] >= 10).all()
    assert (proposed(SMALL, state, [[1, 3 + SIZE]], [2]).tokens[:, 1:] == -1).all()


def test_the_root_has_the_other_likely_tokens_of_its_law():
    """Those after the node that the last token was drawn after, without the root itself."""
    nodes = jnp.array([[2, -1, -1, -1], [1, 2, -1, -1], [-1] * 4])
    seen = Seen(
        jnp.full((3, 3), 20),
        jnp.arange(3 * 3 * TOKENS_PER_ENTRY).reshape(3, 3, TOKENS_PER_ENTRY) % V,
        jnp.zeros((3, 3, TOKENS_PER_ENTRY)),
    )
    advance = after_a_round([2, 1, 0], seen)._replace(nodes=nodes)
    state = tables(SMALL, 3)._replace(guesses=jnp.full((3, TOKENS_PER_ENTRY), 5))
    state = SMALL.absorb(None, state, advance)
    assert state.guesses.tolist() == [seen.ids[0, 2].tolist(), seen.ids[1, 0].tolist(), [5] * TOKENS_PER_ENTRY]
    drafter = dataclasses.replace(SMALL, tree=branching(3))
    state = state._replace(token=jnp.full_like(state.token, -1))
    root = int(seen.ids[0, 2, 1])
    text = jnp.array([[21, root], [21, 23], [21, 22]])
    found = proposed(drafter, state, text, [2, 2, 2]).tokens[:, 1:]
    assert found[0].tolist() == [t for t in seen.ids[0, 2].tolist() if t != root][:3]
    assert found[1].tolist() == seen.ids[1, 0, :3].tolist()


def test_a_long_match_is_copied():
    text = np.array([[*range(10), 0, 1, 2, 3, 0, 0, 0]])
    drafter = Recycling(chain(5), SIZE)
    assert proposed(drafter, tables(drafter, 1), text, [14]).tokens[0, 1:].tolist() == [4, 5, 6, 7, 8]
    periodic = np.array([[7, 1, 2, 3, 1, 2, 3, 1, 2, 0, 0]])  # the copy reaches the end of the text
    assert proposed(drafter, tables(drafter, 1), periodic, [9]).tokens[0, 1:].tolist() == [3, 1, 2, 3, 1]
    alone = np.array([[0, 1, 2, 0, 0]])
    history = jnp.array([[-1, 1, 2, 3, 4, -1]])  # of the same prompt; nothing is copied from beyond its end
    for given, wanted in ((None, [-1] * 5), (history, [3, 4, -1, -1, -1])):
        assert proposed(drafter, tables(drafter, 1), alone, [3], history=given).tokens[0, 1:].tolist() == wanted


@pytest.mark.parametrize("rule", with_slow(["coupled", "deterministic", "rejection"], ("deterministic", "rejection")))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_does_not_depend_on_other_rows(rule, temperature):
    """Not its text, and of a rule that is not coupled not its rounds, which decide the text."""
    tree = dynamic(3, 3, 6) if rule != "rejection" else branching(2, 1)
    config = dataclasses.replace(decoder(LM, Recycling(tree, SIZE)), rule=find("rule", rule)())
    prompts = [[1, 2, 3, 1, 2, 3], [4, 5], [1, 2, 9]]
    asked = request(prompts, [40, 12, 30], vocab=V, temperature=temperature, stops=[[], [7], []])
    result = generate(config, Weights(PARAMS), asked, 64)
    for row in range(3):
        one = jax.tree.map(lambda a, row=row: a[row : row + 1], asked)
        alone = generate(config, Weights(PARAMS), one, 64)
        assert texts(alone)[0] == texts(result)[row]
        assert rule == "coupled" or np.array_equal(alone.log.emitted[0], result.log.emitted[row])
    assert int(not_none(result).log.accepted.sum()) > 3
    if rule == "coupled" or temperature == 0:
        assert texts(generate(decoder(LM, NoDraft()), Weights(PARAMS), asked, 64)) == texts(result)


@pytest.mark.parametrize("kind", [Noise.NONE, Noise.SHARED])
def test_all_tokens_as_candidates_are_a_law(kind):
    """With every token listed, the children are those that logits of the whole vocabulary give."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(3, 4, V)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=V), jnp.float32)
    sampling = Sampling(temperature=jnp.array([0.0, 0.7, 1.3]), logit_bias=bias).rows(3, V)
    noise = RoundNoise(jax.random.split(jax.random.key(0), 3), jnp.array([5, 6, 7]), jnp.asarray(True), V)
    draw = Draw(kind, noise, sampling, jnp.array([2, 2, 0]), states=((),))
    order = np.stack([[rng.permutation(V) for _ in range(4)] for _ in range(3)])
    among = draw.among(Candidates(jnp.asarray(order), jnp.take_along_axis(logits, order, 2)), 1, 3)
    ranked = draw.ranked(logits, 1, 3)
    assert np.array_equal(among[0], ranked[0])
    np.testing.assert_allclose(among[1], ranked[1], rtol=1e-5)


def test_the_unlisted_share_lowers_the_worth():
    noise = RoundNoise(jax.random.split(jax.random.key(0), 1), jnp.array([5]), jnp.asarray(False), V)
    draw = Draw(Noise.NONE, noise, Sampling().rows(1, V))
    tokens, worth = draw.among(Candidates(jnp.array([[[4, -1, 7]]]), jnp.log(jnp.array([[[0.25, 0.5, 0.25]]]))), 0, 3)
    assert tokens.tolist() == [[[4, 7, -1]]]
    np.testing.assert_allclose(np.exp(worth), [[[0.25, 0.25, 0.0]]], rtol=1e-6)


def test_memory_does_not_grow_with_the_vocabulary():
    """At 152 thousand tokens and 16 rows, from shapes: 68 bytes for each slot, and no copy of the logits of a round."""
    drafter, params = Recycling.build(DrafterInputs(Model(TableLM(151_936, order=0), {})))
    state = jax.tree.leaves(jax.eval_shape(lambda: drafter.init(params, 16, 2048)))
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in state) == 16 * (68 * 8192 + 4 * TOKENS_PER_ENTRY)
    nodes = drafter.shape.nodes
    tokens, logits = (jax.ShapeDtypeStruct((16, nodes, *v), t) for v, t in (((), "int32"), ((151_936,), "float32")))
    seen = (
        jax.jit(lambda tokens, logits: select_likeliest(tokens, logits, TOKENS_PER_ENTRY, nodes))
        .lower(tokens, logits)
        .compile()
    )
    assert not_none(seen.memory_analysis()).temp_size_in_bytes < logits.size * 4 / 50


@pytest.mark.parametrize(
    ("tree", "what"), [(chain(0), "at least one drafted"), (dynamic(9, 2, 9), "width 9"), (branching(9), "width 9")]
)
def test_trees_that_cannot_be_drafted_are_refused(tree, what):
    with pytest.raises(InvalidConfig, match=what):
        Recycling(tree)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "rule"), [
    (Recycling(dynamic(3, 3, 6), 8), "deterministic"),
    (Recycling(branching(2, 1), 8), "rejection"),
    (Recycling(dynamic(3, 3, 6), 8), "coupled"),
    (PromptLookup(dynamic(3, 3, 6)), "deterministic"),
])  # fmt: skip
def test_text_follows_its_law_though_the_tables_decide_the_rounds(drafter, rule, seed):
    """A table, or the text, decides how long a round is, and so which noise draws its tokens. Fails below 1e-4."""
    lm, sampling, prompt = TableLM(8, order=2), Sampling(temperature=0.8), [3, 1, 3, 1]
    params = lm.init_params(jax.random.key(7))
    config = Decoder(lm, drafter, find("rule", rule)(), chunk=4)
    found = sample_texts(config, Weights(params), prompt, 4, sampling, samples=100_000, seed=seed, stops=[2])
    test = g_test(found.counts, joint_law(model_law(lm, params, prompt, sampling), 4, [2]), max_cells=256)
    assert test.p > 1e-4
    assert test.detectable(1e-4) < 0.024
    assert found.accepted > 0.05
