"""Writes with a small language model, speculatively, and compares every drafter with plain decoding."""

import argparse
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from jaxspec.bench.texts import QUESTION, TASKS
from jaxspec.cli.options import TARGET, Parser, own_heads
from jaxspec.registry import DRAFTERS, find

if TYPE_CHECKING:
    from rich.table import Table

    from jaxspec.models.heads import DraftHeads
    from jaxspec.models.model import Model
    from jaxspec.output import Output

PLAIN, QUICK = "none", "prompt-lookup"
LENGTHS = {"early-exit": 2, "model": 4}  # drafts that cost here more than they bring are kept short
WIDTH = 88
NOTES = {
    "model": "here the target drafts for itself; nearly all is accepted and nothing gained: it shows the machinery.",
    "early-exit": "a model not trained for it accepts little; it shows that the text stays the same.",
    "medusa": "heads trained for this model by `jaxspec train medusa` guess the tokens after the next one.",
}


def add_options(parser: Parser) -> None:
    """All but --debug, which every command has."""
    parser.add_argument(
        "--target", default=TARGET, metavar="NAME_OR_PATH", help=f"the model that writes (default: {TARGET})"
    )


def run(args: argparse.Namespace) -> int:
    """Shows it; 1 if a drafter changed a text."""
    import jax

    import jaxspec
    from jaxspec.cli import show

    model = show.load(args.target, "float32")
    heads = own_heads(args.target)
    bench = Bench(model, None if heads is None else jaxspec.load_heads(heads, target=model))
    print(f"\nQuestion: {QUESTION}\n")
    bench.stream(QUESTION, 96)

    tables, greedy = [], jaxspec.Sampling()
    names = sorted(DRAFTERS, key=PLAIN.__ne__)
    if heads is None:
        names = [name for name in names if "heads" not in find("drafter", name).takes]
    for task, (prompt, count) in TASKS.items():
        rows = {name: bench.measure(name, prompt, count, greedy) for name in names}
        tables.append((f"{task}, greedy, up to {count} tokens", rows))
    sampling, key = jaxspec.Sampling(temperature=0.8, top_p=0.95), jax.random.key(0)
    rows = {name: bench.measure(name, QUESTION, 96, sampling, key) for name in (PLAIN, QUICK)}
    tables.append(("an ordinary question, temperature 0.8, top-p 0.95, the same seed", rows))

    from rich.console import Console

    console = Console(width=WIDTH)
    for title, rows in tables:
        console.print()
        console.print(as_table(title, rows))
    same = all(row[0].tokens == rows[PLAIN][0].tokens for _, rows in tables for row in rows.values())
    print(closing(args.target, names, same))
    return 0 if same else 1


class Bench:
    """One model and one cache size, so that a drafter compiles once for all tasks."""

    def __init__(self, model: "Model", heads: "DraftHeads | None"):
        self._model, self._heads, self._chat = model, heads, model.chat_template is not None
        longest = max(len(model.encode(prompt)) + count for prompt, count in TASKS.values())
        self._capacity = max(512, 1 << (longest + 128).bit_length())  # 128: the chat template, a window
        self._compiled: set[str] = set()

    def _options(self, name: str, count: int) -> dict[str, Any]:
        return {
            "drafter": name,
            "draft": self._model if "draft" in find("drafter", name).takes else None,
            "heads": self._heads if "heads" in find("drafter", name).takes else None,
            "tree": LENGTHS.get(name),
            "max_new_tokens": count,
            "chat": self._chat,
            "capacity": self._capacity,
        }

    def stream(self, prompt: str, count: int) -> None:
        """Prints a text as it comes."""
        import jaxspec
        from jaxspec.cli import show

        with show.busy(f"compiling {QUICK}, reading the prompt"):
            running = jaxspec.stream(self._model, prompt, **self._options(QUICK, count))
            print(next(running).text, end="", flush=True)
        for chunk in running:
            print(chunk.text, end="", flush=True)
        print("\n", flush=True)
        show.say(show.summary(running.output.timing, running.output.stats))
        self._compiled.add(QUICK)

    def measure(self, name: str, prompt: str, count: int, sampling: Any, key: Any = None) -> "Output":
        """Decodes, twice where that is quick; the faster run counts, as other programs only slow one down."""
        import jaxspec
        from jaxspec.cli import show

        doing = "decoding" if name in self._compiled else "compiling, then decoding"
        times = 1 if name in LENGTHS else 2
        options = self._options(name, count) | {"sampling": sampling, "key": key}
        with show.busy(f"{name}: {doing} up to {count} tokens" + ", twice" * (times - 1)):
            runs = [jaxspec.generate(self._model, prompt, **options) for _ in range(times)]
        self._compiled.add(name)
        return min(runs, key=lambda run: run.timing.decode_s)


def as_table(title: str, rows: dict[str, "Output"]) -> "Table":
    """One task: a row per drafter, plain decoding first."""
    from rich.table import Table

    plain = rows[PLAIN]
    table = Table(title=title, title_justify="left", width=WIDTH)
    table.add_column("drafter")
    for heading in ("tokens/s", "vs plain", "tokens/round", "acceptance", "same text"):
        table.add_column(heading, justify="right")
    for name, output in rows.items():
        speed, stats = output.timing.tokens_per_s, output.stats
        table.add_row(
            f"{name} (plain decoding)" if name == PLAIN else name,
            f"{speed:.1f}",
            f"{speed / plain.timing.tokens_per_s:.2f}x",
            f"{stats.tokens_per_round:.2f}",
            f"{stats.acceptance_rate:.0%}" if stats.drafted else "-",
            "yes" if output[0].tokens == plain[0].tokens else "no",
        )
    return table


def closing(target: str, names: list[str], same: bool) -> str:
    """How to read the tables, and what to type next."""
    script = os.path.join(os.path.dirname(sys.executable), "jaxspec")
    command = os.path.relpath(script) if os.path.exists(script) else f"{os.path.relpath(sys.executable)} -m jaxspec"
    if shutil.which("jaxspec") == script:
        command = "jaxspec"
    command += " generate" + ("" if target == TARGET else f" --target {target}")
    verdict = "Every drafter wrote the same text as plain decoding, token for token."
    if not same:
        verdict = "A TEXT DIFFERS from that of plain decoding, which should not be: please report it."
    notes = "\n".join(f"{name}: {NOTES[name]}" for name in names if name in NOTES)
    return f"""
{verdict}

tokens/s is of decoding alone, on this machine: compiling, and reading the prompt, are left out.
{notes}

Next:
  {command} "Write a haiku about the sea."
  {command} --drafter none --json "Write a haiku about the sea."
  {command} --help
"""
