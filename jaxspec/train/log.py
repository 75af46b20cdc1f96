"""What is told and written of a run while it goes."""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

from jaxspec.errors import TrainingError
from jaxspec.train.disk import write_whole

LOG, SPEED = "log.jsonl", "speed.jsonl"


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
    """The lines up to a step, and those that come."""

    def __init__(self, folder: pathlib.Path, step: int):
        self.records: list[dict] = []
        self._paths = [folder / name for name in (LOG, SPEED)]
        for path in self._paths:
            lines = []
            if path.exists():
                for line in path.read_text("utf-8", "replace").splitlines():
                    try:
                        record = json.loads(line)
                    except ValueError:  # cut by a kill
                        break
                    if record["step"] > step:
                        break
                    lines.append(record)
            if path.name == LOG:
                self.records = lines
            # Whole or not at all: a run may be killed here, too.
            text = "".join(json.dumps(record) + "\n" for record in lines)
            write_whole(path, lambda file, text=text: file.write(text.encode()))

    def add(self, record: dict) -> None:
        self.records.append(record)
        self._append(self._paths[0], record)

    def speed(self, record: dict) -> None:
        self._append(self._paths[1], record)

    @staticmethod
    def _append(path: pathlib.Path, record: dict) -> None:
        try:
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise TrainingError(f"{path}: cannot be written: {error.strerror}") from None
