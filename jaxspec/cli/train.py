"""Trains draft heads or a draft model: 'jaxspec train eagle3 --target TARGET --prompts FILE --out DIR'.

Everything is kept in the folder, and the same command resumes an interrupted run. At the end, DIR/heads holds the heads
with the tree fitted to them, a card and the figures: 'jaxspec generate --drafter eagle --heads DIR/heads'.

'jaxspec train pard --start DRAFT ...' trains a draft model that names several tokens in one call; DIR/draft holds it.
"""

import argparse
import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from jaxspec.cli import options
from jaxspec.cli.options import Parser, UsageError, one_of, whole
from jaxspec.errors import InvalidConfig, JaxspecError, StorageError
from jaxspec.registry import TRAINEES, find
from jaxspec.storage.reading import check_path
from jaxspec.storage.writing import reason

if TYPE_CHECKING:
    import numpy as np

    from jaxspec.heads.network import DraftHeads
    from jaxspec.models.model import Model
    from jaxspec.train.evaluate import Candidate
    from jaxspec.train.run import Trained

KIND = "kind of heads"


def add_options(parser: Parser) -> None:
    """Adds all options but --debug, which every command has."""
    from jaxspec.train.settings import Settings

    names = "|".join(TRAINEES)
    parser.add_argument("kind", type=one_of(KIND, TRAINEES), metavar=names, help="kind of heads, or of draft model")
    add = parser.add_argument_group("models and data").add_argument
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
    add("--out", type=pathlib.Path, required=True, metavar="DIR", help="folder of the run")
    add(
        "--data",
        type=pathlib.Path,
        metavar="DIR",
        help="folder of answers and features, which several runs can share (default: --out)",
    )
    add(
        "--fit-prompts",
        type=whole(0),
        default=6,
        metavar="N",
        help="number of held-out prompts to choose the tree on (default: 6)",
    )
    add("--fit-dtype", **options.DTYPE, help="dtype of the target when the tree is chosen (default: that of --dtype)")
    add("--log-to", action="append", default=[], type=one_of("logger", ("tensorboard",)), metavar="tensorboard",
        help="another log besides log.jsonl; needs the package tensorboardX")  # fmt: skip
    own: dict[str, argparse.Action] = {}
    for name in TRAINEES:
        _add_settings(parser.add_argument_group(f"settings of {name}").add_argument, find(KIND, name), own, name)
    _add_settings(parser.add_argument_group("settings").add_argument, Settings, {})


def _add_settings(add: Callable, settings: Any, there: dict[str, argparse.Action], kind: str = "") -> None:
    """Adds a flag for every field of a class of settings; a flag that is not used leaves no attribute.

    Args:
        add: adds an argument to the parser.
        settings: the class.
        there: the flags of other kinds by name, which may be of the same name and type; the new ones are added.
        kind: the name of the kind of heads.
    """
    for field in dataclasses.fields(settings):
        if field.name in there:
            action = there[field.name]
            action.help = f"{action.help}; of {kind}: {field.metadata['about']} (default: {field.default})"
            continue
        words: dict[str, Any] = {"type": type(field.default), "metavar": "N" if type(field.default) is int else "X"}
        if type(field.default) is str:
            words["metavar"] = field.name.upper()
        if choices := field.metadata["choices"]:
            words = {"type": one_of(field.name, choices), "metavar": "|".join(choices)}
        if isinstance(field.default, bool):
            words = {"action": argparse.BooleanOptionalAction}
        about = f"{field.metadata['about']} (default: {field.default if field.default != '' else 'none'})"
        flag = f"--{field.name.replace('_', '-')}"
        there[field.name] = add(flag, default=argparse.SUPPRESS, help=about, **words)


def _settings_of(args: argparse.Namespace, settings: Any) -> Any:
    """Returns the settings of a class that the flags give."""
    return settings(**{name: vars(args)[name] for name in _names(settings) if name in vars(args)})


def _names(settings: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(settings)]


def _check_kind(args: argparse.Namespace) -> None:
    """Refuses flags of other kinds of heads."""
    own = _names(find(KIND, args.kind))
    for other in TRAINEES:
        for name in _names(find(KIND, other)):
            if name in vars(args) and name not in own:
                raise UsageError(f"--{name.replace('_', '-')} is a setting of {other}, not of {args.kind}")


def run(args: argparse.Namespace) -> int:
    """Trains heads or a draft model, fits a tree, and writes them."""
    from jaxspec.train.settings import Settings, check_together

    _check_kind(args)
    try:
        settings, kind = _settings_of(args, Settings), _settings_of(args, find(KIND, args.kind))
        check_together(settings, kind)
    except InvalidConfig as error:
        raise UsageError(str(error)) from None
    if not settings.held_out:
        raise UsageError("--held-out 0: the tree and the card need held-out texts; use a fraction above 0")
    out, fit_dtype = check_path(args.out, "--out"), args.fit_dtype or args.dtype

    from jaxspec.cli import show
    from jaxspec.train import card
    from jaxspec.train.manifest import DRAFT, HEADS
    from jaxspec.train.monitor import Monitor
    from jaxspec.train.run import train_heads

    if kind.trains_target:
        if fit_dtype != args.dtype:
            raise UsageError(f"--fit-dtype {fit_dtype}: the target is trained in --dtype {args.dtype}; leave it out")
        show.say(
            "the target is trained, too: text will be lossless against the new one, not against the original",
            answer=True,
        )
    target = show.load(args.target, args.dtype, kernels=False)
    try:
        with Monitor(out, args.log_to) as monitor:
            trained = train_heads(
                target, args.prompts, out, kind, **dataclasses.asdict(settings), watch=monitor.watch, data=args.data
            )
    except KeyboardInterrupt:
        show.say(f"everything so far is kept in {out}: the same command resumes the run", answer=True)
        raise
    folder = out / (DRAFT if kind.trains_model else HEADS)
    try:
        _finish(trained, fit_dtype, folder, args)
    except KeyboardInterrupt:
        held = f"{folder} holds the result; " if folder.exists() else ""
        show.say(f"training is complete: {held}the same command goes on with the measurement", answer=True)
        raise
    show.card((folder / card.CARD).read_text())
    show.say(f"written: {folder}")
    return 0


