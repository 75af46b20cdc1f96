"""Shows what a checkpoint holds, and the memory it would take. No weight is read.

With --draft-model it also shows what the vocabularies of a target and a draft model have in common.

Of draft heads it shows the layout, the sizes, and anything unusual. With --target it also shows whether the heads fit
the target and, by decoding a few prompts with them, whether they work.
"""

import argparse
import json
from typing import Any

from jaxspec.cli.inspect_format import as_lines
from jaxspec.cli.inspect_model import LENGTH
from jaxspec.cli.models import add_allow_pickle
from jaxspec.cli.options import COUNT, SOURCES, Parser, UsageError, add_dtype
from jaxspec.errors import JaxspecError
from jaxspec.storage.reading import check_path


def add_options(parser: Parser) -> None:
    """Adds the command's options."""
    add = parser.add_argument
    add("source", nargs="?", metavar="SOURCE", help=f"{SOURCES}, or heads; without it, the presets are listed")
    add("--revision", metavar="NAME", help="branch, tag or commit of a Hub repository")
    add("--batch", type=COUNT, default=1, metavar="N", help="rows decoded together (default: 1)")
    add("--length", type=COUNT, metavar="N", help=f"tokens of each row (default: {LENGTH}, or the context if less)")
    add_dtype(add)
    add("--draft-model", metavar="SOURCE", help="of a model: a draft model, whose vocabulary is compared with it")
    add("--target", metavar="SOURCE", help="of heads: the model they are to draft for")
    add("--prompt", action="append", metavar="TEXT", help="to try heads on, with --target; repeatable")
    add_allow_pickle(add)
    add("--json", action="store_true", help="a JSON object; what ends in _bytes is in bytes")


def preset_lines() -> list[str]:
    """Returns a line for each preset: its name, parameters, draft model, heads and licence."""
    from jaxspec.checkpoints.presets import PRESETS
    from jaxspec.heads.find import every_shipped

    heads = every_shipped()
    rows = [("preset", "parameters", "draft model", "heads", "licence")]
    for name, preset in PRESETS.items():
        own = ", ".join(one.partition("/")[2] for one in heads if one.startswith(f"{name}/"))
        rows.append((name, f"{preset.parameters / 1e6:,.0f} M", preset.draft or "-", own or "-", preset.license))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def run(args: argparse.Namespace) -> int:
    """Prints the report, then raises the first error that would prevent loading, if any."""
    from jaxspec.checkpoints.source import find_source, weight_files
    from jaxspec.cli import show
    from jaxspec.heads.find import find_layout, hub_files, named_heads
    from jaxspec.heads.layouts import FILES, LAYOUTS

    if args.source is None:
        print("\n".join(preset_lines()))
        return 0
    place = named_heads(args.source)
    if place is None:
        place = check_path(find_source(args.source, args.revision, show.say, hub_files(args.allow_pickle)))
    layout = find_layout(place)
    if layout is None and (args.target or args.prompt or args.allow_pickle):
        raise UsageError(
            f"--target, --prompt and --allow-pickle are for draft heads, and {args.source} is not in a layout of heads"
        )
    if layout is not None and args.draft_model:
        raise UsageError("--draft-model is for a model, and these are draft heads")
    files = weight_files(place) or [place / name for name in FILES if (place / name).is_file()]
    report: dict[str, Any] = {"source": args.source, "path": str(place)}
    report |= {"files": len(files), "file_size_bytes": sum(file.stat().st_size for file in files)}
    refused: list[JaxspecError] = []
    if layout is None or (layout in LAYOUTS and LAYOUTS[layout].in_model):
        from jaxspec.cli.inspect_model import checkpoint_sections

        report |= checkpoint_sections(place, args, refused)
    if args.draft_model:
        from jaxspec.cli.inspect_model import bridge_section

        report["draft_model"] = bridge_section(place, check_path(find_source(args.draft_model, None, show.say)))
    if layout is not None:
        from jaxspec.cli.inspect_heads import heads_sections

        report |= heads_sections(place, args, refused)
    if args.json:
        report["refused"] = [str(error) for error in refused]
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        from rich.console import Console

        print("\n".join(as_lines(report, Console().width)))
    if refused:
        raise refused[0]
    return 0
