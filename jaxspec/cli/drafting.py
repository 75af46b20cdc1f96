"""The options of drafting, and the `Drafting` that they select. Imports JAX only when used."""

import argparse
import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from jaxspec.cli.models import Sources, add_heads, read_sources
from jaxspec.cli.options import MAX_NODES, Parser, UsageError, choice_type, whole_type
from jaxspec.cli.tree import TREE_GRAMMAR, parse_tree
from jaxspec.errors import InvalidConfig
from jaxspec.registry import (
    AUTO_DRAFTER,
    DRAFTER,
    DRAFTER_NAMES,
    DRAFTERS,
    MTP_DRAFTER,
    RULES,
    SCHEDULES,
    SELF_DRAFTER,
    drafter_takes,
    find,
)

if TYPE_CHECKING:
    from jaxspec.core.topology import Dynamic, Topology
    from jaxspec.generation.drafting import Drafting

TRIAL_VOCAB = 256
"""The size of the vocabulary with which rules are tried before the target's vocabulary is known. No rule depends on
it."""


def add_drafter_options(add: Callable) -> None:
    """Adds `--drafter-option`."""
    add(
        "--drafter-option",
        action="append",
        default=[],
        type=parse_option,
        metavar="NAME=VALUE",
        help="an option of the drafter, such as exit_layers=10 of early-exit (repeatable)",
    )


def parse_option(text: str) -> tuple[str, Any]:
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


def add_rule(parser: Parser) -> None:
    """Adds `--rule`, in a group of its own."""
    parser.add_argument_group("verification, which decides whether the text stays the same").add_argument(
        "--rule",
        default="coupled",
        type=choice_type("rule", RULES),
        metavar="|".join(RULES),
        help="coupled gives the text of plain decoding with the same seed; the other rules draw another text from the "
        "same distribution, except the rules whose name begins with 'lossy' (default: coupled)",
    )


def add_drafting(parser: Parser) -> None:
    """Adds the options of drafter, tree and rule, which `read_drafting` reads and checks."""
    add = parser.add_argument_group("drafting, which changes the speed but not the text").add_argument
    add(
        "--drafter",
        default=DRAFTER,
        type=choice_type("drafter", DRAFTER_NAMES),
        metavar="|".join(DRAFTER_NAMES),
        help=f"{AUTO_DRAFTER} measures once which drafter is the fastest on this machine; {MTP_DRAFTER} drafts with "
        f"the layer for multi-token prediction inside the target; {SELF_DRAFTER} drafts with the target rounded to "
        f"int8 (default: {DRAFTER})",
    )
    add(
        "--draft-length",
        type=whole_type(0, MAX_NODES),
        metavar="K",
        help="number of tokens of each draft, which is a chain",
    )
    add("--tree", metavar="SPEC", help=f"tree of each draft: {TREE_GRAMMAR}")
    add_drafter_options(add)
    add_heads(add)
    schedules = "|".join(SCHEDULES)
    add(
        "--schedule",
        type=choice_type("schedule", SCHEDULES),
        metavar=schedules,
        help="what limits each draft (default: nothing, or best-width for prompt-lookup and recycling)",
    )
    add(
        "--tuned",
        metavar="FILE",
        help="file that 'jaxspec tune' wrote, instead of the other drafting options",
    )
    add_rule(parser)


def read_drafting(args: argparse.Namespace) -> tuple["Drafting", Sources]:
    """Reads the options of drafting and of models, and checks them together before anything is loaded.

    Returns:
        The drafting, without models and heads, and the sources of the models and heads.

    Raises:
        UsageError: options cannot be combined, or an option needs another one that is missing.
        TuningError: the file of `--tuned` is malformed.
    """
    written = ""
    if args.tree is not None and args.draft_length is not None:
        raise UsageError("--draft-length and --tree both set the tree; give only one of them")
    if args.tree is not None:
        written = f"--tree {args.tree}"
    elif args.draft_length is not None:
        written = f"--draft-length {args.draft_length}"
    if args.tuned is not None and (args.drafter != DRAFTER or args.drafter_option or args.schedule or written):
        raise UsageError(
            "--tuned sets how to draft; give it without --drafter, --drafter-option, --draft-length, --tree and "
            "--schedule"
        )
    drafting = None if args.tuned is None else _load_tuned(args.tuned, args.rule)
    drafter = args.drafter if drafting is None else str(drafting.drafter)
    sources = read_sources(args, [drafter])
    if drafting is None:
        check_drafter_options(drafter, dict(args.drafter_option))
        drafting = _make(args)
    check_members(drafter, args.rule, drafting.tree, written)
    warn_about_costs([args.schedule])
    return drafting, sources