def _finish(trained: "Trained", dtype: str, folder: pathlib.Path, args: argparse.Namespace) -> None:
    """Writes heads or a draft model, and then measures trees, which it adds to the heads and to the card.

    Whatever ends the measurement leaves a folder that can be used. A draft model has no tree of its own.
    """
    from jaxspec.heads.files import set_tree
    from jaxspec.heads.network import DraftHeads
    from jaxspec.train import calibration, card, evaluate

    result, rows = trained.result, trained.settings.row_tokens
    changed = _write(trained, folder)
    found = evaluate.ranks(trained.target, result, trained.data.answered, rows, trainee=trained.trainee)

    def write_card(trees: list) -> None:
        measured = card.figures(found, trees, dtype) | calibration.best(trained.log)
        card.write(folder, trained, result, args.prompts, measured)

    if changed or not args.fit_prompts or not (folder / card.CARD).exists():
        write_card([])
    if not args.fit_prompts:
        return set_tree(folder, None) if isinstance(result, DraftHeads) else None
    trees = _measure(trained, dtype, found.acceptance(), folder, args)
    drafting = [one for one in trees if one.tree.shape.depth]
    if isinstance(result, DraftHeads):  # heads that predict nothing correctly have no tree
        set_tree(folder, max(drafting, key=lambda one: one.tokens_per_s).tree if drafting else None)
    write_card(trees)


def _measure(
    trained: "Trained", dtype: str, acceptance: "np.ndarray", folder: pathlib.Path, args: argparse.Namespace
) -> "list[Candidate]":
    """Measures trees with the models as they are served, in `dtype`."""
    from jaxspec.checkpoints.base import activation_dtype
    from jaxspec.cli import show
    from jaxspec.heads.files import load_heads
    from jaxspec.train import evaluate

    prompts = trained.data.prompts[:: max(1, len(trained.data.prompts) // args.fit_prompts)][: args.fit_prompts]
    target = trained.target if dtype == args.dtype else show.load(args.target, dtype)
    if trained.kind.trains_model:
        drafts: Model | DraftHeads = show.load(str(folder), dtype)
    else:
        drafts = load_heads(folder, target=target, dtype=activation_dtype(dtype))
    with show.Bar("measuring trees", parts=show.PARTS) as bar:
        return evaluate.measure_trees(target, drafts, acceptance, prompts, progress=bar)


def _write(trained: "Trained", folder: pathlib.Path) -> bool:
    """Writes heads without a tree, or a draft model, and a target that was trained, too.

    Returns:
        False if the folder holds these heads already: their tree stays until another one is measured.
    """
    import jaxspec
    from jaxspec.heads.files import load_heads, save_heads
    from jaxspec.heads.network import DraftHeads
    from jaxspec.train.files import fingerprint

    result, target = trained.result, folder.parent / "target"
    if trained.trainee.joint is not None and not target.exists():
        jaxspec.save(trained.target, target)
    if isinstance(result, DraftHeads):
        with contextlib.suppress(JaxspecError):
            if fingerprint(load_heads(folder).params) == fingerprint(result.params):
                return False
    with replacing(folder) as part:
        if isinstance(result, DraftHeads):
            save_heads(result, part)
        else:
            _write_model(result, part, trained.settings.start)
    return True


def _write_model(model: "Model", folder: pathlib.Path, start: str) -> None:
    """Writes a draft model as the directory that it was trained from, or in jaxspec's own format."""
    from jaxspec.checkpoints.hf_write import export_model, is_hf
    from jaxspec.checkpoints.saved import save
    from jaxspec.cli import show

    if is_hf(start):
        export_model(model, folder, like=start)
    else:
        show.say(f"{start} is not in the Hugging Face format: the model is written in jaxspec's own", answer=True)
        save(model, folder)


@contextlib.contextmanager
def replacing(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary folder to write to, which then replaces `folder`: what an earlier call wrote stays till then.

    Raises:
        StorageError: the temporary folder cannot take the place.
    """
    part, old = (folder.with_name(f".{folder.name}.{name}") for name in ("part", "old"))
    if old.exists() and not folder.exists():  # a call was killed between the two renames
        old.rename(folder)
    for left in (part, old):
        shutil.rmtree(left, ignore_errors=True)
    yield part
    try:
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {reason(error, folder)}") from None
    finally:
        if old.exists() and not folder.exists():  # interrupted between the two renames, or the second one failed
            with contextlib.suppress(OSError):
                old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
