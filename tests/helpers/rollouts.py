"""Runs the loop of docs/rollouts.md beside plain decoding with the same parameters."""

import contextlib
import functools
import tempfile
from typing import Any

import jax
import jax.numpy as jnp

import jaxspec
from helpers.pages import blocks
from helpers.toys import lively, transformer
from jaxspec.testing import TableLM

LM = transformer(num_heads=4, num_kv_heads=4, vocab_size=64, num_layers=1)
COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compilations():
    """Yields a list that grows with every program that is compiled."""
    found: list[str] = []

    def listen(event, duration_secs, **more):
        if event == COMPILED:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def example(steps: int, mesh: str | None = None) -> dict:
    """What each step of the page's loop did, and how many programs were compiled after the first one."""
    loop, start = (block.text for block in blocks("docs/rollouts.md")[:2])
    own = "jaxspec.make_mesh(data=jax.device_count())"
    assert own in loop
    names: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        jaxspec.save(jaxspec.Model(LM, lively(LM.init_params(jax.random.key(0)), 3.0)), "TARGET")
        exec(loop.replace(own, mesh or own), names)
        exec(start.partition("\nfor ")[0], names)
    draw, train, with_params, tokens, count = (
        names[name] for name in ("draw", "train", "with_params", "tokens", "count")
    )
    params, state, found, devices = names["params"], names["state"], [], 0
    plain = jax.jit(functools.partial(draw, drafting=jaxspec.Drafting("none")))
    score = jax.jit(lambda params, rollout: jaxspec.log_probs(with_params(params), rollout, names["mesh"]))
    with compilations() as compiled:
        for step in range(steps):
            key = jax.random.key(step)
            slow, before = plain(params, tokens, count, key), jax.tree.map(jnp.copy, params)
            params, state, rollout, reward = train(params, state, tokens, count, key)
            scored = score(before, rollout)
            gaps = [(abs(a - b) / jnp.maximum(1, abs(b))).max() for a, b in zip(scored[:2], rollout.logprobs[:2])]
            found.append(
                {
                    "texts": rollout.tokens.tolist() if step == 0 else None,
                    "same": bool((rollout.tokens == slow.tokens).all() & (rollout.length == slow.length).all()),
                    "gap": max(map(float, gaps)),
                    "reward": float(reward),
                    "tokens": int(rollout.drawn.sum()),
                    "rounds": int(rollout.rounds.sum()),
                    "law": float(rollout.logprobs.sampled.sum() - rollout.logprobs.raw.sum()),
                }
            )
            devices = len(rollout.tokens.sharding.device_set)
            if step == 0:
                assert compiled, "the event has another name"
                compiled.clear()
    return {"steps": found, "compiled": len(compiled), "devices": devices}


def shared() -> list[bool]:
    """Whether texts are those of one device: of fewer prompts than devices, and with parameters split over them."""
    lm, mesh = TableLM(24), jaxspec.make_mesh(data=4)
    params, found = lm.init_params(jax.random.key(0)), []
    split = jax.device_put(params, jax.NamedSharding(mesh, jax.P(None, "data")))
    for prompts, samples in ((1, 8), (6, 2)):

        def draw(params, mesh, prompts=prompts, samples=samples):
            tokens, count = jnp.arange(prompts * 3).reshape(prompts, 3), jnp.full(prompts, 3)
            return jaxspec.rollout(
                jaxspec.Model(lm, params), tokens, count, key=jax.random.key(1), max_new_tokens=12, samples=samples,
                drafting=jaxspec.Drafting("prompt-lookup", tree=2, schedule="constant"), mesh=mesh,
            )  # fmt: skip

        one, four = (jax.jit(draw, static_argnums=1)(*given) for given in ((params, None), (split, mesh)))
        found.append(bool((one.tokens == four.tokens).all()) and len(four.tokens.sharding.device_set) == 4)
    return found
