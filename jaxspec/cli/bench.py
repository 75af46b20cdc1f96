"""Measures drafters and plain decoding alternately on every prompt, and compares all texts with plain decoding.

The exit status is 1 if a text differs and no certificate attributes the difference to rounding.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.bench.measurements import add_record, write_record
from jaxspec.bench.peers import PEERS, parse_peers
from jaxspec.bench.tasks import TASK_NAMES, load_task
from jaxspec.cli.drafting import add_drafter_options, add_rule, check_members, warn_about_costs
from jaxspec.cli.models import Sources, add_heads, load_heads_by_drafter, load_models, read_sources
from jaxspec.cli.options import (
    COUNT_TYPE,
    MAX_NODES,
    Parser,
    UsageError,
    add_chat,
    add_grammar,
    add_length,
    add_limits,
    add_models,
    add_processors,
    add_split,
    check_output,
    check_split,
    parse_path,
    read_sampling,
    sampling_type,
)
from jaxspec.cli.tree import TREE_GRAMMAR, parse_tree
from jaxspec.errors import JaxspecError, UnknownName
from jaxspec.registry import AUTO_DRAFTER, DRAFTER_NAMES, SCHEDULES, drafter_takes
from jaxspec.storage.reading import check_path

if TYPE_CHECKING:
    from jaxspec.bench.records import Method, Run
    from jaxspec.bench.worker import Worker
    from jaxspec.core.sampling import Sampling
    from jaxspec.heads.network import DraftHeads
    from jaxspec.models.model import Model

OMITTED_OPTIONS = ("debug", "quiet", "words", "record")
"""Options that have no influence on what is measured."""


def add_options(parser: Parser) -> None:
    """Adds the command's options."""
    add_chat(add_models(parser))
    add = parser.add_argument_group("methods").add_argument
    add(
        "--drafters",
        metavar="DRAFTER,...",
        help=f"drafters ({'|'.join(DRAFTER_NAMES)}), each optionally with a tree and a schedule, as in "
        f"model:4,model:2x2,model:8@adaptive. A tree is a number for a chain of that length, or {TREE_GRAMMAR}. "
        f"A schedule is one of {'|'.join(SCHEDULES)} (default: all drafters that the models support)",
    )
    add("--tuned", metavar="FILE", help="also measure the result of 'jaxspec tune'")
    add_drafter_options(add)
    add_heads(add, several=True)
    add(
        "--peers",
        metavar="PEER,...",
        help=f"also measure other systems ({'|'.join(PEERS)}), each optionally with one of its methods, as in "
        "transformers:plain; the first time, each is installed into a virtual environment of its own",
    )
    add("--peers-folder", type=parse_path, metavar="DIR", help="folder of the virtual environments of other systems")
    add_rule(parser)

    add = parser.add_argument_group("prompts").add_argument
    add(
        "--tasks",
        default="mt-bench",
        metavar="NAME_OR_PATH,...",
        help=f"tasks ({'|'.join(TASK_NAMES)}), or files: .jsonl in Spec-Bench's layout or with a prompt per line, or "
        ".txt with prompts (default: mt-bench)",
    )
    add_split(add)
    add("--limit", type=COUNT_TYPE, metavar="N", help="questions per task, from its categories in turn (default: all)")
    add("--turns", type=COUNT_TYPE, default=1, metavar="N", help="maximum turns of a conversation (default: 1)")
    add_length(add, 128)
    add("--repeats", type=COUNT_TYPE, default=3, metavar="R", help="number of runs of each prompt (default: 3)")

    add = parser.add_argument_group("sampling").add_argument
    add(
        "--temperature",
        type=parse_temperatures,
        default=(0.0,),
        metavar="T,...",
        help="one run for each temperature (default: 0, greedy)",
    )
    add_limits(add)
    add_processors(add)
    add_grammar(parser)

    add = parser.add_argument_group("output").add_argument
    add("--json", type=parse_path, metavar="FILE", help="file for all results of every prompt")
    add_record(add)
    add("--plots", type=parse_path, metavar="DIR", help="folder for plots: speedup by task, acceptance by depth")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; the status is 1 if a text differs without a certificate."""
    methods, sources = _check(args)
    check_split(args.split, args.tasks.split(","))

    from jaxspec.bench.environment import peak_memory
    from jaxspec.bench.extra import import_extra
    from jaxspec.bench.run import find_buildable, measure_methods
    from jaxspec.cli import show

    if args.plots:
        import_extra("matplotlib", "--plots")  # before an hour of measuring, not after
    tasks = [load_task(source, args.limit, args.seed, show.say, args.split) for source in args.tasks.split(",")]
    samplings = [read_sampling(args, temperature) for temperature in args.temperature]
    target, draft = load_models(sources, None, args.max_new_tokens, args.chat)
    heads = load_heads_by_drafter(sources, target)
    names = heads if methods is None else [str(method.drafting.drafter) for method in methods]
    for source, drafter in zip(sources.heads, heads):
        if drafter not in names:
            raise UsageError(f"--heads {source}: these heads are for {drafter}, which is not in --drafters")
    samplings = add_grammar_of(args, target, samplings)
    for sampling in samplings:
        sampling.rows(1, target.lm.vocab)  # even the last is refused before the first is measured
    if methods is None:
        methods = find_buildable(target, draft, heads)
    else:
        methods = [complete_method(method, draft, heads, dict(args.drafter_option)) for method in methods]
    workers, missing = _peers(args, sources, target)
    report_once = show.skip_repeats(show.say)
    runs = []
    try:
        for sampling in samplings:
            with show.Bar(f"measuring at temperature {sampling.temperature:g}", parts=show.PROGRESS_LINES) as bar:
                measured = measure_methods(
                    target, methods, tasks, rule=args.rule, sampling=sampling, seed=args.seed,
                    max_new_tokens=args.max_new_tokens, repeats=args.repeats, turns=args.turns, chat=args.chat,
                    ignore_eos=args.ignore_eos, peers=workers, report=report_once, progress=bar,
                )  # fmt: skip
            runs.append(measured)
    finally:
        for worker in workers:
            worker.close()
    show_tables(runs)
    for reason in dict.fromkeys(reason for measured in runs for reason in measured.left_out):
        show.print_wrapped(f"NOT MEASURED: {reason}")
    for label, why in missing.items():
        show.print_wrapped(f"NOT MEASURED: {label}: {why}")
    memory = {"target": target.bytes, "draft": draft.bytes if draft else 0, "peak_rss": peak_memory()}
    _write(args, runs, memory, missing)
    return 1 if any(measured.wrong for measured in runs) else 0


def _write(args: argparse.Namespace, runs: list["Run"], memory: dict, missing: dict[str, str]) -> None:
    """Writes the files that the options ask for."""
    from jaxspec.bench import plots, report
    from jaxspec.bench.environment import describe_environment
    from jaxspec.cli import show

    if args.json:
        arguments = {name: value for name, value in vars(args).items() if name not in OMITTED_OPTIONS}
        record = report.as_record(runs, arguments, describe_environment(), memory) | {"peers_left_out": missing}
        args.json.write_text(json.dumps(record, indent=1, allow_nan=False, default=str) + "\n")
        show.say(f"written: {args.json}")
    if args.record:
        packages = {name: version for run in runs for peer in run.peers.values() for name, version in peer.items()}
        show.say(f"written: {write_record(args.record, 'bench', args.words, report.summarise_runs(runs), packages)}")
    if args.plots:
        for path in plots.save_plots(runs, args.plots):
            show.say(f"written: {path}")


def add_grammar_of(args: argparse.Namespace, target: "Model", samplings: list["Sampling"]) -> list["Sampling"]:
    """Adds the grammar of the options to sampling settings; plain decoding and all methods have it."""
    if args.grammar is None:
        return samplings
    from jaxspec.generation.inputs import stop_array, with_grammar
    from jaxspec.grammar.compilation import compile_grammar

    automaton = compile_grammar(target, args.grammar, after=args.grammar_after)
    stops = stop_array(target, (), args.ignore_eos, 1)
    return [with_grammar(target, sampling, automaton, None, stops, 1, 1) for sampling in samplings]


def show_tables(runs: list["Run"]) -> None:
    """Prints the tables, and a line for every text that differs."""
    from rich.console import Console

    from jaxspec.bench import report
    from jaxspec.cli import show

    console = Console()
    for measured in runs:
        parts = [report.overall_table(measured), report.format_other_times(measured), report.group_table(measured)]
        parts += [report.peer_table(measured), report.format_versions(measured)] if measured.peers else []
        for part in parts:
            console.print(part, "", highlight=False, markup=False, sep="\n")
    for measured in runs:
        for line in report.describe_differences(measured):
            show.print_wrapped(line)
    show.print_wrapped(report.format_conclusion(runs))


def parse_temperatures(text: str) -> tuple[float, ...]:
    """Parses an option's value: one or more temperatures."""
    return tuple(map(sampling_type("temperature"), text.split(",")))


