"""What commands share: options, and what they stand for. Nothing here imports JAX before it is called for."""

import argparse
import difflib
import itertools
import operator
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from jaxspec.core.sizes import MAX_NODES as MAX_NODES
from jaxspec.errors import InvalidConfig, UnknownName
from jaxspec.registry import DRAFTERS, RULES, SCHEDULES
from jaxspec.storage.prompt_files import SPLITS

if TYPE_CHECKING:
    from jaxspec.core.tree import Dynamic, Topology
    from jaxspec.heads.network import DraftHeads
    from jaxspec.models.model import Model

TARGET, DRAFTER = "smollm2-135m-instruct", "prompt-lookup"
SOURCES = (
    "a preset, a .gguf file, a Hugging Face directory or a repository of its Hub (organization/name, @revision may "
    "follow), or what jaxspec.save wrote"
)
DTYPES = ("float32", "bfloat16")  # of heads
WEIGHTS = (*DTYPES, "int8")  # of models

TREE_GRAMMAR = (
    "either the children of each node, depth by depth (4x2x1: 4 nodes, then 8, then 8), or the paths of "
    "ranks from the root, with a dash or a comma (0-0-0,0-1,1: rank 0 is the likeliest; prefixes are implied), or "
    "dynamic-BEAMxDEPTH-NODES, the NODES likeliest every round (dynamic-8x5-32; BEAM nodes of each of DEPTH levels are "
    "expanded), or a name (mc_sim_7b_63: Medusa's, of 64 nodes)"
)


class UsageError(Exception):
    """The command line is wrong: exit status 2."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the nearest name where one was misspelt."""

    def __init__(self, **settings):
        settings |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**settings)
        self.set_defaults(quiet=False)  # where a command's options are parsed without those that all have

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def parse_options(self, words: list[str]) -> argparse.Namespace:
        """The options; positional words may stand before, between and after them."""
        args, unknown = self.parse_known_intermixed_args(self._ordered(words))
        if unknown:
            known = re.findall(r"--[\w-]+", self.format_help())
            near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
            self.error(f"unknown option {unknown[0]!r}" + (f", did you mean {near[0]!r}?" if near else ""))
        return args

    def _ordered(self, words: list[str]) -> list[str]:
        """The words; one that is no number stands before an option whose value is a number that may be left out."""
        optional = {name for action in self._actions if action.nargs == "?" for name in action.option_strings}
        found: list[str] = []
        for word in words:
            swallowed = found and found[-1] in optional and "--" not in found
            taken = word.startswith("-") or re.fullmatch(r"[\d.]+", word, re.ASCII)
            found.insert(len(found) - 1 if swallowed and not taken else len(found), word)
        return found


def one_of(kind: str, names: Iterable[str]) -> Callable[[str], str]:
    """An option's type: one of the names."""
    names = tuple(names)

    def check(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(str(UnknownName(kind, name, names)))
        return name

    return check


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """An option's type: a whole number within limits."""

    def check(text: str) -> int:
        limits = f"from {least}" if most is None else f"from {least} to {most}"
        if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or not least <= int(text) <= (most or int(text)):
            raise argparse.ArgumentTypeError(f"expected a whole number {limits}, got {text!r}")
        return int(text)

    return check


DTYPE: dict[str, Any] = {"type": one_of("dtype", WEIGHTS), "metavar": "|".join(WEIGHTS)}


def add_dtype(add: Callable) -> None:
    """`--dtype`, to a parser's or a group's `add_argument`."""
    add("--dtype", default=WEIGHTS[0], **DTYPE, help=f"of the weights (default: {WEIGHTS[0]})")


def add_split(add: Callable) -> None:
    """How `.txt` files of prompts are split; see `jaxspec.storage.prompt_files`."""
    add(
        "--split",
        type=one_of("split", SPLITS),
        metavar="|".join(SPLITS),
        help=f"what is a prompt in a .txt file: a line, what blank lines part, or the file (default: {SPLITS[0]})",
    )


def check_split(split: str | None, files: Iterable[str]) -> None:
    """Refuses --split where no file is a `.txt` file."""
    if split is not None and not any(file.lower().endswith(".txt") for file in files):
        raise UsageError("--split is for .txt files of prompts; leave it out, or name such a file")


def add_models(parser: Parser) -> Callable:
    """Target and draft model. Gives the group's `add_argument`, for what a command adds; so do the next three."""
    add = parser.add_argument_group("models").add_argument
    add("--target", default=TARGET, metavar="NAME_OR_PATH", help=f"{SOURCES} (default: {TARGET})")
    add("--draft-model", metavar="SOURCE", help="the same for the drafter 'model' (default: the preset's own draft)")
    add("--context", type=whole(1), metavar="N", help="longest text of the target (default: what it was made for)")
    add_dtype(add)
    add("--draft-dtype", **DTYPE, help="of the draft model's weights (default: that of --dtype)")
    return add


def add_heads(add: Callable) -> None:
    """`--heads` and `--allow-pickle`."""
    add(
        "--heads",
        metavar="SOURCE",
        help="heads of the drafter 'medusa': a directory, a file, a Hub repository (default: the preset's own)",
    )
    add("--allow-pickle", action="store_true", help="read heads also from .pt files; nothing of them is run")


def add_chat(add: Callable) -> None:
    """`--chat` and `--no-chat`."""
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="take prompts as messages to an assistant (default: if the target has a chat template)",
    )


