"""Writes with a small language model, speculatively, and shows where drafting is faster than plain decoding."""

import argparse
import os
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.bench.table import Table
from jaxspec.bench.texts import DEMO_TASKS, QUESTION
from jaxspec.cli.models import find_preset_draft, find_preset_heads
from jaxspec.cli.options import DEFAULT_TARGET, Parser
from jaxspec.cli.takeaway import PLAIN_DRAFTER, Speed, Speeds, explain_speeds, find_fastest
from jaxspec.cli.wrap import wrap
from jaxspec.registry import DRAFTERS, find

if TYPE_CHECKING:
    from jaxspec.generation.output import Output
    from jaxspec.models.model import Model

QUICK_DRAFTER = "prompt-lookup"
DRAFT_LENGTHS = {"model": 3}
DRAFT_DTYPE = "int8"
ANSWER_TOKENS = 96
"""The number of tokens of the answer that is shown."""
SHORT_TOKENS = 16
"""The maximum number of tokens of a text with `--short`."""
RUNS_PER_DRAFTER = 2
"""The number of runs of each drafter. The fastest run counts, because other programs can only slow a run down."""
NOTES = {
    "prompt-lookup": "guesses what followed the same words earlier in the text.",
    "medusa": "heads trained for this model guess the tokens after the next one.",
    "eagle": "a layer trained for this model continues the model's own states.",
    "model": "{draft} in int8 writes ahead, and the model checks it.",
}
"""The drafters that are shown. Early-exit accepts little unless the model was trained for it."""
LEGEND = (
    "tokens/s is the speed of decoding alone, without compiling and reading the prompt. The cost of a round is its "
    "time divided by the time of a plain round; times plain is tokens per round divided by the cost of a round."
)


