"""Measures a target with draft models of other vocabularies, beside plain decoding with the same keys.

    python scripts/measure/bridges.py TARGET DRAFT [--draft DRAFT ...] [--limit 2] [--tokens 48] [--lengths 2 4]

The prompts are a question each in English, German, Chinese and Russian, one with emoji and one of code with tabs, and
the first `--limit` of MT-bench and HumanEval; each model reads them in its own chat template. Every text is decoded
alone, at temperature 0 and 0.8, and must be that of plain decoding; a difference must be a certified tie. A prompt's
speed, and the cost of its round, are relative to plain decoding of the same prompt. Times exclude compilation and
prefill.
"""

import argparse
import statistics
import sys
from typing import Any

import jax

import jaxspec
from jaxspec.bench import tasks
from jaxspec.bench.measurements import add_record, round_significant, write_record
from jaxspec.decode.stats import Stats
from jaxspec.drafters.model import BridgedDraft
from jaxspec.generation.drafting import Drafting
from jaxspec.generation.inputs import row_keys
from jaxspec.testing import tie_gap

PROMPTS = (
    "What happens to the water of a river when it reaches the sea?",
    "Erkläre in drei Sätzen, warum der Himmel am Abend rot wird.",
    "用三句话解释为什么天空是蓝色的。",
    "Объясни в трёх предложениях, почему небо голубое.",
    "Write the names of five animals, each with its emoji 🐱🐶.",
    "Add a docstring to this function and keep the tabs:\n\ndef area(width, height):\n\tif width < 0:\n\t\treturn 0\n"
    "\treturn width * height\n",
)
TIE = 1e-3  # the greatest gap of perturbed scores that is a tie; see scripts/prove/identity.py


def decode(target: jaxspec.Model, prompt: str, temperature: float, tokens: int, **drafting: Any) -> Any:
    """Returns the output of the faster of two runs, of which the first may compile."""
    options: dict[str, Any] = {"sampling": jaxspec.Sampling(temperature=temperature), "max_new_tokens": tokens}
    runs = [
        jaxspec.generate(target, prompt, key=jax.random.key(0), verbose=False, capacity=1024, **options, **drafting)
        for _ in range(2)
    ]
    return min(runs, key=lambda run: run.timing.decode_s)


def round_s(output: Any) -> float:
    """Returns the seconds of one round: drafting, the target's call and all else."""
    return output.timing.decode_s / output.stats.rounds


def same_text(target: jaxspec.Model, one: Any, other: Any, temperature: float) -> bool:
    """Tells whether two texts are equal, or differ first at a tie."""
    if one.tokens == other.tokens:
        return True
    at = next(i for i, (a, b) in enumerate(zip(one.tokens, other.tokens)) if a != b)
    key = row_keys(jax.random.key(0), 1, 1, jaxspec.Sampling(temperature=temperature))[0]
    text = [*one.prompt_tokens, *one.tokens[:at]]
    choice = one.tokens[at], other.tokens[at]
    gap = tie_gap(target.lm, target.params, text, choice, key, jaxspec.Sampling(temperature=temperature))
    print(f"differs at {at}, gap {gap:.1e}")
    return gap < TIE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft", nargs="+")
    parser.add_argument("--limit", type=int, default=2, help="prompts of MT-bench and of HumanEval")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--dtype", default="float32")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    target = jaxspec.load(arguments.target, dtype=arguments.dtype)
    prompts = list(PROMPTS)
    for name in ("mt-bench", "humaneval") if arguments.limit else ():
        prompts += [str(question.turns[0]) for question in tasks.load_task(name).questions[: arguments.limit]]
    plain = {
        (prompt, temperature): decode(target, prompt, temperature, arguments.tokens, drafter="none")
        for prompt in prompts
        for temperature in arguments.temperatures
    }
    rows, failed = [], 0
    for name in arguments.draft:
        draft = jaxspec.load(name, dtype=arguments.dtype)
        built = Drafting("model", draft=draft).build_drafter(target)[0]
        shares = (
            built.bridge.shares if isinstance(built, BridgedDraft) else dict.fromkeys(("target", "draft", "sample"), 1)
        )
        for temperature in arguments.temperatures:
            for length in arguments.lengths:
                stats, ratios, costs, same = [], [], [], 0
                for prompt in prompts:
                    one = plain[prompt, temperature]
                    drafting = {"drafter": "model", "draft": draft, "tree": length}
                    other = decode(target, prompt, temperature, arguments.tokens, **drafting)
                    same += same_text(target, one[0], other[0], temperature)
                    stats.append(other[0].stats)
                    ratios.append(other.timing.tokens_per_s / one.timing.tokens_per_s)
                    costs.append(round_s(other) / round_s(one))
                total = Stats.total(stats)
                failed += len(prompts) - same
                rows.append(
                    {"draft": draft.name, "temperature": temperature, "length": length, "prompts": len(prompts)}
                    | {f"share_{key}": round_significant(value, 3) for key, value in shares.items()}
                    | {"acceptance": round_significant(total.acceptance_rate, 3), "same_text": same}
                    | {"tokens_per_round": round_significant(total.tokens_per_round, 3)}
                    | {"by_prompt": [round_significant(row.tokens_per_round, 3) for row in stats]}
                    | {"times_plain": [round_significant(f(ratios), 3) for f in (min, statistics.median, max)]}
                    | {"round_cost": [round_significant(f(costs), 3) for f in (min, statistics.median, max)]}
                )
                print(rows[-1], flush=True)
    if arguments.record:
        print(f"written: {write_record(arguments.record, 'bridges', sys.argv, {'target': target.name, 'rows': rows})}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