def parse_drafters(text: str) -> list["Method"]:
    """Parses the value of `--drafters`; plain decoding is always measured and need not be named.

    Raises:
        UsageError: a name is unknown, or a tree cannot be parsed.
    """
    from jaxspec.bench.records import PLAIN_METHOD, Method
    from jaxspec.generation.drafting import Drafting

    methods = []
    for spec in re.split(r",(?=[A-Za-z]|$)", text):  # a tree may also have commas
        drafter, at, schedule = spec.partition("@")
        name, colon, tree = drafter.partition(":")
        if name not in DRAFTER_NAMES:
            raise UsageError(f"--drafters: {UnknownName('drafter', name, DRAFTER_NAMES)}")
        if at and schedule not in SCHEDULES:
            raise UsageError(f"--drafters: {UnknownName('schedule', schedule, SCHEDULES)}")
        length = re.fullmatch(r"\d{1,4}", tree, re.ASCII) and int(tree) <= MAX_NODES
        shape = (int(tree) if length else parse_tree(tree)) if colon else None
        methods.append(Method(spec, Drafting(name, tree=shape, schedule=schedule or None)))
    return [method for method in methods if method.label != PLAIN_METHOD]


def complete_method(
    method: "Method", draft: "Model | None", heads: Mapping[str, "DraftHeads"], options: Mapping[str, Any]
) -> "Method":
    """Adds to a method the models and options that its drafter takes; its own options take precedence.

    A drafter that takes heads and is not among `heads` has the heads of the target's preset.
    """
    own = method.drafting
    given = heads.get(str(own.drafter))
    all_of = dataclasses.replace(own, draft=draft, heads=given, drafter_options={**options, **own.drafter_options})
    return dataclasses.replace(method, drafting=all_of.without_unused())


