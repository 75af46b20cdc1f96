"""Tests the drafter "dflash": its laws against numpy, its cache, texts under trees, rules and schedules, refusals."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from cases import RULES, TREES, WEIGHING, verifies
from helpers import toys
from helpers.tiers import with_slow
from helpers.toys import RAGGED
from jaxspec.core import noise
from jaxspec.core.draw import Draw, Noise
from jaxspec.core.networks import with_taps
from jaxspec.core.noise import RoundNoise
from jaxspec.core.records import Advance, Context, Window
from jaxspec.core.sampling import Sampling
from jaxspec.core.schedule import Constant
from jaxspec.core.topology import branching, chain, dynamic, from_paths
from jaxspec.decode.state import Weights
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.none import NoDraft
from jaxspec.errors import InvalidConfig, MissingDraft, ShapeMismatch
from jaxspec.heads.dflash_config import DFlashConfig
from jaxspec.heads.eagle_config import EagleConfig
from jaxspec.heads.network import DraftHeads, flatten, init_params, make_network
from jaxspec.kernels import library
from jaxspec.models.execution import Execution
from jaxspec.models.packed import pack_params
from jaxspec.models.rope import Rope
from jaxspec.schedules.confidence import Confidence
from jaxspec.testing import bias, random_laws

V = 13
TARGET = toys.transformer(vocab_size=V, num_layers=4)
PARAMS = toys.lively(TARGET.init_params(jax.random.key(0)), 2.0)
MODEL = jaxspec.Model(TARGET, PARAMS)
TWO = dataclasses.replace(TARGET.config, num_layers=2, rope=Rope(500.0), qk_norm=True)
ONE = dataclasses.replace(TWO, num_layers=1, qk_norm=False, qkv_bias=True)
SLIDING = dataclasses.replace(TWO, window=4, windowed=(True, False))
IDS = np.arange(0, V, 2)
CONFIGS = {
    "dflash": DFlashConfig(TWO, 5, 12),
    "dflash, from the anchor": DFlashConfig(ONE, 4, 12, from_anchor=True, taps=(1, 4, 4)),
    "jetspec": DFlashConfig(TWO, 5, 12, causal=(True, True), taps=(2, 4)),
    "dflash 2": DFlashConfig(ONE, 5, 12, conv_size=2, conv_group=16, selector_rank=6, selector_top=5),
    "dflash, sliding": DFlashConfig(SLIDING, 5, 12, causal=(True, False), taps=(3,)),
    "dspark": DFlashConfig(TWO, 4, 12, from_anchor=True, markov="vanilla", markov_rank=6, own_embedding=True),
    "dspark, gated": DFlashConfig(
        ONE, 5, 3, markov="gated", markov_rank=6, draft_vocab_size=7, own_projection=True, confidence=True
    ),
    "dspark, rnn": DFlashConfig(
        TWO, 4, 12, from_anchor=True, causal=(True, True), markov="rnn", markov_rank=6, draft_vocab_size=7,
        confidence=True, confidence_reads_token=True,
    ),
}  # fmt: skip
LENGTH = np.array([9, 3])
KEYS = jax.random.split(jax.random.key(0), 2)


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


def built(name: str, tree) -> tuple[DFlash, Any]:
    return DFlash.build(jaxspec.DrafterInputs(MODEL, tree=tree, heads=heads(name)))


# By hand.


class ByHand:
    """A whole block of a head in numpy, in float64, after a text; written from the papers."""

    def __init__(self, name: str, features: np.ndarray, root: int):
        """`features` are those of the target at every token of the text before the root."""
        self.config = config = CONFIGS[name]
        rows = config.block_size
        self.params = p = {key: np.asarray(a, np.float64) for key, a in flatten(heads(name).params).items()}
        d, length = config.decoder, len(features)
        embed = p.get("embed", np.asarray(PARAMS["embed"], np.float64))
        context = self.norm(features[:, config.feature_size :] @ p["fc"], "hidden_norm")
        x = embed[[root] + [config.mask_token] * (rows - 1)]
        for layer in range(d.num_layers):
            self.at = f"layers.{layer}."
            read, attended = self.convolved(layer, "attention", self.norm(x, self.at + "attn_norm"))
            ours, theirs = self.heads(read, length), self.heads(context, 0)
            keys, values = (np.concatenate([theirs[i], ours[i]]) for i in (1, 2))
            query, key = length + np.arange(rows)[:, None], np.arange(length + rows)
            seen = (key < length) | (not config.is_causal(layer)) | (key <= query)
            if (window := d.window_of(layer)) is not None:
                seen &= key > query - window
            group = d.num_heads // d.num_kv_heads
            mixed = []
            for head in range(d.num_heads):
                score = ours[0][:, head] @ keys[:, head // group].T * d.head_dim**-0.5
                weights = np.exp(np.where(seen, score, -np.inf))
                mixed.append(weights / weights.sum(-1, keepdims=True) @ values[:, head // group])
            x = x + attended(np.concatenate(mixed, -1) @ p[self.at + "out"])
            read, fed = self.convolved(layer, "mlp", self.norm(x, self.at + "mlp_norm"))
            gate, up = np.split(read @ p[self.at + "gate_up"], 2, -1)
            x = x + fed(gate / (1 + np.exp(-gate)) * up @ p[self.at + "down"])
        self.states = self.norm(x, "norm")

    def convolved(self, layer, part, read):
        """What a sublayer reads, and what becomes of its output."""
        c, p, at = self.config, self.params, f"convs.{layer}.{part}_"
        if not c.conv_size:
            return read, lambda x: x
        mixed = np.repeat((read @ p[at + "mix"]).reshape(len(read), 2, c.conv_size, -1), c.conv_group, axis=-1)

        def convolve(x, side):
            out = np.zeros_like(x)
            for row in range(len(x)):
                for back in range(min(c.conv_size, row + 1)):
                    out[row] += (p[at + "base"][side, back] + mixed[row, side, back]) * x[row - back]
            return out

        return convolve(read, 0), lambda x: convolve(x, 1)

    def norm(self, x, name):
        scale = self.params.get(name)
        return (
            x if scale is None else x / np.sqrt(np.mean(x**2, -1, keepdims=True) + self.config.decoder.norm_eps) * scale
        )

    def heads(self, x, first):
        d, p, at = self.config.decoder, self.params, self.at
        parts = (x @ p[at + "qkv"] + p.get(at + "qkv_bias", 0)).reshape(len(x), -1, d.head_dim)
        queries, keys, values = np.split(parts, [d.num_heads, d.num_heads + d.num_kv_heads], axis=1)
        angles = (first + np.arange(len(x)))[:, None] * d.rope.theta ** (-np.arange(0, d.head_dim, 2) / d.head_dim)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

        def turned(a):
            low, high = np.split(a, 2, -1)
            return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

        return turned(self.norm(queries, at + "q_norm")), turned(self.norm(keys, at + "k_norm")), values

    def logits(self, path: list[int]) -> np.ndarray:
        """The logits after a path, the root first, over the whole vocabulary."""
        config, p = self.config, self.params
        row = self.states[len(path) - 1 + (not config.from_anchor)]
        table = p.get("head", np.asarray(PARAMS["head"], np.float64))
        ids = IDS if config.draft_vocab_size else np.arange(V)
        table = table if len(table) == len(ids) else table[ids]
        found = table @ row
        if config.selector_rank:
            best = np.argsort(-found)[: config.selector_top]
            reads = p["selector_in"][path[-1]] * (row @ p["selector_mix"])
            ids, found = best, found[best] + p["selector_out"][best] @ reads
        memory = np.zeros(config.markov_rank)
        for depth, token in enumerate(path if config.markov else []):
            word, state = p["markov_in"][token], self.states[depth + (not config.from_anchor)]
            reads = {"gated": [state, word], "rnn": [memory, word, state]}.get(config.markov or "")
            mixed = np.concatenate(reads) @ p["markov_mix"] + p["markov_mix_bias"] if reads else word
            followed = mixed
            if config.markov == "gated":
                followed = word / (1 + np.exp(-mixed))
            if config.markov == "rnn":
                gate, new, out = np.split(mixed, 3)
                gate = 1 / (1 + np.exp(-gate))
                memory, followed = gate * memory + (1 - gate) * np.tanh(new), np.tanh(out)
            if depth == len(path) - 1:
                found = found + p["markov_out"] @ followed
        logits = np.full(V, -np.inf)
        logits[ids] = found
        return logits

    def certainty(self, path: list[int]) -> float:
        """The estimate of the confidence head after a path."""
        reads = [self.states[len(path) - 1 + (not self.config.from_anchor)]]
        reads += [self.params["markov_in"][path[-1]]] if self.config.confidence_reads_token else []
        score = np.concatenate(reads) @ self.params["confidence"] + self.params["confidence_bias"]
        return float(1 / (1 + np.exp(-score[0])))


@functools.cache
def told(name: str, tree):
    """A drafter that was told of two random texts, in two parts; its parameters, state, texts and features."""
    drafter, params = built(name, tree)
    rng = np.random.default_rng(0)
    width = 64 * (1 + len(drafter.needs.taps))
    tokens, features = rng.integers(0, V, (2, 12)).astype(np.int32), rng.normal(size=(2, 9, width)).astype(np.float32)
    features[:, 0] = 0  # there is none before the text's first token
    state, absorb = drafter.init(params, 2, 16), jax.jit(drafter.absorb)
    for first, last in ((0, 5), (5, 9)):
        count = jnp.asarray(np.clip(LENGTH - first, 0, last - first))
        part = jnp.asarray(tokens[:, first:last]), jnp.asarray(features[:, first:last])
        state = absorb(params, state, Advance(*part, count, None, jnp.asarray(tokens), jnp.full(2, first)))
    return drafter, params, state, tokens, features


def by_hand(name: str, tree) -> list[tuple[int, ByHand]]:
    """The root of each row, and the head."""
    *_, tokens, features = told(name, tree)
    roots = [int(tokens[row, LENGTH[row] - 1]) for row in range(2)]
    before = [features[row, 1 : LENGTH[row]].astype(np.float64) for row in range(2)]
    return [(root, ByHand(name, texts, root)) for root, texts in zip(roots, before)]


def proposed(name: str, tree, kind: Noise, temperature: float, schedule=Constant()):
    """The proposal of the drafter."""
    drafter, params, state, tokens, _ = told(name, tree)
    context: Any = Context(jnp.asarray(tokens), jnp.asarray(LENGTH), None, PARAMS)  # pyright: ignore[reportArgumentType]

    @jax.jit
    def propose(params, state, context, keys, sampling):
        rounds = RoundNoise(keys, context.length, jnp.asarray(temperature > 0), V)
        draw = Draw(kind, rounds, sampling, stop_after=schedule.stop_after)
        return drafter.propose(params, state, context, draw)[0]

    return propose(params, state, context, KEYS, Sampling(temperature=temperature).rows(2, V))


MIXED = from_paths([(0, 0, 0), (0, 1), (1, 0), (2,)])


@pytest.mark.parametrize(
    ("name", "kind"),
    with_slow(
        [*((name, Noise.FRESH) for name in CONFIGS), ("dflash", Noise.NONE), ("dspark, gated", Noise.SHARED)],
        CONFIGS.keys() - {"dflash", "dspark, gated", "dflash 2"},
    ),
)
def test_proposals_are_those_computed_by_hand(name, kind):
    """Every node's children are the likeliest of its row's law under the noise of the rule; and so is the law."""
    tree, temperature = MIXED, 0.7 if kind is not Noise.NONE else 0.0
    proposal = proposed(name, tree, kind, temperature)
    ids = IDS if CONFIGS[name].draft_vocab_size else np.arange(V)
    shared = np.asarray(noise.draw_gumbel(KEYS, jnp.asarray(LENGTH)[:, None] + jnp.arange(3), V))
    fresh = np.zeros((2, tree.shape.nodes, V))
    fresh[..., ids] = noise.draw_fresh(KEYS, jnp.asarray(LENGTH), jnp.arange(tree.shape.nodes), ids.size)
    for row, (root, head) in enumerate(by_hand(name, tree)):
        for node in range(tree.shape.nodes):
            below = [child for child in tree.tree.children[node] if child >= 0]
            if not below:
                continue
            path = [root, *(int(proposal.tokens[row, at]) for at in tree.tree.paths[node][1:] if at >= 0)]
            score = head.logits(path) / (temperature or 1)
            if kind is Noise.FRESH:
                np.testing.assert_allclose(proposal.law[row, node], toys.log_softmax(score), atol=1e-4)
            depth = len(path) - 1
            extra = {Noise.SHARED: shared[row, depth], Noise.FRESH: fresh[row, node], Noise.NONE: 0}[kind]
            wanted = np.argsort(-(score + extra), kind="stable")[: len(below)]
            assert [int(proposal.tokens[row, child]) for child in below] == wanted.tolist()


@pytest.mark.parametrize("name", ["dflash", "dspark, rnn"])
def test_dynamic_trees_are_eagle2s(name):
    """The reader's whole beam at depth 0, and the memory of each path."""
    tree = dynamic(3, 3, 9)
    proposal = proposed(name, tree, Noise.NONE, 0.0)
    for row, (root, head) in enumerate(by_hand(name, tree)):

        def log_share(text, head=head, root=root):
            return toys.log_softmax(head.logits([root, *text]))

        parents, nodes = toys.eagle2(log_share, 3, 3, 9)
        assert np.asarray(proposal.tree.parents)[row].tolist() == parents
        assert np.asarray(proposal.tokens)[row, 1:].tolist() == [text[-1] for text in nodes[1:]]


