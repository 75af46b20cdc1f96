"""Measures drafts from earlier samples of the same prompts, in a run like GRPO that reads its prompts twice.

    python -m scripts.measure.history [--prompts 25] [--samples 8] [--tokens 48] [--temperature 1] [--task gsm]

Every step draws samples of one prompt, rewards short texts, and updates SmolLM2-135M. The ways of drafting draw the
same texts with the same parameters and key, in turns; their texts are compared with those of plain decoding. The
matrices are XLA's, because a policy with the CPU kernels cannot be trained.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxspec
from jaxspec.bench import tasks
from jaxspec.bench.measurements import add_record, quartiles, round_significant, write_record
from jaxspec.generation.inputs import pad_prompts

MODEL = "smollm2-135m-instruct"
WAYS = {
    "none": ("none", False),
    "prompt-lookup": ("prompt-lookup", False),
    "prompt-lookup with history": ("prompt-lookup", True),
    "recycling": ("recycling", False),
    "recycling with history": ("recycling", True),
}
"""The drafter of each way, and whether it has a history."""
TREES = {"prompt-lookup": 4, "recycling": jaxspec.dynamic(2, 4, 5)}
"""Trees of five nodes, so that the ways cost about the same."""
EPOCHS = 2


def drawer(model: jaxspec.Model, way: str, given: argparse.Namespace) -> Callable:
    """Returns a jitted function from parameters, a prompt, a key and its history to a rollout and the new history."""
    drafter, reads = WAYS[way]
    drafting = jaxspec.Drafting("none")
    if drafter != "none":
        # With the default schedule, these rows would not draft at all on a CPU.
        drafting = jaxspec.Drafting(drafter, tree=TREES[drafter], schedule="constant")

    @jax.jit
    def draw(params: Any, tokens: jax.Array, count: jax.Array, key: jax.Array, history: jaxspec.History) -> tuple:
        rollout = jaxspec.rollout(
            dataclasses.replace(model, params=params), tokens, count, key=key,
            sampling=jaxspec.Sampling(given.temperature), max_new_tokens=given.tokens, samples=given.samples,
            drafting=drafting, history=history if reads else None,
        )  # fmt: skip
        return rollout, history.add(rollout)

    return draw


def trainer(
    model: jaxspec.Model,
    optimizer: optax.GradientTransformation,
    reward: Callable[[jaxspec.Rollout], jax.Array],
) -> Callable:
    """Returns a jitted function that updates a policy by the samples of one prompt; `reward` returns one per sample."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, state: Any, rollout: jaxspec.Rollout) -> tuple:
        rewards = reward(rollout)
        gain = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[:, None]

        def loss(params: Any) -> jax.Array:
            own = jaxspec.log_probs(dataclasses.replace(model, params=params), rollout)
            ratio = jnp.exp(own.sampled - rollout.logprobs.sampled)
            each = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain)
            return -jnp.where(rollout.drawn, each, 0).sum() / rollout.drawn.sum()

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return update


def read_prompts(model: jaxspec.Model, given: argparse.Namespace) -> tuple[Any, Any]:
    """Returns the prompts of a task in the chat template, padded, and their lengths."""
    questions = [str(q.turns[0]) for q in tasks.load_task(given.task, given.prompts).questions]
    ids = [model.encode_chat([{"role": "user", "content": text}]) for text in questions]
    return pad_prompts(ids, max(map(len, ids)))


def run(model: jaxspec.Model, given: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of every way, by epoch."""
    tokens, count = read_prompts(model, given)
    optimizer = optax.adam(given.learning_rate)
    params = jax.tree.map(jnp.copy, model.params)
    # Texts should be short.
    update = trainer(model, optimizer, lambda rollout: -rollout.drawn.sum(1).astype(jnp.float32))
    state = optimizer.init(params)
    draws = {way: drawer(model, way, given) for way in WAYS}
    history = jaxspec.History.empty(len(count), given.size)
    for draw in draws.values():  # compiles
        jax.block_until_ready(draw(params, tokens[:1], count[:1], jax.random.key(0), history.of(jnp.array([0]))))
    names = ("seconds", "tokens", "rounds", "same")
    found = [{way: {name: [] for name in names} for way in WAYS} for _ in range(EPOCHS)]
    for step in range(EPOCHS * len(count)):
        epoch, prompt = divmod(step, len(count))
        part, key, plain = history.of(jnp.array([prompt])), jax.random.fold_in(jax.random.key(1), step), None
        for way, draw in draws.items():
            start = time.perf_counter()
            rollout, new = jax.block_until_ready(
                draw(params, tokens[prompt : prompt + 1], count[prompt : prompt + 1], key, part)
            )
            seconds = time.perf_counter() - start
            plain = (rollout, new) if plain is None else plain
            counts = int(rollout.drawn.sum()), int(rollout.rounds.sum())
            same = int((rollout.tokens == plain[0].tokens).all(1).sum())
            for name, value in zip(names, (seconds, *counts, same)):
                found[epoch][way][name].append(value)
        assert plain is not None
        history = history.replace(jnp.array([prompt]), plain[1])
        params, state = update(params, state, plain[0])
        print(f"step {step}: {found[epoch]['none']['tokens'][-1]} tokens", flush=True)
    return {"epochs": [{way: figures(epoch[way], epoch["none"]) for way in WAYS} for epoch in found]}


def figures(way: dict[str, list], plain: dict[str, list]) -> dict[str, Any]:
    """Returns the figures of a way of drafting in an epoch."""
    ratios = np.array(plain["seconds"]) / np.array(way["seconds"])
    return {
        "tokens_per_round": round_significant(sum(way["tokens"]) / sum(way["rounds"])),
        "seconds": round_significant(sum(way["seconds"])),
        "times_plain": quartiles(ratios.tolist()),
        "same_texts": sum(way["same"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=25, help="steps of each of the two epochs")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of a text")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--task", default="gsm", help="the prompts, see jaxspec bench --tasks")
    parser.add_argument("--size", type=int, default=2048, help="tokens that the history keeps of each prompt")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    add_record(parser.add_argument)
    given = parser.parse_args()
    values = run(jaxspec.load(MODEL, kernels=False), given)
    values |= {name: getattr(given, name) for name in ("prompts", "samples", "tokens", "temperature", "task", "size")}
    for number, epoch in enumerate(values["epochs"]):
        for way, entry in epoch.items():
            low, middle, high = entry["times_plain"]
            print(f"epoch {number + 1} {way:27} {entry['tokens_per_round']:.2f} tokens per round, {middle:.2f} x plain "
                  f"({low:.2f} to {high:.2f}), {entry['same_texts']} of "
                  f"{given.prompts * given.samples} texts")  # fmt: skip
    if given.record:
        print(f"written: {write_record(given.record, 'history', sys.argv, values)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
