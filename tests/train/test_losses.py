"""Tests the losses against a float64 reference in numpy: values, gradients, labels, weights, and masks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import trainees
from helpers.tiers import with_slow
from jaxspec.heads.medusa_config import HeadsConfig
from jaxspec.heads.network import flatten, init_params, unflatten
from jaxspec.train import losses
from jaxspec.train.medusa import MedusaTrainee
from jaxspec.train.medusa_settings import MedusaSettings
from jaxspec.train.packing import Text, pack_supervised_spans, pack_texts
from jaxspec.train.settings import LOSSES
from jaxspec.train.step import Trainable, init_state, train_step
from jaxspec.train.tokenized import find_frequent_tokens

LM, E = trainees.LM, 64
V = LM.vocab
PARAMS = LM.init_params(jax.random.key(0))
IDS = np.arange(0, V, 2)
CE = MedusaSettings(loss="ce")


@functools.cache
def rows():
    """Three texts in two rows, and features at random."""
    rng = np.random.default_rng(0)
    texts = [
        Text(rng.integers(0, V, n).astype(np.int32), np.arange(n) >= first) for n, first in ((9, 2), (6, 1), (12, 5))
    ]
    packed, cut = pack_texts(texts, 16)
    assert cut == 0
    assert packed.tokens.shape == (2, 16)
    features = rng.normal(size=(2, 16, E)).astype(np.float32)
    return losses.Batch(*map(jnp.asarray, (*packed, features)))


def heads(inputs: str, reduced: bool):
    config = HeadsConfig(E, V, 3, 2, inputs=inputs, draft_vocab_size=len(IDS) if reduced else None)
    rng = np.random.default_rng(1)
    params = flatten(init_params(config, tokens=IDS if reduced else None))
    return config, {k: a if k == "tokens" else jnp.asarray(0.1 * rng.normal(size=a.shape), jnp.float32)
                    for k, a in params.items()}  # fmt: skip


def reference(kind: str, config: HeadsConfig, named: dict, reduced: bool, weights) -> float:
    """The published objectives, written out position by position."""
    batch = [np.asarray(a) for a in rows()]
    tokens, segments, mask, features = (*batch[:3], batch[3].astype(np.float64))
    table, embed = (np.asarray(PARAMS[name], np.float64) for name in ("head", "embed"))
    ids = IDS if reduced else np.arange(V)
    total = 0.0
    for head in range(config.num_heads):
        values = []
        for b, t in np.ndindex(*tokens.shape):
            at = t + 2 + head
            if at >= tokens.shape[1] or not segments[b, t] or segments[b, at] != segments[b, t] or not mask[b, at]:
                continue
            x = features[b, t]
            read = x
            if config.inputs == "path":
                words = [embed[tokens[b, t + 1 + j]] for j in range(head + 1)]
                read = np.concatenate([x, *(w / np.sqrt(np.mean(w * w)) for w in words)])
            for j in range(head + 1 if config.inputs == "recurrent" else 0):
                word = embed[tokens[b, t + 1 + j]]
                read = np.concatenate([x, word / np.sqrt(np.mean(word * word))])
                for layer in range(config.num_layers):
                    inner = (read if layer == 0 else x) @ named[f"network.{layer}.up"] + named[f"network.{layer}.bias"]
                    x = x + inner / (1 + np.exp(-inner)) @ named[f"network.{layer}.down"]
            for layer in range(config.num_layers if config.inputs != "recurrent" else 0):
                inner = (read if layer == 0 else x) @ named[f"blocks.{head}.{layer}.kernel"]
                inner = inner + named[f"blocks.{head}.{layer}.bias"]
                x = x + inner / (1 + np.exp(-inner))
            logits = table[ids] @ x
            draft = np.exp(logits - np.logaddexp.reduce(logits))
            law = np.exp((whole := table @ features[b, at - 1]) - np.logaddexp.reduce(whole))[ids]
            acceptance = np.minimum(law, draft).sum()
            known = law / law.sum()
            divergence = (known * np.log(known / draft)).sum()
            mix = np.exp(-3 * acceptance)
            drafted = tokens[b, at] in ids
            entropy = -np.log(draft[ids.tolist().index(int(tokens[b, at]))]) if drafted else 0.0
            if kind == "ce":
                if drafted:
                    values.append(entropy)
                continue
            values.append(
                {
                    "kl": divergence,
                    "tv": 1 - acceptance,
                    "lk-alpha": -np.log(acceptance),
                    "lk-lambda": mix * divergence + (1 - mix) * (1 - acceptance),
                    "ce-l1": 0.1 * entropy + 0.9 * (np.abs(law - draft).sum() + 1 - law.sum()),
                }[kind]
            )
        total += weights[head] * np.mean(values)
    return float(total)


def objective(settings: MedusaSettings, config: HeadsConfig, reduced: bool):
    frozen = losses.freeze(
        MedusaTrainee.of(config), LM, PARAMS, IDS if reduced else None, laws=settings.loss not in ("ce", "kl")
    )
    weights = losses.head_weights(settings, jnp.zeros(3))

    @jax.jit
    def loss(named):
        args = settings, MedusaTrainee.of(config), unflatten(named), frozen, rows()
        return trainees.weighted(*args, lambda sums: weights / sums.counted)[0]

    return loss, np.asarray(weights)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(
    ("inputs", "reduced"), with_slow([("hidden", False), ("path", True), ("recurrent", True)], ("hidden", "path"))
)
def test_loss_and_gradient_equal_the_reference(kind, inputs, reduced):
    """To 1e-5, at a random direction of every parameter; "lk-lambda" has its mixture held fast, as its paper has."""
    config, named = heads(inputs, reduced)
    loss, weights = objective(MedusaSettings(loss=kind), config, reduced)
    precise = {name: np.asarray(a, np.float64) for name, a in named.items()}
    value = reference(kind, config, precise, reduced, weights)
    assert float(loss(named)) == pytest.approx(value, abs=1e-5, rel=1e-5)
    if kind == "lk-lambda":
        return  # a difference would move the mixture; its parts are checked one by one
    trained = {name: a for name, a in named.items() if name != "tokens"}
    gradient = jax.grad(lambda trained: loss(named | trained))(trained)
    rng = np.random.default_rng(2)
    for name, leaf in trained.items():
        step = rng.normal(size=leaf.shape)
        step *= 1e-5 / np.linalg.norm(step)
        ends = [
            reference(kind, config, precise | {name: precise[name] + sign * step}, reduced, weights) for sign in (1, -1)
        ]
        slope = (ends[0] - ends[1]) / 2e-5
        assert float((np.asarray(gradient[name]) * step).sum() / 1e-5) == pytest.approx(slope, abs=1e-5, rel=1e-4)


def test_the_mixture_of_lk_lambda_has_no_gradient():
    config, named = heads("hidden", False)
    parts = {kind: jax.grad(lambda logits, kind=kind: losses.compute_loss(kind, logits, jnp.int32(0), TARGET).sum())
             for kind in ("kl", "tv", "lk-lambda")}  # fmt: skip
    logits = jnp.asarray(np.random.default_rng(0).normal(size=8), jnp.float32)
    acceptance = np.minimum(np.exp(TARGET), np.exp(jax.nn.log_softmax(logits))).sum()
    mix = np.exp(-3 * acceptance)
    wanted = mix * parts["kl"](logits) + (1 - mix) * parts["tv"](logits)
    np.testing.assert_allclose(parts["lk-lambda"](logits), wanted, atol=1e-6)
    assert config.num_heads == 3
    assert named


TARGET = jax.nn.log_softmax(jnp.asarray(np.random.default_rng(5).normal(size=8), jnp.float32))


def test_what_is_not_finite_and_not_counted_does_no_harm():
    """Features of padding and of a text's end may be anything."""
    config, named = heads("hidden", False)
    loss, _ = objective(CE, config, False)
    spoilt = rows()._replace(features=jnp.where((rows().segments == 0)[..., None], jnp.nan, rows().features))
    frozen = losses.freeze(MedusaTrainee.of(config), LM, PARAMS)
    value, gradient = jax.jit(
        jax.value_and_grad(
            lambda named: losses.weigh_losses(
                CE, MedusaTrainee.of(config), unflatten(named), frozen, spoilt, jnp.ones(3)
            )[0]
        )
    )(named)
    assert np.isfinite(value)
    assert float(loss(named)) > 0
    assert all(np.isfinite(leaf).all() for leaf in gradient.values())