def heap_tree(laws: list[np.ndarray], width: int, nodes: int) -> list[tuple[int, ...]]:
    """The ranks along the path to each node of a tree as JetSpec's code builds it, root included.

    The likeliest node that was not expanded gets all of its `width` children, as far as there is room.
    """
    tree: list[tuple[int, ...]] = [()]
    share: dict[tuple[int, ...], float] = {(): 0.0}
    waiting: list[tuple[int, ...]] = [()]
    while waiting and len(tree) < nodes:
        best = max(waiting, key=share.__getitem__)
        waiting.remove(best)
        if len(best) == len(laws):
            continue
        for rank in range(min(width, nodes - len(tree))):
            share[*best, rank] = share[best] + np.sort(laws[len(best)])[-1 - rank]
            tree.append((*best, rank))
            waiting.append((*best, rank))
    return tree


def test_a_dynamic_tree_of_jetspec_has_the_likeliest_nodes():
    """All nodes of a level have one distribution. JetSpec's own trees of as many nodes are less likely."""
    tree = dynamic(4, 3, 12)
    proposal = proposed("jetspec", tree, Noise.NONE, 0.0)
    for row, (root, head) in enumerate(by_hand("jetspec", tree)):
        laws = [toys.log_softmax(head.logits([root] * (1 + depth))) for depth in range(3)]
        order = [np.argsort(-law, kind="stable") for law in laws]
        ranks = [path for depth in (1, 2, 3) for path in itertools.product(range(4), repeat=depth)]

        def share(path, laws=laws, order=order):
            return sum(laws[depth][order[depth][rank]] for depth, rank in enumerate(path))

        best = sorted(ranks, key=share)[: -tree.nodes : -1]
        parents = np.asarray(proposal.tree.parents)[row]
        paths: dict[int, tuple[int, ...]] = {0: ()}
        for node in range(1, tree.nodes):
            paths[node] = (*paths[int(parents[node])], int(proposal.tokens[row, node]))
        wanted = {tuple(int(order[depth][rank]) for depth, rank in enumerate(path)) for path in best}
        assert set(paths.values()) - {()} == wanted
        theirs = heap_tree(laws, 4, tree.nodes)[1:]
        assert sum(np.exp(share(path)) for path in best) > sum(np.exp(share(path)) for path in theirs)