def add_options(parser: Parser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        metavar="NAME_OR_PATH",
        help=f"the model that writes (default: {DEFAULT_TARGET})",
    )
    parser.add_argument(
        "--short",
        action="store_true",
        help=f"only {QUICK_DRAFTER}, on texts of {SHORT_TOKENS} tokens, which are too short to measure a speed",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the demo; returns 1 if a drafter changed a text."""
    import jax
    from rich.console import Console

    import jaxspec
    from jaxspec.cli import show

    model = show.load_model(args.target, "float32")
    draft = find_preset_draft(args.target) or args.target
    counts = {task: min(count, SHORT_TOKENS) if args.short else count for task, (_, count) in DEMO_TASKS.items()}
    longest = SHORT_TOKENS if args.short else ANSWER_TOKENS
    bench = Bench(model, None if args.short else show.load_model(draft, DRAFT_DTYPE))
    show.print_wrapped(f"\nQuestion: {QUESTION}\n")
    bench.stream(QUESTION, longest)

    names = [name for name in sorted(DRAFTERS, key=PLAIN_DRAFTER.__ne__) if name in (PLAIN_DRAFTER, *NOTES)]
    names = [
        name for name in names if "heads" not in find("drafter", name).takes or find_preset_heads(args.target, name)
    ]
    names = [PLAIN_DRAFTER, QUICK_DRAFTER] if args.short else names
    tasks = {task: bench.compare(names, prompt, counts[task]) for task, (prompt, _) in DEMO_TASKS.items()}
    sampling, key = jaxspec.Sampling(temperature=0.8, top_p=0.95), jax.random.key(0)
    drawn = [
        bench.decode(name, QUESTION, longest, sampling=sampling, key=key) for name in (PLAIN_DRAFTER, QUICK_DRAFTER)
    ]

    console = Console()

    def paragraph(text: str, indent: str = "") -> None:
        for line in wrap(text, console.width - len(indent)):
            print(indent + line)

    speeds = {task: {name: Speed.of(output) for name, output in of.items()} for task, of in tasks.items()}
    notes = {name: NOTES[name].format(draft=draft) for name in names if name in NOTES}
    print()
    for name, note in notes.items():
        paragraph(f"{name}: {note}")
    for task, of in tasks.items():
        print()
        console.print(speed_table(f"{task}, greedy, up to {counts[task]} tokens", of, speeds[task]))
    same = all(output[0].tokens == of[PLAIN_DRAFTER][0].tokens for of in tasks.values() for output in of.values())
    same = same and drawn[0][0].tokens == drawn[1][0].tokens
    print()
    paragraph(LEGEND)
    print()
    paragraph(describe_equality(same))
    print("\nWhat this means:")
    for text in explain_speeds(speeds, jax.devices()[0].platform):
        print()
        paragraph(text, "  ")
    print("\nNext:")
    for words in next_commands(args.target, draft, speeds):
        print("\n".join(f"  {line}" for line in wrap_command(words, console.width - 2)))
    return 0 if same else 1


class Bench:
    """One model and one cache size, so that a drafter compiles once for all tasks."""

    def __init__(self, model: "Model", draft: "Model | None"):
        self._model, self._draft = model, draft
        longest = max(len(model.encode(prompt)) + count for prompt, count in DEMO_TASKS.values())
        self._capacity = max(512, 1 << (longest + 128).bit_length())  # 128: the chat template, a window
        self._compiled: set[str] = set()

    def _options(self, name: str, count: int) -> dict[str, Any]:
        from jaxspec.generation.drafting import Drafting

        return {
            "drafting": Drafting(name, tree=DRAFT_LENGTHS.get(name), draft=self._draft).without_unused(),
            "max_new_tokens": count,
            "chat": self._model.chat_template is not None,
            "verbose": False,  # the lines shown here say what is compiled
            "capacity": self._capacity,
        }

    def stream(self, prompt: str, count: int) -> None:
        """Prints a text as it is generated."""
        import jaxspec
        from jaxspec.cli import show

        with show.writer() as write:
            with show.show_activity(f"compiling {QUICK_DRAFTER}, reading the prompt"):
                running = jaxspec.stream(self._model, prompt, **self._options(QUICK_DRAFTER, count))
                first = next(running).text
            write(first)
            for chunk in running:
                write(chunk.text)
            write("\n\n")
        show.say(show.format_summary(running.output.timing, running.output.stats))
        self._compiled.add(QUICK_DRAFTER)

    def compare(self, names: list[str], prompt: str, count: int) -> dict[str, "Output"]:
        """Returns the fastest run of each drafter; the drafters decode greedily, in turn."""
        runs: dict[str, list[Output]] = {name: [] for name in names}
        for _ in range(RUNS_PER_DRAFTER):
            for name in names:
                runs[name].append(self.decode(name, prompt, count))
        return {name: min(outputs, key=lambda output: output.timing.decode_s) for name, outputs in runs.items()}

    def decode(self, name: str, prompt: str, count: int, **options: Any) -> "Output":
        """Decodes once; without a terminal, progress is printed only if the drafter must be compiled."""
        import jaxspec
        from jaxspec.cli import show

        compiled = name in self._compiled
        with show.show_activity(f"{name}: decoding" if compiled else f"compiling {name}, decoding", quiet=compiled):
            output = jaxspec.generate(self._model, prompt, **self._options(name, count) | options)
        self._compiled.add(name)
        return output


def speed_table(title: str, outputs: Mapping[str, "Output"], speeds: Speeds) -> Table:
    """Returns the table of a task: a row per drafter, plain decoding first."""
    plain, text = speeds[PLAIN_DRAFTER], outputs[PLAIN_DRAFTER][0].tokens
    headings = ("drafter", "tokens/s", "times plain", "tokens per round", "cost of a round", "same text")
    rows = [
        (
            f"{name} (plain)" if name == PLAIN_DRAFTER else name,
            f"{speed.tokens_per_s:.1f}",
            f"{speed.times(plain):.2f}",
            f"{speed.tokens_per_round:.2f}",
            f"{speed.cost(plain):.2f}",
            "yes" if outputs[name][0].tokens == text else "NO",
        )
        for name, speed in speeds.items()
    ]
    return Table(title, headings, rows)


def describe_equality(same: bool) -> str:
    """Returns a sentence that says whether drafts changed a text."""
    if not same:
        return "A TEXT DIFFERS from the text of plain decoding. This is an error: please report it."
    return (
        "Every drafter wrote the same text as plain decoding, token for token. This also holds for "
        f"{QUICK_DRAFTER} at temperature 0.8 with the same seed."
    )


def next_commands(target: str, draft: str, tasks: Mapping[str, Speeds]) -> list[list[str]]:
    """Returns commands to try next, as words; the first uses the fastest drafter of the first task."""
    script = os.path.join(os.path.dirname(sys.executable), "jaxspec")
    program = [os.path.relpath(sys.executable), "-m", "jaxspec"]
    if os.path.exists(script):
        program = ["jaxspec" if shutil.which("jaxspec") == script else os.path.relpath(script)]
    target_words = [] if target == DEFAULT_TARGET else [f"--target {target}"]
    name = find_fastest(next(iter(tasks.values())))
    drafting = [f"--drafter {name}"] if name != QUICK_DRAFTER else []
    if "draft" in find("drafter", name).takes:
        drafting += [f"--draft-model {draft}", f"--draft-dtype {DRAFT_DTYPE}"]
    if name in DRAFT_LENGTHS:
        drafting.append(f"--draft-length {DRAFT_LENGTHS[name]}")
    return [
        [*program, "generate", *target_words, *drafting, '"Write a haiku about the sea."'],
        [*program, "chat", *target_words],
        [*program, "generate", "--help"],
    ]


def wrap_command(words: list[str], width: int) -> list[str]:
    """Returns a command in lines that end in backslashes, so that a shell joins them."""
    lines = [words[0]]
    for word in words[1:]:
        if len(f"{lines[-1]} {word} \\") > width:
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return lines
