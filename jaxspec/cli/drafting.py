"""The options of drafting, and the models and the `Drafting` that they select. Imports JAX only when used."""

import argparse
import contextlib
import dataclasses
import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from jaxspec.cli.options import DRAFTER, MAX_NODES, Parser, UsageError, one_of, whole
from jaxspec.errors import CapacityError, InvalidConfig, MissingTokenizer, nearest
from jaxspec.registry import DRAFTERS, RULES, SCHEDULES, find

if TYPE_CHECKING:
    from jaxspec.checkpoints.base import Checkpoint
    from jaxspec.core.topology import Dynamic, Topology
    from jaxspec.heads.network import DraftHeads
    from jaxspec.models.model import Model

MODELS = {"draft_model": "draft", "heads": "heads"}
"""The options that load what some drafters are built from, and its name among what a drafter takes."""
VOCAB = 256
"""A vocabulary for rules that are tried before the target's is known; no rule depends on its size."""
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


def add_rule(parser: Parser) -> None:
    """Adds `--rule`, in a group of its own."""
    parser.add_argument_group("verification, which decides whether the text stays the same").add_argument(
        "--rule",
        default="coupled",
        type=one_of("rule", RULES),
        metavar="|".join(RULES),
        help="coupled: the text is that of plain decoding with the same seed; the other rules draw another text, from "
        "the same distribution unless their name has 'lossy' in it (default: coupled)",
    )


def add_drafting(parser: Parser) -> None:
    """Adds the options of drafter, tree and rule, which `check_drafting` checks."""
    add = parser.add_argument_group("drafting, which changes the speed but not the text").add_argument
    drafters = "|".join(DRAFTERS)
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
    schedules = "|".join(SCHEDULES)
    add(
        "--schedule",
        type=one_of("schedule", SCHEDULES),
        metavar=schedules,
        help="how deep each round may draft; default: as the tree is deep, for prompt-lookup while that pays",
    )
    add("--tuned", metavar="FILE", help="draft as 'jaxspec tune' found best, in place of the other options")
    add_rule(parser)


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
    check_draft_dtype(args)
    check_drafter_options(args)
    if (option := missing(args.drafter, args)) is not None:
        raise UsageError(f"--drafter {args.drafter} needs {option} SOURCE")
    if "heads" in takes:
        args.heads = args.heads or own_heads(args.target, args.drafter)
    tree = tuned if tuned is not None else args.draft_length if args.tree is None else parse_tree(args.tree)
    check_members(args.drafter, args.rule, tree, _tree_option(args))
    note_costs([None if args.tuned is not None else args.schedule])
    return tree


def _tree_option(args: argparse.Namespace) -> str:
    """Returns the option that gives the tree, as it was written, or an empty text."""
    if args.tree is not None:
        return f"--tree {args.tree}"
    return "" if args.draft_length is None else f"--draft-length {args.draft_length}"


def check_members(drafter: str, rule: str, tree: "Topology | Dynamic | int | None", written: str) -> None:
    """Checks rule, tree and drafter against one another, as far as that needs no model.

    Args:
        drafter: the drafter's name.
        rule: the rule's name.
        tree: the tree; None for the drafter's own.
        written: the option that gives the tree, for the message.

    Raises:
        UsageError: the drafter takes no such tree, or the rule takes no such tree or drafter.
    """
    from jaxspec.core.topology import as_topology, chain
    from jaxspec.generation.members import check_together

    member, topology = find("drafter", drafter), as_topology(tree)
    if topology is not None and "tree" not in member.takes:
        raise UsageError(f"{written}: the drafter {drafter} takes no tree; leave it out")
    if topology is not None and not topology.shape.depth and drafter != "none" and DRAFTERS.own(drafter):
        raise UsageError(f"{written}: {drafter} drafts at least one token; for plain decoding, give --drafter none")
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
        except InvalidConfig:  # a rule of chains gets a chain
            built = member(tree=chain(built.shape.depth))
    with UsageError.instead(f"--rule {rule} with {written or f'--drafter {drafter}'}: "):
        check_together(made, built, VOCAB)


def note_costs(schedules: Iterable[str | None]) -> None:
    """Says that the costs of drafts are assumed, if one of the schedules is "adaptive" by name."""
    if "adaptive" in schedules:
        from jaxspec.cli import show
        from jaxspec.schedules.adaptive import Adaptive

        first, second = Adaptive().costs
        show.say(
            f"the schedule 'adaptive' needs the costs of rounds on this machine, which are not measured: a round with "
            f"one drafted token is assumed to cost {second / first:g} times a plain round, and every further token "
            f"{second - first:g} more; measure them with 'jaxspec tune', and give its file as --tuned",
            answer=True,
        )


def check_draft_dtype(args: argparse.Namespace) -> None:
    """Raises UsageError if there is a `--draft-dtype` but no draft model."""
    if args.draft_dtype is not None and args.draft_model is None:
        raise UsageError(f"--draft-dtype is for the draft model of --drafter {takers('draft')}, and there is none")


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
    from jaxspec.core.topology import Topology
    from jaxspec.generation.drafting import Drafting

    others = (args.tree, args.draft_length, args.schedule)
    if args.drafter != DRAFTER or args.drafter_option or any(other is not None for other in others):
        raise UsageError(
            "--tuned says how to draft; give it without --drafter, --drafter-option, --draft-length, --tree and "
            "--schedule"
        )
    tuned = Drafting.load(args.tuned)
    args.drafter, args.schedule, args.drafter_option = (
        tuned.drafter,
        tuned.schedule,
        list(tuned.drafter_options.items()),
    )
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