def add_drafting(parser: Parser) -> Callable:
    """Drafter, tree and rule; `check_drafting` holds them against one another."""
    add = parser.add_argument_group("drafting, which changes the speed but not the text").add_argument
    drafters, rules = "|".join(DRAFTERS), "|".join(RULES)
    add(
        "--drafter",
        default=DRAFTER,
        type=one_of("drafter", DRAFTERS),
        metavar=drafters,
        help=f"default: {DRAFTER}",
    )
    add("--draft-length", type=whole(0, MAX_NODES), metavar="K", help="draft chains of K tokens")
    add("--tree", metavar="SPEC", help=f"draft trees: {TREE_GRAMMAR}")
    add("--exit-layers", type=whole(1), metavar="E", help="layers of the drafter 'early-exit'")
    add_heads(add)
    add("--rule", default="coupled", type=one_of("rule", RULES), metavar=rules, help="default: coupled")
    schedules = "|".join(SCHEDULES)
    add(
        "--schedule",
        type=one_of("schedule", SCHEDULES),
        metavar=schedules,
        help="how deep each round may draft; default: as the tree is deep, for prompt-lookup while that pays",
    )
    add("--tuned", metavar="FILE", help="draft as 'jaxspec tune' found best; instead of the other options but --rule")
    return add


def add_sampling(parser: Parser) -> Callable:
    """The law that is drawn from, and the seed."""
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest token (default)")
    add_limits(add)
    return add


def add_limits(add: Callable) -> None:
    """What may be drawn, beside the temperature, and the seed."""
    add("--top-k", type=whole(0), default=0, metavar="K", help="only the K likeliest tokens; 0: all")
    add("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest of mass P; 1: all")
    add("--min-p", type=float, default=0.0, metavar="P", help="only P times the likeliest and above; 0: all")
    add("--seed", type=whole(0), default=0, metavar="N", help="the same seed gives the same text (default: 0)")


def add_ending(parser: Parser, budget: int) -> Callable:
    """What ends a text; `budget` is the default of `--max-new-tokens`."""
    add = parser.add_argument_group("ending").add_argument
    add("--max-new-tokens", type=whole(1), default=budget, metavar="N", help=f"default: {budget}")
    add("--stop", action="append", default=[], metavar="STR", help="end before this string; repeatable")
    add("--ignore-eos", action="store_true", help="write on where the model would end")
    return add


def check_drafting(args: argparse.Namespace) -> "Topology | Dynamic | int | None":
    """The tree; what options say of one another is checked before anything is loaded.

    Raises:
        UsageError: options that exclude, or need, one another.
    """
    tuned = None if args.tuned is None else take_tuned(args)
    if args.tree is not None and args.draft_length is not None:
        raise UsageError("--draft-length is a chain and --tree another tree; give one of the two")
    if args.drafter == "model":
        args.draft_model = args.draft_model or own_draft(args.target)
    if args.drafter == "medusa":
        args.heads = args.heads or own_heads(args.target)
    for option, drafter in (("draft_model", "model"), ("exit_layers", "early-exit"), ("heads", "medusa")):
        if getattr(args, option) is not None and args.drafter != drafter:
            raise UsageError(f"--{option.replace('_', '-')} is for --drafter {drafter}, not {args.drafter}")
    if args.drafter == "model" and args.draft_model is None:
        raise UsageError("--drafter model needs --draft-model SOURCE")
    if args.drafter == "medusa" and args.heads is None:
        raise UsageError("--drafter medusa needs --heads SOURCE")
    if tuned is not None:
        return tuned
    return args.draft_length if args.tree is None else parse_tree(args.tree)


