"""The options of drafting, and the models and the `Drafting` that they select. Imports JAX only when used."""

import argparse
import contextlib
import itertools
import operator
import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from jaxspec.cli.options import DRAFTER, MAX_NODES, Parser, UsageError, one_of, whole
from jaxspec.errors import InvalidConfig
from jaxspec.registry import DRAFTERS, RULES, SCHEDULES, find

if TYPE_CHECKING:
    from jaxspec.core.tree import Dynamic, Topology
    from jaxspec.heads.network import DraftHeads
    from jaxspec.models.model import Model

MODELS = {"draft_model": "draft", "heads": "heads"}
"""The options that load what some drafters are built from, and its name among what a drafter takes."""
TREE_GRAMMAR = (
    "either the children of each node, depth by depth (4x2x1: 4 nodes, then 8, then 8), or the paths of "
    "ranks from the root, with a dash or a comma (0-0-0,0-1,1: rank 0 is the likeliest; prefixes are implied), or "
    "dynamic-BEAMxDEPTH-NODES, the NODES likeliest every round (dynamic-8x5-32; BEAM nodes of each of DEPTH levels are "
    "expanded), or a name (mc_sim_7b_63: Medusa's, of 64 nodes)"
)


def takers(field: str) -> str:
    """Returns the names of the drafters that take "draft" or "heads", for a message; imports all of jaxspec's own."""
    return " or ".join(name for name in DRAFTERS if DRAFTERS.own(name) and field in find("drafter", name).takes)


def missing(drafter: str, args: argparse.Namespace) -> str | None:
    """Returns the option that a drafter of jaxspec's own needs and that is not given, such as `--heads`; or None.

    Heads may also come with jaxspec. Other packages' drafters say themselves what they miss.
    """
    takes = find("drafter", drafter).takes if DRAFTERS.own(drafter) else ()
    if "draft" in takes and args.draft_model is None:
        return "--draft-model"
    return "--heads" if "heads" in takes and args.heads is None and own_heads(args.target, drafter) is None else None


def add_heads(add: Callable, *, several: bool = False) -> None:
    """Adds `--heads`, which may be given once for every drafter if `several`, and `--allow-pickle`."""
    add(
        "--heads",
        action="append" if several else "store",
        metavar="SOURCE",
        help="heads of 'medusa', 'eagle' or 'dflash': a directory, a file, a Hub repository (default: "
        "the preset's own)" + "; repeatable, once for every drafter" * several,
    )
    add("--allow-pickle", action="store_true", help="read heads also from .pt files; nothing of them is run")


def add_drafter_options(add: Callable) -> None:
    """Adds `--drafter-option`."""
    add(
        "--drafter-option",
        action="append",
        default=[],
        type=option,
        metavar="NAME=VALUE",
        help="an option of the drafter's own, such as exit_layers=10 of early-exit; repeatable",
    )


def option(text: str) -> tuple[str, Any]:
    """Parses NAME=VALUE, where the value is a number, true or false, or else a text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, as in exit_layers=10, got {text!r}")
    if value in ("true", "false"):
        return name, value == "true"
    for kind in (int, float):
        if re.fullmatch(r"-?[\d.]{1,18}", value, re.ASCII):
            with contextlib.suppress(ValueError):
                return name, kind(value)
    return name, value


def add_drafting(parser: Parser) -> Callable:
    """Adds the options of drafter, tree and rule, which `check_drafting` checks; returns the group's `add_argument`."""
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
    add_drafter_options(add)
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


def check_drafting(args: argparse.Namespace) -> "Topology | Dynamic | int | None":
    """Checks the options against one another, before anything is loaded, and returns the tree.

    Raises:
        UsageError: if options exclude one another, or one needs another that is missing.
    """
    tuned = None if args.tuned is None else take_tuned(args)
    if args.tree is not None and args.draft_length is not None:
        raise UsageError("--draft-length is a chain and --tree another tree; give one of the two")
    if args.drafter == "model":
        args.draft_model = args.draft_model or own_draft(args.target)
    takes = find("drafter", args.drafter).takes
    for option, field in MODELS.items():
        if getattr(args, option) is not None and field not in takes:
            name = option.replace("_", "-")
            raise UsageError(f"--{name} is for --drafter {takers(field)}, not {args.drafter}")
    check_drafter_options(args)
    if (option := missing(args.drafter, args)) is not None:
        raise UsageError(f"--drafter {args.drafter} needs {option} SOURCE")
    if "heads" in takes:
        args.heads = args.heads or own_heads(args.target, args.drafter)
    if tuned is not None:
        return tuned
    return args.draft_length if args.tree is None else parse_tree(args.tree)


def check_drafter_options(args: argparse.Namespace) -> None:
    """Refuses options that the drafter does not have.

    Raises:
        UsageError: if there are any; it names the first.
    """
    for name, _ in args.drafter_option:
        if name not in find("drafter", args.drafter).takes:
            raise UsageError(f"--drafter-option {name}: the drafter {args.drafter} has no such option")


