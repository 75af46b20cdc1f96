"""Tests degenerate inputs: each through the shipped rules, and through a decode."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import RULES, WEIGHING, verifies
from helpers.tiers import with_slow
from helpers.toys import request, start, step, texts
from jaxspec.analysis.enumeration import stop_laws
from jaxspec.core import noise as noises
from jaxspec.core.draw import Draw, Noise
from jaxspec.core.noise import RoundNoise
from jaxspec.core.records import Proposal, Status
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import branching, chain
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Weights
from jaxspec.decode.verify import Processing, apply_rule, pick
from jaxspec.drafters.model import ModelDraft
from jaxspec.testing import ScriptedDrafter, TableLM, accepted_length, bias, random_laws

pytestmark = pytest.mark.quick

LOSSLESS = [name for name, rule in WEIGHING.items() if rule.lossless]
SAMPLED = [name for name in LOSSLESS if RULES[name].noise is Noise.FRESH]
V = 5


def weighed(name, law, tokens, draft, topology=None):
    """Chances `[N]` and laws after `[N, V]` of one proposal, on a chain unless said otherwise."""
    topology = topology or chain(len(tokens) - 1)
    tree = jax.tree.map(lambda a: a[None], topology.tree)
    proposal = Proposal(jnp.asarray(tokens, jnp.int32)[None], tree, None if draft is None else as_log(draft)[None])
    return tuple(np.asarray(a[0]) for a in stop_laws(RULES[name], as_log(law)[None], proposal))


def as_log(law):
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(np.asarray(law)), jnp.float32)


# Laws.


@pytest.mark.parametrize("name", SAMPLED)
def test_equal_laws_keep_everything(name):
    """Nothing is left after a rejection, which has no chance; the fallback is the target, never token 0 or the last."""
    law = np.full((3, V), 0.2)
    chances, after = weighed(name, law, [0, 1, 2], law)
    np.testing.assert_allclose(chances, [0, 0, 1], atol=1e-6)
    np.testing.assert_allclose(after, law, atol=1e-6)
    rounded = law * (1 + 1e-7 * np.arange(V))
    chances, after = weighed(name, law, [0, 1, 2], rounded / rounded.sum(-1, keepdims=True))
    assert chances[2] > 1 - 1e-5
    assert np.isfinite(after).all()


@pytest.mark.parametrize("name", LOSSLESS)
def test_disjoint_supports_keep_nothing(name):
    """The draft can never be right: the walk ends at the root, and the target's law is all that is left."""
    law, draft = np.tile([0.5, 0.3, 0.2, 0, 0], (3, 1)), np.tile([0, 0, 0, 0.4, 0.6], (3, 1))
    for given in (draft, None):
        chances, after = weighed(name, law, [0, 3, 4], given)
        np.testing.assert_allclose(chances, [1, 0, 0], atol=1e-6)
        np.testing.assert_allclose(after[0], law[0], atol=1e-6)


@pytest.mark.parametrize("name", WEIGHING)
def test_nothing_impossible_is_kept_or_drawn(name):
    """Probability 0 under the target, above it under the draft: not even by a number of exactly 0."""
    law, draft = np.array([[0.7, 0.3, 0, 0, 0]] * 2), np.array([[0.1, 0.1, 0.8, 0, 0]] * 2)
    chances, after = weighed(name, law, [0, 2], draft)
    assert chances[1] == 0
    assert (after[0][2:] == 0).all()
    for number in (0.0, 1 - 2.0**-24):
        assert int(pick(jnp.asarray(chances), jnp.float32(number))) == 0


def test_a_number_of_zero_or_almost_one_picks_nothing_impossible():
    """Also where the chances' sum is not quite 1, and where the first or the last are 0."""
    for chances in ([0, 0.5, 0, 0.5, 0], [0, 1e-30, 0], [0.3, 0.7, 0, 0], [0, 0, 1.0], [0.1] * 9):
        for number in (0.0, 2.0**-32, 0.5, 1 - 2.0**-24):
            assert chances[int(pick(jnp.asarray(chances, jnp.float32), jnp.float32(number)))] > 0
    numbers = noises.draw_uniform(jax.random.split(jax.random.key(0), 20_000), jnp.zeros(20_000, int))
    assert 0 <= float(numbers.min()) < 1e-3
    assert 1 - 1e-3 < float(numbers.max()) < 1


@pytest.mark.parametrize("name", SAMPLED)
def test_products_that_underflow(name):
    """64 ratios of 0.1 are 1e-64 together, which float32 has no number for; what is kept is what theory says."""
    size = 64
    law, draft = np.tile([0.05, 0.95, 0, 0, 0], (size + 1, 1)), np.tile([0.5, 0.5, 0, 0, 0], (size + 1, 1))
    chances, after = weighed(name, law, [0] * (size + 1), draft)
    assert np.isfinite(chances).all()
    assert np.isfinite(after).all()
    assert chances.sum() == pytest.approx(1, abs=1e-5)
    if name == "rejection":
        np.testing.assert_allclose(chances[:4], [0.9, 0.09, 0.009, 9e-4], rtol=1e-4)
    else:  # they look at the whole path, of which nothing is left
        assert chances[0] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in LOSSLESS if verifies(RULES[name], branching(4))])