@pytest.mark.parametrize(
    ("name", "tree", "kind"),
    [
        ("dspark, gated", MIXED, Noise.FRESH),
        ("dspark, rnn", MIXED, Noise.NONE),
        ("dspark, rnn", dynamic(3, 3, 9), Noise.NONE),
    ],
)
def test_a_confidence_head_is_the_schedules_doubt(name, tree, kind):
    """Nothing is drafted below nodes of which the head, and not the law, is unsure; and everything below the others."""
    found, rows = set(), by_hand(name, tree)
    threshold = float(np.median([head.certainty([root, *[1] * depth]) for root, head in rows for depth in range(3)]))
    proposal = proposed(name, tree, kind, 1.0 * (kind is Noise.FRESH), Confidence(threshold=threshold))
    parents = np.broadcast_to(proposal.tree.parents, proposal.tokens.shape)
    for row, (root, head) in enumerate(rows):
        paths = {0: [root]}
        for node in range(1, tree.shape.nodes):
            token, above = int(proposal.tokens[row, node]), paths.get(int(parents[row, node]))
            sure = above is not None and head.certainty(above) >= threshold
            assert token < 0 or sure
            assert token >= 0 or not sure or tree is not MIXED, "a dynamic tree leaves out others, too"
            if above is not None:
                found.add(sure)
            if token >= 0 and above is not None:
                paths[node] = [*above, token]
    assert found == {False, True}


