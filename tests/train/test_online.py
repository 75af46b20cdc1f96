"""Tests heads that follow a policy: they learn its texts inside a program, and change no token."""

import dataclasses
import functools
import json
import subprocess
import sys
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers import rollouts
from helpers.compiling import simulated
from helpers.paths import TESTS
from helpers.toys import lively, noisy, transformer
from jaxspec.errors import InvalidConfig
from jaxspec.train.batch import Batch, FrozenTarget
from jaxspec.train.step import compute_features

LM = transformer(num_heads=2, num_kv_heads=2, vocab_size=32)
PARAMS = lively(LM.init_params(jax.random.key(0)))
POLICY = jaxspec.Model(LM, PARAMS)
TOKENS, COUNT = jnp.array([[3, 1, 4], [5, 0, 0], [9, 2, 0], [6, 6, 0]]), jnp.array([3, 1, 2, 2])
KINDS = {
    "medusa": jaxspec.MedusaSettings(heads=2, inputs="recurrent", steps=60, learning_rate=1e-2, warmup=0),
    "eagle": jaxspec.Eagle3Settings(depth=2, steps=60, learning_rate=1e-2, warmup=0),
}


def draw(params, key, drafting) -> jaxspec.Rollout:
    return jaxspec.rollout(
        jaxspec.Model(LM, params), TOKENS, COUNT, key=key, sampling=jaxspec.Sampling(temperature=0.5),
        max_new_tokens=24, samples=4, drafting=drafting,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
@pytest.mark.slow
def test_heads_follow_a_policy_that_changes(kind):
    """Sixty policies: nothing compiles after the first; more tokens are accepted, and texts stay as without heads."""
    online = jaxspec.OnlineHeads.of(POLICY, KINDS[kind])

    def turn(params, state, key):
        rollout = draw(params, key, jaxspec.Drafting(kind, heads=online.heads(state), tree=2))
        return rollout, online.step(jaxspec.Model(LM, params), state, rollout)[0]

    turn = jax.jit(turn, donate_argnums=1)
    plain = jax.jit(lambda params, key: draw(params, key, jaxspec.Drafting("none")))
    state, rates = online.init(POLICY), []
    with rollouts.compilations() as compiled:
        for step in range(60):
            params, key = jax.tree.map(lambda leaf, by=1 + 1e-3 * step: leaf * by, PARAMS), jax.random.key(step)
            rollout, state = turn(params, state, key)
            rates.append(float(rollout.drawn.sum() / rollout.rounds.sum()))
            if step % 10 == 0:
                assert (rollout.tokens == plain(params, key).tokens).all()
            if step == 0:
                compiled.clear()
    assert not compiled
    assert sum(rates[-5:]) > 1.15 * sum(rates[:5]), rates
    assert int(state.step) == 60


MESHES = """
import dataclasses, json, sys
import jax, jax.numpy as jnp, numpy as np
sys.path.insert(0, sys.argv[1])
import jaxspec
from jaxspec.train import placement
from train import test_online as tested
placement.MIN_SPLIT_ELEMENTS = 64

found = []
for name, sizes in {"": (1, 1), "data=4": (4, 1), "data=2,model=2": (2, 2)}.items():
    mesh = jaxspec.make_mesh(*sizes)
    policy = jaxspec.shard(tested.POLICY, mesh)
    online = jaxspec.OnlineHeads.of(policy, dataclasses.replace(tested.KINDS[sys.argv[2]], mesh=name))

    @jax.jit
    def turn(params, state, key):
        drafting = jaxspec.Drafting(sys.argv[2], heads=online.heads(state), tree=2)
        now = dataclasses.replace(policy, params=params)
        rollout = jaxspec.rollout(
            now, tested.TOKENS, tested.COUNT, key=key, max_new_tokens=6, samples=2, drafting=drafting, mesh=mesh
        )
        return rollout, *online.step(now, state, rollout)

    state, one = online.init(policy), {"losses": [], "tokens": []}
    for step in range(3):
        rollout, state, report = turn(policy.params, state, jax.random.key(step))
        one["losses"].append(float(report.loss))
        one["tokens"].append(np.asarray(rollout.tokens).tolist())
    one["split"] = sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state.opt))
    found.append(one)
print(json.dumps(found))
"""


@pytest.mark.mesh
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_heads_follow_a_policy_on_several_devices(kind):
    """With the texts and the losses of one device, and with moments that stay split."""
    words = [sys.executable, "-c", MESHES, str(TESTS), kind]
    done = subprocess.run(words, env=simulated(4), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    one, *others = json.loads(done.stdout.splitlines()[-1])
    assert one["split"] == 0
    for other in others:
        assert other["tokens"] == one["tokens"]
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert other["split"] > 2


def heads_of(kind, ids) -> jaxspec.DraftHeads:
    """Returns heads as before training that draft some tokens, or all tokens if `ids` is None."""
    trainee: Any = KINDS[kind].trainee(POLICY)
    if ids is not None:
        config = dataclasses.replace(trainee.config, draft_vocab_size=len(ids))
        trainee = dataclasses.replace(trainee, config=config)
    return trainee.result(trainee.init_params(POLICY, ids), ids, "start")


def follow(online, steps=3):
    """Returns the losses and the state after steps on the same rollout, and the rollout that the heads draft then."""
    rollout = draw(PARAMS, jax.random.key(0), jaxspec.Drafting("none"))
    state, losses, step = online.init(POLICY), [], jax.jit(functools.partial(online.step, POLICY))
    for _ in range(steps):
        state, report = step(state, rollout)
        losses.append(float(report.loss))
    return losses, state, rollout


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_heads(kind):
    """With the parameters, the tree and the drafted tokens of the heads to start from; texts stay as without heads."""
    ids = jnp.array([1, 3, 4, 5, 8, 9, 17, 30])
    start = dataclasses.replace(heads_of(kind, ids), tree=jaxspec.chain(1))
    settings = dataclasses.replace(KINDS[kind], learning_rate=1e-3)
    online = jaxspec.OnlineHeads.of(POLICY, settings, start)
    chex.assert_trees_all_equal(online.heads(online.init(POLICY)).params, start.params)
    losses, state, rollout = follow(online)
    assert losses[2] < losses[0]
    heads = online.heads(state)
    assert heads.tree == start.tree
    assert heads.config == start.config
    assert heads.params["tokens"].tolist() == ids.tolist()
    assert (draw(PARAMS, jax.random.key(0), jaxspec.Drafting(kind, heads=heads)).tokens == rollout.tokens).all()
    later = jaxspec.OnlineHeads.of(POLICY, KINDS[kind], heads)
    chex.assert_trees_all_equal(later.init(POLICY).params, state.params)


def test_the_loss_of_a_reduced_vocabulary():
    """The first step's loss is the cross-entropy of the drafted tokens, and other tokens have no loss."""
    ids = np.array([1, 3, 4, 5, 8, 9, 17, 30])
    online = jaxspec.OnlineHeads.of(POLICY, KINDS["medusa"], heads_of("medusa", jnp.asarray(ids)))
    state, rollout = online.init(POLICY), draw(PARAMS, jax.random.key(0), jaxspec.Drafting("none"))
    _, report = jax.jit(functools.partial(online.step, POLICY))(state, rollout)

    tokens, mask = np.asarray(rollout.tokens), np.arange(rollout.tokens.shape[1]) < np.asarray(rollout.length)[:, None]
    features = compute_features(LM, PARAMS, rollout.tokens, jnp.asarray(mask, jnp.int32))
    rows = LM.unembedding(PARAMS)[ids].astype(jnp.float32)
    frozen = FrozenTarget(rows, None, jnp.asarray(PARAMS["embed"]), None, jnp.asarray(ids))
    batch = Batch(rollout.tokens, jnp.asarray(mask, jnp.int32), jnp.asarray(mask), features)
    new, expected = mask & (np.arange(tokens.shape[1]) >= np.asarray(rollout.start)[:, None]), 0.0
    for head, logits in enumerate(online.trainee.unroll_logits(state.params.heads, frozen, batch)):
        laws, losses = np.asarray(jax.nn.log_softmax(logits, -1)), []
        for row, at in zip(*np.nonzero(new)):
            if at >= 2 + head and tokens[row, at] in ids:
                losses.append(-laws[row, at - 2 - head, list(ids).index(tokens[row, at])])
        assert 10 < len(losses) < new.sum()
        expected += 0.8**head * np.mean(losses)
    assert float(report.loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reduced_vocabulary_of_all_tokens_is_no_reduction(kind):
    """The losses of heads that list every token are the losses of heads for the whole vocabulary."""
    listed, whole = (
        follow(jaxspec.OnlineHeads.of(POLICY, KINDS[kind], start))[0]
        for start in (heads_of(kind, jnp.arange(LM.vocab)), heads_of(kind, None))
    )
    assert listed == pytest.approx(whole, rel=1e-5)
    assert whole == pytest.approx(follow(jaxspec.OnlineHeads.of(POLICY, KINDS[kind]))[0], rel=1e-6)


def test_heads_to_start_from_are_loaded_from_a_folder(tmp_path):
    start = heads_of("medusa", None)
    start = dataclasses.replace(start, params=noisy(start.params, 1, 0.1))
    jaxspec.save_heads(start, tmp_path / "heads")
    online = jaxspec.OnlineHeads.of(POLICY, KINDS["medusa"], tmp_path / "heads")
    chex.assert_trees_all_equal(online.init(POLICY).params.heads, start.params)


def test_a_step_does_not_take_the_arrays_of_the_heads_to_start_from():
    """The state of the heads may be donated."""
    online = jaxspec.OnlineHeads.of(POLICY, KINDS["medusa"], heads_of("medusa", None))
    rollout = draw(PARAMS, jax.random.key(0), jaxspec.Drafting("none"))
    jax.jit(functools.partial(online.step, POLICY), donate_argnums=0)(online.init(POLICY), rollout)
    assert online.start is not None
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(online.start.params))


def test_wrong_heads_to_start_from_are_refused():
    wrong: list[tuple[Any, str]] = [
        (3, "start must be DraftHeads"), (heads_of("eagle", None), "eagle"),
    ]  # fmt: skip
    for start, message in wrong:
        with pytest.raises(InvalidConfig, match=message):
            jaxspec.OnlineHeads.of(POLICY, KINDS["medusa"], start)
    with pytest.raises(InvalidConfig, match="heads to start from are the argument start of OnlineHeads"):
        jaxspec.OnlineHeads.of(POLICY, jaxspec.MedusaSettings(start="heads"))


def test_wrong_settings_are_refused():
    changes: dict[str, Any] = {"draft_vocab": 8, "accumulate": 2}
    for name, value in changes.items():
        with pytest.raises(InvalidConfig, match=f"online heads do not support {name}; leave it at its default"):
            jaxspec.OnlineHeads.of(POLICY, jaxspec.MedusaSettings(**{name: value}))
    with pytest.raises(InvalidConfig, match="settings must be of heads, such as jaxspec"):
        jaxspec.OnlineHeads.of(POLICY, jaxspec.MedusaSettings(medusa2=True, cache_features=False))
