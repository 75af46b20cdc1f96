"""Tests whether texts were drawn with the watermark of a secret; see docs/watermark.md.

No weight is read: only the tokenizer of the model.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

from jaxspec.cli.options import DEFAULT_TARGET, SOURCE_HELP, Parser, whole_type
from jaxspec.core.sizes import MAX_SEED, MAX_WATERMARK_CONTEXT
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.storage.reading import check_path, read_text_file


def add_options(parser: Parser) -> None:
    """Adds the command's options."""
    add = parser.add_argument
    add("files", nargs="*", type=pathlib.Path, metavar="FILE", help="text files, one text each (default: stdin)")
    add("--secret", type=whole_type(0, MAX_SEED), required=True, metavar="N", help="the watermark's secret")
    add(
        "--context",
        type=whole_type(1, MAX_WATERMARK_CONTEXT),
        default=4,
        metavar="N",
        help="the watermark's context (default: 4)",
    )
    add("--target", default=DEFAULT_TARGET, metavar="NAME_OR_PATH", help=f"{SOURCE_HELP} (default: {DEFAULT_TARGET})")
    add("--json", action="store_true", help="print a JSON object for each text")


def run(args: argparse.Namespace) -> int:
    """Prints a line for each text: its name, the number of tested tokens, the score and the p-value."""
    from jaxspec.analysis.watermark import detect_watermark
    from jaxspec.checkpoints.source import open_source
    from jaxspec.cli import show
    from jaxspec.text.tokenizer import Tokenizer

    checkpoint = open_source(args.target, report=show.say)
    if checkpoint.tokenizer is None:
        raise CheckpointError(f"{args.target} has no tokenizer, which splits the texts into tokens")
    vocab = checkpoint.config.vocab_size
    tokenizer = Tokenizer.from_source(checkpoint.tokenizer, vocab)
    files = [(str(file), check_path(file, "FILE")) for file in args.files]
    texts = [(name, read_text_file(path, InvalidConfig)) for name, path in files] or [("-", sys.stdin.read())]
    for name, text in texts:
        found = detect_watermark(tokenizer.encode(text, begins=False), args.secret, vocab, args.context)
        if args.json:
            print(json.dumps({"text": name, **dataclasses.asdict(found)}))
        else:
            print(f"{name}: {found.tokens} tokens, score {found.score:.1f}, p-value {found.p_value:.3g}")
    return 0
