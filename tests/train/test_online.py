"""Tests heads that follow a policy: they learn its texts inside a program, and change no token."""

import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxspec
from helpers import rollouts
from helpers.compiling import simulated
from helpers.paths import TESTS
from helpers.toys import lively, transformer
from jaxspec.errors import InvalidConfig

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


def test_wrong_settings_are_refused():
    changes: dict[str, Any] = {"draft_vocab": 8, "accumulate": 2, "start": "heads"}
    for name, value in changes.items():
        with pytest.raises(InvalidConfig, match=f"online heads do not support {name}; leave it at its default"):
            jaxspec.OnlineHeads.of(POLICY, jaxspec.MedusaSettings(**{name: value}))
    with pytest.raises(InvalidConfig, match="settings must be of heads, such as jaxspec"):
        jaxspec.OnlineHeads.of(POLICY, jaxspec.MedusaSettings(medusa2=True, cache_features=False))
