"""Writes draft heads in the layout of another system: 'jaxspec export HEADS --layout vllm --out DIR'.

EAGLE, DFlash, DSpark and JetSpec heads can be exported, and heads trained with '--inputs hidden' (Medusa's kind). Heads
trained with '--inputs path' or 'recurrent' cannot be exported: no other system has a layout for them, and only jaxspec
serves them.
"""

import argparse

from jaxspec.cli.models import add_allow_pickle
from jaxspec.cli.options import HEAD_DTYPES, SOURCE_HELP, Parser, check_output, choice_type, parse_path
from jaxspec.heads.layouts import EXPORT_LAYOUTS, LAYOUTS


def add_options(parser: Parser) -> None:
    """Adds the command's options."""
    add = parser.add_argument
    layouts = (f"{name}: {LAYOUTS[name].summary} ({LAYOUTS[name].readers})" for name in EXPORT_LAYOUTS)
    add(
        "heads",
        metavar="HEADS",
        help="the heads: a directory, a file or a Hub repository, in any layout that jaxspec reads",
    )
    add(
        "--layout",
        type=choice_type("layout", EXPORT_LAYOUTS),
        metavar="|".join(EXPORT_LAYOUTS),
        help=f"{'; '.join(layouts)} (default: the first layout that can hold the heads)",
    )
    add("--out", type=parse_path, required=True, metavar="DIR", help="directory to write to")
    add(
        "--target",
        metavar="SOURCE",
        help=f"the model that the heads draft for, whose projection is copied: {SOURCE_HELP}",
    )
    add("--base", metavar="NAME", help="name of the target in other systems (default: the name of --target)")
    shown = "|".join(HEAD_DTYPES)
    add(
        "--dtype",
        type=choice_type("dtype", HEAD_DTYPES),
        metavar=shown,
        help="dtype to write (default: the dtype of the file)",
    )
    add_allow_pickle(add)


def run(args: argparse.Namespace) -> int:
    """Exports the heads."""
    from jaxspec.cli import show
    from jaxspec.heads.export import export_heads
    from jaxspec.heads.files import load_heads
    from jaxspec.heads.headers import open_heads
    from jaxspec.heads.serving import check_layout

    check_output("--out", args.out, folder=True)
    # The layout is checked before the target, which may be large, is loaded.
    opened = open_heads(args.heads, allow_pickle=args.allow_pickle)
    if args.layout is not None:
        check_layout(opened.config_of_any_vocabulary(), LAYOUTS[args.layout])
    target = None if args.target is None else show.load_model(args.target, args.dtype or HEAD_DTYPES[0])
    heads = load_heads(args.heads, target=target, dtype=args.dtype, allow_pickle=args.allow_pickle)
    for note in heads.notes:
        show.say(f"{args.heads}: {note}", answer=True)
    folder = export_heads(heads, args.out, args.layout, target=target, base=args.base)
    show.say(f"written: {folder}")
    return 0
