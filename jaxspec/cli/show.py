"""The output of a command besides its result, on standard error: bars on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from jaxspec.amounts import plural
from jaxspec.bench.table import Table
from jaxspec.cli.wrap import Wrapper, wrap

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxspec.checkpoints.base import Checkpoint
    from jaxspec.decode.session import Timing
    from jaxspec.decode.stats import Stats
    from jaxspec.models.model import Model


_silenced = False


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Silences progress: draws no bars, and prints only the lines that answer the user."""
    global _silenced
    before, _silenced = _silenced, True
    try:
        yield
    finally:
        _silenced = before


def say(line: str, answer: bool = False) -> None:
    """Prints a line on standard error, wrapped between words on a terminal.

    Args:
        line: the text to print.
        answer: print it even if progress is silenced, since the user asked for it or must know it.
    """
    if _silenced and not answer:
        return
    console = Console(stderr=True)
    for part in wrap(line, console.width) if console.is_terminal else [line]:
        console.print(Text(part, style="dim"), soft_wrap=True)


def print_wrapped(line: str) -> None:
    """Prints a line of the result, wrapped between words on a terminal."""
    with writer() as write:
        write(f"{line}\n")


@contextlib.contextmanager
def writer() -> Iterator[Callable[[str], None]]:
    """Yields a function that prints a text piece by piece; on a terminal, it wraps between words."""
    wrapper = Wrapper() if sys.stdout.isatty() else None

    def write(piece: str) -> None:
        print(piece if wrapper is None else wrapper.feed(piece), end="", flush=True)

    try:
        yield write
    finally:
        if wrapper is not None:
            print(wrapper.end(), end="", flush=True)


def print_card(markdown: str) -> None:
    """Prints a card; tables fit the terminal, and paragraphs are wrapped between words."""
    console, rows = Console(), []
    for line in [*markdown.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
            continue
        if rows:
            headings, _, *cells = rows  # between them is the rule
            console.print(Table("", headings, cells))
            rows = []
        for part in wrap(line.removeprefix("# "), console.width):
            print(part)


def skip_repeats(line: Callable[[str], object]) -> Callable[[str], None]:
    """Returns a function that passes each distinct line on only once."""
    seen = set()

    def first(text: str) -> None:
        if text not in seen:
            seen.add(text)
            line(text)

    return first


def print_legend(*parts: str | tuple[str, str]) -> None:
    """Prints a legend of texts, each with or without a colour."""
    if not _silenced:
        Console(stderr=True).print(Text(", ").join(Text.assemble(part) for part in parts), soft_wrap=True)


@contextlib.contextmanager
def show_activity(what: str, quiet: bool = False) -> Iterator[None]:
    """Shows activity of unknown length; with `quiet`, only on terminals."""
    console = Console(stderr=True)
    if _silenced or not console.is_terminal:
        if not quiet:
            say(f"{what} ...")
        yield
        return
    with console.status(Text(f"{what} ...", style="dim")):
        yield


PROGRESS_LINES = 4
"""The number of lines that report progress without a terminal."""
MAX_SILENT_SECONDS = 30.0
"""Seconds after which progress is reported without a terminal, however small it is."""


class Bar:
    """Shows progress: call it with `(done, total)`.

    Without a terminal it prints a line at the beginning, `parts` more lines on the way, and another line after every
    `MAX_SILENT_SECONDS` seconds without a line.
    """

    def __init__(self, what: str, parts: int = 0):
        self._what, self._console, self._parts = what, Console(stderr=True), parts
        self._progress: Progress | None = None
        self._part, self._said = 0, time.monotonic()

    def __enter__(self) -> "Bar":
        if _silenced or not self._console.is_terminal:
            say(f"{self._what} ...")
        return self

    def __call__(self, done: int, total: int, *_: object) -> None:
        if _silenced or not self._console.is_terminal:
            part, now = done * self._parts // total, time.monotonic()
            if part > self._part or now - self._said >= MAX_SILENT_SECONDS:
                self._part, self._said = part, now
                say(f"{self._what}: {done} of {total}")
            return
        bar = self._progress
        if bar is None:  # created late: earlier code may draw a bar of its own, as pip does
            columns = (
                TextColumn("[dim]{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
            )
            self._progress = bar = Progress(*columns, console=self._console, transient=True)
            bar.add_task(self._what)
            bar.start()
        bar.update(bar.task_ids[0], completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


def load_model(
    source: "str | Checkpoint",
    dtype: str,
    kernels: bool | None = None,
    exact: bool | None = None,
    mesh: "Mesh | None" = None,
    generation_config: bool = False,
) -> "Model":
    """Loads a model and shows a progress bar; see `jaxspec.load` for the arguments."""
    from jaxspec.checkpoints.load import load as read

    name = source if isinstance(source, str) else source.source
    weights = "with the weights of the file as they are" if dtype == "file" else f"in {dtype}"
    with Bar(f"loading {name} {weights}") as bar:
        return read(
            source, dtype=dtype, mesh=mesh, kernels=kernels, exact=exact, generation_config=generation_config,
            report=say, progress=bar,
        )  # fmt: skip


def format_summary(timing: "Timing", stats: "Stats") -> str:
    """Returns the speed and the statistics of decoding in one line; if nothing was decoded, the number of tokens."""
    tokens = plural(stats.committed, "token")
    if not timing.decode_s:
        return f"{tokens}, all from earlier; this command decoded nothing"
    accepted = f"{stats.accepted} of {plural(stats.drafted, 'drafted token')} accepted"
    return (
        f"{tokens}, {timing.tokens_per_s:.1f} tokens/s of decoding alone, {stats.tokens_per_round:.2f} tokens per "
        f"round, {accepted if stats.drafted else 'nothing drafted'}; "
        f"compile {timing.compile_s:.1f} s, prefill {timing.prefill_s:.2f} s, decode {timing.decode_s:.2f} s"
    )
