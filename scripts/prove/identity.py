"""Tests that speculation never changes the text: SmolLM2, every drafter, tree and temperature, against plain decoding.

    python scripts/prove/identity.py                     # float32: equal, up to certified ties
    python scripts/prove/identity.py --dtype bfloat16    # bit-identical to the width-matched reference

Each configuration decodes 10 prompts at temperature 0 and, with 3 seeds, at temperature 0.8 with top-p 0.95: 40
rows of 64 tokens in one batch. (A seed changes nothing at temperature 0, so those rows stand once.) The draft
model is the target with noise on its weights, so that it is right often, not always.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec.testing import TIE_GAP, tie_gap

PROMPTS = [
    "What is gravity?",
    "Write a haiku about the sea.",
    "Explain how a bicycle stays upright.",
    "List five uses of a paper clip.",
    "Write a Python function that adds two numbers, then write it again.",
    "Why is the sky blue?",
    "Translate to French: The cat sleeps on the sofa.",
    "Repeat after me: red, green, blue, red, green, blue, red, green, blue.",
    "What is the difference between weather and climate?",
    "Give me a recipe for pancakes.",
]
TREES = {
    "chain 1": jaxspec.chain(1),
    "chain 4": jaxspec.chain(4),
    "chain 8": jaxspec.chain(8),
    "ragged": jaxspec.from_paths([(0, 0, 0, 0), (0, 1), (1, 0), (2,)]),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trees", nargs="+", choices=TREES, default=list(TREES))
    arguments = parser.parse_args()
    target = jaxspec.load("smollm2-135m-instruct", dtype=arguments.dtype)
    draft = jaxspec.Model(target.lm, noisy(target.params, 0.1))
    rows = [(prompt, None) for prompt in PROMPTS]
    rows += [(prompt, seed) for seed in range(arguments.seeds) for prompt in PROMPTS]
    sampling = jaxspec.Sampling(
        temperature=np.array([0.0 if seed is None else 0.8 for _, seed in rows]),
        top_p=np.array([1.0 if seed is None else 0.95 for _, seed in rows]),
    )
    keys = jnp.stack([jax.random.fold_in(jax.random.key(seed or 0), i) for i, (_, seed) in enumerate(rows)])
    matched = arguments.dtype == "bfloat16"

    def decode(drafter: str, **options):
        print(f"  {drafter} {options.pop('label', '')} ...", file=sys.stderr, flush=True)
        return jaxspec.generate(
            target, [prompt for prompt, _ in rows], key=keys, drafter=drafter, sampling=sampling, chat=True,
            max_new_tokens=arguments.tokens, ignore_eos=True, width_matched=matched, **options,
        )  # fmt: skip

    widest = None if matched else decode("none")
    bad = ties = total = 0
    print(f"{len(rows)} rows of {arguments.tokens} tokens, {arguments.dtype}, jax {jax.__version__}")
    for label in arguments.trees:
        tree = TREES[label]
        reference = widest or decode("none", tree=tree, label=label)
        for drafter in ("prompt-lookup", "early-exit", "model"):
            if drafter == "prompt-lookup" and not tree.is_chain:
                continue
            output = decode(drafter, tree=tree, label=label, **({"draft": draft} if drafter == "model" else {}))
            differ = [b for b in range(len(rows)) if output[b].tokens != reference[b].tokens]
            for b in differ:
                gap, place = first_difference(target, reference[b], output[b], keys[b], sampling, b)
                tied = not matched and gap < TIE_GAP
                ties, bad = ties + tied, bad + (not tied)
                print(f"    row {b} differs at token {place}: gap {gap:.2e}, {'a tie' if tied else 'NOT A TIE'}")
            total += len(rows)
            stats = output.stats
            print(
                f"{drafter:14} {label:8} {len(rows) - len(differ)}/{len(rows)} rows equal, "
                f"{stats.tokens_per_round:.2f} tokens per round, acceptance {stats.acceptance_rate:.2f}",
                flush=True,
            )
    print(f"{total} rows compared: {total - ties - bad} equal, {ties} certified ties, {bad} wrong")
    return bad > 0


def noisy(params, share: float):
    """The parameters with normal noise of `share` times each matrix's standard deviation."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    noised = [
        (x + share * x.std() * jax.random.normal(k, x.shape)).astype(x.dtype) if x.ndim > 1 else x
        for x, k in zip(leaves, keys)
    ]
    return jax.tree.unflatten(structure, noised)


def first_difference(target, one, other, key, sampling, b) -> tuple[float, int]:
    """The gap at the first token that differs, and its place."""
    place = next(i for i, (x, y) in enumerate(zip(one.tokens, other.tokens)) if x != y)
    row = jaxspec.Sampling(float(sampling.temperature[b]), 0, float(sampling.top_p[b]))
    text = one.prompt_tokens + one.tokens[:place]
    gap = tie_gap(target.lm, target.params, text, (one.tokens[place], other.tokens[place]), key, row)
    return gap, place


if __name__ == "__main__":
    sys.exit(main())