def test_labels_are_those_two_and_more_ahead():
    """A table model of which every head knows one step: right it scores one, off by one zero, either way."""
    size = 12
    tokens = jnp.asarray((np.arange(30) * 5 % size)[None], jnp.int32)  # token t is 5 t mod 12
    config = HeadsConfig(size, size, 3, 1)
    for shift in (-1, 0, 1):
        # The feature of token t is the one-hot of the token t + shift; a head maps one-hots to one-hots.
        features = jax.nn.one_hot((tokens + 5 * shift) % size, size)
        params = flatten(init_params(config))
        for head in range(3):
            after = np.roll(np.eye(size), 5 * (2 + head), axis=1)
            params[f"blocks.{head}.0.kernel"] = jnp.asarray(40 * after - 20 * (1 - after))
        batch = losses.Batch(tokens, jnp.ones_like(tokens), jnp.ones(tokens.shape, bool), features)
        frozen = losses.FrozenTarget(jnp.eye(size), None, None, None)
        found = losses.sum_losses(CE, MedusaTrainee.of(config), unflatten(params), frozen, batch)
        assert (found.top1 / found.seen).tolist() == ([1.0] * 3 if shift == 0 else [0.0] * 3)
        assert found.seen.tolist() == [28, 27, 26]
        assert float(losses.estimate_accepted_length(found)) == (4 if shift == 0 else 1)


