"""Trains draft heads or a draft model: 'jaxspec train eagle3 --target TARGET --prompts FILE --out DIR'.

Everything is kept in the folder, and the same command resumes an interrupted run. At the end, DIR/heads holds the heads
with the tree fitted to them, a card and the figures: 'jaxspec generate --drafter eagle --heads DIR/heads'.

'jaxspec train pard --start DRAFT ...' trains a draft model that proposes several tokens in one call; DIR/draft holds
it.
"""

import argparse
import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from jaxspec.cli import options
from jaxspec.cli.options import Parser, UsageError, choice_type, whole_type
from jaxspec.core.descriptions import describe_fields
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
    from jaxspec.train.settings import TrainSettings

HEAD_KIND, GGUF_DTYPE = "kind of heads", "file"
TREE_LINES = 12
"""Number of lines of progress while trees are measured, which takes minutes, on a console without a progress bar."""


def add_options(parser: Parser) -> None:
    """Adds all options except --quiet and --debug, which every command has."""
    from jaxspec.train.settings import TrainSettings, own_fields

    names = "|".join(TRAINEES)
    parser.add_argument(
        "kind", type=choice_type(HEAD_KIND, TRAINEES), metavar=names, help="kind of heads or draft model"
    )
    add = parser.add_argument_group("models and data").add_argument
    add(
        "--target",
        default=options.DEFAULT_TARGET,
        metavar="NAME_OR_PATH",
        help=f"{options.SOURCE_HELP} (default: {options.DEFAULT_TARGET})",
    )
    options.add_dtype(add)
    add(
        "--prompts",
        nargs="+",
        required=True,
        metavar="FILE",
        help=".jsonl or .json files of prompts or conversations (prompt, messages, or ShareGPT's), or .txt files of "
        "prompts",
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
        type=whole_type(0),
        default=6,
        metavar="N",
        help="number of held-out prompts to choose the tree on (default: 6)",
    )
    add("--fit-dtype", **options.DTYPE_ARGUMENTS, help="dtype of the target for this choice (default: as --dtype)")
    _add_run_options(add)
    own = parser.add_argument_group("settings of the kind")
    flags = {field.name: field for name in TRAINEES for field in own_fields(find(HEAD_KIND, name))}
    special = {name: _add_setting(own.add_argument, flags[name]) for name in flags}
    common = parser.add_argument_group("settings").add_argument
    shared = {field.name: _add_setting(common, field) for field in dataclasses.fields(TrainSettings)}

    def show_kind(words: list[str]) -> None:
        """Shows the settings of the kind that the words name, with its defaults, in the help."""
        name = next((word for word in words if word in TRAINEES), None)
        kind = find(HEAD_KIND, name) if name else TrainSettings
        fields, described = {field.name: field for field in dataclasses.fields(kind)}, describe_fields(kind)
        own.title = f"settings of {name}"
        parser.usage = f"jaxspec train {name or 'KIND'} --prompts FILE [FILE ...] --out DIR [options]"
        for each, action in (special | shared).items():
            action.help = (
                _describe_setting(fields[each], described[each], name) if each in fields else argparse.SUPPRESS
            )

    parser.before_parsing = show_kind
    show_kind([])
    parser.epilog = f"'jaxspec train KIND --help' lists the settings of a kind as well: {', '.join(TRAINEES)}"


def _add_run_options(add: Callable) -> None:
    """Adds the options of logging, of several hosts and of a dry run to a group of the parser."""
    add("--log-to", action="append", default=[], type=choice_type("logger", ("tensorboard",)), metavar="tensorboard",
        help="write a log for TensorBoard as well; needs the package tensorboardX")  # fmt: skip
    add(
        "--hosts",
        default="",
        metavar="auto|HOST:PORT,N,I",
        help="train with several processes: auto on a TPU pod, with SLURM or Open MPI; otherwise the address of "
        "process 0, the number of processes, and the number of this one (default: one process)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="compile the run without loading weights, and print the memory of each device, the collectives and the "
        "ideal time; exit status 1 if it does not fit",
    )
    add(
        "--on",
        default="",
        metavar="TOPOLOGY",
        help="with --dry-run: devices to compile for in place of the devices at hand: TPUs such as v5e:2x4 (needs "
        "libtpu), or GPUs such as h100:8 or h100:2x8 (needs jaxspec-decoding[gpu])",
    )


