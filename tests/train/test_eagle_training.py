"""Tests EAGLE heads in training: unrolled steps are the drafter's chain, with the gradients of one dense mask."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers import trainees
from helpers.narrow import not_none
from helpers.tiers import with_slow
from jaxspec.core import cache as caches
from jaxspec.core.records import KV, Window
from jaxspec.errors import InvalidConfig, TrainingError
from jaxspec.heads.eagle_config import EagleConfig
from jaxspec.heads.network import DraftHeads, init_cache, init_params, make_network
from jaxspec.models.rope import Rope
from jaxspec.train import losses
from jaxspec.train.batch import Batch, FrozenTarget, Guess, shift_left
from jaxspec.train.eagle import EagleTrainee, attend_to_rows_and_chain
from jaxspec.train.files import fingerprint
from jaxspec.train.log import LOG_FILE, Watch
from jaxspec.train.packing import Text, pack_texts

LM = trainees.LM
V, E = LM.vocab, LM.config.hidden_size
LAYER = dataclasses.replace(LM.config, num_layers=1, rope=Rope(100.0))
TWO = dataclasses.replace(LAYER, num_layers=2, qk_norm=True, qkv_bias=True)
IDS = np.arange(0, V, 2)
STEPS = 4
LENGTHS = (9, 6, 12)
CONFIGS = {
    "1": EagleConfig(TWO, 1, fc_bias=True),
    "3": EagleConfig(LAYER, taps=(1, 1, 2)),
    "3.1": EagleConfig(LAYER, taps=(1, 2), draft_vocab_size=len(IDS), fc_norm=True, norm_output=True),
    "3, two layers": EagleConfig(
        TWO, taps=(2,), draft_vocab_size=len(IDS), norm_before_fc=True, norm_before_residual=True, own_projection=True
    ),
}


def trainee(name: str) -> EagleTrainee:
    return EagleTrainee.of(CONFIGS[name], STEPS, feature_loss=2.0 * (name == "1"))


@functools.cache
def target() -> jaxspec.Model:
    return trainees.target()


@functools.cache
def batch(name: str) -> Batch:
    """Three texts in two rows, and features at random."""
    rng = np.random.default_rng(0)
    texts = [Text(rng.integers(0, V, n).astype(np.int32), np.arange(n) >= n // 4) for n in LENGTHS]
    packed, _ = pack_texts(texts, 16)
    assert packed.segments.max() == 2
    count = 1 + CONFIGS[name].num_taps
    return Batch(*map(jnp.asarray, (*packed, rng.normal(size=(2, 16, count * E)).astype(np.float32))))


@functools.cache
def inputs(name: str) -> tuple[dict, FrozenTarget]:
    """Parameters of which no norm or bias is that of a beginning, and the target's tables."""
    ids = IDS if CONFIGS[name].draft_vocab_size else None
    rng = np.random.default_rng(2)
    params = jax.tree.map(
        lambda leaf: leaf + 0.2 * jnp.asarray(rng.normal(size=leaf.shape), jnp.float32),
        trainee(name).init_params(target(), ids),
    )
    return params, losses.freeze(trainee(name), LM, target().params, ids)


def whole(params: dict, frozen: FrozenTarget) -> dict:
    return params if frozen.ids is None else params | {"tokens": jnp.asarray(frozen.ids)}


def logits_of(head, frozen: FrozenTarget, states):
    projection = head.head[...] if head.config.own_projection else frozen.rows
    return jnp.matmul(head.projected(states), projection.T, precision="highest")


class Dense(EagleTrainee):
    """The same steps by the drafter's own network, with a mask of all rows of all steps, and all logits at once."""

    def logits(self, projection, rows, step, states):
        return jnp.matmul(states, (projection or [rows])[0].T, precision="highest")

    def unroll(self, params, frozen, batch) -> Iterator[Guess]:
        c, head, (rows, size) = self.config, make_network(self.config, whole(params, frozen)), batch.tokens.shape
        cache, places = init_cache(c, rows, 0, "float32"), jnp.arange(size)
        causal = (batch.segments[:, :, None] == batch.segments[:, None, :]) & (places[:, None] >= places)
        diagonal = jnp.broadcast_to(jnp.eye(size, dtype=bool), causal.shape)
        states, past = head.fuse(batch.features), None
        for step in range(self.drafted):
            mask = jnp.concatenate([causal, *[diagonal] * step], axis=-1)
            tokens = shift_left(batch.tokens, 1 + step)
            window = Window(tokens, jnp.broadcast_to(places + step, tokens.shape), mask)
            states, new = head(states, not_none(frozen.embed)[tokens], window, cache, past)
            past = new if past is None else KV(*(jnp.concatenate(both, axis=3) for both in zip(past, new)))
            penalty = None
            if self.feature_loss:
                apart = states - shift_left(batch.features, 1)
                penalty = self.feature_loss * jnp.where(abs(apart) < 1, apart**2 / 2, abs(apart) - 0.5).mean(-1)
            yield Guess(head.projected(states), penalty)


