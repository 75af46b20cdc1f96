"""Measures the cost and acceptance of drafts on prompts like yours, and writes the best schedule and tree to a file.

Use the file with 'jaxspec generate --tuned FILE', 'jaxspec chat --tuned FILE' or 'jaxspec bench --tuned FILE'.
"""

import argparse
from typing import Any

from jaxspec.amounts import plural
from jaxspec.bench.measurements import add_record, write_record
from jaxspec.bench.tasks import TASK_NAMES, load_task
from jaxspec.cli import drafting, models, options
from jaxspec.cli.options import COUNT_TYPE, MAX_NODES, Parser, UsageError, check_output, choice_type, whole_type
from jaxspec.cli.tree import TREE_GRAMMAR
from jaxspec.registry import AUTO_DRAFTER, DRAFTER_NAMES

MIN_ROUNDS = 10
"""The number of timed rounds of a depth from which on their median is reliable."""


def add_options(parser: Parser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        "prompt",
        nargs="*",
        type=options.text_type("prompt"),
        metavar="PROMPT",
        help="a prompt like the prompts that will be decoded",
    )
    options.add_chat(options.add_models(parser))
    add = parser.add_argument_group("drafts and prompts").add_argument
    names = "|".join(DRAFTER_NAMES)
    text = f"{AUTO_DRAFTER} first finds the fastest drafter on these prompts"
    add("--drafter", required=True, type=choice_type("drafter", DRAFTER_NAMES), metavar=names, help=text)
    add("--draft-length", type=whole_type(1, MAX_NODES), metavar="K", help="length of the longest drafts (default: 8)")
    add("--tree", metavar="SPEC", help=f"trees instead of chains: {TREE_GRAMMAR}")
    drafting.add_drafter_options(add)
    add(
        "--tasks",
        metavar="NAME_OR_PATH,...",
        help=f"tasks ({'|'.join(TASK_NAMES)}), or .jsonl, .json or .txt files of prompts",
    )
    options.add_split(add)
    add("--limit", type=COUNT_TYPE, default=8, metavar="N", help="questions per task (default: 8)")
    options.add_option(add, "max_new_tokens", type=COUNT_TYPE, metavar="N")
    models.add_heads(add)
    drafting.add_rule(parser)
    options.add_sampling(parser)
    add = parser.add_argument_group("output").add_argument
    add("--out", type=options.parse_path, required=True, metavar="FILE", help="file to write")
    add_record(add)
    parser.set_defaults(tuned=None, schedule=None)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    chosen, sources = drafting.read_drafting(args)
    options.check_split(args.split, (args.tasks or "").split(","))
    if not args.prompt and args.tasks is None:
        raise UsageError("no PROMPT given; give one or more, or --tasks")
    if (args.tree or "").startswith("dynamic"):
        raise UsageError(f"--tree {args.tree}: a dynamic tree changes in every round; use a chain or a static tree")
    check_output("--out", args.out)

    from jaxspec.cli import show
    from jaxspec.core.noise import seed_key
    from jaxspec.core.topology import Topology
    from jaxspec.generation import inputs
    from jaxspec.tuning.prompt_lengths import keep_fitting
    from jaxspec.tuning.tune import tune

    texts: list[tuple[str, Any]] = [(f"prompt {i}", text) for i, text in enumerate(args.prompt, start=1)]
    for source in args.tasks.split(",") if args.tasks else ():
        task = load_task(source, args.limit, args.seed, show.say, args.split)
        texts += [(f"{task.name} {question.id}", question.prompt) for question in task.questions]
    target, chosen = models.load_for_drafting(sources, chosen, args.max_new_tokens, args.chat)
    chat = target.chat_template is not None if args.chat is None else args.chat
    prompts = [(name, inputs.encode_prompts(target, [text], chat)[0]) for name, text in texts]
    prompts = keep_fitting(prompts, args.max_new_tokens, target.lm.context, show.say)
    with show.Bar("measuring", parts=show.PROGRESS_LINES) as bar:
        tuned = tune(
            target,
            [ids for _, ids in prompts],
            drafter=args.drafter,
            draft=chosen.draft,
            tree=chosen.tree,
            drafter_options=chosen.drafter_options,
            heads=chosen.heads,
            rule=args.rule,
            sampling=options.read_sampling(args, args.temperature),
            key=seed_key(args.seed),
            max_new_tokens=args.max_new_tokens,
            progress=bar,
        )
    tuned.save(args.out)
    nodes = tuned.tree.shape.nodes if isinstance(tuned.tree, Topology) and not tuned.tree.is_chain else None
    if "drafters" in tuned.measured:
        for line in format_drafters(tuned.measured):
            print(line)
    if "round_s" not in tuned.measured:
        show.print_wrapped(f"the drafter {tuned.drafter}, with its default tree, is written")
    else:
        for line in format_table(tuned.measured, nodes):
            print(line)
    if "speedups" in tuned.measured:
        chain, static = (tuned.measured["speedups"][shape] for shape in ("chain", "tree"))
        best = "chain" if nodes is None else "tree"
        show.print_wrapped(
            f"the best chain is {chain:.2f} times plain, the best tree {static:.2f}: the {best} is written"
        )
    if "round_s" in tuned.measured and (warning := warn_about_few_rounds(tuned.measured, len(prompts))):
        show.say(warning, answer=True)
    show.say(f"written: {args.out}")
    if args.record:
        show.say(f"written: {write_record(args.record, 'tune', args.words, dict(tuned.measured))}")
    return 0