@pytest.mark.parametrize("rule", [name for name, rule in WEIGHING.items() if rule.lossless])
def test_rounds_follow_the_target_exactly(rule):
    """By enumeration with the laws of a Markov head, which depend on the path: every rule emits the target's law."""
    head = ByHand("dspark, rnn", np.random.default_rng(5).normal(size=(4, 64 * 3)), 3)

    def draft(text):
        law = np.exp(toys.log_softmax(head.logits([3, *(int(IDS[token]) for token in text)])[IDS[:4]]))
        return law / law.sum()

    for tree in (chain(3), branching(2, 1), RAGGED):
        if verifies(RULES[rule], tree) and tree.shape.nodes < 8:
            assert bias(WEIGHING[rule], tree, random_laws(1, 4), draft) < 1e-12


# The cache.


@functools.partial(jax.jit, static_argnums=0)
def fresh_pass(drafter: DFlash, params, texts):
    """Keys and values of whole texts, read at once."""
    target, (batch, size) = with_taps(TARGET, drafter.needs.taps), texts.shape
    mask = jnp.broadcast_to(jnp.tri(size, dtype=bool), (batch, size, size))
    places = jnp.broadcast_to(jnp.arange(size), (batch, size))
    features, _ = target.apply(PARAMS, Window(texts, places, mask), target.init_cache(batch, 0))
    head = make_network(drafter.config, params)
    return head.remember(head.fuse(features), places, jnp.float32)


