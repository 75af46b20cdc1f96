"""Measures heads that follow a policy in a run like GRPO: never refreshed, refreshed every n steps, or when stale.

    python -m scripts.measure.refresh [--steps 60] [--samples 8] [--tokens 24] [--every 5] [--learning-rate 1e-5]

Every step draws samples of one prompt, rewards tokens with digits, and updates SmolLM2-135M. All heads start as the
Medusa heads that come with the model. A refresh is an optimiser step of `jaxspec.OnlineHeads` on the rollout that was
drawn, with the policy's own features of its tokens. The ways of drafting draw the same texts with the same parameters
and key, in turns; their texts are compared with those of plain decoding. The matrices are XLA's, because a policy with
the CPU kernels cannot be trained.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxspec
from jaxspec.bench.measurements import add_record, quartiles, round_significant, write_record
from scripts.measure.history import read_prompts, trainer

MODEL = "smollm2-135m-instruct"
PHASES = 4
"""The number of parts of the run whose figures are shown apart."""
RECENT = 5
"""The number of steps that the tokens per round are averaged over to find out whether heads are stale."""
STALE = 0.97
"""Heads are stale if their recent tokens per round are below this share of the most since they were refreshed."""
BURST = 5
"""The number of consecutive steps that refresh stale heads."""


@dataclasses.dataclass
class Way:
    """A way of drafting, and what is measured of it.

    Attributes:
        refresh: a function that returns whether to refresh the heads after a step, from the tokens per round of all
            steps and whether each of these steps refreshed the heads.
        learner: the state of the heads; None for plain decoding.
    """

    refresh: Callable[[list[float], list[bool]], bool]
    learner: Any = None
    rates: list[float] = dataclasses.field(default_factory=list)
    refreshed: list[bool] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    refresh_seconds: list[float] = dataclasses.field(default_factory=list)
    same: list[int] = dataclasses.field(default_factory=list)


def is_stale(rates: list[float], refreshed: list[bool]) -> bool:
    """Returns whether to refresh heads: a burst of steps when their tokens per round have fallen."""
    if refreshed and refreshed[-1] and not all(refreshed[-BURST:]):
        return True  # in the middle of a burst
    last = max((step for step, flag in enumerate(refreshed) if flag), default=-1)
    since = rates[last + 1 :]
    means = [statistics.mean(since[i : i + RECENT]) for i in range(len(since) - RECENT + 1)]
    return bool(means) and means[-1] < STALE * max(means)


def digit_reward(model: jaxspec.Model) -> jax.Array:
    """Returns `[V]`: 1 for tokens with a digit."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    return jnp.array([any(c.isdigit() for c in tokenizer.decode([i])) for i in range(model.lm.vocab)], jnp.float32)


def drawer(model: jaxspec.Model, online: jaxspec.OnlineHeads, given: argparse.Namespace) -> Callable:
    """Returns a jitted function from parameters, heads, a prompt and a key to a rollout; no heads: plain decoding."""

    @jax.jit
    def draw(params: Any, learner: Any, tokens: jax.Array, count: jax.Array, key: jax.Array) -> jaxspec.Rollout:
        drafting = jaxspec.Drafting("none")
        if learner is not None:
            drafting = jaxspec.Drafting("medusa", heads=online.heads(learner), tree=given.tree)
        return jaxspec.rollout(
            dataclasses.replace(model, params=params), tokens, count, key=key,
            sampling=jaxspec.Sampling(given.temperature), max_new_tokens=given.tokens, samples=given.samples,
            drafting=drafting,
        )  # fmt: skip

    return draw