def load_models(args: argparse.Namespace, is_chat: bool = False) -> tuple["Model", "Model | None"]:
    """Loads the target and the draft model; they are one object if source and dtype agree.

    All headers are read before any weight, so that a misspelled name of a draft model or of heads costs no time.

    Args:
        args: the options of a command that decodes.
        is_chat: whether the command is a chat, which needs a chat template and fits its answers into the context.

    Raises:
        JaxspecError: a source does not exist or is malformed.
        CapacityError: the options ask for longer texts than the target's context.
    """
    from jaxspec.checkpoints.source import open_source
    from jaxspec.cli import show

    for source in [args.heads] if isinstance(args.heads, str) else args.heads or []:
        check_heads(source, args)
    draft = None if args.draft_model is None else open_source(args.draft_model, report=show.say)
    own = open_source(args.target, report=show.say, context=args.context)
    check_target(args, own, is_chat)
    target = show.load(own, args.dtype)
    if draft is None:
        return target, None
    dtype = args.draft_dtype or args.dtype
    same = args.draft_model == args.target and dtype == args.dtype
    return target, target if same else show.load(draft, dtype)


def check_target(args: argparse.Namespace, checkpoint: "Checkpoint", is_chat: bool) -> None:
    """Checks options against the headers of the target.

    Raises:
        CapacityError: the new tokens alone exceed the target's context.
        MissingTokenizer: a chat is asked for, and the target has no chat template.
    """
    context = checkpoint.config.max_position
    if args.max_new_tokens >= context and not is_chat:  # a chat lowers its budget to the room that is left
        raise CapacityError(
            f"max_new_tokens={args.max_new_tokens}: the model's context is {context} tokens, the prompt included"
        )
    if (is_chat or args.chat) and checkpoint.chat_template is None and not checkpoint.named_templates:
        way = "`jaxspec generate` needs none" if is_chat else "pass plain text (--no-chat) instead"
        raise MissingTokenizer(f"{args.target} has no chat template; {way}")


def check_heads(source: str, args: argparse.Namespace) -> None:
    """Checks the headers of heads against the options; reads no weight.

    Raises:
        UsageError: they are for another drafter, or cannot draft the tree.
        JaxspecError: there are none, or they are malformed.
    """
    from jaxspec.cli import show
    from jaxspec.core.topology import as_topology
    from jaxspec.heads.headers import open_heads

    config = open_heads(source, allow_pickle=args.allow_pickle, report=show.say).config_of_any_vocabulary()
    drafter = getattr(args, "drafter", None)
    if drafter is None:  # of a benchmark, which has several
        return
    if config.drafter != drafter:
        raise UsageError(f"--heads {source}: {config.summary}, for --drafter {config.drafter} and not {drafter}")
    if args.tree is not None or args.draft_length is not None:
        topology = as_topology(args.draft_length if args.tree is None else parse_tree(args.tree))
        if topology is not None and (depth := topology.shape.depth) > config.max_depth:
            most = f"drafts at most {config.max_depth} tokens deep, got {depth}"
            raise UsageError(f"{_tree_option(args)}: --heads {source} ({config.summary}) {most}")


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
    import jaxspec
    from jaxspec.core.noise import seed_key
    from jaxspec.generation.drafting import Drafting

    return {
        "key": seed_key(args.seed),
        "drafting": Drafting(
            args.drafter,
            rule=args.rule,
            tree=tree,
            schedule=args.schedule,
            draft=draft,
            heads=heads,
            drafter_options=dict(args.drafter_option),
        ),
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
    from jaxspec.core.topology import branching, dynamic, from_paths
    from jaxspec.core.tree_spec import NAMES, named_tree

    if spec in NAMES:
        return named_tree(spec)
    reason = "this is not a tree"
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
    if (meant := _similar_tree(spec)) is not None:
        raise UsageError(f"tree {spec}: {reason}; did you mean {meant}?")
    raise UsageError(f"tree {spec}: {reason}. Write {TREE_GRAMMAR}.")


_BETWEEN = r"(?:\s*[,;xX*×/-]\s*|\s+)"
"""What may stand between the sizes of a tree in other notations."""


def _similar_tree(spec: str) -> str | None:
    """Returns the tree that is probably meant by a text that is none: one with the same numbers, or a similar name."""
    from jaxspec.core.tree_spec import NAMES

    numbers = re.findall(r"\d+", spec, re.ASCII)
    if re.match(r"\W*dyn", spec, re.IGNORECASE) and len(numbers) == 3:
        meant = "dynamic-{}x{}-{}".format(*numbers)
    elif re.fullmatch(rf"\s*[\[(]?\d+({_BETWEEN}\d+)*[\])]?\s*", spec, re.ASCII):
        meant = "x".join(numbers)
    else:
        meant = nearest(spec, NAMES)
    if meant is None or meant == spec:
        return None
    try:
        parse_tree(meant)
    except UsageError:
        return None
    return meant
