"""Shows what a checkpoint holds, and the memory it would take. No weight is read.

With --draft-model it also shows what the vocabularies of a target and a draft model have in common.

Of draft heads it shows the layout, the sizes, and anything unusual. With --target it also shows whether the heads fit
the target and, by decoding a few prompts with them, whether they work.
"""

import argparse
import json
from typing import Any

from jaxspec.cli.inspect_format import format_lines
from jaxspec.cli.inspect_model import INSPECT_LENGTH
from jaxspec.cli.models import add_allow_pickle
from jaxspec.cli.options import COUNT_TYPE, SOURCE_HELP, Parser, UsageError, add_dtype
from jaxspec.errors import JaxspecError
from jaxspec.storage.reading import check_path


def add_options(parser: Parser) -> None:
    """Adds the command's options."""
    add = parser.add_argument
    add("source", nargs="?", metavar="SOURCE", help=f"{SOURCE_HELP}, or heads (default: list the presets)")
    add("--revision", metavar="NAME", help="branch, tag or commit of a Hub repository")
    add("--batch", type=COUNT_TYPE, default=1, metavar="N", help="rows decoded together (default: 1)")
    add(
        "--length",
        type=COUNT_TYPE,
        metavar="N",
        help=f"tokens of each row (default: {INSPECT_LENGTH}, or the context if smaller)",
    )
    add_dtype(add)
    add("--draft-model", metavar="SOURCE", help="for a model: a draft model to compare vocabularies with")
    add("--target", metavar="SOURCE", help="for heads: the model that they draft for")
    add(
        "--prompt", action="append", metavar="TEXT", help="for heads with --target: a prompt to try them on; repeatable"
    )
    add_allow_pickle(add)
    add("--json", action="store_true", help="print a JSON object; values whose name ends in _bytes are in bytes")


def preset_lines() -> list[str]:
    """Returns a line for each preset: its name, parameters, draft model, heads and licence."""
    from jaxspec.checkpoints.presets import PRESETS
    from jaxspec.heads.find import list_shipped_heads

    heads = list_shipped_heads()
    rows = [("preset", "parameters", "draft model", "heads", "licence")]
    for name, preset in PRESETS.items():
        kinds = ", ".join(path.partition("/")[2] for path in heads if path.startswith(f"{name}/"))
        rows.append((name, f"{preset.parameters / 1e6:,.0f} M", preset.draft or "-", kinds or "-", preset.license))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def run(args: argparse.Namespace) -> int:
    """Prints the report, then raises the first error that would prevent loading, if any."""
    from jaxspec.checkpoints.source import find_source, weight_files
    from jaxspec.cli import show
    from jaxspec.heads.find import find_layout, find_named_heads, list_hub_files
    from jaxspec.heads.layouts import HEAD_FILES, LAYOUTS

    if args.source is None:
        print("\n".join(preset_lines()))
        return 0
    place = find_named_heads(args.source)
    if place is None:
        place = check_path(find_source(args.source, args.revision, show.say, list_hub_files(args.allow_pickle)))
    layout = find_layout(place)
    if layout is None and (args.target or args.prompt or args.allow_pickle):
        raise UsageError(
            f"--target, --prompt and --allow-pickle are for draft heads, but {args.source} does not hold heads in a "
            "known layout"
        )
    if layout is not None and args.draft_model:
        raise UsageError(f"--draft-model is for models, but {args.source} holds draft heads")
    files = weight_files(place) or [place / name for name in HEAD_FILES if (place / name).is_file()]
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

        print("\n".join(format_lines(report, Console().width)))
    if refused:
        raise refused[0]
    return 0
