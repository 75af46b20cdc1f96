"""Computes the acceptance of the rules from the distributions of a target and a draft, and an upper bound.

The target writes a text per prompt. Then both models read it, and their distributions are compared after every token.
Heads and PARD models have a distribution for each drafted token. These distributions are compared one by one, where all
tokens before the drafted token are tokens of the text. The optimum is an upper bound for any lossless rule with the
same candidates. For "rejection" the candidates are sampled without replacement from the draft's distribution after
top-k, top-p and min-p. For "coupled" they are sampled from the draft's distribution at the given temperature alone, and
for "deterministic" they are the draft's most likely tokens. At one position, "block" and "traversal" accept as
"rejection" does. Over a whole draft they accept more, which `jaxspec.analysis.text_chain_lengths` computes. Lossy rules
have no such figure.
"""

import argparse
import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxspec.amounts import fixed, plural
from jaxspec.bench.measurements import add_record, write_record
from jaxspec.bench.tasks import TASK_NAMES, load_task
from jaxspec.cli import models
from jaxspec.cli.bench import OMITTED_OPTIONS, parse_temperatures
from jaxspec.cli.drafting import add_drafter_options, read_drafting
from jaxspec.cli.options import (
    COUNT_TYPE,
    Parser,
    add_chat,
    add_length,
    add_limits,
    add_models,
    add_split,
    check_output,
    check_split,
    choice_type,
    parse_path,
    read_sampling,
    text_type,
)

if TYPE_CHECKING:
    from jaxspec.bench.table import Table
    from jaxspec.tuning.acceptance import Figure, Positions

ACCEPTANCE_FORMAT = 1
"""Version of the JSON, incremented whenever a name changes its meaning."""
DRAFTERS_WITH_LAWS = ("model", "early-exit", "pard", "medusa", "eagle", "dflash")