def take_tuned(args: argparse.Namespace) -> "Topology":
    """Sets the options that the file of `--tuned` selects, and returns its tree.

    Raises:
        UsageError: if `--tuned` is combined with options that it sets.
        TuningError: if the file is not a tuned file.
    """
    from jaxspec.core.tree import Topology
    from jaxspec.generation.drafting import Drafting

    others = (args.tree, args.draft_length, args.schedule)
    if args.drafter != DRAFTER or args.drafter_option or any(other is not None for other in others):
        raise UsageError("--tuned says how to draft; give it without --drafter, --tree, --schedule and their like")
    tuned = Drafting.load(args.tuned)
    args.drafter, args.schedule, args.drafter_option = tuned.drafter, tuned.schedule, list(tuned.options.items())
    assert isinstance(tuned.tree, Topology)
    return tuned.tree


def own_draft(target: str) -> str | None:
    """Returns the draft model of a preset, or None if the target is no preset or has none."""
    from jaxspec.checkpoints.presets import PRESETS

    return PRESETS[target].draft if target in PRESETS else None


def own_heads(target: str, drafter: str) -> str | None:
    """Returns the source of the heads that come with jaxspec, or None if the target is no preset or has none."""
    from jaxspec.heads.find import shipped_heads

    return f"{target}/{drafter}" if shipped_heads(target, drafter) else None


def load_models(args: argparse.Namespace) -> tuple["Model", "Model | None"]:
    """Loads the target and the draft model; they are one object if source and dtype agree.

    Raises:
        UsageError: if `--draft-dtype` is used without a draft model.
    """
    if args.draft_dtype is not None and args.draft_model is None:
        raise UsageError(f"--draft-dtype is for the draft model of --drafter {takers('draft')}, and there is none")
    from jaxspec.cli import show

    target = show.load(args.target, args.dtype, args.context)
    if args.draft_model is None:
        return target, None
    dtype = args.draft_dtype or args.dtype
    same = args.draft_model == args.target and dtype == args.dtype
    return target, target if same else show.load(args.draft_model, dtype)


def load_heads(args: argparse.Namespace, target: "Model") -> "DraftHeads | None":
    """Loads the heads that `--heads` names, if any, and prints their notes."""
    return None if args.heads is None else read_heads(args.heads, args, target)


def load_all_heads(
    args: argparse.Namespace, target: "Model", drafters: Collection[str] | None
) -> dict[str, "DraftHeads"]:
    """Loads the heads of every `--heads`, and prints their notes; returns them by drafter.

    Raises:
        UsageError: two of them are for the same drafter, or one is for none of `drafters`; None stands for all.
    """
    found: dict[str, DraftHeads] = {}
    for source in args.heads or ():
        heads = read_heads(source, args, target)
        drafter = heads.config.drafter
        if drafter in found:
            raise UsageError(f"--heads {source}: a second source of heads for {drafter}; give one per drafter")
        if drafters is not None and drafter not in drafters:
            raise UsageError(f"--heads {source}: these are heads for {drafter}, which is not in --drafters")
        found[drafter] = heads
    return found


def read_heads(source: str, args: argparse.Namespace, target: "Model") -> "DraftHeads":
    """Loads heads, and prints their notes."""
    from jaxspec.checkpoints.base import activation_dtype
    from jaxspec.cli import show
    from jaxspec.heads.files import load_heads

    heads = load_heads(source, target=target, dtype=activation_dtype(args.dtype), allow_pickle=args.allow_pickle)
    for note in heads.notes:
        show.say(f"{source}: {note}", answer=True)
    return heads


def stream_options(
    args: argparse.Namespace,
    draft: "Model | None",
    tree: "Topology | Dynamic | int | None",
    heads: "DraftHeads | None" = None,
) -> dict[str, Any]:
    """Returns keywords of `jaxspec.stream` from the options of drafting, sampling and ending."""
    import jax

    import jaxspec
    from jaxspec.generation.drafting import Drafting

    return {
        "key": jax.random.key(args.seed),
        "drafting": Drafting(args.drafter, args.rule, tree, args.schedule, draft, heads, dict(args.drafter_option)),
        "sampling": jaxspec.Sampling(args.temperature, args.top_k, args.top_p, args.min_p),
        "max_new_tokens": args.max_new_tokens,
        "stop": args.stop,
        "ignore_eos": args.ignore_eos,
        "tools": args.tools,
        "template_variables": dict(args.template_variable) or None,
        "verbose": not args.quiet,
    }


def parse_tree(spec: str) -> "Topology | Dynamic":
    """Parses the value of `--tree`; see `TREE_GRAMMAR`.

    Raises:
        UsageError: if it does not follow the grammar, or the tree is too large.
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