@pytest.mark.parametrize("name", with_slow(["dflash, sliding", "dspark, gated"], ("dspark, gated",)))
def test_after_every_round_the_cache_is_that_of_a_fresh_pass(name):
    """Prompts of one token and of several chunks, rounds, a further turn, and finished rows; no block's rows are in."""
    drafter, params = built(name, RAGGED)
    decoder, weights = toys.decoder(TARGET, drafter), Weights(PARAMS, params)
    prompts = [[1], [2, 3, 4, 5, 6, 7, 8, 9, 1], [5, 6, 7, 8]]
    asked = toys.request(prompts, [14, 12, 2], vocab=V, temperature=[0.0, 0.9, 0.5])

    def check(state):
        entries = fresh_pass(drafter, params, state.tokens[:, :64])  # what follows a text changes nothing
        for row, length in enumerate(state.length.tolist()):
            assert int(state.draft.cache.length[row]) == length - 1
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


@pytest.mark.skipif(not library.kernels_available(), reason=library.describe_kernels())
@pytest.mark.parametrize("name", ["dflash, sliding", "dspark, rnn", "dflash 2"])
def test_the_kernels_compute_the_same(name):
    """Packed matrices, and attention in both directions inside a block."""
    drafter, params, state, _, features = told(name, chain(3))
    config, text = drafter.config, jnp.broadcast_to(jnp.arange(9), (2, 9))
    words = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 64)), jnp.float32)
    places = state.cache.length[:, None] + jnp.arange(4)

    @functools.partial(jax.jit, static_argnums=1)
    def compute(params, kernels):
        head = make_network(config, params, Execution(kernels=kernels))
        states = head(words, places, state.cache)
        parts = [states, *head.remember(head.fuse(jnp.asarray(features)), text, jnp.float32)]
        if config.selector_rank:
            parts.append(head.select(jnp.arange(8).reshape(2, 4), states[:, :1], words[:, :1, :V]))
        if config.markov:
            memory = jnp.zeros((2, 4, config.memory))
            followed = head.follow(head.words(jnp.arange(8).reshape(2, 4)), states, memory)
            parts += [*followed, head.correction(followed[0]), head.certainty(states, followed[0])]
        return parts

    for plain, packed in zip(compute(params, False), compute(pack_params(params), True), strict=True):
        np.testing.assert_allclose(packed, plain, atol=2e-5)