def _check(args: argparse.Namespace) -> tuple[list["Method"] | None, Sources]:
    """Checks options against one another before anything is loaded.

    Returns:
        The methods, None for all, and the sources of models and heads.

    Raises:
        UsageError: options cannot be combined, an option requires another one, or a directory does not exist.
    """
    if args.grammar is None and args.grammar_after is not None:
        raise UsageError("--grammar-after needs --json-schema or --regex")
    check_output("--json", args.json)
    check_output("--plots", args.plots, folder=True)
    check_output("--peers-folder", args.peers_folder, folder=True)
    if args.peers is not None:
        if any(args.temperature):
            raise UsageError("--peers always decode greedily; use --temperature 0")
        if args.processor or args.grammar is not None:
            raise UsageError(
                "--peers have no processors and no grammars; leave out --processor, --json-schema, --regex"
            )
        try:
            parse_peers(args.peers, args.draft_model is not None)
        except JaxspecError as error:
            raise UsageError(f"--peers: {error}") from None
    if args.drafters is None and args.tuned is None:
        return None, read_sources(args, None)
    methods = [] if args.drafters is None else parse_drafters(args.drafters)
    if args.tuned is not None:
        from jaxspec.bench.records import Method
        from jaxspec.generation.drafting import Drafting

        methods.append(Method("tuned", Drafting.load(args.tuned)))
    names = [str(method.drafting.drafter) for method in methods]
    sources = read_sources(args, None if names == [AUTO_DRAFTER] else [name for name in names if name != AUTO_DRAFTER])
    takes = set().union(*map(drafter_takes, names))
    for name, _ in args.drafter_option:
        if name not in takes:
            raise UsageError(f"--drafter-option {name}: no drafter in --drafters has this option")
    labels = [method.label for method in methods]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise UsageError(f"--drafters: {twice[0]} is named twice; leave one out")
    for method in methods:
        own = method.drafting
        check_members(str(own.drafter), args.rule, own.tree, f"--drafters {method.label}")
    warn_about_costs({method.drafting.schedule for method in methods if isinstance(method.drafting.schedule, str)})
    return methods, sources


def _peers(args: argparse.Namespace, sources: Sources, target: "Model") -> tuple[list["Worker"], dict[str, str]]:
    """Starts other systems. Returns the systems that run, and for each of the others the reason why it does not run."""
    from jaxspec.bench.worker import Models, start_workers
    from jaxspec.checkpoints.source import find_source
    from jaxspec.cli import show

    if args.peers is None:
        return [], {}

    def files(source: str) -> dict[str, str]:
        place = check_path(find_source(source)).absolute()
        return {"hf" if place.is_dir() else "gguf": str(place)}

    draft = None if sources.draft is None else files(sources.draft)
    longest = max(target.lm.context, 1)
    models = Models(files(sources.target), draft, min(longest, 2048), target.stop_ids)
    return start_workers(parse_peers(args.peers, draft is not None), models, args.peers_folder, show.say)
