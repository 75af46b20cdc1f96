"""Writes draft heads in the layout of another system."""

import argparse
import pathlib

from jaxspec.cli.options import DTYPES, SOURCES, Parser, one_of

LAYOUTS = ("v0.1", "legacy", "vllm")


def add_options(parser: Parser) -> None:
    """All but --debug, which every command has."""
    add = parser.add_argument
    add("heads", metavar="HEADS", help="a directory, a file or a repository of the Hub, in any layout that is read")
    add(
        "--layout",
        default=LAYOUTS[0],
        type=one_of("layout", LAYOUTS),
        metavar="|".join(LAYOUTS),
        help="Medusa's own with projections, Medusa's without (the target's is shared), or vLLM's (default: v0.1)",
    )
    add("--out", type=pathlib.Path, required=True, metavar="DIR", help="where to write them")
    add("--target", metavar="SOURCE", help=f"the model they draft for, whose projection is copied: {SOURCES}")
    add("--base", metavar="NAME", help="what other systems call the target (default: as --target)")
    shown = "|".join(DTYPES)
    add("--dtype", type=one_of("dtype", DTYPES), metavar=shown, help="of what is written (default: that of the file)")
    add("--allow-pickle", action="store_true", help="read heads also from .pt files; nothing of them is run")


def run(args: argparse.Namespace) -> int:
    """Exports them."""
    from jaxspec.cli import show
    from jaxspec.models.head_export import export_heads
    from jaxspec.models.head_files import load_heads

    target = None if args.target is None else show.load(args.target, args.dtype or DTYPES[0])
    heads = load_heads(args.heads, target=target, dtype=args.dtype, allow_pickle=args.allow_pickle)
    for note in heads.notes:
        show.say(f"{args.heads}: {note}")
    place = export_heads(heads, args.out, args.layout, target=target, base=args.base)
    show.say(f"written: {place}")
    return 0
