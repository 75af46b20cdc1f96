"""Measures rollouts of SmolLM2-135M inside a jitted program, by drafter, beside plain decoding.

    python scripts/measure/rollout.py [--rows 8] [--tokens 48] [--temperature 1] [--repeats 5]

Parameters change before every call. The drafters take turns, and texts are compared with those of plain decoding. With
the CPU kernels a policy can be drawn from and not trained, so both forms of the model are measured.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jaxspec
from jaxspec.bench.measurements import add_record, quartiles, round_significant, write_record
from jaxspec.bench.texts import COPY_TASKS
from jaxspec.generation.inputs import pad_prompts

MODEL = "smollm2-135m-instruct"
PROMPTS = {
    "ordinary": ["Why is the sky blue?", "Tell me a short story about a lighthouse keeper."],
    "copying": [COPY_TASKS[name][1] for name in ("table", "settings")],
}
WAYS: tuple[str, ...] = ("none", "prompt-lookup", "medusa")


def drawer(model: jaxspec.Model, drafting: jaxspec.Drafting, arguments: Any) -> Callable:
    """Returns a jitted function from parameters, prompts and a key to a rollout."""
    sampling = jaxspec.Sampling(arguments.temperature)

    @jax.jit
    def draw(params: Any, tokens: jax.Array, count: jax.Array, key: jax.Array) -> jaxspec.Rollout:
        policy = dataclasses.replace(model, params=params)
        return jaxspec.rollout(
            policy, tokens, count, key=key, sampling=sampling, max_new_tokens=arguments.tokens,
            samples=arguments.rows // len(tokens), drafting=drafting, ignore_eos=True,
        )  # fmt: skip

    return draw


def padded(model: jaxspec.Model) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns the prompts of each kind, all of one shape, so that they share a compilation, and their lengths."""
    ids = {
        name: [model.encode_chat([{"role": "user", "content": text}]) for text in texts]
        for name, texts in PROMPTS.items()
    }
    size = max(len(prompt) for prompts in ids.values() for prompt in prompts)
    return {name: pad_prompts(prompts, size) for name, prompts in ids.items()}


def measure(model: jaxspec.Model, arguments: Any) -> dict[str, Any]:
    """Returns, by kind of prompt, the figures of each drafter, and how many texts equal plain decoding's."""
    heads = jaxspec.load_heads(MODEL, target=model)
    settings = {"none": jaxspec.Drafting("none"), "prompt-lookup": jaxspec.Drafting("prompt-lookup")}
    settings["medusa"] = jaxspec.Drafting("medusa", heads=heads, tree=3)
    draws = {way: drawer(model, settings[way], arguments) for way in WAYS}
    score = jax.jit(lambda params, rollout: jaxspec.log_probs(dataclasses.replace(model, params=params), rollout))
    found: dict[str, Any] = {}
    for name, prompts in padded(model).items():
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        rounds, same, texts, gap = dict.fromkeys(WAYS, 0), dict.fromkeys(WAYS, 0), 0, 0.0
        for repeat in range(arguments.repeats + 1):
            params = model.params | {"norm": model.params["norm"] * (1 + 1e-3 * repeat)}
            plain = None
            for way, draw in draws.items():
                start = time.perf_counter()
                rollout = jax.block_until_ready(draw(params, *prompts, jax.random.key(repeat)))
                seconds = time.perf_counter() - start
                tokens = np.asarray(rollout.tokens)
                plain = tokens if plain is None else plain
                if repeat:
                    rates[way].append(float(rollout.drawn.sum()) / seconds)
                    rounds[way] += int(rollout.rounds.sum())
                    same[way] += int((tokens == plain).all(1).sum())
                if repeat == 1:
                    gap = max(gap, float(abs(score(params, rollout).sampled - rollout.logprobs.sampled).max()))
            texts += arguments.rows * bool(repeat)
        found[name] = {"texts": texts, "largest_gap": round_significant(gap, 2), "ways": {}}
        for way in WAYS:
            ratio = np.median(np.array(rates[way]) / np.array(rates["none"]))
            found[name]["ways"][way] = {
                "tokens_per_s": quartiles(rates[way]), "times_plain": round_significant(ratio),
                "tokens_per_round": round_significant(texts * arguments.tokens / rounds[way]), "same_texts": same[way],
            }  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="texts of a rollout, of two prompts")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of a text")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--form", choices=("both", "kernels", "xla"), default="both", help="of the model's matrices")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    values: dict[str, Any] = {"rows": arguments.rows, "temperature": arguments.temperature, "runs": []}
    for kernels in {"both": (True, False), "kernels": (True,), "xla": (False,)}[arguments.form]:
        model = jaxspec.load(MODEL, kernels=kernels)
        for name, found in measure(model, arguments).items():
            values["runs"].append({"kernels": kernels, "prompts": name} | found)
            for way, entry in found["ways"].items():
                low, middle, high = entry["tokens_per_s"]
                form = "CPU kernels" if kernels else "XLA"
                print(f"{form:11} {name:9} {way:14} {middle:7.1f} tokens/s ({low:.1f} to {high:.1f}), "
                      f"{entry['times_plain']:.2f} x plain, {entry['tokens_per_round']:.2f} tokens per round, "
                      f"{entry['same_texts']} of {found['texts']} texts, log-probabilities within "
                      f"{found['largest_gap']:g}", flush=True)  # fmt: skip
    if arguments.record:
        print(f"written: {write_record(arguments.record, 'rollout', sys.argv, values)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
