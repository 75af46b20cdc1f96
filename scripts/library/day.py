"""Runs the parts of a long measurement in order, each in its own process, within one deadline.

A part that crashes or hangs does not affect the others. Every part has a limit in seconds; time that a part leaves
unused goes to the parts after it, up to half of their own. Near the deadline parts are cut or skipped, and the journal
says so. Three files are kept up to date while a part runs, so that a run that is killed keeps everything until then:

- `day.json`: the journal, with the plan and a line for each part.
- `records.json`: the records that the parts wrote with `--record`, by file name.
- `log.txt`: the output of all parts.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspec.bench.measurements import RECORDS_FOLDER

JOURNAL, RECORDS, LOG = "day.json", "records.json", "log.txt"
POLL_S = 0.2
SAVE_S = 2.0
"""Seconds between two looks at the records of a running part."""
GRACE_S = 5.0
"""Seconds between the request to end and the end by force of a part that is out of time."""
SPARE_TIMES = 1.5
"""How many times its limit a part may take, if earlier parts left time unused."""
LEAST_S = 15.0
"""Seconds below which a part is not begun: importing JAX and compiling one program takes longer."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of the day.

    Attributes:
        name: its name.
        answers: the question that it answers, for the journal.
        command: the module to run and its arguments.
        limit_s: its seconds.
        needs: files that must exist, by what they are; without them the part is skipped.
    """

    name: str
    answers: str
    command: tuple[str, ...]
    limit_s: float
    needs: Mapping[str, pathlib.Path] = dataclasses.field(default_factory=dict)


class Day:
    """Runs parts and keeps the journal.

    Attributes:
        out: the folder of the results.
        parts: the parts, the most valuable first.
        lines: the journal's line for each part that was run or skipped.
        environment: the environment of the parts.
    """

    def __init__(
        self,
        out: pathlib.Path,
        parts: Sequence[Part],
        seconds: float,
        about: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prepares the folder; the deadline counts from now.

        Args:
            out: the folder of the results, which is made if it is missing.
            parts: the parts, the most valuable first.
            seconds: the seconds of the whole run.
            about: further entries of the journal.
            environment: the environment of the parts; None for this process's environment.
            clock: returns seconds.

        Raises:
            ValueError: the folder has the results of another run.
        """
        self.out, self.parts, self.seconds, self.lines = out, parts, seconds, []
        self._about, self._clock, self._records = dict(about), clock, {}
        self.environment = dict(os.environ if environment is None else environment)
        self._begun = clock()
        self._started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        out.mkdir(parents=True, exist_ok=True)
        if (out / JOURNAL).exists():
            raise ValueError(f"{out} has the results of another run; name a new folder")
        self._save()

    def describe(self, **entries: Any) -> None:
        """Adds entries to the journal."""
        self._about |= entries
        self._save()

    @property
    def left_s(self) -> float:
        """The seconds until the deadline."""
        return self.seconds - (self._clock() - self._begun)

    def run(self) -> bool:
        """Runs all parts; returns whether each of them was done."""
        planned = self._clock()  # what came before, such as an installation, is taken from the last parts
        with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
            for number, part in enumerate(self.parts):
                planned += part.limit_s
                missing = [what for what, path in part.needs.items() if not path.exists()]
                limit = min(planned - self._clock(), SPARE_TIMES * part.limit_s, self.left_s - GRACE_S)
                if missing:
                    self._end(part, "skipped", 0.0, f"missing: {', '.join(missing)}")
                elif limit < min(LEAST_S, part.limit_s / 2):
                    self._end(part, "skipped", 0.0, f"{max(limit, 0):.0f} s were left")
                else:
                    work = pathlib.Path(folder) / f"{number}-{part.name}"
                    work.mkdir()
                    self._run(part, work, limit)
        self.describe(ended=True)
        return all(line["status"] == "done" for line in self.lines)

    def _run(self, part: Part, work: pathlib.Path, limit: float) -> None:
        """Runs one part in a folder of its own, and ends it after `limit` seconds."""
        command, start = [sys.executable, "-m", *part.command], self._clock()
        self._say(f"{part.name}: begins, at most {limit:.0f} s: {' '.join(part.command)}")
        with open(self.out / LOG, "a") as log:
            mark = log.tell()
            process = subprocess.Popen(
                command, cwd=work, env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                cut = not self._wait(process, work, start + limit)
                last = last_line(self.out / LOG, mark)  # before an answer to the signal
            finally:
                end(process)
        self._collect(work)
        seconds = self._clock() - start
        if cut:
            self._end(part, "cut", seconds, f"out of time after {limit:.0f} s; the last line was: {last}")
        elif process.returncode:
            self._end(part, "failed", seconds, f"exit status {process.returncode}: {last}")
        else:
            self._end(part, "done", seconds)

    def _wait(self, process: subprocess.Popen, work: pathlib.Path, until: float) -> bool:
        """Collects records until the process ends; returns False if it has not ended by then."""
        saved = self._clock()
        while process.poll() is None:
            if self._clock() >= until:
                return False
            time.sleep(POLL_S)
            if self._clock() - saved >= SAVE_S:
                self._collect(work)
                saved = self._clock()
        return True

    def _collect(self, work: pathlib.Path) -> None:
        """Takes over the records of a part; a record that is being written is taken later."""
        found = {}
        for path in sorted((work / RECORDS_FOLDER).glob("*.json")):
            try:
                found[path.name] = json.loads(path.read_text())
            except ValueError:
                continue
        if any(self._records.get(name) != record for name, record in found.items()):
            self._records |= found
            write_json(self.out / RECORDS, self._records)

    def _end(self, part: Part, status: str, seconds: float, reason: str | None = None) -> None:
        """Writes a part's line of the journal."""
        line = {"part": part.name, "status": status, "seconds": round(seconds, 1)}
        self.lines.append(line if reason is None else line | {"reason": reason})
        self._say(f"{part.name}: {status} after {seconds:.0f} s" + (f": {reason}" if reason else ""))
        self._save()

    def _say(self, text: str) -> None:
        print(text, flush=True)
        with open(self.out / LOG, "a") as log:
            log.write(f"\n=== {text}\n")

    def _save(self) -> None:
        plan = [{"part": part.name, "answers": part.answers, "limit_s": part.limit_s} for part in self.parts]
        spent = round(self._clock() - self._begun, 1)
        times = {"started": self._started, "limit_s": self.seconds, "spent_s": spent}
        write_json(self.out / JOURNAL, self._about | times | {"plan": plan, "parts": self.lines})


def end(process: subprocess.Popen) -> None:
    """Ends a process and the processes that it started, which share its group."""
    for sign, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        with contextlib.suppress(subprocess.TimeoutExpired):  # the second signal also ends its children
            process.wait(patience)
    process.wait()


def last_line(path: pathlib.Path, start: int) -> str:
    """Returns the last line of text that a file has after a byte, at most 300 characters of it."""
    with open(path, "rb") as stream:
        stream.seek(start)
        lines = stream.read().decode(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "nothing was printed")


def write_json(path: pathlib.Path, content: Any) -> None:
    """Writes a file at once, so that a reader finds the old or the new content."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(part, path)