def format_drafters(measured: dict) -> list[str]:
    """Returns the lines of a table with a row per drafter, the fastest first."""
    width = max(map(len, measured["drafters"]))
    lines = [f"{'drafter':{width}}  times plain  slowest prompt"]
    for name, mean in sorted(measured["drafters"].items(), key=lambda item: -item[1]):
        lines.append(f"{name:{width}}  {mean:11.2f}  {measured['slowest'][name]:14.2f}")
    if measured["stopped_early"]:
        lines.append(f"clearly slower, and not run to the end: {', '.join(measured['stopped_early'])}")
    return lines


def format_table(measured: dict, nodes: int | None = None) -> list[str]:
    """Returns the lines of a table with a row per depth, for a tree of `nodes` nodes; None for a chain."""
    from jaxspec.tuning.tune import interpolate_round_times

    timed = {int(depth): [seconds] for depth, seconds in measured["round_s"].items()}
    every = interpolate_round_times(timed, len(measured["speedup_by_depth"]) - 1)
    accepted = ["", *(f"{share:.0%}" for share in measured["acceptance_by_depth"])]
    shape = "a chain, by its length" if nodes is None else f"a tree of {nodes} nodes, cut at each depth"
    lines = [f"{shape}:", "depth  ms/round  accepted  times plain"]
    for depth, speedup in enumerate(measured["speedup_by_depth"]):
        mark = " " if depth in timed else "~"
        ms, times = f"{mark}{every[depth] * 1e3:.1f}", f"{mark}{speedup:.2f}"
        best = "  best" if depth == measured["best_depth"] else ""
        lines.append(f"{depth:5}  {ms:>8}  {accepted[depth]:>8}  {times:>11}{best}")
    if len(timed) < len(every):
        lines.append("~ was not timed, but interpolated between timed depths")
    return lines


def warn_about_few_rounds(measured: dict, prompts: int) -> str:
    """Returns a warning if few rounds were timed; an empty string if there were enough."""
    fewest = min(measured["rounds_timed"].values())
    if fewest >= MIN_ROUNDS:
        return ""
    return (
        f"only {plural(fewest, 'round')} of some depths were timed on {plural(prompts, 'prompt')}; for reliable "
        "figures, use more prompts or a larger --max-new-tokens"
    )