@pytest.mark.parametrize("name", with_slow(CONFIGS, ("1", "3, two layers")))
def test_losses_and_gradients_are_those_of_one_dense_mask(name):
    """Of every parameter, with packed texts, to 2e-5 of the largest gradient, which is ill-conditioned in "3.1"."""
    settings, (params, frozen), one, rows = jaxspec.Eagle3Settings(loss="kl"), inputs(name), trainee(name), batch(name)
    found = []
    for each in (one, Dense(**vars(one))):

        def loss(params, each=each):
            weigh = lambda sums: 0.8 ** jnp.arange(STEPS) / sums.counted  # noqa: E731
            return trainees.weighted(settings, each, params, frozen, rows, weigh)

        found.append(jax.jit(jax.value_and_grad(loss, has_aux=True))(params))
    (ours, gradient), (theirs, expected) = found
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), ours, theirs)
    for leaf, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert float(jnp.abs(other).max()) > 1e-6
        np.testing.assert_allclose(leaf, other, atol=2e-5 * float(jnp.abs(other).max()))


@pytest.mark.parametrize("steps", [1, 5])
def test_attention_in_bfloat16_is_that_in_float32(steps):
    """In sizes at which XLA:CPU has no bfloat16 product of the chain's columns."""
    rng = np.random.default_rng(3)
    queries = rng.normal(size=(2, 3, 3, 16, 64)).astype(np.float32)
    seen = KV(*rng.normal(size=(2, steps, 2, 3, 16, 64)).astype(np.float32))
    sees = jnp.broadcast_to(jnp.tri(16, dtype=bool), (2, 16, 16))
    attend = jax.jit(functools.partial(attend_to_rows_and_chain, step=steps - 1, scale=0.125))
    halves = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (queries, seen))
    expected = attend(*jax.tree.map(lambda a: a.astype(jnp.float32), halves), sees=sees)
    found = attend(*halves, sees=sees)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=0.02)  # weights of 8 bits, values of some 3


@functools.partial(jax.jit, static_argnums=0)
def chains(config: EagleConfig, params, frozen: FrozenTarget, text, features):
    """The logits `[S, T, R]` of a chain from every row of a text [T], one batch row each, by the drafter's cache."""
    size, head = len(text), make_network(config, params)
    tokens = jnp.append(text[1:], jnp.zeros(STEPS + 1, text.dtype))
    here, start = jnp.arange(size), jnp.broadcast_to(jnp.arange(size), (size, size))
    causal = jnp.broadcast_to(jnp.tri(size, dtype=bool), (size, size, size))
    cache = init_cache(config, size, 64, "float32")
    every = jnp.broadcast_to(tokens[:size], (size, size))
    states = head.fuse(jnp.broadcast_to(features, (size, *features.shape)))
    states, entries = head(states, not_none(frozen.embed)[every], Window(every, start, causal), cache)
    cache = caches.append_to_cache(cache, entries, None, here + 1)
    states, past = states[here, here][:, None], None
    found = [logits_of(head, frozen, states)]
    for step in range(1, STEPS):
        token = tokens[here + step][:, None]
        window = Window(token, (here + step)[:, None], jnp.ones((size, 1, step), bool))
        states, new = head(states, not_none(frozen.embed)[token], window, cache, past)
        past = new if past is None else KV(*(jnp.concatenate(both, axis=3) for both in zip(past, new)))
        found.append(logits_of(head, frozen, states))
    return jnp.stack(found)[:, :, 0]


@pytest.mark.parametrize("name", with_slow(["1", "3.1", "3, two layers"], ("1", "3, two layers")))
def test_each_step_is_the_drafters_chain_with_the_same_tokens(name):
    """From every row of every packed text, to as many tokens as the text has."""
    (params, frozen), one, rows = inputs(name), trainee(name), batch(name)
    unrolled = jax.jit(lambda params: list(one.unroll_logits(params, frozen, rows)))(params)
    longest, compared = max(LENGTHS), 0
    for row in range(len(rows.tokens)):
        for number in range(1, int(rows.segments[row].max()) + 1):
            there = np.flatnonzero(rows.segments[row] == number)
            text = np.zeros(longest, np.int32)
            text[: len(there)] = rows.tokens[row, there]
            features = np.zeros((longest, rows.features.shape[-1]), np.float32)
            features[: len(there)] = rows.features[row, there]
            found = chains(CONFIGS[name], whole(params, frozen), frozen, text, features)
            for step in range(STEPS):
                last = len(there) - 1 - step  # the rows whose token is in the text
                expected = found[step, :last]
                tolerance = 1e-5 * float(np.abs(expected).max())
                np.testing.assert_allclose(unrolled[step][row, there[:last]], expected, atol=tolerance)
                compared += last
    assert compared == sum(n - 1 - step for n in LENGTHS for step in range(STEPS))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return trainees.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


KINDS = {"eagle3": jaxspec.Eagle3Settings(depth=3), "eagle1": jaxspec.Eagle1Settings()}


