"""Writes draft heads in the layout of another system: 'jaxspec export HEADS --layout vllm --out DIR'.

EAGLE, DFlash and DSpark heads can be exported, and heads trained with '--inputs hidden' (Medusa's kind). Heads trained
with '--inputs path' or 'recurrent' cannot be exported: no other system has a layout for them, and only jaxspec serves
them.
"""

import argparse

from jaxspec.cli.models import add_allow_pickle
from jaxspec.cli.options import DTYPES, SOURCES, Parser, check_output, one_of, path
from jaxspec.heads.layouts import EXPORTED, LAYOUTS


def add_options(parser: Parser) -> None:
    """Adds the command's options."""
    add = parser.add_argument
    layouts = (f"{name}: {LAYOUTS[name].summary} ({LAYOUTS[name].readers})" for name in EXPORTED)
    add("heads", metavar="HEADS", help="a directory, a file or a repository of the Hub, in any layout that is read")
    add(
        "--layout",
        type=one_of("layout", EXPORTED),
        metavar="|".join(EXPORTED),
        help=f"{'; '.join(layouts)} (default: the first that can hold them)",
    )
    add("--out", type=path, required=True, metavar="DIR", help="where to write them")
    add("--target", metavar="SOURCE", help=f"the model they draft for, whose projection is copied: {SOURCES}")
    add("--base", metavar="NAME", help="what other systems call the target (default: as --target)")
    shown = "|".join(DTYPES)
    add("--dtype", type=one_of("dtype", DTYPES), metavar=shown, help="of what is written (default: that of the file)")
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
    found = open_heads(args.heads, allow_pickle=args.allow_pickle)
    if args.layout is not None:
        check_layout(found.config_of_any_vocabulary(), LAYOUTS[args.layout])
    target = None if args.target is None else show.load(args.target, args.dtype or DTYPES[0])
    heads = load_heads(args.heads, target=target, dtype=args.dtype, allow_pickle=args.allow_pickle)
    for note in heads.notes:
        show.say(f"{args.heads}: {note}", answer=True)
    place = export_heads(heads, args.out, args.layout, target=target, base=args.base)
    show.say(f"written: {place}")
    return 0