# Texts.


@pytest.mark.parametrize(
    ("name", "tree"),
    with_slow(
        [
            ("dflash", "chain-4"),
            ("dflash 2", "ragged"),
            ("dspark", "wide"),
            ("dspark, gated", "dynamic"),
            ("dspark, rnn", "ragged"),
        ],
        ("dflash", "dflash 2", "dspark", "dspark, rnn"),
    ),
)
def test_text_is_that_of_plain_decoding(name, tree):
    """Greedy and sampled rows."""
    drafter, params = built(name, TREES[tree])
    asked = toys.request([[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]], 24, vocab=V, temperature=[0.0, 0.8, 1.2])
    plain = toys.decoder(TARGET, NoDraft(TREES[tree]), width_matched=True)
    decoder = toys.decoder(TARGET, drafter, width_matched=True)
    expected = toys.generate(plain, Weights(PARAMS), asked, 64)
    found = toys.generate(decoder, Weights(PARAMS, params), asked, 64)
    assert toys.texts(found) == toys.texts(expected)
    assert np.asarray(found.log.accepted).sum() > 0


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
    given: dict[str, Any] = {"drafter": "dflash", "heads": heads("dspark, rnn"), "rule": rule, "tree": tree}
    found = jaxspec.generate(MODEL, [[1, 2, 3], [4, 5]], schedule=schedule, **given, **common)
    plain = jaxspec.generate(MODEL, [[1, 2, 3], [4, 5]], drafter="none", **common)
    assert found[0].tokens == plain[0].tokens
    assert (found[1].tokens == plain[1].tokens) >= (rule == "coupled")
    assert found.stats.drafted > 0
    assert (found.stats.drafted < 4 * found.stats.rounds) == (schedule is not None) or tree != chain(4)


# Refusals.