@pytest.mark.slow
def test_a_head_that_knows_its_texts_drafts_them(prompts, tmp_path):
    """Nearly all of a chain is accepted where the head was trained, as training says; heads and card are written."""
    settings = {"steps": 240, "held_out": 0.05, "learning_rate": 1e-2, "warmup": 10, "log_every": 40, "eval_every": 240}
    trained = trainees.train(target(), prompts, tmp_path, of=KINDS["eagle3"], **settings | {"save_every": 240})
    last = [record for record in trained.log if "loss" in record][-1]
    assert last["accepted"] == sorted(last["accepted"], reverse=True)
    assert last["accepted_length"] == pytest.approx(1 + sum(last["accepted"]), abs=1e-5)
    assert last["accepted_length"] > 3.7
    assert trained.heads.config.taps == (1, 1, 2)
    asked = [json.loads(line)["prompt"] for line in pathlib.Path(prompts).read_text().splitlines()][:12]
    drafting = {"drafter": "eagle", "heads": trained.heads, "tree": 3}
    drafted = jaxspec.generate(target(), asked, max_new_tokens=20, width_matched=False, **drafting)
    plain = jaxspec.generate(target(), asked, max_new_tokens=20, drafter="none")
    assert [row.tokens for row in drafted] == [row.tokens for row in plain]
    assert min(drafted.stats.conditional_acceptance) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_ended_goes_on_to_the_same_bits(kind, prompts, tmp_path):
    """The noise of EAGLE-1 is that of the step, too; the folder refuses features without taps."""

    class Ended(Exception):
        pass

    def end(step, steps, record):
        if step >= 9:
            raise Ended

    shelf, lines = tmp_path / "data", []
    train = functools.partial(trainees.train, target(), prompts, data=shelf, of=KINDS[kind])
    whole = train(tmp_path / "whole")
    with pytest.raises(Ended):
        train(tmp_path / "parts", Watch(step=end))
    parts = train(tmp_path / "parts", Watch(say=lines.append))
    assert "resumes after step 6" in lines
    assert fingerprint(parts.heads.params) == fingerprint(whole.heads.params)
    assert (tmp_path / "parts" / LOG_FILE).read_bytes() == (tmp_path / "whole" / LOG_FILE).read_bytes()
    losses_by_step = [record["loss"] for record in whole.log if "loss" in record]
    assert losses_by_step[-1] < losses_by_step[0]
    other = KINDS["eagle1" if kind == "eagle3" else "eagle3"]
    with pytest.raises(TrainingError, match="features holds features made with network="):
        trainees.train(target(), prompts, tmp_path / "other", data=shelf, of=other)


@pytest.mark.slow
def test_training_goes_on_from_a_head_with_its_sizes_and_tokens(prompts, tmp_path):
    """Saved and loaded: one further step at a vanishing rate leaves it as it is, whatever the texts' tokens are."""
    config = dataclasses.replace(CONFIGS["3.1"], taps=(2, 1))
    params = init_params(config, key=jax.random.key(1), tokens=IDS)
    jaxspec.save_heads(DraftHeads(config, params), tmp_path / "heads")
    settings = {"start": str(tmp_path / "heads"), "steps": 1, "learning_rate": 1e-30, "warmup": 0}
    trained = trainees.train(target(), prompts, tmp_path / "run", of=KINDS["eagle3"], **settings)
    assert trained.heads.config == config
    assert fingerprint(trained.heads.params) == fingerprint(params)
    for of, changes, why in (
        (jaxspec.Eagle3Settings(layers=2), {}, "layers .--layers. is 2, but the heads to start from have 1"),
        (jaxspec.Eagle1Settings(), {}, "is an EAGLE-3 head of 1 layer, expected an EAGLE-1 head"),
        (jaxspec.Eagle3Settings(), {"draft_vocab": 9}, "keeps their drafted tokens: leave draft_vocab at 0"),
        (jaxspec.MedusaSettings(), {}, "the drafter 'medusa' cannot use 'heads'"),
    ):
        with pytest.raises(InvalidConfig, match=why):
            trainees.train(target(), prompts, tmp_path / "other", of=of, **settings | changes)


def test_heads_that_cannot_be_are_refused_at_once():
    for make, why in (
        (lambda: jaxspec.Eagle3Settings(taps="2,x"), "taps must be numbers of layers such as '2,15,27', got '2,x'"),
        (lambda: jaxspec.Eagle3Settings(taps="3").trainee(target()), "taps must be whole numbers from 1 to 2"),
        (lambda: jaxspec.Eagle3Settings(norm_before_fc=True).trainee(target()), "cannot both be true"),
        (lambda: jaxspec.Eagle1Settings(draft_vocab=9), "leave draft_vocab at 0"),
    ):
        with pytest.raises(InvalidConfig, match=why):
            make()
    assert [jaxspec.Eagle3Settings().loss, jaxspec.Eagle1Settings().loss, jaxspec.MedusaSettings().loss] == [
        "kl",
        "kl",
        "ce",
    ]