def _add_setting(add: Callable, field: dataclasses.Field) -> argparse.Action:
    """Adds the flag of a field of a class of settings; a flag that is not used leaves no attribute.

    Args:
        add: adds an argument to a group of the parser.
        field: the field. Kinds of heads share the flags of fields of the same name, whose types are then the same.
    """
    words: dict[str, Any] = {"type": type(field.default), "metavar": "N" if type(field.default) is int else "X"}
    if type(field.default) is str:
        words["metavar"] = field.name.upper()
    if choices := field.metadata.get("choices"):
        words = {"type": choice_type(field.name, choices), "metavar": "|".join(choices)}
    if isinstance(field.default, bool):
        words = {"action": argparse.BooleanOptionalAction}
    return add(f"--{field.name.replace('_', '-')}", default=argparse.SUPPRESS, **words)


def _describe_setting(field: dataclasses.Field, description: str, kind: str | None) -> str:
    """Returns the help of a setting, with its default for a kind; None means no kind in particular."""
    default: Any = field.default
    if kind is None and any(getattr(find(HEAD_KIND, name), field.name) != default for name in TRAINEES):
        default = "depends on the kind"
    if isinstance(default, bool):
        default = "yes" if default else "no"
    if default == "":  # its meaning is in the description
        default = "empty" if "empty" in description else "none"
    return f"{description.removesuffix('.')} (default: {default})".replace("%", "%%")


