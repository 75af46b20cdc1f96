"""Tests that with the CPU kernels a draft changes no bit: SmolLM2's tokens and log-probabilities on real prompts.

    python scripts/prove/bits.py
    python scripts/prove/bits.py --dtypes int8 --prompts 3

Every prompt is decoded plainly and alone; then all of them with every drafter and tree, in batches of 1, 3 and 8. Every
second prompt is sampled at temperature 0.8 with top-p 0.95, the others are greedy. The exit status is 1 if a token or a
log-probability differs in a bit.
"""

import argparse
import sys

import jax
import numpy as np

import jaxspec
from jaxspec.bench import tasks

MODEL = "smollm2-135m-instruct"
DRAFTERS = {
    "prompt-lookup": {"drafter": "prompt-lookup"},
    "recycling": {"drafter": "recycling"},
    "early-exit of 10 layers, tree 2x2": {
        "drafter": "early-exit", "tree": jaxspec.branching(2, 2), "drafter_options": {"exit_layers": 10}
    },
    "model, chain 4": {"drafter": "model", "tree": 4},
    "model, dynamic tree of 64 nodes": {"drafter": "model", "tree": jaxspec.dynamic(8, 5, 64)},
    "medusa, the heads' own tree": {"drafter": "medusa"},
    "medusa, tree of 64 nodes": {"drafter": "medusa", "tree": jaxspec.named_tree("mc_sim_7b_63")},
    "eagle, chain 5": {"drafter": "eagle", "tree": 5},
    "eagle, dynamic tree of 64 nodes": {"drafter": "eagle", "tree": jaxspec.dynamic(8, 6, 64)},
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 3, 8])
    parser.add_argument("--prompts", type=int, default=8, help="of MT-bench and HumanEval, in turns")
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    chosen = [tasks.load(name, -(-arguments.prompts // 2), 0).questions for name in ("mt-bench", "humaneval")]
    prompts = [str(question.turns[0]) for pair in zip(*chosen) for question in pair][: arguments.prompts]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), np.arange(len(prompts)))
    sampled = np.arange(len(prompts)) % 2 == 1
    wrong = total = 0
    for dtype in arguments.dtypes:
        target = jaxspec.load(MODEL, dtype=dtype)
        draft = jaxspec.load(MODEL, dtype="bfloat16" if dtype == "int8" else "int8")

        def decode(rows: np.ndarray, target: jaxspec.Model = target, **drafting) -> list[tuple]:
            out = jaxspec.generate(
                target, [prompts[row] for row in rows], key=keys[rows], chat=True, max_new_tokens=arguments.tokens,
                sampling=jaxspec.Sampling(np.where(sampled[rows], 0.8, 0.0), top_p=np.where(sampled[rows], 0.95, 1.0)),
                logprobs=2, capacity=640, verbose=False, **drafting,
            )  # fmt: skip
            return [(row.tokens, row.logprobs, row.sampled_logprobs, row.top_logprobs) for row in out]

        every = np.arange(len(prompts))
        plain = [decode(every[row : row + 1], drafter="none")[0] for row in every]
        for name, drafting in DRAFTERS.items():
            own = drafting | ({"draft": draft} if drafting["drafter"] == "model" else {})
            for batch in arguments.batches:
                found = decode(every, batch=batch, **own)
                same = sum(one == other for one, other in zip(plain, found, strict=True))
                wrong, total = wrong + len(plain) - same, total + len(plain)
                print(f"{dtype:8} {name:34} batch {batch}: {same} of {len(plain)} texts equal to the bit", flush=True)
    print(f"{total} texts compared, {wrong} differ")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