def test_an_exhausted_draft_law(name):
    """Fewer possible tokens than children: the rest is not proposed, and the round stays exact."""

    def two(text):
        return np.array([0.6, 0.4, 0, 0, 0])

    rule, topology = WEIGHING[name], branching(4)
    assert bias(rule, topology, random_laws(1, V), two) < 1e-12
    assert bias(rule, topology, two, random_laws(1, V)) < 1e-12
    kept = accepted_length(rule, topology, two, lambda text: np.array([0.5, 0.5, 0, 0, 0]))
    assert kept == pytest.approx(1, abs=1e-9), "all that the target may say was proposed"


def test_children_of_an_exhausted_law_are_not_proposed():
    """A draft that allows two tokens proposes two, whatever the tree's width and the noise."""
    logits = jnp.full((1, 1, V), -jnp.inf).at[0, 0, 1:3].set(0.0)
    rows = Sampling(temperature=1.0).rows(1, V)
    for kind in Noise:
        draw = Draw(kind, RoundNoise(jax.random.split(jax.random.key(0), 1), jnp.array([3]), jnp.array(True), V), rows)
        tokens = np.asarray(draw(logits, jnp.array([0]), 0, 4)[0])[0, 0]
        assert set(tokens[:2]) == {1, 2}
        assert (tokens[2:] == -1).all()


APPLY = jax.jit(lambda *inputs: apply_rule(*inputs)[0], static_argnums=0)


def verdicts(rule, logits, proposal, keys, **settings):
    """The verdict of many keys on one proposal."""
    batch = len(keys)
    rows = Sampling(**{"temperature": 1.0} | settings).rows(batch, logits.shape[-1])
    many = jax.tree.map(lambda a: jnp.broadcast_to(a, (batch, *a.shape)), proposal)
    scores = jnp.broadcast_to(logits, (batch, *logits.shape))
    any_sampled = jnp.asarray(bool((np.asarray(rows.temperature) > 0).any()))
    noise = RoundNoise(keys, jnp.full((batch,), 7), any_sampled, logits.shape[-1])
    return APPLY(rule, noise, Processing.of(rows, (), many), scores, many)


@pytest.mark.parametrize("name", RULES)
def test_duplicate_siblings_and_laws_that_are_no_numbers(name):
    """A repeated child is dropped; a child whose law is NaN, or excludes it, counts as not proposed: by every rule."""
    rule, keys = RULES[name], jax.random.split(jax.random.key(1), 4000)
    topology = chain(2) if name == "block" else branching(2)
    logits = jnp.log(jnp.asarray([[0.1, 0.2, 0.3, 0.4, 1e-9]] * 3))
    draft = jnp.log(jnp.full((3, V), 0.2))
    given = None if rule.noise is not Noise.FRESH else draft

    def run(tokens, law):
        proposal = Proposal(jnp.asarray(tokens), jax.tree.map(jnp.asarray, topology.tree), law)
        return jax.tree.map(np.asarray, verdicts(rule, logits, proposal, keys))

    nothing = run([0, -1, -1], given)
    assert (nothing.node == 0).all()
    if name != "block":
        for a, b in zip(run([0, 2, 2], given), run([0, 2, -1], given)):
            np.testing.assert_array_equal(a, b)
    if given is not None:
        broken = [draft.at[:].set(jnp.nan), draft.at[:, 2:4].set(-jnp.inf)]
        for law in broken:
            for a, b in zip(run([0, 2, 3], law), nothing):
                np.testing.assert_array_equal(a, b)


# Decodes: one chain of two for every rule, whose tables change.

LM = TableLM(V)
TABLE = np.asarray(LM.init_params(jax.random.key(7))["table"])  # a greedy text that is not constant
DRAFT = np.asarray(LM.init_params(jax.random.key(1))["table"])


def decoded(name, target, draft, new_tokens=8, rows=6, seed=0, **settings: Any):
    """The state after a decode of some rows, a round at a time."""
    decoder = Decoder(LM, ModelDraft(LM, chain(2)), RULES[name], chunk=4, width_matched=True)
    asked = request([[3, 1]] * rows, new_tokens, vocab=V, seed=seed, **{"temperature": 1.0, **settings})
    weights = Weights({"table": jnp.asarray(target)}, {"table": jnp.asarray(draft)})
    state = start(decoder, weights, asked, 64)
    for _ in range(new_tokens):
        state = step(decoder, weights, state)
    return state


def plain(target, length, **settings):
    """The greedy text."""
    text = [3, 1]
    while len(text) < length:
        text.append(int(target[text[-2], text[-1]].argmax()))
    return text