def take_tuned(args: argparse.Namespace) -> "Topology":
    """Sets the options that `--tuned` stands for, and gives its tree.

    Raises:
        UsageError: they are given beside it.
        TuningError: the file is none.
    """
    from jaxspec.generation.drafting import Tuned

    others = (args.tree, args.draft_length, args.exit_layers, args.schedule)
    if args.drafter != DRAFTER or any(other is not None for other in others):
        raise UsageError("--tuned says how to draft; give it without --drafter, --tree, --schedule and their like")
    tuned = Tuned.load(args.tuned)
    args.drafter, args.exit_layers, args.schedule = tuned.drafter, tuned.exit_layers, tuned.schedule
    return tuned.tree


def own_draft(target: str) -> str | None:
    """The preset that drafts for the target, where it is a preset that has one."""
    from jaxspec.checkpoints.presets import PRESETS

    return PRESETS[target].draft if target in PRESETS else None


def own_heads(target: str) -> str | None:
    """The target's name, where it is a preset whose heads come with jaxspec."""
    from jaxspec.checkpoints.presets import PRESETS

    return target if target in PRESETS and PRESETS[target].heads else None


def load_models(args: argparse.Namespace) -> tuple["Model", "Model | None"]:
    """Target and draft model, one and the same where the options say so.

    Raises:
        UsageError: a dtype for a draft model that there is not.
    """
    if args.draft_dtype is not None and args.draft_model is None:
        raise UsageError("--draft-dtype is for the draft model of --drafter model, and there is none")
    from jaxspec.cli import show

    target = show.load(args.target, args.dtype, args.context)
    if args.draft_model is None:
        return target, None
    dtype = args.draft_dtype or args.dtype
    same = args.draft_model == args.target and dtype == args.dtype
    return target, target if same else show.load(args.draft_model, dtype)


def load_heads(args: argparse.Namespace, target: "Model") -> "DraftHeads | None":
    """The heads that `--heads` names, if it names some; what one should know of them is told."""
    if args.heads is None:
        return None
    from jaxspec.checkpoints.base import beside
    from jaxspec.cli import show
    from jaxspec.heads.files import load_heads

    heads = load_heads(args.heads, target=target, dtype=beside(args.dtype), allow_pickle=args.allow_pickle)
    for note in heads.notes:
        show.say(f"{args.heads}: {note}", answer=True)
    return heads


def stream_options(
    args: argparse.Namespace,
    draft: "Model | None",
    tree: "Topology | Dynamic | int | None",
    heads: "DraftHeads | None" = None,
) -> dict[str, Any]:
    """The keywords of `jaxspec.stream` that the options of drafting, sampling and ending stand for."""
    import jax

    import jaxspec

    return {
        "key": jax.random.key(args.seed),
        "drafter": args.drafter,
        "rule": args.rule,
        "sampling": jaxspec.Sampling(args.temperature, args.top_k, args.top_p, args.min_p),
        "max_new_tokens": args.max_new_tokens,
        "draft": draft,
        "tree": tree,
        "exit_layers": args.exit_layers,
        "heads": heads,
        "schedule": args.schedule,
        "stop": args.stop,
        "ignore_eos": args.ignore_eos,
        "verbose": not args.quiet,
    }


def parse_tree(spec: str) -> "Topology | Dynamic":
    """The topology that a `--tree` describes; see `TREE_GRAMMAR`.

    Raises:
        UsageError: saying how to write one.
    """
    from jaxspec.core.tree import branching, dynamic, from_paths
    from jaxspec.core.tree_spec import NAMES, named_tree

    if spec in NAMES:
        return named_tree(spec)
    reason = "this is no tree"
    if re.fullmatch(r"\d{1,4}(x\d{1,4})*", spec, re.ASCII):
        counts = [int(count) for count in spec.split("x")]
        if 0 in counts:
            reason = "every level needs at least one child per node"
        elif sum(itertools.accumulate(counts, operator.mul)) > MAX_NODES:
            reason = f"more than {MAX_NODES} nodes"
        else:
            return branching(*counts)
    elif re.fullmatch(r"\d{1,4}([-,]\d{1,4})+", spec, re.ASCII):
        try:
            return from_paths([[int(rank) for rank in path.split("-")] for path in spec.split(",")])
        except InvalidConfig as error:
            reason = str(error)
    elif match := re.fullmatch(r"dynamic-(\d{1,4})x(\d{1,4})-(\d{1,4})", spec, re.ASCII):
        beam, depth, nodes = map(int, match.groups())
        if max(nodes, beam * depth) > MAX_NODES:
            reason = f"more than {MAX_NODES} nodes to read"
        else:
            try:
                return dynamic(beam, depth, nodes)
            except InvalidConfig as error:
                reason = str(error)
    raise UsageError(f"tree {spec}: {reason}. Write {TREE_GRAMMAR}.")
