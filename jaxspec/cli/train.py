"""Trains draft heads for a target: 'jaxspec train medusa --target TARGET --prompts FILE --out DIR'.

The folder keeps all that was made, and the same command goes on where it was ended. At its end DIR/heads holds the
heads with the tree fitted to them, a card and the figures: 'jaxspec generate --drafter medusa --heads DIR/heads'.
"""

import argparse
import dataclasses
import os
import pathlib
import shutil
from typing import TYPE_CHECKING

from jaxspec.cli import options
from jaxspec.cli.options import Parser, UsageError, one_of, whole
from jaxspec.errors import InvalidConfig, StorageError
from jaxspec.storage.reading import check_path
from jaxspec.storage.writing import reason

if TYPE_CHECKING:
    from jaxspec.heads.network import DraftHeads

KINDS = ("medusa",)


def add_options(parser: Parser) -> None:
    """All but --debug, which every command has."""
    from jaxspec.train.settings import Settings

    parser.add_argument("kind", type=one_of("kind of heads", KINDS), metavar="|".join(KINDS),
                        help="heads on the target's features; --inputs says which systems can serve them")  # fmt: skip
    add = parser.add_argument_group("what is trained on what").add_argument
    add(
        "--target",
        default=options.TARGET,
        metavar="NAME_OR_PATH",
        help=f"{options.SOURCES} (default: {options.TARGET})",
    )
    options.add_dtype(add)
    add(
        "--prompts",
        nargs="+",
        required=True,
        metavar="FILE",
        help=".jsonl or .json of prompts or conversations (prompt, messages, ShareGPT's), or .txt of prompts",
    )
    add("--out", type=pathlib.Path, required=True, metavar="DIR", help="the run's folder")
    add(
        "--data", type=pathlib.Path, metavar="DIR", help="keeps answers and features, for several runs (default: --out)"
    )
    add(
        "--fit-prompts",
        type=whole(0),
        default=6,
        metavar="N",
        help="held-out prompts to choose the tree on (default: 6)",
    )
    add("--fit-dtype", **options.DTYPE, help="of the target when the tree is chosen (default: that of --dtype)")
    add("--log-to", action="append", default=[], type=one_of("logger", ("tensorboard",)), metavar="tensorboard",
        help="besides log.jsonl; needs the package tensorboardX")  # fmt: skip
    add = parser.add_argument_group("settings").add_argument
    for field in dataclasses.fields(Settings):
        flag, about = f"--{field.name.replace('_', '-')}", field.metadata["about"]
        if isinstance(field.default, bool):
            add(
                flag,
                action=argparse.BooleanOptionalAction,
                default=field.default,
                help=f"{about} (default: {field.default})",
            )
            continue
        kind: dict = {"type": type(field.default), "metavar": "N" if isinstance(field.default, int) else "X"}
        if choices := field.metadata["choices"]:
            kind = {"type": one_of(field.name, choices), "metavar": "|".join(choices)}
        add(flag, default=field.default, help=f"{about} (default: {field.default})", **kind)


def run(args: argparse.Namespace) -> int:
    """Trains as told."""
    from jaxspec.train.settings import Settings

    try:
        settings = Settings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)})
    except InvalidConfig as error:
        raise UsageError(str(error)) from None

    if not settings.held_out:
        raise UsageError("--held-out 0: the tree and the card are made with held-out texts; give a share above 0")
    fit_dtype = args.fit_dtype or args.dtype
    if settings.medusa2 and fit_dtype != args.dtype:
        raise UsageError(f"--fit-dtype {fit_dtype}: --medusa2 trains the target in --dtype {args.dtype}, leave it out")

    from jaxspec.cli import show
    from jaxspec.train import card, evaluate
    from jaxspec.train.manifest import HEADS
    from jaxspec.train.monitor import Monitor
    from jaxspec.train.run import train

    out = check_path(args.out, "--out")
    target = show.load(args.target, args.dtype)
    if settings.medusa2:
        show.say(
            "Medusa-2 trains the target, too: text will be lossless against the new one, not against the original",
            answer=True,
        )
    try:
        with Monitor(out, args.log_to) as monitor:
            trained = train(target, args.prompts, out, settings, monitor.watch, args.data)
    except KeyboardInterrupt:
        show.say(f"what was made is kept in {out}: the same command goes on", answer=True)
        raise
    folder, heads, trees = out / HEADS, trained.heads, []
    found = evaluate.ranks(trained.target, heads, trained.data.answered, settings.row_tokens)
    if args.fit_prompts:
        prompts = trained.data.prompts[:: max(1, len(trained.data.prompts) // args.fit_prompts)][: args.fit_prompts]
        deciding = trained.target if fit_dtype == args.dtype else show.load(args.target, fit_dtype)
        with show.Bar("measuring trees", parts=show.PARTS) as bar:
            trees = evaluate.measure_trees(deciding, heads, found.acceptance(), prompts, progress=bar)
        drafting = [one for one in trees if one.tree.shape.depth]
        if drafting:  # heads that guess nothing right have no tree
            heads = dataclasses.replace(heads, tree=max(drafting, key=lambda one: one.tokens_per_s).tree)
    _replace(heads, folder)
    card.write(folder, trained, heads, settings, args.prompts, card.figures(found, trees, fit_dtype))
    if settings.medusa2 and not (out / "target").exists():
        import jaxspec

        jaxspec.save(trained.target, out / "target")
    show.card((folder / card.CARD).read_text())
    show.say(f"written: {folder}")
    return 0


def _replace(heads: "DraftHeads", folder: pathlib.Path) -> None:
    """Writes heads beside their place, so that those of an earlier call stay whole until the new ones are."""
    from jaxspec.heads.files import save_heads

    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    save_heads(heads, part)
    try:
        folder.mkdir(exist_ok=True)
        for file in part.iterdir():
            os.replace(file, folder / file.name)
        part.rmdir()
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {reason(error, folder)}") from None
