"""What a command shows beside its result, on standard error: bars on a terminal, plain lines elsewhere."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from jaxspec.decode.session import Timing
    from jaxspec.decode.stats import Stats
    from jaxspec.models.model import Model


def say(line: str) -> None:
    """A line as it is, never wrapped."""
    console = Console(stderr=True)
    console.print(Text(line, style="dim"), soft_wrap=True)


def legend(*parts: str | tuple[str, str]) -> None:
    """What colours mean: texts, some of them with their colour."""
    Console(stderr=True).print(Text(", ").join(Text.assemble(part) for part in parts), soft_wrap=True)


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """Shows that something is under way whose end is not known."""
    console = Console(stderr=True)
    if not console.is_terminal:
        say(f"{what} ...")
        yield
        return
    with console.status(Text(f"{what} ...", style="dim")):
        yield


class Bar:
    """Shows how far something is: call it with `(done, total)`.

    Where no bar can be drawn, it says so in a line, and says how far it is in `parts` lines more.
    """

    def __init__(self, what: str, parts: int = 0):
        self._what, self._console, self._parts = what, Console(stderr=True), parts
        self._progress: Progress | None = None

    def __enter__(self) -> "Bar":
        if not self._console.is_terminal:
            say(f"{self._what} ...")
        return self

    def __call__(self, done: int, total: int, *_: object) -> None:
        if not self._console.is_terminal:
            if done * self._parts // total > (done - 1) * self._parts // total:
                say(f"{self._what}: {done} of {total}")
            return
        bar = self._progress
        if bar is None:  # not before: what comes first may draw a bar of its own, as pip does
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


def load(source: str, dtype: str, context: int | None = None) -> "Model":
    """Loads a model, with a bar."""
    from jaxspec.models import model

    with Bar(f"loading {source} in {dtype}") as bar:
        return model.load(source, dtype=dtype, context=context, report=say, progress=bar)


def summary(timing: "Timing", stats: "Stats") -> str:
    """How fast a text came, in one line."""
    drafts = f"{stats.acceptance_rate:.0%} of drafts accepted" if stats.drafted else "nothing drafted"
    return (
        f"{stats.committed} tokens, {timing.tokens_per_s:.1f} tokens/s of decoding alone, "
        f"{stats.tokens_per_round:.2f} tokens/round, {drafts}; "
        f"compile {timing.compile_s:.1f} s, prefill {timing.prefill_s:.2f} s, decode {timing.decode_s:.2f} s"
    )
