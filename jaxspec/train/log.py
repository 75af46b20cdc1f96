"""What is told and written of a run while it goes."""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

from jaxspec.errors import StorageError, TrainingError
from jaxspec.storage.writing import reason, write_whole
from jaxspec.train.manifest import LOG

SPEED, UNDONE = "speed.jsonl", "undone.jsonl"


@dataclasses.dataclass
class Watch:
    """What is told of a run while it goes; all may be left out.

    Attributes:
        say: called with a line of text.
        phase: called with (what, done, total) of what comes before training.
        step: called with (step, steps, the newest line of the log).
    """

    say: Callable[[str], Any] = lambda line: None
    phase: Callable[[str, int, int], Any] = lambda what, done, total: None
    step: Callable[[int, int, dict], Any] = lambda step, steps, record: None


class Log:
    """The lines up to a step, and those that come.

    Lines of later steps, which are taken again, are moved to `undone.jsonl`: nothing that was measured is lost.

    Raises:
        TrainingError: a line is damaged, or a file cannot be read; it is as it was.
        StorageError: a file cannot be written.
    """

    def __init__(self, folder: pathlib.Path, step: int):
        self._paths = [folder / name for name in (LOG, SPEED)]
        found = [read(path) for path in self._paths]
        for path, (records, cut) in zip(self._paths, found):
            kept = [record for record in records if record["step"] <= step]
            if undone := [record for record in records if record["step"] > step]:
                self._append(folder / UNDONE, *undone)
            if undone or cut or not path.exists():
                text = "".join(map(_line, kept))
                write_whole(path, lambda file, text=text: file.write(text.encode()))
        self.records = [record for record in found[0][0] if record["step"] <= step]

    def add(self, record: dict) -> None:
        self.records.append(record)
        self._append(self._paths[0], record)

    def speed(self, record: dict) -> None:
        self._append(self._paths[1], record)

    @staticmethod
    def _append(path: pathlib.Path, *records: dict) -> None:
        try:
            with path.open("a") as file:
                file.write("".join(map(_line, records)))
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {reason(error, path.parent)}") from None


def _line(record: dict) -> str:
    return json.dumps(record) + "\n"


def read(path: pathlib.Path) -> tuple[list[dict], bool]:
    """The records of a file, and whether a kill has cut its last line."""
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
                raise ValueError("it names no step")
        except (ValueError, RecursionError) as error:
            raise TrainingError(
                f"{path}, line {number}: is damaged ({error}); move the file away to go on without its lines"
            ) from None
        records.append(record)
    return records, bool(last)
