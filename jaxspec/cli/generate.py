"""Continues prompts. The text comes as it is written; what it cost is told on standard error."""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from jaxspec.cli.options import MAX_NODES, TREE_GRAMMAR, Parser, UsageError, one_of, parse_tree, whole
from jaxspec.registry import DRAFTERS, RULES

if TYPE_CHECKING:
    from jaxspec.api import Chunk, Output

TARGET = "smollm2-135m-instruct"
DTYPES = ("float32", "bfloat16")


def add_options(parser: Parser) -> None:
    """All but --debug, which every command has."""
    parser.add_argument(
        "prompt", nargs="*", metavar="PROMPT", help="text to continue; none: standard input is the one prompt"
    )
    add_models(parser)
    add = parser.add_argument_group("drafting, which changes the speed but not the text").add_argument
    drafters, rules = "|".join(DRAFTERS), "|".join(RULES)
    add(
        "--drafter",
        default="prompt-lookup",
        type=one_of("drafter", DRAFTERS),
        metavar=drafters,
        help="default: prompt-lookup",
    )
    add("--draft-length", type=whole(0, MAX_NODES), metavar="K", help="draft chains of K tokens")
    add("--tree", metavar="SPEC", help=f"draft trees: {TREE_GRAMMAR}")
    add("--exit-layers", type=whole(1), metavar="E", help="layers of the drafter 'early-exit'")
    add("--rule", default="coupled", type=one_of("rule", RULES), metavar=rules, help="default: coupled")

    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest token (default)")
    add_limits(add)
    add("--samples", type=whole(1), default=1, metavar="N", help="texts per prompt (default: 1)")

    add = parser.add_argument_group("ending").add_argument
    add("--max-new-tokens", type=whole(1), default=128, metavar="N", help="default: 128")
    add("--stop", action="append", default=[], metavar="STR", help="end before this string; repeatable")
    add("--ignore-eos", action="store_true", help="write on where the model would end")

    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="a JSON list: text, tokens, finish_reason, stats, timing, ...")
    add("--logprobs", action="store_true", help="log-probabilities of the tokens, in the JSON")


def add_models(parser: Parser) -> None:
    """What is loaded, and how prompts are put to it."""
    add = parser.add_argument_group("models").add_argument
    source = "a preset, a .gguf file, a Hugging Face directory, or a repository of its Hub"
    add("--target", default=TARGET, metavar="NAME_OR_PATH", help=f"{source} (default: {TARGET})")
    add("--draft-model", metavar="SOURCE", help="the same for the drafter 'model'")
    add(
        "--dtype",
        default="float32",
        type=one_of("dtype", DTYPES),
        metavar="|".join(DTYPES),
        help="default: float32",
    )
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="take prompts as messages to an assistant (default: if the target has a chat template)",
    )