def test_a_step_in_parts_is_the_step_in_one():
    """Gradients of two parts of unlike shares add up to those of the whole."""
    config, named = heads("hidden", False)
    state = functools.partial(
        lambda: init_state(MedusaSettings(), MedusaTrainee.of(config), Trainable(unflatten(named)))
    )
    frozen = losses.freeze(MedusaTrainee.of(config), LM, PARAMS)
    ends = []
    for parts in (1, 2):
        settings = MedusaSettings(loss="ce", batch=2, accumulate=parts, warmup=0, steps=10, learning_rate=1e-3)
        batch = jax.tree.map(lambda a, parts=parts: a.reshape(parts, 2 // parts, *a.shape[1:]), rows())
        step = jax.jit(functools.partial(train_step, settings, MedusaTrainee.of(config), LM))
        end, report = step(frozen, state(), batch)
        ends.append((flatten(end.params.heads), float(report.loss), float(report.gradient)))
    assert ends[0][1:] == pytest.approx(ends[1][1:], rel=1e-5)
    for name in ends[0][0]:
        np.testing.assert_allclose(ends[0][0][name], ends[1][0][name], atol=2e-6)


def test_packing_loses_nothing_and_mixes_nothing():
    rng = np.random.default_rng(0)
    texts = [Text(rng.integers(1, 99, n).astype(np.int32), rng.random(n) < 0.5) for n in rng.integers(2, 40, 50)]
    packed, cut = pack_texts(texts, 32)
    kept = [t for t in texts if t.mask[:32].any()]
    assert cut == sum(t.ids.size > 32 for t in texts)
    found = []
    for tokens, segments, mask in zip(*packed):
        for number in range(1, segments.max() + 1):
            there = np.flatnonzero(segments == number)
            assert (np.diff(there) == 1).all()
            found.append((tokens[there].tolist(), mask[there].tolist()))
    assert sorted(found) == sorted((t.ids[:32].tolist(), t.mask[:32].tolist()) for t in kept)
    assert len(packed.tokens) <= 1.25 * sum(min(t.ids.size, 32) for t in kept) / 32 + 1


@pytest.mark.parametrize("heads", [1, 3])
def test_what_is_learnt_from_alone_gives_the_same_sums(heads):
    """Prompts left out and the rest packed anew: the same guesses at fewer places, each feature its own token's."""
    rng = np.random.default_rng(1)
    turns = [np.repeat(rng.random(6) < 0.4, rng.integers(1, 9, 6)) for _ in range(20)]
    texts = [Text(rng.integers(0, V, mask.size).astype(np.int32), mask) for mask in turns if mask.any()]
    whole, _ = pack_texts(texts, 40)
    features = rng.normal(size=(*whole.tokens.shape, E)).astype(np.float32)
    few, places = pack_supervised_spans(whole, heads)
    assert few.segments.astype(bool).sum() < whole.segments.astype(bool).sum()
    held = few.segments > 0
    np.testing.assert_array_equal(few.tokens[held], whole.tokens.reshape(-1)[places][held])
    config = HeadsConfig(E, V, heads, inputs="path")
    params = init_params(config)
    params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), jnp.float32), params)
    frozen = losses.freeze(MedusaTrainee.of(config), LM, PARAMS)
    both = [
        losses.sum_losses(
            MedusaSettings(loss="ce"),
            MedusaTrainee.of(config),
            params,
            frozen,
            losses.Batch(*map(jnp.asarray, (*rows, a))),
        )
        for rows, a in ((whole, features), (few, features.reshape(-1, E)[places]))
    ]
    for name, all_rows, few_rows in zip(losses.LossSums._fields[:-1], *both):
        np.testing.assert_allclose(all_rows, few_rows, rtol=1e-5, err_msg=name)
    assert float(both[0].seen.min()) > 0


def test_the_most_frequent_tokens_of_answers():
    texts = [Text(np.array([5, 5, 7, 9, 1, 1, 1]), np.array([1, 1, 1, 1, 0, 0, 1], bool))]
    assert find_frequent_tokens(texts, 10, 2).tolist() == [1, 5]  # 1, 7 and 9 are equal: the lowest id
    assert find_frequent_tokens(texts, 10, 3).tolist() == [1, 5, 7]
