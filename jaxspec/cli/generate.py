"""Continues prompts. The text comes as it is written; what it cost is told on standard error."""

import argparse
import itertools
import json
import pathlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jaxspec.cli import options
from jaxspec.cli.options import Parser, UsageError, whole

if TYPE_CHECKING:
    from jaxspec.models.model import Model
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
    add = parser.add_argument_group("many prompts").add_argument
    add("--prompts", metavar="FILE", help="instead of PROMPT: .jsonl or .json of conversations, .txt of texts")
    add("--out", metavar="FILE", help="a line of JSON per text, as it ends; the same command goes on with the rest")
    add(
        "--batch",
        type=whole(1),
        metavar="N",
        help="texts at once; the next takes the place of one that ends (default: all)",
    )
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="a JSON list: text, tokens, finish_reason, stats, timing, ...")
    add("--logprobs", action="store_true", help="log-probabilities of the tokens, in the JSON")
    add("--compile-only", action="store_true", help="compile what the call needs, and keep it for later calls")


def run(args: argparse.Namespace) -> int:
    """Generates as told; 1 if a text ended in logits that are not finite."""
    tree = options.check_drafting(args)
    if args.logprobs and not (args.json or args.out):
        raise UsageError("--logprobs are written to the JSON; give --json, too")
    if args.out and args.json:
        raise UsageError("--out is a file of JSON, --json writes to standard output; give one of the two")
    if args.compile_only and (args.json or args.out):
        raise UsageError("--compile-only writes no text; give it without --json and --out")
    if args.prompts and args.prompt:
        raise UsageError("--prompts is instead of PROMPT; give one of the two")
    if args.out and not pathlib.Path(args.out).absolute().parent.is_dir():
        raise UsageError(f"--out {args.out}: there is no folder {pathlib.Path(args.out).absolute().parent}; make it")
    prompts: list = _prompts(args.prompts) if args.prompts else args.prompt or [_standard_input()]

    import jaxspec
    from jaxspec.cli import show

    target, draft = options.load_models(args)
    heads = options.load_heads(args, target)
    keywords = options.stream_options(args, draft, tree, heads) | {
        "samples": args.samples,
        "chat": target.chat_template is not None if args.chat is None else args.chat,
        "logprobs": args.logprobs,
        "batch": args.batch,
    }
    if args.compile_only:
        with show.busy("compiling"):
            seconds = jaxspec.precompile(target, prompts, **keywords)
        show.say(f"compiled in {seconds:.1f} s")
        return 0
    if args.out:
        output = _into_file(target, prompts, args.out, keywords)
    else:
        with show.busy("compiling, reading the prompt"):
            running = jaxspec.stream(target, prompts, **keywords)
            first = list(itertools.islice(running, 1))  # the first step compiles, too
        _show(args, prompts, itertools.chain(first, running))
        output = running.output
        if args.json:
            records = as_records(output, prompts, args.seed)
            print("[\n" + ",\n".join(json.dumps(record, allow_nan=False) for record in records) + "\n]")
    show.say(show.summary(output.timing, output.stats))
    failed = [i for i, row in enumerate(output) if row.finish_reason == "error"]
    if failed:
        raise ArithmeticError(f"the target's logits were not finite, which ended text {failed[0] + 1} early")
    return 0


def _into_file(target: "Model", prompts: list, path: str, options: dict[str, Any]) -> "Output":
    """Writes every text as it ends, and shows how far it is."""
    import jaxspec
    from jaxspec.cli import show
    from jaxspec.decode.loop import FOREVER

    with show.Bar("decoding", parts=10) as bar:
        running = jaxspec.stream(target, prompts, out=path, progress=bar, rounds=FOREVER, **options)
        show.say(f"{len(prompts) * options['samples']} texts, caches of {running.memory / 1e9:.2f} GB")
        for _ in running:
            pass
    return running.output


def _show(args: argparse.Namespace, prompts: list, chunks: Iterable["Chunk"]) -> None:
    """The texts as they come, or how far they are."""
    from jaxspec.cli import show

    rows = len(prompts) * args.samples
    if args.json:
        with show.Bar("decoding") as bar:
            for done in itertools.accumulate(len(chunk.tokens) for chunk in chunks):
                bar(done, rows * args.max_new_tokens)
        return
    titles = [f"{i + 1}.{s + 1}" if args.samples > 1 else f"{i + 1}" for i, s in
              itertools.product(range(len(prompts)), range(args.samples))]  # fmt: skip
    print_in_order(chunks, [f"=== {title} ===" for title in titles] if rows > 1 else [""])


def _prompts(path: str) -> list:
    """Texts, and conversations up to their first answer."""
    from jaxspec.train.conversations import read

    found = []
    for one in read([path], refuse=True)[0]:
        asked = itertools.takewhile(lambda message: message["role"] != "assistant", one.messages)
        found.append(list(asked) if one.text is None else one.text)
    return found


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