def add_limits(add: Callable) -> None:
    """What may be drawn, beside the temperature, and the seed."""
    add("--top-k", type=whole(0), default=0, metavar="K", help="only the K likeliest tokens; 0: all")
    add("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest of mass P; 1: all")
    add("--min-p", type=float, default=0.0, metavar="P", help="only P times the likeliest and above; 0: all")
    add("--seed", type=whole(0), default=0, metavar="N", help="the same seed gives the same text (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Generates as told; 1 if a text ended in logits that are not finite."""
    tree = _check(args)
    prompts = args.prompt or [_standard_input()]

    import jax

    import jaxspec
    from jaxspec.cli import show

    target = show.load(args.target, args.dtype)
    draft = None
    if args.draft_model is not None:
        same = args.draft_model == args.target
        draft = target if same else show.load(args.draft_model, args.dtype)
    with show.busy("compiling, reading the prompt"):
        running = jaxspec.stream(
            target,
            prompts,
            key=jax.random.key(args.seed),
            drafter=args.drafter,
            rule=args.rule,
            sampling=jaxspec.Sampling(args.temperature, args.top_k, args.top_p, args.min_p),
            max_new_tokens=args.max_new_tokens,
            draft=draft,
            tree=tree,
            exit_layers=args.exit_layers,
            samples=args.samples,
            chat=target.chat_template is not None if args.chat is None else args.chat,
            stop=args.stop,
            ignore_eos=args.ignore_eos,
            logprobs=args.logprobs,
        )
        first = list(itertools.islice(running, 1))  # the first step compiles, too
    chunks, rows = itertools.chain(first, running), len(prompts) * args.samples
    if args.json:
        with show.Bar("decoding") as bar:
            for done in itertools.accumulate(len(chunk.tokens) for chunk in chunks):
                bar(done, rows * args.max_new_tokens)
        records = as_records(running.output, prompts, args.seed)
        print("[\n" + ",\n".join(json.dumps(record, allow_nan=False) for record in records) + "\n]")
    else:
        titles = [f"{i + 1}.{s + 1}" if args.samples > 1 else f"{i + 1}" for i, s in
                  itertools.product(range(len(prompts)), range(args.samples))]  # fmt: skip
        print_in_order(chunks, [f"=== {title} ===" for title in titles] if rows > 1 else [""])
    show.say(show.summary(running.output))
    failed = [i for i, row in enumerate(running.output) if row.finish_reason == "error"]
    if failed:
        raise ArithmeticError(f"the target's logits were not finite, which ended text {failed[0] + 1} early")
    return 0


def _check(args: argparse.Namespace):
    """The tree; what options say of one another is checked before anything is loaded.

    Raises:
        UsageError: options that exclude, or need, one another.
    """
    if args.tree is not None and args.draft_length is not None:
        raise UsageError("--draft-length is a chain and --tree another tree; give one of the two")
    for option, drafter in (("draft_model", "model"), ("exit_layers", "early-exit")):
        if getattr(args, option) is not None and args.drafter != drafter:
            raise UsageError(f"--{option.replace('_', '-')} is for --drafter {drafter}, not {args.drafter}")
    if args.drafter == "model" and args.draft_model is None:
        raise UsageError("--drafter model needs --draft-model SOURCE")
    if args.logprobs and not args.json:
        raise UsageError("--logprobs are written to the JSON; give --json, too")
    return args.draft_length if args.tree is None else parse_tree(args.tree)


def _standard_input() -> str:
    """All of it, but for the line end that shells add."""
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("no PROMPT given; write one, or send it to standard input")
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise UsageError("no PROMPT given, and standard input is empty")
    return text


def as_records(output: "Output", prompts: list[str], seed: int) -> list[dict]:
    """What `--json` writes, one record per text. All were decoded together: `timing` is of all `rows`."""
    timing = output.timing.as_dict() | {"rows": len(output)}
    return [
        {
            "prompt": prompts[row.prompt],
            "sample": row.sample,
            "text": row.text,
            "tokens": row.tokens,
            "finish_reason": row.finish_reason,
            **({} if row.logprobs is None else {"logprobs": row.logprobs}),
            "stats": row.stats.as_dict(),
            "timing": timing,
            "noise_version": output.noise_version,
            "key_seed": seed,
        }
        for row in output
    ]


def print_in_order(chunks: Iterable["Chunk"], headers: list[str]) -> None:
    """Prints each row's text below its header: the first unfinished one as it comes, the others in turn."""
    waiting, ended, at = ["" for _ in headers], [False for _ in headers], 0
    print(headers[0], end="\n" if headers[0] else "", flush=True)
    for chunk in chunks:
        waiting[chunk.row] += chunk.text
        ended[chunk.row] = chunk.finish_reason is not None
        while at < len(headers):
            print(waiting[at], end="\n" if ended[at] else "", flush=True)
            waiting[at] = ""
            if not ended[at]:
                break
            at += 1
            if at < len(headers):
                print(f"\n{headers[at]}")