def read_settings(args: argparse.Namespace) -> "TrainSettings":
    """Returns the settings that the options give; refuses options of other kinds."""
    kind = find(HEAD_KIND, args.kind)
    known = {field.name for field in dataclasses.fields(kind)}
    for other in TRAINEES:
        for field in dataclasses.fields(find(HEAD_KIND, other)):
            if field.name in vars(args) and field.name not in known:
                raise UsageError(f"--{field.name.replace('_', '-')} is a setting of {other}, not of {args.kind}")
    try:
        return kind(**{name: vars(args)[name] for name in known if name in vars(args)})
    except InvalidConfig as error:
        raise UsageError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Trains heads or a draft model, fits a tree, and writes them."""
    settings = read_settings(args)
    if not settings.held_out:
        raise UsageError("--held-out 0: the tree and the card need held-out texts; use a fraction above 0")
    if args.dtype == GGUF_DTYPE:
        raise UsageError("--dtype file: the blocks of a GGUF file have no gradients; use another dtype, such as int8")
    if args.on and not args.dry_run:
        raise UsageError("--on: names devices for --dry-run; add --dry-run, or leave it out")
    if args.dry_run and args.hosts:
        raise UsageError("--hosts: a dry run is one process; leave it out, and name the devices of all hosts by --on")
    if args.dry_run:
        return _dry_run(args, settings)
    out, fit_dtype = check_path(args.out, "--out"), args.fit_dtype or args.dtype
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: is a file, expected a folder")

    from jaxspec.backend import processes
    from jaxspec.cli import show

    if settings.trains_target:
        if fit_dtype != args.dtype:
            raise UsageError(f"--fit-dtype {fit_dtype}: the target is trained in --dtype {args.dtype}; leave it out")
        show.say(
            "the target is trained as well: text will be lossless against the trained target, not against the original",
            answer=True,
        )
    with processes.joined(args.hosts), show.silence() if processes.process_number() else contextlib.nullcontext():
        _train(args, settings, out, fit_dtype)
    return 0


def _train(args: argparse.Namespace, settings: "TrainSettings", out: pathlib.Path, fit_dtype: str) -> None:
    """Trains heads or a draft model. Process 0 fits a tree and writes the result, while other processes wait."""
    from jaxspec.backend import processes
    from jaxspec.cli import show
    from jaxspec.train import card
    from jaxspec.train.manifest import DRAFT_FOLDER, HEADS_FOLDER
    from jaxspec.train.run import check_machine, train_heads

    check_machine(settings)
    _check_files(args, settings)
    target, settings = _load_target(args, settings)
    try:
        with _watch(args, settings, out) as watch:
            trained = train_heads(target, args.prompts, out, settings, watch=watch, data=args.data)
    except KeyboardInterrupt:
        show.say(f"the run so far is kept in {out}; the same command resumes it", answer=True)
        raise
    folder = out / (DRAFT_FOLDER if settings.trains_model else HEADS_FOLDER)
    try:
        processes.alone(lambda: _finish(trained, fit_dtype, folder, args))
    except KeyboardInterrupt:
        result = f"{folder} holds the result; " if folder.exists() else ""
        show.say(f"training is complete: {result}the same command continues with the measurement", answer=True)
        raise
    if not processes.process_number():
        show.print_card((folder / card.CARD_FILE).read_text())
        show.say(f"written: {folder}")


@contextlib.contextmanager
def _watch(args: argparse.Namespace, settings: "TrainSettings", out: pathlib.Path) -> Iterator[Any]:
    """Yields the callbacks of the run. Only process 0 shows progress and writes plots."""
    from jaxspec.backend.processes import process_number
    from jaxspec.train.log import Watch
    from jaxspec.train.monitor import Monitor

    if process_number():
        yield Watch()
        return
    with Monitor(out, args.log_to, settings.log_every) as monitor:
        yield monitor.watch


def _load_target(args: argparse.Namespace, settings: "TrainSettings") -> "tuple[Model, TrainSettings]":
    """Loads the target on the first device, or on a mesh of accelerators, and names the mesh of the training."""
    import jax

    from jaxspec.backend.chips import chip_of
    from jaxspec.checkpoints.base import activation_dtype
    from jaxspec.checkpoints.source import open_source
    from jaxspec.cli import show
    from jaxspec.models.transformer import TransformerLM
    from jaxspec.train.placement import answer_mesh, default_mesh

    devices = jax.local_devices()  # each process answers prompts with its own target
    chip = chip_of(devices[0])
    if jax.device_count() == 1 or chip is None:
        return show.load_model(args.target, args.dtype, kernels=False), settings
    checkpoint = open_source(args.target, report=show.say)
    mesh = answer_mesh(TransformerLM(checkpoint.config, activation_dtype(args.dtype)), devices, chip.memory)
    settings = dataclasses.replace(settings, mesh=settings.mesh or default_mesh(settings, jax.device_count()))
    return show.load_model(checkpoint, args.dtype, kernels=False, mesh=mesh), settings


def _dry_run(args: argparse.Namespace, settings: "TrainSettings") -> int:
    """Prints what the run would need; returns 1 if it does not fit. Only sizes are read of the target."""
    from jaxspec.heads.files import load_heads
    from jaxspec.train.dry_run import dry_run

    if args.dtype not in ("float32", "bfloat16"):
        raise UsageError(f"--dtype {args.dtype}: a dry run needs float32 or bfloat16")
    target, start = _shapes_of(args.target, args.dtype), None
    if settings.start:
        start = _shapes_of(settings.start, "float32") if settings.trains_model else load_heads(settings.start)
    planned = dry_run(target, settings, start, args.on)
    for line in planned.lines():
        print(line)
    return 0 if planned.fits else 1


def _shapes_of(source: str, dtype: str) -> "Model":
    """Returns a model with the shapes of its parameters in place of arrays; a file config.json is enough."""
    from jaxspec.checkpoints.hf_config import read_config
    from jaxspec.checkpoints.hf_wrappers import text_settings
    from jaxspec.checkpoints.source import open_source
    from jaxspec.models.model import Model
    from jaxspec.models.transformer import TransformerLM
    from jaxspec.storage.reading import read_json_file
    from jaxspec.train.dry_run import shapes_of

    if source.endswith(".json"):
        entries = text_settings(read_json_file(pathlib.Path(source)))
        config, _ = read_config(source, entries)
    else:
        checkpoint = open_source(source)
        config, entries = checkpoint.config, checkpoint.settings
    lm = TransformerLM(config, dtype)
    return Model(lm, shapes_of(lm), name=pathlib.Path(source).name, settings=entries)


def _check_files(args: argparse.Namespace, settings: "TrainSettings") -> None:
    """Reads small inputs before the target, whose weights may take minutes.

    The small inputs are the prompts, and the headers of the heads or the draft model from which training starts.
    """
    from jaxspec.checkpoints.source import open_source
    from jaxspec.heads.headers import open_heads
    from jaxspec.train.log import Watch
    from jaxspec.train.run import read_prompts

    if args.data is not None and check_path(args.data, "--data").is_file():
        raise UsageError(f"--data {args.data}: is a file, expected a folder")
    read_prompts(args.prompts, settings, Watch())
    if settings.start:
        (open_source if settings.trains_model else open_heads)(settings.start)


def _finish(trained: "Trained", dtype: str, folder: pathlib.Path, args: argparse.Namespace) -> None:
    """Writes heads or a draft model, and then measures trees, which it adds to the heads and to the card.

    If the measurement is interrupted, the folder can still be used. A draft model has no tree of its own.
    """
    from jaxspec.heads.files import set_tree
    from jaxspec.heads.network import DraftHeads
    from jaxspec.train import calibration, card, evaluate

    result, rows = trained.result, trained.settings.row_tokens
    changed = _write(trained, folder)
    ranks = evaluate.rank_tokens(trained.target, result, trained.data.answered, rows, trainee=trained.trainee)

    def write_card(trees: list) -> None:
        measured = card.collect_figures(ranks, trees, dtype) | calibration.best_figures(trained.log)
        card.write_card(folder, trained, result, args.prompts, measured)

    if changed or not args.fit_prompts or not (folder / card.CARD_FILE).exists():
        write_card([])
    if not args.fit_prompts:
        return set_tree(folder, None) if isinstance(result, DraftHeads) else None
    trees = _measure(trained, dtype, ranks.acceptance(), folder, args)
    drafting = [candidate for candidate in trees if candidate.tree.shape.depth]
    if isinstance(result, DraftHeads):  # heads that predict nothing correctly have no tree
        set_tree(folder, max(drafting, key=lambda candidate: candidate.tokens_per_s).tree if drafting else None)
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
    target = trained.target if dtype == args.dtype else show.load_model(args.target, dtype)
    if trained.settings.trains_model:
        drafts: Model | DraftHeads = show.load_model(str(folder), dtype)
    else:
        drafts = load_heads(folder, target=target, dtype=activation_dtype(dtype))
    with show.Bar("measuring trees", parts=TREE_LINES) as bar:
        return evaluate.measure_trees(target, drafts, acceptance, prompts, progress=bar)


def _write(trained: "Trained", folder: pathlib.Path) -> bool:
    """Writes heads without a tree, or a draft model, and the target if it was trained as well.

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
    with replace_folder(folder) as part:
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
        show.say(
            f"{start} is not in the Hugging Face format, so the model is written in jaxspec's own format", answer=True
        )
        save(model, folder)


@contextlib.contextmanager
def replace_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary folder to write to, which then replaces `folder`.

    The files of an earlier call stay until then.

    Raises:
        StorageError: the temporary folder cannot replace `folder`.
    """
    part, old = (folder.with_name(f".{folder.name}.{name}") for name in ("part", "old"))
    try:
        if old.exists() and not folder.exists():  # a call was killed between the two renames
            old.rename(folder)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {reason(error, folder)}") from None
    for left in (part, old):
        shutil.rmtree(left, ignore_errors=True)
    try:
        yield part
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
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
