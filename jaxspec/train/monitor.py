"""Shows the progress of a run: a progress bar, a plot of the log, and TensorBoard."""

import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxspec.errors import MissingPackage
from jaxspec.train import log
from jaxspec.train.log import Watch

PLOT = "plot.png"
PARTS = 4
"""Number of lines of progress on a console without a progress bar."""


class Monitor:
    """A context that shows the progress of a run and plots its log at the end.

    Attributes:
        watch: the callbacks of the run.
    """

    def __init__(self, folder: pathlib.Path, loggers: Sequence[str] = ()):
        """Takes the folder of the run and the names of other loggers: "tensorboard"."""
        self._folder, self._stepped = folder, False
        self._console = Console(stderr=True)
        self._progress: Progress | None = None
        self._tasks: dict[str, Any] = {}
        self._tensorboard = _tensorboard(folder) if "tensorboard" in loggers else None
        self.watch = Watch(self._say, self._phase, self._step)

    def __enter__(self) -> "Monitor":
        if self._console.is_terminal:
            columns = (TextColumn("[dim]{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._stepped and (records := log.read(self._folder / log.LOG)[0]):
            plot(records, self._folder / PLOT)

    def _say(self, line: str) -> None:
        self._console.print(line, style="dim", soft_wrap=True, markup=False, highlight=False)

    def _phase(self, what: str, done: int, total: int) -> None:
        self._bar(what, what, done, total)

    def _step(self, step: int, steps: int, record: dict) -> None:
        self._stepped = True
        if "held_out" in record:
            held = record["held_out"]
            self._say(f"step {step}, held out: {_shown(held)}")
            self._write(step, {f"held_out/{k}": v for k, v in held.items()})
            return
        line = f"loss {record['loss'] or float('nan'):.3f}, {_shown(record)}, {record['tokens_per_s']:.0f} tokens/s"
        if self._progress is not None:
            self._bar("training", f"training: {line}", step, steps)
        elif self._passes("training", step, steps):
            self._say(f"step {step} of {steps}: {line}")
        self._write(step, record)

    def _bar(self, name: str, text: str, done: int, total: int) -> None:
        if self._progress is None:
            if self._passes(name, done, total):
                self._say(f"{name}: {done} of {total}")
            return
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(text, total=total)
        self._progress.update(self._tasks[name], completed=done, description=text)

    def _passes(self, name: str, done: int, total: int) -> bool:
        """Tells whether another of the `PARTS` parts is done."""
        part = done * PARTS // total
        passed = part > self._tasks.get(name, 0)
        self._tasks[name] = max(part, self._tasks.get(name, 0))
        return passed

    def _write(self, step: int, record: dict) -> None:
        if self._tensorboard is None:
            return
        for name, value in record.items():
            for i, each in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(each, (int, float)) and name != "step":
                    self._tensorboard.add_scalar(f"{name}/{i}" if isinstance(value, list) else name, each, step)


def _shown(record: dict) -> str:
    share = " ".join(f"{top1:.2f}/{top5:.2f}" for top1, top5 in zip(record["top1"], record["top5"]))
    accepted = " ".join(f"{share:.2f}" for share in record["accepted"])
    length = f"accepted {accepted}, accepted length {record['accepted_length']:.2f}"
    return f"by drafted token top-1/top-5 {share}, {length}"


def _tensorboard(folder: pathlib.Path) -> Any:
    try:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingPackage("--log-to tensorboard needs the package tensorboardX: pip install tensorboardX") from None
    return SummaryWriter(str(folder / "tensorboard"))


def plot(records: Sequence[dict], path: pathlib.Path) -> bool:
    """Plots loss, accuracy and acceptance of each drafted token, and the accepted length, by step.

    Returns:
        False if matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    trained = [r for r in records if "loss" in r]
    held = [(r["step"], r["held_out"]) for r in records if "held_out" in r]
    figure, axes = pyplot.subplots(1, 4, figsize=(17, 4), constrained_layout=True)
    for axis, name in zip(axes, ("loss_by_token", "top1", "accepted", "accepted_length")):
        axis.set_title(f"{name.replace('_', ' ')}: line in training, dots held out")
        axis.set_xlabel("step")
        for rows, style in (([(r["step"], r) for r in trained], "-"), (held, "o")):
            if not rows:
                continue
            steps = [step for step, _ in rows]
            values = [r[name] if isinstance(r[name], list) else [r[name]] for _, r in rows]
            for i, line in enumerate(zip(*values)):
                axis.plot(steps, line, style, color=f"C{i}", label=f"token {i + 1}" if style == "-" else None)
        if name != "accepted_length":
            axis.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
