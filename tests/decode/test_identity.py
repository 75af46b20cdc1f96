"""Tests that speculation never changes the text: every drafter, tree and draft against plain decoding."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import cases
from helpers.narrow import not_none
from helpers.tiers import with_slow
from helpers.toys import (
    RAGGED,
    Chaos,
    all_noise,
    by_hand,
    decoder,
    generate,
    lively,
    noisy,
    random_request,
    request,
    start,
    texts,
    transformer,
)
from jaxspec.core.records import Window
from jaxspec.core.sampling import MIN_TEMPERATURE
from jaxspec.core.theory import TokenCost
from jaxspec.core.topology import branching, chain, dynamic
from jaxspec.decode.state import Weights
from jaxspec.drafters.early_exit import EarlyExit
from jaxspec.drafters.model import ModelDraft
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.drafters.recycling import Recycling
from jaxspec.models.functional import FunctionLM, from_flax
from jaxspec.schedules.best_width import BestWidth
from jaxspec.testing import ScriptedDrafter, TableLM

V, BATCH, SEEDS = 12, 128, (0, 1, 2)
LM = TableLM(V)
PARAMS = LM.init_params(jax.random.key(0))
DRAFTS = {
    "right": PARAMS,
    "near": noisy(PARAMS, 1, 0.3),
    "wrong": LM.init_params(jax.random.key(9), 4.0),
    "opposite": {"table": -PARAMS["table"]},
    "constant": {"table": jnp.zeros_like(PARAMS["table"])},
    "nan": {"table": jnp.where(jnp.arange(V) % 3 == 0, jnp.nan, PARAMS["table"])},
    "all-nan": {"table": jnp.full_like(PARAMS["table"], jnp.nan)},
    "infinite": {"table": jnp.where(jnp.arange(V) % 3 == 0, jnp.inf, -jnp.inf) + PARAMS["table"]},
}
NOT_NUMBERS = ("nan", "all-nan", "infinite")
DRAFTERS = {
    "narrow-none": (NoDraft(RAGGED), {}, [None]),
    "wide-none": (NoDraft(chain(4)), {"widths": ()}, [None]),
    "lookup": (PromptLookup(chain(4), min_match=1), {}, [None]),
    "lookup-while-it-pays": (
        PromptLookup(dynamic(3, 5, 9)),
        {"chunk": 64, "schedule": BestWidth((1, 4), TokenCost(0.0005, 1e5))},
        [None],
    ),
    "lookup-in-earlier-answers": (
        PromptLookup(dynamic(3, 5, 9), earlier=9),
        {},
        [{"earlier": jnp.arange(9) % 5 - 1}],
    ),
    "recycling": (Recycling(dynamic(3, 3, 8), size=8), {}, [None]),
    "chaos": (Chaos(V), {}, [jax.random.key(5), jax.random.key(6)]),
    **{f"model-{name}": (ModelDraft(LM, tree), {}, list(DRAFTS.values())) for name, tree in cases.TREES.items()},
}
SLOW = {f"model-{name}" for name in cases.TREES.keys() - {"ragged"}} | {"lookup-in-earlier-answers", "recycling"}


@pytest.fixture(scope="module")
def plain():
    """The texts of plain decoding, for every seed."""
    return {
        seed: texts(generate(decoder(LM, NoDraft()), Weights(PARAMS), random_request(seed, BATCH, V), 128))
        for seed in SEEDS
    }


def test_plain_decoding_is_the_reference_by_hand(plain):
    """No jaxspec but the noise: table, sort, argmax, stop and budget in numpy, token by token."""
    table = np.asarray(PARAMS["table"])
    for seed, rows in ((0, range(BATCH)), (1, range(0, BATCH, 4))):
        asked = random_request(seed, BATCH, V)
        noise = np.asarray(all_noise(asked.key, 48, V))
        for row in rows:
            assert plain[seed][row] == by_hand(table, asked, noise, row), (seed, row)


@pytest.mark.parametrize("name", with_slow(DRAFTERS, SLOW))
def test_toy_text_is_that_of_plain_decoding(name, plain):
    """Each seed is 128 configurations: prompts, budgets, stops, temperature, top-k, top-p, min-p and bias.

    About 17,000 in all with the drafts: right, near, wrong, opposite, constant, with NaN and infinities.
    """
    drafter, options, drafts = DRAFTERS[name]
    config = decoder(LM, drafter, **options)
    accepted = []
    for draft in drafts:
        result = None
        for seed in SEEDS:
            result = generate(config, Weights(PARAMS, draft), random_request(seed, BATCH, V), 128)
            got = texts(result)
            wrong = [row for row in range(BATCH) if got[row] != plain[seed][row]]
            assert not wrong, (name, seed, wrong)
        accepted.append(int(np.asarray(not_none(result).log.accepted).sum()))
    assert (max(accepted) > 0) == ("none" not in name), "a test without accepted tokens shows nothing"


def test_a_right_draft_is_accepted_whole():
    """Greedy and sampled, with the target as its own draft and no limits on the law: D + 1 tokens a round."""
    asked = request([[1, 2], [3]], 25, vocab=V, temperature=[0.0, 1.0])
    result = generate(decoder(LM, ModelDraft(LM, chain(4))), Weights(PARAMS, PARAMS), asked, 128)
    assert result.log.emitted[:, :5].tolist() == [[5] * 5] * 2


# Real transformers.


def certified(config, params, asked, got, expected, tolerance=1e-4) -> int:
    """The number of rows that differ; each must differ first at a tie of the perturbed scores."""
    differ = 0
    for row, (a, b) in enumerate(zip(got, expected)):
        if a == b:
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        size = max(map(len, expected))
        single = decoder(config.target, NoDraft())
        state = start(single, Weights(params), request([b[:at]], 1, vocab=config.target.vocab, size=size), 128)
        window = Window(jnp.asarray([[b[at - 1]]]), state.cache.length[:, None], jnp.ones((1, 1, 1), bool))
        features, _ = config.target.apply(params, window, state.cache)
        logits = np.asarray(config.target.head(params, features))[0, 0]
        temperature = float(asked.sampling.temperature[row])
        noise = np.asarray(all_noise(asked.key, 128, logits.size))[row, at]
        perturbed = logits if temperature < MIN_TEMPERATURE else logits / temperature + noise
        second, first = np.sort(perturbed)[-2:]
        print(f"row {row}: a tie at position {at}, gap {first - second:.2e}")
        assert first - second < tolerance, (row, at, first - second)
        differ += 1
    return differ


def ask(lm, new_tokens=24):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, lm.vocab, n).tolist() for n in (1, 3, 7, 12)]
    # Row 2 repeats itself, for prompt lookup.
    prompts[2] = [5, 6, 7, 8] * 3
    return request(prompts, new_tokens, vocab=lm.vocab, temperature=[0.0, 0.8, 1.0, 0.0],
                   top_p=[1, 0.95, 1, 1], logprobs=True)  # fmt: skip


SMALL = transformer()
LARGE = transformer(hidden_size=512, intermediate_size=640, num_layers=2, num_heads=8, head_dim=64)


def members(lm, params, tree):
    early = type(lm)(lm.config, lm.dtype, layers=1)
    return [(EarlyExit(early, tree), None), (ModelDraft(lm, tree), noisy(params, 3, 0.05))]


@pytest.mark.parametrize(
    ("size", "tree"),
    [
        ("small", RAGGED),
        ("small", dynamic(3, 3, 8)),
        ("large", branching(2, 2)),
    ],
)
@pytest.mark.slow
def test_transformer_text_is_that_of_plain_decoding(size, tree):
    """Float32 at the highest precision; a difference is allowed at a tie below 1e-4, and is printed."""
    lm = {"small": SMALL, "large": LARGE}[size]
    params = lively(lm.init_params(jax.random.key(1)))
    asked = ask(lm)
    plain = texts(generate(decoder(lm, NoDraft()), Weights(params), asked, 128))
    assert len(set(map(tuple, plain))) == 4
    ties = 0
    for drafter, draft in members(lm, params, tree):
        config = decoder(lm, drafter)
        result = generate(config, Weights(params, draft), asked, 128)
        assert np.asarray(result.log.accepted).sum() > 0
        ties += certified(config, params, asked, texts(result), plain)
    assert ties <= 1


def matched(dtype, proposal):
    """The results with nothing proposed, and with a script made from that text, out of one executable."""
    lm = type(LARGE)(LARGE.config, dtype)
    params = lively(lm.init_params(jax.random.key(1)))
    config = decoder(lm, ScriptedDrafter(RAGGED), width_matched=True)
    nothing = jnp.full((lm.vocab, RAGGED.shape.nodes), -1)
    reference = generate(config, Weights(params, nothing), ask(lm), 128, quick=False)
    script = jnp.asarray(proposal(lm.vocab, texts(reference)), nothing.dtype)
    return reference, generate(config, Weights(params, script), ask(lm), 128, quick=False)


def assert_same_bits(got, expected, ulps=0):
    assert texts(got) == texts(expected)
    for row, (first, end) in enumerate(zip(np.asarray(got.start), np.asarray(got.length))):
        for one, other in zip(
            (got.logprobs.raw, got.logprobs.sampled), (expected.logprobs.raw, expected.logprobs.sampled)
        ):
            np.testing.assert_allclose(
                one[row, first:end], other[row, first:end], rtol=float(ulps * np.finfo(np.float32).eps), atol=0
            )


def wrong(vocab, rows):
    """Tokens that never follow one another in the reference text."""
    follows = {pair for row in rows for pair in itertools.pairwise(row)}
    script = np.random.default_rng(0).integers(0, vocab, (vocab, RAGGED.shape.nodes))
    for root, node in np.ndindex(*script.shape):
        while (root, script[root, node]) in follows:
            script[root, node] = (script[root, node] + 1) % vocab
    return script


def right(vocab, rows):
    """Down from every node a continuation that the reference text has; the younger siblings are off."""
    after = {a: b for row in rows for a, b in itertools.pairwise(row)}
    script = np.zeros((vocab, RAGGED.shape.nodes), int)
    script[:, 0] = np.arange(vocab)
    for node, parent in enumerate(RAGGED.parents[1:], start=1):
        script[:, node] = [after.get(token, 0) + RAGGED.tree.ranks[node] for token in script[:, parent].tolist()]
        script[:, node] %= vocab
    return script


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rejected_drafts_leave_no_trace(dtype):
    """At one width, wrong drafts change no bit of tokens or log-probabilities, in bfloat16 or float32."""
    reference, result = matched(dtype, wrong)
    assert not np.asarray(result.log.accepted).any()
    assert_same_bits(result, reference)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.slow
def test_bits_are_those_of_the_width_matched_reference(dtype):
    """The same tree with nothing proposed: equal tokens, and log-probabilities equal to the last bit.

    In float32, XLA:CPU of JAX 0.12 rounds a row of a product by its place among the rows (25 ulps were seen).
    """
    reference, result = matched(dtype, right)
    assert np.asarray(result.log.accepted).sum() > 10
    assert_same_bits(result, reference, ulps=0 if dtype == "bfloat16" or jax.__version__ < "0.11" else 500)


# Other people's models, through the adapters.


class Recurrent(nnx.Module):
    """A causal module: a decaying sum of embeddings."""

    def __init__(self, vocab, width, rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.out = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens):
        def fade(state, x):
            state = 0.7 * state + x
            return state, state

        x = self.embed(tokens).swapaxes(0, 1)
        return 4 * self.out(jnp.tanh(jax.lax.scan(fade, jnp.zeros(x.shape[1:]), x)[1])).swapaxes(0, 1)


class Windowed(linen.Module):
    """A causal Linen module: the last three tokens."""

    vocab: int

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(self.vocab, 16)(tokens)
        x = linen.Conv(16, (3,), padding="CAUSAL")(x)
        return 4 * linen.Dense(self.vocab)(jnp.tanh(x))


def by_sum(params, tokens, lengths):
    """A plain function of whole texts: the table row of the sum of all tokens and the last one."""
    inside = jnp.arange(tokens.shape[1]) < lengths[:, None]
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
    return params[jnp.where(inside, tokens, 0).sum(-1) % params.shape[0], last]


def flax_models():
    linen_module = Windowed(V)
    variables = linen_module.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    table = 2 * jax.random.normal(jax.random.key(2), (7, V, V))
    return {
        "nnx": from_flax(Recurrent(V, 16, nnx.Rngs(0)), V),
        "linen": from_flax(linen_module, V, variables=variables),
        "function": (FunctionLM(by_sum, V), table),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("target", "draft"), [("nnx", "linen"), ("linen", "nnx"), ("function", "function")])
def test_adapted_models_as_target_and_draft(target, draft):
    """Plain text equals the module called on whole texts by hand, and speculative text equals plain text."""
    models = flax_models()
    (lm, params), (small, other) = models[target], models[draft]
    asked = request([[1], [2, 3, 4], [5] * 9], 12, vocab=V, temperature=[0.0, 1.0, 0.7])
    plain = texts(generate(decoder(lm, NoDraft()), Weights(params), asked, 128))
    noise = np.asarray(all_noise(asked.key, 24, V))
    function = jax.jit(lm.function)
    for row, (prompt, temperature) in enumerate(zip(([1], [2, 3, 4], [5] * 9), (0.0, 1.0, 0.7))):
        text = list(prompt)
        for at in range(len(prompt), len(prompt) + 12):
            padded = jnp.zeros((1, 24), jnp.int32).at[0, :at].set(jnp.asarray(text))
            logits = np.asarray(function(params, padded, jnp.asarray([at])))[0]
            text.append(int((logits / temperature + noise[row, at] if temperature else logits).argmax()))
        assert text == plain[row]
    near = noisy(other, 1, 0.1) if draft == target else other
    assert texts(generate(decoder(lm, ModelDraft(small, chain(2))), Weights(params, near), asked, 128)) == plain
    own = generate(decoder(lm, ModelDraft(lm, chain(2))), Weights(params, params), asked, 128)
    assert texts(own) == plain
    assert (own.log.emitted[:, :4] == 3).all(), "a target that drafts for itself is always right"
