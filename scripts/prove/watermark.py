"""Measures how soon the watermark of a text is found, on three kinds of text, and how often other texts are accused.

    python -m scripts.prove.watermark --record watermark

SmolLM2-135M answers prompts of each kind with `jaxspec.Watermark`, each row with a secret of its own, without drafts
and with `prompt-lookup`, and once without a watermark. The texts of both drafters must be equal. For the first tokens
of each marked text, the table has the median p-value and the share of texts that are found at 1 in 1,000. Each text
without a watermark is tested with many secrets: its p-values must be uniform (Kolmogorov-Smirnov).
"""

import argparse
import itertools
import sys
from typing import Any

import jax
import numpy as np
from scipy import stats

import jaxspec
from jaxspec.bench.measurements import add_record, round_significant, write_record

MODEL = "smollm2-135m-instruct"
KINDS = {
    "stories": ("Write a story about {}.", ("a fox", "the sea", "a clock", "two brothers", "a lost key", "a garden")),
    "code": ("Write a Python function that {}.", (
        "sorts a list", "counts words", "finds primes", "reverses a string", "merges two dicts", "parses a date")),
    "arithmetic": ("Compute {} step by step.", ("17 + 25", "12 * 9", "144 / 12", "91 - 37", "15 * 15", "1000 - 1")),
}  # fmt: skip
LENGTHS = (15, 25, 50, 100, 150)
LEVEL, SECRETS = 1e-3, 40


def prompts() -> list[tuple[str, list[dict[str, str]]]]:
    """Returns each kind and conversation."""
    return [
        (kind, [{"role": "user", "content": form.format(word)}])
        for kind, (form, words) in KINDS.items()
        for word in words
    ]


def write_texts(target: jaxspec.Model, temperature: float, tokens: int) -> dict[str, list[list[int]]]:
    """Returns the texts with a watermark by each drafter, and those without a watermark."""
    chats = [chat for _, chat in prompts()]
    mark = jaxspec.Watermark(list(range(1000, 1000 + len(chats))), temperature=temperature)
    options: dict[str, Any] = {"max_new_tokens": tokens, "verbose": False}
    marked = {
        drafter: jaxspec.generate(
            target, chats, drafter=drafter, sampling=jaxspec.Sampling(processors=[mark]), **options
        )
        for drafter in ("none", "prompt-lookup")
    }
    sampling = jaxspec.Sampling(temperature=temperature)
    plain = jaxspec.generate(target, chats, drafter="none", sampling=sampling, key=jax.random.key(0), **options)
    return {name: [row.tokens for row in out] for name, out in (*marked.items(), ("unmarked", plain))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=max(LENGTHS))
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    target = jaxspec.load(MODEL)
    vocab, kinds = target.lm.vocab, [kind for kind, _ in prompts()]
    found = write_texts(target, arguments.temperature, arguments.tokens)
    equal = found["none"] == found["prompt-lookup"]
    rows = []
    for kind, length in itertools.product(KINDS, LENGTHS):
        own = [(i, text) for i, text in enumerate(found["none"]) if kinds[i] == kind and len(text) >= length]
        values = [jaxspec.detect_watermark(text[:length], 1000 + i, vocab).p_value for i, text in own]
        if values:
            rows.append({
                "kind": kind, "tokens": length, "texts": len(values), "p_value": round_significant(np.median(values)),
                "found": float(np.mean(np.array(values) < LEVEL)),
            })  # fmt: skip
            print(rows[-1], flush=True)
    others = [
        jaxspec.detect_watermark(text, secret, vocab).p_value
        for text in found["unmarked"] for secret in range(1, SECRETS + 1)
        if len(text) > 4
    ]  # fmt: skip
    values = {
        "temperature": arguments.temperature, "level": LEVEL, "equal_texts": equal, "rows": rows,
        "unmarked": {
            "p_values": len(others), "below_level": float(np.mean(np.array(others) < LEVEL)),
            "uniform_p": round_significant(float(stats.kstest(others, "uniform").pvalue)),
        },
    }  # fmt: skip
    print(values["unmarked"], "equal texts:", equal)
    if arguments.record:
        print(f"written: {write_record(arguments.record, 'watermark', sys.argv, values)}")
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())
