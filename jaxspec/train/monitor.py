"""Shows the progress of a run: a progress bar, a plot of the log, and TensorBoard."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxspec.errors import MissingPackage, StorageError
from jaxspec.storage.writing import reason, write_whole
from jaxspec.train import log
from jaxspec.train.log import Watch

PLOT_FILE = "plot.png"
PHASE_LINES, STEP_LINES = 4, 20
"""Numbers of lines of progress on a console without a progress bar: the number for each phase before training, and the
largest number for training, whose lines are evenly spaced in the log."""


class Monitor:
    """A context that shows the progress of a run and plots its log at the end.

    Attributes:
        watch: the callbacks of the run.
    """

    def __init__(self, folder: pathlib.Path, loggers: Sequence[str] = (), log_every: int = 1):
        """Takes the folder of the run, the names of other loggers ("tensorboard"), and the steps between log lines."""
        self._folder, self._stepped, self._log_every = folder, False, log_every
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
        """Ends the display. A failure is only reported, so that it does not hide the error that ended the run."""
        if self._progress is not None:
            self._optional("the progress bar", self._progress.stop)
        if self._tensorboard is not None:
            self._optional("the TensorBoard log", self._tensorboard.close)
        if self._stepped:
            self._optional(f"{self._folder / PLOT_FILE}", self._plot)

    def _plot(self) -> None:
        if records := log.read_log(self._folder / log.LOG_FILE)[0]:
            plot_log(records, self._folder / PLOT_FILE)

    def _optional(self, what: str, do: Callable[[], Any]) -> bool:
        """Calls a function that no result depends on, and returns whether it succeeded."""
        try:
            do()
        except Exception as error:  # other packages write here, and may raise any error on a full disk
            self._say(f"{what} is incomplete: {' '.join(str(error).split()) or type(error).__name__}")
            return False
        return True

    def _say(self, line: str) -> None:
        try:
            self._console.print(line, style="dim", soft_wrap=True, markup=False, highlight=False)
        except BrokenPipeError:  # the reader of the output has ended, so the command ends as well
            raise
        except OSError:  # standard error is a file on a full disk
            pass

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
        elif step == steps or step % (self._log_every * -(-steps // (self._log_every * STEP_LINES))) == 0:
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
        """Returns True if another one of the `PHASE_LINES` parts is done."""
        part = done * PHASE_LINES // total
        passed = part > self._tasks.get(name, 0)
        self._tasks[name] = max(part, self._tasks.get(name, 0))
        return passed

    def _write(self, step: int, record: dict) -> None:
        if self._tensorboard is None:
            return
        for name, value in record.items():
            for i, each in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(each, (int, float)) and name != "step":
                    label = f"{name}/{i}" if isinstance(value, list) else name
                    add = functools.partial(self._tensorboard.add_scalar, label, each, step)
                    if not self._optional("the TensorBoard log", add):
                        self._tensorboard = None
                        return


def _shown(record: dict) -> str:
    share = " ".join(f"{top1:.2f}/{top5:.2f}" for top1, top5 in zip(record["top1"], record["top5"]))
    accepted = " ".join(f"{share:.2f}" for share in record["accepted"])
    length = f"accepted {accepted}, accepted length {record['accepted_length']:.2f}"
    return f"by drafted token top-1/top-5 {share}, {length}"


def _tensorboard(folder: pathlib.Path) -> Any:
    try:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingPackage(
            f"--log-to tensorboard needs the package tensorboardX, which cannot be imported here ({error}); run "
            "`pip install tensorboardX`"
        ) from None
    place = folder / "tensorboard"
    try:
        return SummaryWriter(str(place))
    except OSError as error:
        raise StorageError(f"{place} cannot be written: {reason(error, place)}") from None


def plot_log(records: Sequence[dict], path: pathlib.Path) -> bool:
    """Plots loss, accuracy and acceptance of each drafted token, and the accepted length, by step.

    Returns:
        False if matplotlib is not installed.

    Raises:
        StorageError: the file cannot be written; an existing one is unchanged.
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
    try:
        write_whole(path, lambda file: figure.savefig(file, format="png", dpi=110))
    finally:
        pyplot.close(figure)
    return True
