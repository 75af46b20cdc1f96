"""Progress of a run: callbacks, and the log on disk."""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

from jaxspec.backend.processes import alone, process_number
from jaxspec.errors import StorageError, TrainingError
from jaxspec.storage.writing import reason, write_whole
from jaxspec.train.manifest import LOG_FILE

SPEED_FILE, UNDONE_FILE = "speed.jsonl", "undone.jsonl"


@dataclasses.dataclass
class Watch:
    """Callbacks for the progress of a run; each is optional.

    Attributes:
        say: called with a line of text.
        phase: called with (name, done, total) while answers and features are computed.
        step: called with (step, steps, line) for every line of the log.
    """

    say: Callable[[str], Any] = lambda line: None
    phase: Callable[[str, int, int], Any] = lambda what, done, total: None
    step: Callable[[int, int, dict], Any] = lambda step, steps, record: None


class Log:
    """The log of a run: the lines up to the step that the run continues after, and the lines that are added.

    Lines of later steps are moved to `undone.jsonl`, because the run takes these steps again. Of several processes,
    process 0 writes the files.

    Attributes:
        records: the lines of `log.jsonl`.

    Raises:
        TrainingError: a line is damaged, or a file cannot be read; nothing is changed.
        StorageError: a file cannot be written.
    """

    def __init__(self, folder: pathlib.Path, step: int):
        """Opens the log of a run that continues after a step."""
        self._paths = [folder / name for name in (LOG_FILE, SPEED_FILE)]
        self.records: list[dict] = alone(lambda: self._open(folder, step))

    def _open(self, folder: pathlib.Path, step: int) -> list[dict]:
        """Moves later lines, and returns the lines that remain."""
        logs = [read_log(path) for path in self._paths]
        for path, (records, cut) in zip(self._paths, logs):
            kept = [record for record in records if record["step"] <= step]
            if undone := [record for record in records if record["step"] > step]:
                self._append(folder / UNDONE_FILE, *undone)
            if undone or cut or not path.exists():
                text = "".join(map(_line, kept))
                write_whole(path, lambda file, text=text: file.write(text.encode()))
        return [record for record in logs[0][0] if record["step"] <= step]

    def add(self, record: dict) -> None:
        """Adds a line to `log.jsonl`."""
        self.records.append(record)
        self._append(self._paths[0], record)

    def speed(self, record: dict) -> None:
        """Adds a line to `speed.jsonl`."""
        self._append(self._paths[1], record)

    @staticmethod
    def _append(path: pathlib.Path, *records: dict) -> None:
        if process_number():
            return
        try:
            with path.open("a") as file:
                file.write("".join(map(_line, records)))
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {reason(error, path.parent)}") from None


def _line(record: dict) -> str:
    return json.dumps(record) + "\n"


def read_log(path: pathlib.Path) -> tuple[list[dict], bool]:
    """Returns the lines of a file, and whether the last one is incomplete, as it is after the process was killed."""
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], False
    except OSError as error:
        raise TrainingError(f"{path}: cannot be read: {error.strerror}") from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise ValueError("its step is missing")
        except (ValueError, RecursionError) as error:
            raise TrainingError(
                f"{path}, line {number}: is damaged ({error}); remove the file to resume without its lines"
            ) from None
        records.append(record)
    return records, bool(last)