def test_a_block_is_the_default():
    assert built("dflash", None)[0].shape == chain(4).shape
    assert built("dspark", None)[0].shape == chain(4).shape
    drafter, _ = DFlash.build(jaxspec.DrafterInputs(MODEL, heads=heads("dflash"), options={"taps": "1,3"}))
    assert (drafter.needs.taps, built("dflash", None)[0].needs.taps) == ((1, 3), (2, 2))
    assert built("dspark, rnn", None)[1]["head"].shape == (7, 64), "rows of the target's projection"


def test_what_does_not_fit_is_refused():
    say = functools.partial(jaxspec.generate, MODEL, [[1]], drafter="dflash")
    with pytest.raises(MissingDraft, match="needs DFlash, DSpark or JetSpec heads"):
        say()
    eagle = DraftHeads(EagleConfig(ONE), {}, name="some")
    with pytest.raises(InvalidConfig, match=r"'dflash' cannot use 'some' .an EAGLE-3 head of 1 layer.*'eagle'"):
        say(heads=eagle)
    with pytest.raises(InvalidConfig, match=r"'eagle' cannot use .*a DFlash head of 2 layers, blocks of 5.*'dflash'"):
        jaxspec.generate(MODEL, [[1]], drafter="eagle", heads=heads("dflash"))
    with pytest.raises(InvalidConfig, match="a tree of at least one drafted token"):
        say(heads=heads("dflash"), tree=0)
    with pytest.raises(InvalidConfig, match="a block of this head predicts at most 4 tokens, got a tree of depth 5"):
        say(heads=heads("dflash"), tree=5)
    with pytest.raises(InvalidConfig, match="8 children, but the draft has a vocabulary of only 7"):
        say(heads=heads("dspark, rnn"), tree=branching(8))
    with pytest.raises(InvalidConfig, match="dynamic tree keeps only the most likely"):
        say(heads=heads("dspark"), tree=dynamic(2, 2, 4), rule="rejection")
    with pytest.raises(InvalidConfig, match="taps must be 2 numbers of target layers"):
        say(heads=heads("dflash"), drafter_options={"taps": (1, 2, 3)})
    config = dataclasses.replace(CONFIGS["dflash"], decoder=dataclasses.replace(TWO, vocab_size=14))
    with pytest.raises(ShapeMismatch, match="a vocabulary of 14"):
        say(heads=DraftHeads(config, init_params(config, key=jax.random.key(0))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size must be a whole number from 2 to"),
        ({"mask_token": V}, "mask_token must be a whole number from 0 to 12"),
        ({"from_anchor": 1}, "from_anchor must be true or false"),
        ({"causal": (True,)}, "causal must have 2 entries"),
        ({"causal": True}, "causal must be true or false for each layer"),
        ({"taps": ()}, "at least one tap"),
        ({"taps": (0, 1)}, "taps must be whole numbers from 1"),
        ({"markov": "gru", "markov_rank": 4}, "markov must be one of vanilla, gated, rnn"),
        ({"markov": "rnn"}, "set both markov and markov_rank, or neither; got 'rnn' and 0"),
        ({"confidence": True, "confidence_reads_token": True}, "needs a confidence head and a Markov head"),
        ({"conv_size": 2}, "conv_size 2 and conv_group 0 must both be"),
        ({"conv_size": 2, "conv_group": 24}, "conv_group must divide the width 64"),
        ({"selector_rank": 4}, "selector_rank 4 and selector_top 0 must both be"),
        ({"selector_rank": 4, "selector_top": 4, "confidence": True}, "with a selector has no Markov head, confidence"),
        ({"target_size": 128}, "needs an embedding and a projection of its own"),
        ({"decoder": None}, "decoder must be a ModelConfig"),
        ({"decoder": dataclasses.replace(SLIDING, window_rope=Rope(9.0))}, "have the same rotary positions"),
    ],
)
def test_sizes_that_exclude_one_another(changes, message):
    with pytest.raises(InvalidConfig, match=message):
        DFlashConfig(**{"decoder": TWO, "block_size": 4, "mask_token": 0} | changes)
