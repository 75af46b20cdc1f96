"""Continues prompts. The text is printed as it is decoded; statistics go to standard error."""

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jaxspec.amounts import plural, size
from jaxspec.cli import drafting, models, options
from jaxspec.cli.options import COUNT_TYPE, Parser, UsageError, add_option, check_output, whole_type
from jaxspec.core import sizes

if TYPE_CHECKING:
    from jaxspec.generation.options import GenerateOptions
    from jaxspec.generation.output import Chunk, Generation, Output
    from jaxspec.models.model import Model


def add_options(parser: Parser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        "prompt",
        nargs="*",
        type=options.text_type("prompt"),
        metavar="PROMPT",
        help="text to continue (default: the text of standard input)",
    )
    add = options.add_models(parser)
    options.add_chat(add)
    options.add_template(add)
    drafting.add_drafting(parser)
    add = options.add_sampling(parser)
    add_option(add, "samples", type=whole_type(1, sizes.MAX_SAMPLES), metavar="N")
    options.add_grammar(parser)
    options.add_ending(parser, 128)
    add = parser.add_argument_group("many prompts").add_argument
    add(
        "--prompts",
        metavar="FILE",
        help="file of prompts, instead of PROMPT: .jsonl or .json of conversations, or .txt",
    )
    options.add_split(add)
    add_option(add, "out", "the same command resumes, see FILE.job.json", metavar="FILE")
    add_option(add, "batch", "default: all", type=COUNT_TYPE, metavar="N")
    add = parser.add_argument_group("output").add_argument
    add(
        "--json", action="store_true", help="print a JSON list with text, tokens, finish_reason, stats, timing and more"
    )
    number = whole_type(0, sizes.MAX_LOGPROBS)
    add_option(add, "logprobs", "in the JSON", nargs="?", type=number, const=True, metavar="N")
    width = whole_type(2, sizes.MAX_NODES + 1)
    add_option(add, "width_matched", "docs/guarantees.md", nargs="?", type=width, const=True, metavar="N")
    add(
        "--compile-only",
        action="store_true",
        help="only compile the programs of this call, and keep them for later calls",
    )


def run(args: argparse.Namespace) -> int:
    """Generates texts.

    Raises:
        ArithmeticError: if a text ended because logits were not finite.
    """
    chosen, sources = drafting.read_drafting(args)
    if args.logprobs is not False and not (args.json or args.out):
        raise UsageError("--logprobs needs JSON output; add --json or --out FILE")
    if args.out and args.json:
        raise UsageError("--out writes JSON to a file, and --json writes it to standard output; give only one of them")
    if args.compile_only and (args.json or args.out):
        raise UsageError("--compile-only writes no text; leave out --json and --out")
    if args.prompts and args.prompt:
        raise UsageError("PROMPT and --prompts cannot be combined; give only one of them")
    options.check_split(args.split, [args.prompts] if args.prompts else [])
    check_output("--out", args.out)
    prompts: list = _prompts(args.prompts, args.split) if args.prompts else args.prompt or [_standard_input()]

    from jaxspec.api import start_stream
    from jaxspec.cli import show
    from jaxspec.generation.precompile import compile_programs

    target, chosen = models.load_for_drafting(sources, chosen, args.max_new_tokens, args.chat)
    selected = options.read_options(args, chosen)
    if args.compile_only:
        if not compile_programs(target, prompts, selected):
            show.say("nothing had to be compiled")
        return 0
    if args.out:
        output = _into_file(target, prompts, selected)
    else:
        with show.show_activity("reading the prompt"):
            running = start_stream(target, prompts, selected)
            first = list(itertools.islice(running, 1))  # the first step also compiles
        chunks = itertools.chain(first, running)
        if args.json:
            _count(chunks, len(prompts) * args.samples * args.max_new_tokens)
        else:
            print_in_order(chunks, _headers(len(prompts), args.samples))
        output = running.output
        if args.json:
            records = as_records(output, prompts, args.seed)
            print("[\n" + ",\n".join(json.dumps(record, allow_nan=False) for record in records) + "\n]")
    show.say(show.format_summary(output.timing, output.stats))
    failed = [i for i, row in enumerate(output) if row.finish_reason == "error"]
    if failed:
        raise ArithmeticError(f"the target's logits were not finite, which ended text {failed[0] + 1} early")
    return 0