def add_options(parser: Parser) -> None:
    """Adds the command's options."""
    add_chat(add_models(parser))
    add = parser.add_argument_group("drafts").add_argument
    add(
        "--drafter",
        default="model",
        type=choice_type("drafter", DRAFTERS_WITH_LAWS),
        metavar="|".join(DRAFTERS_WITH_LAWS),
        help="default: model",
    )
    add_drafter_options(add)
    models.add_heads(add)
    add(
        "--children",
        type=parse_children,
        default=(1, 2, 4),
        metavar="K,...",
        help="numbers of candidates (default: 1,2,4)",
    )
    add("--draws", type=COUNT_TYPE, default=32, metavar="N", help="Monte Carlo samples per position (default: 32)")

    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", action="append", type=text_type("prompt"), default=[], metavar="TEXT", help="a prompt; repeatable")
    add(
        "--tasks",
        metavar="NAME_OR_PATH,...",
        help=f"tasks ({'|'.join(TASK_NAMES)}), or .jsonl, .json or .txt files; the first turn of each question is used "
        "(default without --prompt: mt-bench)",
    )
    add_split(add)
    add(
        "--limit",
        type=COUNT_TYPE,
        metavar="N",
        help="questions per task, taken from its categories in turn (default: all)",
    )
    add_length(add, 64)

    add = parser.add_argument_group("sampling").add_argument
    add(
        "--temperature",
        type=parse_temperatures,
        default=(1.0,),
        metavar="T,...",
        help="one run for each temperature (default: 1)",
    )
    add_limits(add)
    add = parser.add_argument_group("output").add_argument
    add("--json", type=parse_path, metavar="FILE", help="file for all results of every prompt")
    add_record(add)
    parser.set_defaults(tuned=None, tree=None, draft_length=None, schedule=None, rule="coupled")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    check_output("--json", args.json)
    drafting, sources = read_drafting(args)
    check_split(args.split, (args.tasks or "").split(","))

    import dataclasses

    from rich.console import Console

    from jaxspec.bench.environment import describe_environment
    from jaxspec.cli import show
    from jaxspec.generation import inputs
    from jaxspec.tuning import acceptance
    from jaxspec.tuning.prompt_lengths import keep_fitting

    names = args.tasks.split(",") if args.tasks else [] if args.prompt else ["mt-bench"]
    tasks = [load_task(name, args.limit, args.seed, show.say, args.split) for name in names]
    samplings = [read_sampling(args, temperature) for temperature in args.temperature]
    target, drafting = models.load_for_drafting(sources, drafting, args.max_new_tokens, args.chat)
    for sampling in samplings:
        sampling.rows(1, target.lm.vocab)  # even the last is refused before the first is measured
    model, params = acceptance.drafting_model(target, drafting)
    texts = [(f"prompt {i}", text) for i, text in enumerate(args.prompt, start=1)]
    texts += [(f"{task.name} {question.id}", question.prompt) for task in tasks for question in task.questions]
    chat = target.chat_template is not None if args.chat is None else args.chat
    prompts = [(name, inputs.encode_prompts(target, [text], chat)[0]) for name, text in texts]
    prompts = keep_fitting(prompts, args.max_new_tokens, min(target.lm.context, model.context), show.say)
    runs = []
    for sampling in samplings:
        with show.Bar(f"comparing at temperature {sampling.temperature:g}", parts=show.PROGRESS_LINES) as bar:
            found = acceptance.measure_acceptance(
                target, model, params, prompts, sampling=sampling, children=max(args.children), draws=args.draws,
                max_new_tokens=args.max_new_tokens, seed=args.seed, ignore_eos=args.ignore_eos, progress=bar,
            )  # fmt: skip
        made = acceptance.average_acceptance(found, args.children, args.seed)
        positions = sum(prompt.count for prompt in found)
        settings = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        shown = ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in settings.items())
        Console().print(acceptance_table(made, f"{shown}: {format_counts(found)}"), "", highlight=False)
        runs.append(
            {"sampling": settings, "positions": positions, "by_rank": acceptance.rank_acceptance(found)}
            | {"figures": [dataclasses.asdict(figure) | {"gap": figure.gap} for figure in made]}
            | {"prompts": [dataclasses.asdict(prompt) for prompt in found]}
        )
    if args.json:
        arguments = {name: value for name, value in vars(args).items() if name not in OMITTED_OPTIONS}
        machine = describe_environment()
        record = {"format": ACCEPTANCE_FORMAT, "arguments": arguments, "environment": machine, "runs": runs}
        plain = json.dumps(
            record, indent=1, allow_nan=False, default=lambda o: o.tolist() if hasattr(o, "tolist") else str(o)
        )
        args.json.write_text(plain + "\n")
        show.say(f"written: {args.json}")
    if args.record:
        kept = ("sampling", "positions", "figures")
        small = [{key: run[key] for key in kept} | {"texts": len(run["prompts"])} for run in runs]
        show.say(f"written: {write_record(args.record, 'acceptance', args.words, {'runs': small})}")
    return 0


def format_counts(positions: Iterable["Positions"]) -> str:
    """Returns how many positions of how many texts were compared.

    With heads, later drafted tokens are compared at fewer positions. The positions of the first drafted token are
    counted.
    """
    first = [one for one in positions if one.token == 1]
    return f"{plural(sum(one.count for one in first), 'position')} of {plural(len(first), 'text')}"


def acceptance_table(figures: Iterable["Figure"], title: str) -> "Table":
    """Returns a table with a row per drafted token, number of children and rule."""
    from jaxspec.bench.table import Table

    headings = ("token", "rule", "children", "acceptance", "95 % interval (bootstrap over prompts)", "optimum", "gap")
    figures = list(figures)
    several, rows = any(figure.token > 1 for figure in figures), []
    for figure in figures:
        spread = "-" if figure.low is None else f"{figure.low:.4f} to {figure.high:.4f}"
        shares = f"{figure.acceptance:.4f}", spread, f"{figure.optimum:.4f}", fixed(figure.gap, 4)
        rows.append((str(figure.token), figure.rule, str(figure.children), *shares)[not several :])
    return Table(title, headings[not several :], rows, labels=2 + several)


def parse_children(text: str) -> tuple[int, ...]:
    """Parses an option's value: numbers of children."""
    if not re.fullmatch(r"\d{1,3}(,\d{1,3})*", text, re.ASCII) or 0 in map(int, text.split(",")):
        raise argparse.ArgumentTypeError(f"expected whole numbers from 1, separated by commas, got {text!r}")
    return tuple(sorted({int(number) for number in text.split(",")}))
