"""Continues prompts. The text comes as it is written; what it cost is told on standard error."""

import argparse
import itertools
import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxspec.cli import options
from jaxspec.cli.options import Parser, UsageError, whole

if TYPE_CHECKING:
    from jaxspec.output import Chunk, Output


def add_options(parser: Parser) -> None:
    """All but --debug, which every command has."""
    parser.add_argument(
        "prompt", nargs="*", metavar="PROMPT", help="text to continue; none: standard input is the one prompt"
    )
    options.add_chat(options.add_models(parser))
    options.add_drafting(parser)
    add = options.add_sampling(parser)
    add("--samples", type=whole(1), default=1, metavar="N", help="texts per prompt (default: 1)")
    options.add_ending(parser, 128)
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="a JSON list: text, tokens, finish_reason, stats, timing, ...")
    add("--logprobs", action="store_true", help="log-probabilities of the tokens, in the JSON")


def run(args: argparse.Namespace) -> int:
    """Generates as told; 1 if a text ended in logits that are not finite."""
    tree = options.check_drafting(args)
    if args.logprobs and not args.json:
        raise UsageError("--logprobs are written to the JSON; give --json, too")
    prompts = args.prompt or [_standard_input()]

    import jaxspec
    from jaxspec.cli import show

    target, draft = options.load_models(args)
    heads = options.load_heads(args, target)
    with show.busy("compiling, reading the prompt"):
        running = jaxspec.stream(
            target,
            prompts,
            samples=args.samples,
            chat=target.chat_template is not None if args.chat is None else args.chat,
            logprobs=args.logprobs,
            **options.stream_options(args, draft, tree, heads),
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
    show.say(show.summary(running.output.timing, running.output.stats))
    failed = [i for i, row in enumerate(running.output) if row.finish_reason == "error"]
    if failed:
        raise ArithmeticError(f"the target's logits were not finite, which ended text {failed[0] + 1} early")
    return 0


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