def _into_file(target: "Model", prompts: list, options: "GenerateOptions") -> "Output":
    """Writes every text when it ends, and shows the progress."""
    from jaxspec.api import start_stream
    from jaxspec.cli import show
    from jaxspec.decode.loop import NO_LIMIT

    with show.Bar("decoding", parts=show.PROGRESS_LINES) as bar:
        running = start_stream(target, prompts, dataclasses.replace(options, progress=bar, rounds=NO_LIMIT))
        rows = len(prompts) * options.samples
        complete = sum(row.finish_reason is not None for row in running.output)
        resumed = f", {'all' if complete == rows else complete} of them already in {options.out}" if complete else ""
        show.say(f"{plural(rows, 'text')}{resumed}, caches of {size(running.memory)}")
        for _ in running:
            pass
    return running.output


def _count(chunks: Iterable["Chunk"], total: int) -> None:
    """Decodes all chunks, and shows how many of the `total` tokens there are."""
    from jaxspec.cli import show

    with show.Bar("decoding") as bar:
        for done in itertools.accumulate(len(chunk.tokens) for chunk in chunks):
            bar(done, total)


def _headers(prompts: int, samples: int) -> list[str]:
    """Returns the header of each row; an empty header for a single row."""
    if prompts * samples == 1:
        return [""]
    rows = itertools.product(range(1, prompts + 1), range(1, samples + 1))
    return [f"=== {prompt}.{sample} ===" if samples > 1 else f"=== {prompt} ===" for prompt, sample in rows]


def _prompts(path: str, split: str | None) -> list:
    """Reads texts, and conversations up to their first answer, and prints their number."""
    from jaxspec.cli import show
    from jaxspec.storage.prompt_files import SPLITS
    from jaxspec.text.conversations import read_conversations

    prompts = [row.prompt for row in read_conversations([path], strict=True, split=split or SPLITS[0])[0]]
    show.say(f"{path}: {plural(len(prompts), 'prompt')}")
    return prompts


def _standard_input() -> str:
    """Reads standard input, without the newline at its end."""
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("no PROMPT given; give one, or send it to standard input")
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise UsageError("no PROMPT given, and standard input is empty")
    return text


def as_records(output: "Output", prompts: list[str], seed: int) -> list[dict]:
    """Returns a record for JSON per text; `timing` is the time of all `rows`, which were decoded together."""
    timing = output.timing.as_dict() | {"rows": len(output)}
    return [
        {
            "prompt": prompts[row.prompt],
            "sample": row.sample,
            "text": row.text,
            "tokens": row.tokens,
            "finish_reason": row.finish_reason,
            **logprobs_record(row),
            "stats": row.stats.as_dict(),
            "timing": timing,
            "noise_version": output.noise_version,
            "key_seed": seed,
        }
        for row in output
    ]


def logprobs_record(row: "Generation") -> dict:
    """Returns the log-probabilities of a text, if any; None for a token of probability 0, from a lossy rule."""
    record: dict[str, Any] = {}
    if row.logprobs is not None:
        record["logprobs"] = row.logprobs
    if row.sampled_logprobs is not None:
        record["sampled_logprobs"] = [value if math.isfinite(value) else None for value in row.sampled_logprobs]
    if row.top_logprobs is not None:
        record["top_logprobs"] = row.top_logprobs
    return record


def print_in_order(chunks: Iterable["Chunk"], headers: list[str]) -> None:
    """Prints the text of each row below its header, in the order of the rows, as early as possible."""
    from jaxspec.cli import show

    waiting, ended, at = ["" for _ in headers], [False for _ in headers], 0
    with show.writer() as write:
        write(headers[0] + "\n" * bool(headers[0]))
        for chunk in chunks:
            waiting[chunk.row] += chunk.text
            ended[chunk.row] = chunk.finish_reason is not None
            while at < len(headers):
                write(waiting[at] + "\n" * ended[at])
                waiting[at] = ""
                if not ended[at]:
                    break
                at += 1
                if at < len(headers):
                    write(f"\n{headers[at]}\n")