def _load_tuned(path: str, rule: str) -> "Drafting":
    """Returns the drafting of a file that `jaxspec tune` wrote, with this rule."""
    from jaxspec.generation.drafting import Drafting

    return dataclasses.replace(Drafting.load(path), rule=rule)


def _make(args: argparse.Namespace) -> "Drafting":
    """Returns the drafting that the options select."""
    from jaxspec.generation.drafting import Drafting

    tree = args.draft_length if args.tree is None else parse_tree(args.tree)
    options = dict(args.drafter_option)
    return Drafting(args.drafter, rule=args.rule, tree=tree, schedule=args.schedule, drafter_options=options)


def check_drafter_options(drafter: str, options: Iterable[str]) -> None:
    """Refuses options that the drafter does not have.

    Raises:
        UsageError: there are such options; the message names the first.
    """
    for name in options:
        if name not in drafter_takes(drafter):
            raise UsageError(f"--drafter-option {name}: the drafter {drafter} has no such option")


def check_members(drafter: str, rule: str, tree: "Topology | Dynamic | int | None", written: str) -> None:
    """Checks that rule, tree and drafter fit together, as far as this is possible without a model.

    Args:
        drafter: the drafter's name.
        rule: the rule's name.
        tree: the tree; None for the drafter's own tree.
        written: the option that gives the tree, for the message.

    Raises:
        UsageError: the drafter takes no such tree, or the rule takes no such tree or drafter.
    """
    if drafter == AUTO_DRAFTER:
        if tree is not None:
            raise UsageError(f"{written}: the drafter {drafter} chooses the tree; leave this option out")
        return
    from jaxspec.core.topology import as_topology, chain
    from jaxspec.generation.members import check_together

    member, topology = find("drafter", drafter), as_topology(tree)
    if topology is not None and "tree" not in member.takes:
        raise UsageError(f"{written}: the drafter {drafter} does not draft trees; leave this option out")
    if topology is not None and not topology.shape.depth and drafter != "none" and DRAFTERS.own(drafter):
        raise UsageError(
            f"{written}: the drafter {drafter} drafts at least one token; for plain decoding, use --drafter none"
        )
    made = find("rule", rule)()
    if not all(field.default is not dataclasses.MISSING for field in dataclasses.fields(member)):
        if topology is not None:  # the drafter is made when its model or heads are there
            with UsageError.instead(f"--rule {rule} with {written}: "):
                made.check(topology.shape)
        return
    with UsageError.instead(f"--drafter {drafter} with {written}: " if written else f"--drafter {drafter}: "):
        built = member() if topology is None else member(tree=topology)
    if topology is None:
        try:
            made.check(built.shape)
        except InvalidConfig:  # a rule for chains gets a chain
            built = member(tree=chain(built.shape.depth))
    with UsageError.instead(f"--rule {rule} with {written or f'--drafter {drafter}'}: "):
        made.check(built.shape)
        check_together(made, built, TRIAL_VOCAB)


def warn_about_costs(schedules: Iterable[str | None]) -> None:
    """Says that the costs of drafts are assumed, if one of the schedules is "adaptive" by name."""
    if "adaptive" in schedules:
        from jaxspec.cli import show
        from jaxspec.schedules.adaptive import Adaptive

        first, second = Adaptive().costs
        show.say(
            f"the schedule 'adaptive' assumes the costs of rounds, because they were not measured on this machine: "
            f"{second / first:g} plain rounds for a round with one drafted token, and {second - first:g} more for each "
            "further token. Measure the costs with 'jaxspec tune', and give its file with --tuned",
            answer=True,
        )