@pytest.mark.parametrize("name", with_slow(RULES, [name for name in RULES if name.startswith("lossy")]))
def test_decodes_of_degenerate_laws(name):
    """Temperatures towards 0, point laws by top-k, NaN in the draft and in the target, walked on and not.

    All by one program per rule.
    """
    greedy = plain(TABLE, 10)
    changes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1e-12},
        {"temperature": 1e-3},
        {"top_k": 1},
        {"top_p": 1e-6},
    ]
    for settings in changes:
        state = decoded(name, TABLE, DRAFT, **settings)
        assert texts(state) == [greedy] * 6, settings
        assert (np.asarray(state.status) == Status.LENGTH).all()

    broken = DRAFT.copy()
    broken[:] = np.nan
    impossible = np.full_like(DRAFT, -np.inf)
    for draft in (broken, impossible):
        for temperature in (0.0, 1.0):
            state = decoded(name, TABLE, draft, temperature=temperature)
            log = state.log.part(np.s_[:, :8])
            assert not any(counts.any() for counts in (log.accepted, log.drafted, log.tested)), "there is no draft"
            assert (np.asarray(state.status) == Status.LENGTH).all()
            if temperature == 0:
                assert texts(state) == [greedy] * 6

    # NaN after a text that is never written; and after one that always is.
    target = TABLE.copy()
    target[:, :, 4] = -np.inf
    aside = target.copy()
    aside[:, 4] = np.nan
    draft = DRAFT.copy()
    draft[:, :, 4] += 5.0
    clean, soiled = decoded(name, target, draft), decoded(name, aside, draft)
    assert texts(clean) == texts(soiled)
    assert (np.asarray(soiled.status) == Status.LENGTH).all()
    walked = TABLE.copy()
    walked[greedy[3], greedy[4]] = np.nan
    state = decoded(name, walked, DRAFT, temperature=0.0)
    assert (np.asarray(state.status) == Status.ERROR).all()
    first = next(n for n in range(2, 11) if greedy[n - 2 : n] == greedy[3:5])
    assert texts(state) == [greedy[:first]] * 6


def test_draft_and_target_disjoint_in_a_decode():
    """Nothing is accepted, and no token that only the draft has is written."""
    target, draft = TABLE.copy(), DRAFT.copy()
    target[..., 3:], draft[..., :3] = -np.inf, -np.inf
    for name in ("rejection", "traversal"):
        state = decoded(name, target, draft)
        assert not np.asarray(state.log.accepted).any()
        assert all(max(text[2:]) < 3 for text in texts(state))


@pytest.mark.parametrize("name", ["rejection", "deterministic"])
def test_no_draft_at_all_is_plain_decoding(name):
    """k = 0 by the topology or by the proposal: every rule then draws as the coupled one does, key by key."""
    asked = request([[3, 1], [2, 4]], 8, vocab=V, temperature=1.0)
    weights = Weights({"table": jnp.asarray(TABLE)}, jnp.full((V, 1), -1))
    states = []
    for rule in (RULES["coupled"], RULES[name]):
        decoder = Decoder(LM, ScriptedDrafter(chain(0)), rule, chunk=4)
        state = start(decoder, weights, asked, 64)
        for _ in range(8):
            state = step(decoder, weights, state)
        states.append(texts(state))
    assert states[0] == states[1]


@pytest.mark.parametrize("name", with_slow(["rejection", "coupled"], ("rejection",)))
def test_padded_vocabulary(name):
    """Ids without a text, banned by a bias in draft and target: never drafted into the text, never written."""
    bias = np.zeros(V, np.float32)
    bias[3:] = -np.inf
    target, draft = TABLE.copy(), DRAFT.copy()
    target[..., 3:] += 9.0
    draft[..., 3:] += 9.0
    state = decoded(name, target, draft, logit_bias=bias)
    assert all(max(text[2:]) < 3 for text in texts(state))
    assert np.asarray(state.log.accepted).any(), "the draft is banned from them too"


# The tail.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "coupled", "rejection"])
def test_the_tail_of_a_large_vocabulary_is_written(name):
    """V = 151,936 and 1.5e-3 of the mass in tokens of 1e-8: 12 of 8,000 tokens expected, by draft, residual and bonus.

    The default noise of JAX draws none. The bounds are the 99.9 % interval of a Poisson law.
    """
    size, rows, batches = 151_936, 40, 100
    lm = TableLM(size, order=0)
    logits = np.full(size, np.log(1e-8), np.float32)
    logits[:1936] = np.log((1 - 1.5e-3) / 1936)
    other = logits.copy()
    other[:968] += 0.5
    weights = Weights({"table": jnp.asarray(logits)}, {"table": jnp.asarray(other)})
    drafter, rule = ModelDraft(lm, chain(1)), RULES["rejection" if name == "rejection" else "coupled"]
    if name == "plain":
        drafter, weights = ScriptedDrafter(chain(0)), weights._replace(draft=jnp.full((size, 1), -1))
    decoder = Decoder(lm, drafter, rule, chunk=1, width_matched=True)
    run = jax.jit(lambda weights, asked: decoder.generate(weights, asked, 64).tokens[:, 1:3])
    asked = request([[1]] * rows, 2, vocab=size, temperature=1.0)._replace(
        sampling=Sampling(temperature=1.0).rows(rows, size)
    )
    keys = jax.random.split(jax.random.key(0, impl="rbg"), (batches, rows))
    tail = sum(int((np.asarray(run(weights, asked._replace(key=k))) >= 1936).sum()) for k in keys)
    assert 3 <= tail <= 26
