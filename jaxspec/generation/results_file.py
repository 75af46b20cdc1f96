"""The file that a long job writes its texts to as they end, and resumes from."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import typing
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import InvalidConfig, StorageError, shown
from jaxspec.generation import fingerprint
from jaxspec.generation.job import Job
from jaxspec.generation.output import Generation
from jaxspec.storage import writing
from jaxspec.storage.plain import plain, typed
from jaxspec.storage.reading import check_path

VERSION = 2
BESIDE = ".job.json"
"""What the name of the job's file adds to that of the file of texts."""
_BEGIN, _JOB_BEGIN = b'{"index": ', b'{"format": "jaxspec-texts"'
_LINE = re.compile(rb'(\{"index": .*), "checksum": "([0-9a-f]{16})"\}\r?', re.DOTALL)
_END = re.compile(rb'"checksum": "[0-9a-f]{16}"\}')


class Journal:
    """A file of JSON lines, one per text, and beside it `OUT.job.json`, which says what job they are of.

    A line is written as its text ends, and holds everything of a `Generation`: the `index` of the prompt and of the
    `sample`, the `prompt` as it was given (text, messages or token ids), `text`, `tokens`, `finish_reason`, `stats`,
    log-probabilities where they were asked for, else null, and a `checksum` over the line and the job. All lines have
    the same keys. When the last text is written, the lines are put into the order of the prompts, in one step.

    The same job resumes from the two files: it keeps every whole line, and drops what a killed process left of the last
    one. If the job's file is lost or damaged, it is written again if the lines are this job's. A file is for one job;
    see `jaxspec.generation.fingerprint` for what decides its texts.

    Attributes:
        done: the texts that are there, by row.

    Raises:
        InvalidConfig: the file is another job's, was changed, or is no such file. It is left as it is.
        StorageError: a file cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike, job: Job, stops: tuple[str, ...]):
        self.done = dict[int, Generation]()
        self._job, self._places = job, dict[int, tuple[int, int]]()  # of each row's line: where it begins, its size
        self._path = _checked(path)
        self._beside = self._path.with_name(self._path.name + BESIDE)
        about = json.loads(json.dumps(fingerprint.describe(job, stops)))
        self._digest = fingerprint.digest([VERSION, about])
        try:
            self._open(about)
            for part in map(writing.part_of, (self._path, self._beside)):
                part.unlink(missing_ok=True)
        except OSError as error:
            why = writing.reason(error, self._path.parent)
            raise StorageError(f"{error.filename or self._path} cannot be read or written: {why}") from None
        self._put_in_order()

    def append(self, row: int, text: Generation) -> None:
        """Writes a text down, and puts the lines in order if it was the last one.

        Raises:
            StorageError: the line cannot be written; the file ends with the last whole one.
        """
        line, written = self._line(text), 0
        try:
            with self._path.open("ab", buffering=0) as file:
                begin = file.tell()
                try:
                    while written < len(line):
                        written += file.write(line[written:])
                except BaseException:
                    with contextlib.suppress(OSError):  # what is left of a line is also dropped when the job resumes
                        file.truncate(begin)
                    raise
        except OSError as error:
            why = writing.reason(error, self._path.parent)
            raise StorageError(f"{self._path} cannot be written: {why}; the same call resumes the job") from None
        self._places[row] = begin, len(line)
        self._put_in_order()

    def _open(self, about: dict) -> None:
        """Reads what is there, and leaves both files as a new line needs them."""
        there, damage = self._read_job()
        held = self._path.exists()
        first = b""
        if held:
            with self._path.open("rb") as file:
                first = file.readline()
        lines = first.endswith(b"\n") or _LINE.fullmatch(first) is not None
        if there is None and first and not _torn(first) and not (lines and first.startswith(_BEGIN)):
            raise InvalidConfig(f"{self._path} holds something else than jaxspec's texts; name a new file")
        if lines and there is not None and (odd := fingerprint.difference(there, about)):
            name, was, now = odd
            told = "" if isinstance(now, (str, list)) else f" ({was!r:.40} there, {now!r:.40} now)"
            shown = name if "." in name else name.replace("_", " ")
            raise InvalidConfig(
                f"{self._path} holds texts of another {shown}{told}; name a new file, or remove it and "
                f"{self._beside.name}"
            )
        size = self._read_lines(damage) if held else 0
        if there != about:
            content = {"format": "jaxspec-texts", "version": VERSION, "job": self._digest, "about": about}
            writing.write_whole(self._beside, lambda file: file.write((json.dumps(content, indent=1) + "\n").encode()))
        if held and size < self._path.stat().st_size:
            os.truncate(self._path, size)
        if held and size and self._last_byte() != b"\n":
            with self._path.open("ab") as file:
                file.write(b"\n")
        if not held:
            self._path.touch()

    def _read_job(self) -> tuple[dict | None, str]:
        """What the job's file describes, or None and why nothing can be read from it."""
        try:
            data = self._beside.read_bytes()
        except FileNotFoundError:
            return None, f"{self._beside.name} is missing"
        try:
            found = json.loads(data)
            about, ours = found["about"], found["format"] == "jaxspec-texts"
            if ours and isinstance(about, dict) and found["job"] == fingerprint.digest([found["version"], about]):
                return about, ""
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        start = data.replace(b"\n ", b"")[: len(_JOB_BEGIN)]
        if not (self._path.exists() or _JOB_BEGIN.startswith(start)):
            raise InvalidConfig(f"{self._beside} is in the way, and does not describe jaxspec's texts; name a new file")
        return None, f"{self._beside.name} is damaged"

    def _read_lines(self, damage: str) -> int:
        """Takes every line; the size of the file up to the end of the last one."""
        size = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                whole = line.endswith(b"\n")
                if not whole and _torn(line):
                    break
                try:
                    row, text = self._take(line.removesuffix(b"\n"))
                    if row in self.done:
                        raise ValueError(f"it is a second text of prompt {text.prompt}, sample {text.sample}")
                except (ValueError, KeyError, OverflowError, RecursionError) as error:
                    why = f"{error or type(error).__name__}" + (f", and {damage}" if damage else "")
                    raise InvalidConfig(
                        f"{self._path}, line {number}: {why:.200}; remove that line, and its text is written again, or "
                        "name a new file"
                    ) from None
                self.done[row] = text
                self._places[row] = size, len(line) + (not whole)
                size += len(line)
        return size

    def _last_byte(self) -> bytes:
        with self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1)

    def _line(self, text: Generation) -> bytes:
        record: dict[str, Any] = {"index": text.prompt, "sample": text.sample, "prompt": self._given(text.prompt)}
        for field in _fields():
            if field not in ("prompt", "sample"):
                record[field] = plain(getattr(text, field))
        record["stats"] = text.stats.as_dict()
        body = json.dumps(record, allow_nan=False).encode()
        return body[:-1] + f', "checksum": "{self._checksum(body[:-1])}"}}\n'.encode()

    def _given(self, index: int) -> Any:
        """The prompt as it was given: text, messages or token ids."""
        given = self._job.given[index]
        if isinstance(given, str):
            return given
        if not isinstance(given[0], Mapping):
            return self._job.ids[index]
        messages = [dict(message) for message in given]
        try:
            return json.loads(json.dumps(messages, allow_nan=False))
        except (ValueError, TypeError, RecursionError):  # of messages only the text is sure to be JSON
            return [{name: message[name] for name in ("role", "content")} for message in messages]

    def _checksum(self, body: bytes) -> str:
        return hashlib.sha256(self._digest.encode() + body).hexdigest()[:16]

    def _take(self, line: bytes) -> tuple[int, Generation]:
        """The row and the text of a line.

        Raises:
            ValueError: saying what is wrong with it.
        """
        parts = _LINE.fullmatch(line)
        if parts is None:
            raise ValueError("it is no line of jaxspec's texts")
        body, checksum = parts.groups()
        if self._checksum(body) != checksum.decode():
            raise ValueError("it does not match its checksum, so it was changed, or is of another job")
        record = json.loads(body + b"}")
        values = {name: typed(record[name], hint, name) for name, hint in _fields().items() if name != "prompt"}
        index, job = typed(record["index"], int, "index"), self._job
        row = index * job.samples + values["sample"]
        if not (0 <= index < len(job.ids) and 0 <= values["sample"] < job.samples):
            raise ValueError(
                f"it is of prompt {index}, sample {values['sample']}; there are {len(job.ids)} prompts with "
                f"{job.samples} samples each"
            )
        return row, Generation(prompt=index, prompt_tokens=job.prompt(row), **values)

    def _put_in_order(self) -> None:
        """Once all texts are there, moves the lines into the order of the prompts."""
        order = sorted(self._places)
        if len(order) < self._job.rows or order == list(self._places):
            return

        def write(file: Any) -> None:
            with self._path.open("rb") as source:
                for row in order:
                    begin, size = self._places[row]
                    source.seek(begin)
                    file.write(source.read(size))

        try:
            mode = self._path.stat().st_mode
            writing.write_whole(self._path, write)
            self._path.chmod(mode)
        except (OSError, StorageError) as error:
            raise StorageError(f"all texts are written, but not in the order of the prompts: {error}") from None
        begin = 0
        for row in order:
            size = self._places.pop(row)[1]
            self._places[row] = begin, size
            begin += size


def _checked(path: Any) -> pathlib.Path:
    """The place of a file of texts, links followed."""
    given = check_path(path, "out")
    try:
        place = given.resolve()
        if place.exists() and not place.is_file():
            raise InvalidConfig(f"out must be the path of a file, {path} is something else")
        if not place.parent.is_dir():
            raise InvalidConfig(f"out={str(path)!r}: there is no folder {place.parent}; make it first")
    except OSError as error:  # a folder that may not be looked into
        raise InvalidConfig(f"out={shown(str(path))} cannot be used: {error.strerror}") from None
    return place


def _torn(line: bytes) -> bool:
    """Whether this may be what a killed process left of a line."""
    return _BEGIN.startswith(line[: len(_BEGIN)]) and not _END.search(line)


@functools.cache
def _fields() -> dict[str, Any]:
    """The fields of a `Generation` that a line holds, and their types."""
    hints = typing.get_type_hints(Generation)
    return {f.name: hints[f.name] for f in dataclasses.fields(Generation) if f.name != "prompt_tokens"}