def run(model: jaxspec.Model, given: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of every way, by phase of the run."""
    tokens, count = read_prompts(model, given)
    optimizer = optax.adam(given.learning_rate)
    params = jax.tree.map(jnp.copy, model.params)
    digits = digit_reward(model)
    state, update = optimizer.init(params), trainer(model, optimizer, lambda r: (digits[r.new_tokens] * r.drawn).sum(1))
    settings = jaxspec.MedusaSettings(loss="kl", steps=10 * given.steps, warmup=0, learning_rate=given.heads_rate)
    online = jaxspec.OnlineHeads.of(model, settings, MODEL)
    ways = {
        "none": Way(lambda rates, refreshed: False),
        "never": Way(lambda rates, refreshed: False, online.init(model)),
        f"every {given.every} steps": Way(lambda rates, _: len(rates) % given.every == 0, online.init(model)),
        "every step": Way(lambda rates, refreshed: True, online.init(model)),
        "when stale": Way(is_stale, online.init(model)),
    }
    draw = drawer(model, online, given)

    @functools.partial(jax.jit, donate_argnums=1)
    def follow(params: Any, learner: Any, rollout: jaxspec.Rollout) -> Any:
        return online.step(dataclasses.replace(model, params=params), learner, rollout)[0]

    for learner in (None, online.init(model)):  # compiles
        rollout = jax.block_until_ready(draw(params, learner, tokens[:1], count[:1], jax.random.key(0)))
    jax.block_until_ready(follow(params, online.init(model), rollout))
    rewards = []
    for step in range(given.steps):
        prompt, key = step % len(count), jax.random.fold_in(jax.random.key(1), step)
        plain = None
        for way in ways.values():
            start = time.perf_counter()
            rollout = jax.block_until_ready(
                draw(params, way.learner, tokens[prompt : prompt + 1], count[prompt : prompt + 1], key)
            )
            way.seconds.append(time.perf_counter() - start)
            plain = rollout if plain is None else plain
            way.same.append(int((rollout.tokens == plain.tokens).all(1).sum()))
            way.rates.append(float(rollout.drawn.sum() / rollout.rounds.sum()))
            way.refreshed.append(False)
            way.refreshed[-1] = way.refresh(way.rates, way.refreshed[:-1])
            if way.refreshed[-1]:
                start = time.perf_counter()
                way.learner = jax.block_until_ready(follow(params, way.learner, rollout))
                way.refresh_seconds.append(time.perf_counter() - start)
        assert plain is not None
        rewards.append(float((digits[plain.new_tokens] * plain.drawn).sum() / plain.drawn.sum()))
        params, state = update(params, state, plain)
        rates = ", ".join(f"{name} {way.rates[-1]:.2f}" for name, way in ways.items())
        print(f"step {step}: reward {rewards[-1]:.3f}, tokens per round: {rates}", flush=True)
    return {
        "ways": {name: figures(way, ways["none"]) for name, way in ways.items()},
        "rewards": [round_significant(mean) for mean in by_phase(rewards)],
    }


def by_phase(values: list[float]) -> list[float]:
    """Returns the mean of each phase of the run."""
    size = len(values) // PHASES
    return [statistics.mean(values[i * size : (i + 1) * size]) for i in range(PHASES)]


def figures(way: Way, plain: Way) -> dict[str, Any]:
    """Returns the figures of a way of drafting."""
    return {
        "tokens_per_round": [round_significant(mean) for mean in by_phase(way.rates)],
        "times_plain": quartiles([a / b for a, b in zip(plain.seconds, way.seconds)]),
        "refreshes": sum(way.refreshed),
        "refresh_of_a_draw": round_significant(
            statistics.median(way.refresh_seconds) / statistics.median(way.seconds) if way.refresh_seconds else 0.0
        ),
        "same_texts": sum(way.same),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=30, help="prompts, which are read again and again")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24, help="new tokens of a text")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tree", type=int, default=3, help="tokens that are drafted in a round, as a chain")
    parser.add_argument("--task", default="gsm", help="the prompts, see jaxspec bench --tasks")
    parser.add_argument("--every", type=int, default=5, help="steps between refreshes")
    parser.add_argument("--learning-rate", type=float, default=1e-5, help="of the policy")
    parser.add_argument("--heads-rate", type=float, default=3e-4, help="learning rate of the heads")
    add_record(parser.add_argument)
    given = parser.parse_args()
    if given.steps < PHASES:
        parser.error(f"--steps must be at least {PHASES}, got {given.steps}")
    values = run(jaxspec.load(MODEL, kernels=False), given)
    values |= {name: getattr(given, name) for name in ("steps", "samples", "tokens", "temperature", "task", "tree")}
    for name, entry in values["ways"].items():
        rates = ", ".join(f"{rate:.2f}" for rate in entry["tokens_per_round"])
        print(f"{name:14} tokens per round {rates}; {entry['times_plain'][1]:.2f} x plain; {entry['refreshes']} "
              f"refreshes of {entry['refresh_of_a_draw']:.2f} draws each; {entry['same_texts']} of "
              f"{given.steps * given.samples} texts")  # fmt: skip
    if given.record:
        print(f"written: {write_record(given.record, 'refresh', sys.argv, values)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
