"""Tests rollouts inside programs: texts and log-probabilities under changing parameters, gradients, compilations."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers import rollouts
from helpers.compiling import simulated
from helpers.paths import TESTS
from helpers.shapes import unchecked
from helpers.toys import allowed, log_softmax, noisy
from jaxspec.errors import CapacityError, InvalidConfig
from jaxspec.testing import TableLM

V, NEW, SAMPLES = 24, 20, 3
LM = TableLM(V)
PARAMS = LM.init_params(jax.random.key(0))
MODEL = jaxspec.Model(LM, PARAMS, stop_ids=(5,))
PROMPTS = [[3, 1, 4, 1], [5], [9, 2]]
TOKENS, COUNT = jnp.array([[3, 1, 4, 1], [5, 7, 7, 7], [9, 2, 7, 7]]), jnp.array([4, 1, 2])
ROWS = len(PROMPTS) * SAMPLES
MIXED = jaxspec.Sampling(
    temperature=np.array([0.0, 1.0, 0.7] * 3),
    top_k=np.array([0, 0, 5, 9, 0, 0, 3, 0, 0]),
    top_p=np.array([1.0, 0.8, 1.0, 0.6, 1.0, 0.9, 1.0, 0.7, 1.0]),
    min_p=np.array([0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.2, 0.0]),
)
LOOKUP = jaxspec.Drafting("prompt-lookup", tree=3, schedule="constant")
FOUR = """
import json, sys
sys.path.insert(0, sys.argv[1])
from helpers import rollouts
print(json.dumps(eval(sys.argv[2])))
"""


def with_params(params) -> jaxspec.Model:
    return dataclasses.replace(MODEL, params=params)


def roll(params, key, sampling=MIXED, drafting=LOOKUP, **more) -> jaxspec.Rollout:
    return jaxspec.rollout(
        with_params(params), TOKENS, COUNT, key=key, sampling=sampling, max_new_tokens=NEW, samples=SAMPLES,
        drafting=drafting, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def drawn() -> jaxspec.Rollout:
    return jax.jit(roll)(PARAMS, jax.random.key(1))


def texts(rollout) -> list[list[int]]:
    return [row[:size].tolist() for row, size in zip(rollout.new_tokens, rollout.drawn.sum(1))]


# The loop of the page.


def check(found, steps, gain=1.2):
    """Texts of plain decoding in every step, log-probabilities of a fresh pass, nothing compiled after the first."""
    assert found["compiled"] == 0
    assert len(found["steps"]) == steps
    assert all(step["same"] for step in found["steps"])
    assert max(step["gap"] for step in found["steps"]) < 1e-5
    assert all(step["law"] > 1 for step in found["steps"][:1]), "the sampled law is not the raw one"
    assert sum(step["tokens"] for step in found["steps"]) > gain * sum(step["rounds"] for step in found["steps"])


@pytest.fixture(scope="module")
def one():
    return rollouts.example(50)


def on_four(call: str):
    words = [sys.executable, "-c", FOUR, str(TESTS), call]
    done = subprocess.run(words, env=simulated(4), capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_later_steps_compile_nothing():
    check(rollouts.example(4), 4, gain=1.05)


@pytest.mark.slow
def test_fifty_steps_compile_once(one):
    check(one, 50)
    rewards = [step["reward"] for step in one["steps"]]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1, "the policy has learned"


@pytest.mark.mesh
@pytest.mark.slow
def test_fifty_steps_on_a_mesh_of_four(one):
    found = on_four("rollouts.example(50)")
    assert found["devices"] == 4
    check(found, 50)
    assert found["steps"][0]["texts"] == one["steps"][0]["texts"]


@pytest.mark.mesh
@pytest.mark.slow
def test_a_mesh_shares_prompts_and_parameters():
    assert on_four("rollouts.shared()") == [True, True]


@pytest.mark.mesh
@pytest.mark.slow
def test_matrices_may_be_split_too(one):
    found = on_four("rollouts.example(10, 'jaxspec.make_mesh(data=2, model=2)')")
    check(found, 10, gain=1.1)  # the policy repeats itself more later
    assert found["steps"][0]["texts"] == one["steps"][0]["texts"]


# What a rollout holds.


def test_rows_are_those_of_generate(drawn):
    """The same key: tokens, ends and log-probabilities; rows of a prompt adjacent, one setting for each row."""
    out = jaxspec.generate(
        MODEL, PROMPTS, key=jax.random.key(1), sampling=MIXED, max_new_tokens=NEW, samples=SAMPLES, drafter="none",
        logprobs=True,
    )  # fmt: skip
    assert [row.tokens for row in out] == texts(drawn)
    assert {len(row.tokens) for row in out} > {NEW}, "some end early"
    for row, (text, size) in enumerate(zip(out, drawn.drawn.sum(1).tolist())):
        start, end = int(drawn.start[row]), int(drawn.length[row])
        assert drawn.tokens[row, :end].tolist() == [*PROMPTS[row // SAMPLES], *text.tokens]
        assert not drawn.tokens[row, end:].any()
        assert (start, end - start) == (len(PROMPTS[row // SAMPLES]), size)
        assert (drawn.status[row] == jaxspec.Status.STOP) == (text.finish_reason == "stop")
        for name, given in (("raw", text.logprobs), ("sampled", text.sampled_logprobs)):
            own = getattr(drawn.logprobs, name)[row]
            np.testing.assert_allclose(own[:size], given, atol=1e-6)
            assert not own[size:].any()
    assert drawn.rounds.sum() < drawn.drawn.sum(), "drafts were accepted"


@pytest.mark.slow
def test_keys_of_every_kind_are_folded_as_in_generate():
    key = jax.random.key(3, impl="rbg")
    out = jaxspec.generate(MODEL, PROMPTS, key=key, sampling=MIXED, max_new_tokens=NEW, samples=SAMPLES, drafter="none")
    assert [row.tokens for row in out] == texts(jax.jit(roll)(PARAMS, key))


def test_other_parameters_and_settings_compile_nothing(drawn):
    """Parameters, keys and settings are traced; the values of settings are those of a concrete one."""
    traced = jax.jit(lambda params, key, sampling: roll(params, key, sampling))
    with rollouts.compilations() as compiled:
        first = traced(PARAMS, jax.random.key(1), MIXED)
        assert compiled
        others = noisy(PARAMS, 1, 0.5), jax.random.key(2), dataclasses.replace(MIXED, top_p=MIXED.top_p / 2)
        compiled.clear()
        traced(*others)
        assert not compiled
    assert texts(first) == texts(drawn)


def law(logits, row, token) -> np.ndarray:
    """The log-law that a row samples, in float64; `token` and likelier ones are always kept."""
    names = "temperature", "top_k", "top_p", "min_p"
    temperature, top_k, top_p, min_p = (np.asarray(getattr(MIXED, name))[row].item() for name in names)
    kept = allowed(logits, temperature, top_k, top_p, min_p) | (logits >= logits[token])
    return log_softmax(np.where(kept, logits.astype(np.float64) / temperature, -np.inf))


@pytest.mark.parametrize("changed", [False, True])
def test_log_probs_are_those_of_each_rows_law(drawn, changed):
    """Raw and sampled, by the definition; under other parameters a token that is no longer kept counts as kept."""
    params = noisy(PARAMS, 2, 0.3) if changed else PARAMS
    found = jax.tree.map(np.asarray, jaxspec.log_probs(with_params(params), drawn))
    gone = 0
    for row, text in enumerate(texts(drawn)):
        whole = [*PROMPTS[row // SAMPLES], *text]
        for at, token in enumerate(text):
            logits = np.asarray(LM.logits(params, whole[: len(whole) - len(text) + at]))
            assert found.raw[row, at] == pytest.approx(log_softmax(logits)[token], abs=1e-5)
            if MIXED.temperature[row] > 0:
                assert found.sampled[row, at] == pytest.approx(law(logits, row, token)[token], abs=1e-5)
                gone += law(logits, row, logits.argmax())[token] == -np.inf
            else:
                assert found.sampled[row, at] == 0
        assert not found.raw[row, len(text) :].any()
    assert (gone > 0) == changed
    if not changed:
        np.testing.assert_allclose(found.raw, drawn.logprobs.raw, atol=1e-5)
        np.testing.assert_allclose(found.sampled, drawn.logprobs.sampled, atol=1e-5)


def test_gradients_are_those_of_the_law(drawn):
    """Of a dense softmax of what each row keeps, and of all logits."""

    def dense(params):
        total = 0.0
        for row, text in enumerate(texts(drawn)):
            whole = [*PROMPTS[row // SAMPLES], *text]
            for at, token in enumerate(text):
                logits = LM.logits(params, whole[: len(whole) - len(text) + at])
                total += jax.nn.log_softmax(logits)[token]
                if MIXED.temperature[row] > 0:
                    now = np.asarray(LM.logits(PARAMS, whole[: len(whole) - len(text) + at]))
                    kept = law(now, row, token) > -np.inf
                    total += jax.nn.log_softmax(jnp.where(kept, logits / MIXED.temperature[row], -jnp.inf))[token]
        return total

    def own(params):
        found = jaxspec.log_probs(with_params(params), drawn)
        return found.raw.sum() + found.sampled.sum()

    wanted, found = jax.grad(dense)(PARAMS)["table"], jax.jit(jax.grad(own))(PARAMS)["table"]
    assert jnp.abs(wanted).max() > 1
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.slow
def test_models_without_a_cache_are_scored_too():
    def bigram(params, tokens, lengths):
        return params[jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]]

    model = jaxspec.Model(jaxspec.FunctionLM(bigram, V), jax.random.normal(jax.random.key(0), (V, V)))
    rollout = jax.jit(lambda: jaxspec.rollout(model, TOKENS, COUNT, key=jax.random.key(0), max_new_tokens=8))()
    np.testing.assert_allclose(jaxspec.log_probs(model, rollout).raw, rollout.logprobs.raw, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"tokens": [[1]]}, InvalidConfig, "tokens must be an array of integers"),
        ({"count": jnp.ones(3)}, InvalidConfig, "count must be an array of integers"),
        ({"count": jnp.array([1])}, InvalidConfig, "3 prompts, got 1"),
        ({"key": 0}, InvalidConfig, "key must be a JAX random key"),
        ({"drafting": "none"}, InvalidConfig, "drafting must be a jaxspec.Drafting"),
        ({"sampling": 0.7}, InvalidConfig, "sampling must be a jaxspec.Sampling"),
        ({"max_new_tokens": 0}, InvalidConfig, "max_new_tokens"),
        ({"samples": 0}, InvalidConfig, "samples"),
        ({"max_new_tokens": 1 << 21}, CapacityError, "context"),
        ({"mesh": 4}, InvalidConfig, "mesh must have the axes"),
        ({"sample": 2}, jaxspec.JaxspecError, "samples"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_compiles(changes, error, match):
    arguments = {"target": MODEL, "tokens": TOKENS, "count": COUNT, "key": jax.random.key(0)} | changes
    with unchecked(), rollouts.compilations() as compiled, pytest.raises(error, match=match):
        jax.eval_shape(lambda: jaxspec.rollout(**arguments))
    assert not compiled


def test_a_model_that_is_split_needs_its_mesh():
    split = jaxspec.Model(rollouts.LM.with_execution(shards=2), None)
    with pytest.raises(InvalidConfig, match="split over 2 devices, but the axis 'model' of the mesh has 1"):
        jaxspec.rollout(split, TOKENS, COUNT, key=jax.random.key(0))
