"""Compares plain decoding, constant draft lengths and the adaptive schedule on SmolLM2-135M-Instruct, in one run.

    python scripts/measure/schedules.py early-exit:10     # the target's first ten layers draft
    python scripts/measure/schedules.py model             # the target drafts for itself: all accepted, nothing pays
    python scripts/measure/schedules.py prompt-lookup

First `jaxspec.tune` tunes on other prompts; then all configurations decode each prompt alternately. Times exclude
compilation and prefill. The time of a prompt is the median of its repeats; ratios are relative to plain decoding.
"""

import argparse
import sys
from typing import Any

import jax
import numpy as np

import jaxspec
from jaxspec.bench import tasks
from jaxspec.bench.measurements import add_record, round_significant, write_record
from jaxspec.cli.tune import format_table
from jaxspec.generation.drafting import Drafting
from jaxspec.registry import find
from jaxspec.tuning.tune import tune

MODEL = "smollm2-135m-instruct"


def prompts(limit: int, skip: int) -> list[str]:
    """Returns `limit` ordinary and `limit` copying prompts, after the first `skip` of each."""
    chosen = [tasks.load_task(name, skip + limit, 0).questions[skip:] for name in ("mt-bench", "copy")]
    return [str(question.turns[0]) for questions in chosen for question in questions]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", help="model, prompt-lookup, or early-exit:LAYERS")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--limit", type=int, default=2, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    target = jaxspec.load(MODEL)
    name, _, layers = arguments.drafter.partition(":")
    takes = find("drafter", name).takes
    models: dict[str, Any] = {
        "draft": target if "draft" in takes else None,
        "drafter_options": {"exit_layers": int(layers)} if layers else {},
    }
    longest = max(arguments.lengths)
    drafting = Drafting(name, **models)
    length = max(longest, drafting.build_drafter(target)[0].shape.depth)
    tuned = tune(target, prompts(1, arguments.limit), drafter=name, **models, tree=length, chat=True)
    print("\n".join(format_table(tuned.measured)), tuned.schedule, sep="\n", flush=True)

    fixed = {"drafter": name, **models}
    ways: dict[str, dict[str, Any]] = {"plain": {"drafter": "none"}}
    ways |= {f"constant {n}": fixed | {"tree": n, "schedule": "constant"} for n in arguments.lengths}
    ways["tuned: adaptive"] = {"draft": models["draft"], "drafting": tuned}
    seconds = {way: [] for way in ways}
    asked, alike = prompts(arguments.limit, 0), 0
    for prompt in asked:
        took, texts, rounds = {way: [] for way in ways}, {}, {}
        for repeat in range(arguments.repeats + 1):
            for way in [*list(ways)[repeat % len(ways) :], *list(ways)[: repeat % len(ways)]]:
                out = jaxspec.generate(
                    target,
                    prompt,
                    chat=True,
                    max_new_tokens=arguments.tokens,
                    ignore_eos=True,
                    capacity=1024,
                    **ways[way],
                )
                texts[way], rounds[way] = out[0].tokens, out.stats.tokens_per_round
                if repeat:  # the first one may compile
                    took[way].append(out.timing.decode_s)
        same = all(text == texts["plain"] for text in texts.values())
        for way in ways:
            seconds[way].append(np.median(took[way]))
        speeds = {way: seconds["plain"][-1] / seconds[way][-1] for way in ways}
        shown = ", ".join(f"{way} {speeds[way]:.2f} ({rounds[way]:.2f} tokens a round)" for way in ways)
        print(f"{prompt[:40]!r}: {shown}; texts {'alike' if same else 'DIFFER'}", flush=True)
        alike += same
    print(f"jax {jax.__version__}, {jax.default_backend()}, float32, {len(asked)} prompts of {arguments.tokens} tokens")
    plain, figures = np.array(seconds["plain"]), {}
    for way, values in seconds.items():
        each, overall = plain / values, plain.sum() / sum(values)
        print(f"{way:16} {overall:.2f} times plain overall, {each.min():.2f} to {each.max():.2f}")
        figures[way] = {
            "times_plain": round_significant(overall),
            "least": round_significant(each.min()),
            "most": round_significant(each.max()),
        }
    if arguments.record:
        values = {"drafter": arguments.drafter, "prompts": len(asked), "tokens": arguments.tokens, "same_texts": alike,
                  "ways": figures}  # fmt: skip
        print(f"written: {write_record(arguments.record, 'schedules', sys.argv, values)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
