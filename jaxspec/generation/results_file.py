"""The file to which a long job writes each finished text, and from which it resumes."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.errors import InvalidConfig, StorageError, shown
from jaxspec.generation import fingerprint
from jaxspec.generation.job import Job
from jaxspec.generation.output import Generation
from jaxspec.storage import writing
from jaxspec.storage.plain import plain, typed
from jaxspec.storage.reading import check_path

RESULTS_VERSION = 2
JOB_SUFFIX = ".job.json"
"""Suffix of the file that describes the job, appended to the name of the results file."""
_BEGIN, _JOB_BEGIN = b'{"index": ', b'{"format": "jaxspec-texts"'
_LINE = re.compile(rb'(\{"index": .*), "checksum": "([0-9a-f]{16})"\}\r?', re.DOTALL)
_END = re.compile(rb'"checksum": "[0-9a-f]{16}"\}')


class ResultsFile:
    """A file of JSON lines, one per finished text, with a file `OUT.job.json` that describes the job.

    Each line is written when its text is finished and contains a whole `Generation`: the `index` of the prompt and of
    the `sample`, the `prompt` as passed by the user (text, messages or token ids), `text`, `tokens`, `finish_reason`,
    `stats`, log-probabilities (null unless requested), and a `checksum` over the line and the job. All lines have the
    same keys. After the last text, the lines are sorted by prompt in one atomic step.

    The same job resumes from the two files: it keeps every complete line, and drops a truncated last line of a killed
    process. If `OUT.job.json` is missing or damaged, it is written again, provided that the lines belong to this job. A
    results file belongs to one job; see `jaxspec.generation.fingerprint` for what determines its texts.

    Attributes:
        done: the finished texts, by row.

    Raises:
        InvalidConfig: the file belongs to another job, was edited, or is not a results file. It is left unchanged.
        StorageError: a file cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike, job: Job, stops: tuple[str, ...]):
        self.done = dict[int, Generation]()
        self._job, self._lines = job, dict[int, tuple[int, int]]()  # offset and size of each row's line
        self._path = _resolve(path)
        self._job_path = self._path.with_name(self._path.name + JOB_SUFFIX)
        about = json.loads(json.dumps(fingerprint.describe_job(job, stops)))
        self._digest = fingerprint.digest([RESULTS_VERSION, about])
        try:
            self._open(about)
            for part in map(writing.part_of, (self._path, self._job_path)):
                part.unlink(missing_ok=True)
        except OSError as error:
            why = writing.reason(error, self._path.parent)
            raise StorageError(f"{error.filename or self._path} cannot be read or written: {why}") from None
        self._sort()

    def append(self, row: int, text: Generation) -> None:
        """Appends a text, and sorts the lines if it is the last text.

        Raises:
            StorageError: the line cannot be written; the file then ends with the last complete line.
        """
        line, written = self._line(text), 0
        try:
            with self._path.open("ab", buffering=0) as file:
                begin = file.tell()
                try:
                    while written < len(line):
                        written += file.write(line[written:])
                except BaseException:
                    with contextlib.suppress(OSError):  # a truncated line is also dropped when the job resumes
                        file.truncate(begin)
                    raise
        except OSError as error:
            why = writing.reason(error, self._path.parent)
            raise StorageError(f"{self._path} cannot be written: {why}; the same call resumes the job") from None
        self._lines[row] = begin, len(line)
        self._sort()

    def _open(self, about: dict) -> None:
        """Reads both files, if they exist, and prepares them for appending lines."""
        existing, damage = self._read_job()
        exists = self._path.exists()
        first = b""
        if exists:
            with self._path.open("rb") as file:
                first = file.readline()
        lines = first.endswith(b"\n") or _LINE.fullmatch(first) is not None
        if existing is None and first and not _is_truncated(first) and not (lines and first.startswith(_BEGIN)):
            raise InvalidConfig(f"{self._path} is not a results file of jaxspec; choose a new file")
        if lines and existing is not None and (different := fingerprint.find_difference(existing, about)):
            name, before, now = different
            values = "" if isinstance(now, (str, list)) else f" ({before!r:.40} in the file, {now!r:.40} now)"
            label = name if "." in name else name.replace("_", " ")
            raise InvalidConfig(
                f"{self._path} has texts of another {label}{values}; choose a new file, or remove it and "
                f"{self._job_path.name}"
            )
        size = self._read_lines(damage) if exists else 0
        if existing != about:
            content = {"format": "jaxspec-texts", "version": RESULTS_VERSION, "job": self._digest, "about": about}
            text = json.dumps(content, indent=1) + "\n"
            writing.write_whole(self._job_path, lambda file: file.write(text.encode()))
        if exists and size < self._path.stat().st_size:
            os.truncate(self._path, size)
        if exists and size and self._last_byte() != b"\n":
            with self._path.open("ab") as file:
                file.write(b"\n")
        if not exists:
            self._path.touch()

    def _read_job(self) -> tuple[dict | None, str]:
        """Reads the description of the job, or returns None and the reason why it cannot be read."""
        try:
            data = self._job_path.read_bytes()
        except FileNotFoundError:
            return None, f"{self._job_path.name} is missing"
        try:
            record = json.loads(data)
            about, ours = record["about"], record["format"] == "jaxspec-texts"
            if ours and isinstance(about, dict) and record["job"] == fingerprint.digest([record["version"], about]):
                return about, ""
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        start = data.replace(b"\n ", b"")[: len(_JOB_BEGIN)]
        if not (self._path.exists() or _JOB_BEGIN.startswith(start)):
            raise InvalidConfig(f"{self._job_path} exists and is not the description of a job; choose a new file")
        return None, f"{self._job_path.name} is damaged"

    def _read_lines(self, damage: str) -> int:
        """Reads every line; returns the size of the file up to the end of the last complete line."""
        size = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                complete = line.endswith(b"\n")
                if not complete and _is_truncated(line):
                    break
                try:
                    row, text = self._parse(line.removesuffix(b"\n"))
                    if row in self.done:
                        raise ValueError(f"it is a second text of prompt {text.prompt}, sample {text.sample}")
                except (ValueError, KeyError, OverflowError, RecursionError) as error:
                    why = f"{error or type(error).__name__}" + (f", and {damage}" if damage else "")
                    raise InvalidConfig(
                        f"{self._path}, line {number}: {why:.200}; remove that line to generate its text again, or "
                        "choose a new file"
                    ) from None
                self.done[row] = text
                self._lines[row] = size, len(line) + (not complete)
                size += len(line)
        return size

    def _last_byte(self) -> bytes:
        with self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1)

    def _line(self, text: Generation) -> bytes:
        record: dict[str, Any] = {"index": text.prompt, "sample": text.sample, "prompt": self._prompt(text.prompt)}
        for field in _fields():
            if field not in ("prompt", "sample"):
                record[field] = plain(getattr(text, field))
        record["stats"] = text.stats.as_dict()
        body = json.dumps(record, allow_nan=False).encode()
        return body[:-1] + f', "checksum": "{self._checksum(body[:-1])}"}}\n'.encode()

    def _prompt(self, index: int) -> Any:
        """Returns a prompt as passed by the user: text, messages, messages with tools, or token ids."""
        prompt = self._job.prompts[index]
        if isinstance(prompt, str):
            return prompt
        if not isinstance(prompt, Mapping) and not isinstance(prompt[0], Mapping):
            return self._job.prompt(index * self._job.samples)
        messages = prompt["messages"] if isinstance(prompt, Mapping) else prompt
        plainer = [{name: message[name] for name in ("role", "content") if name in message} for message in messages]
        for content in (prompt, plainer):  # other keys may have values that JSON cannot represent
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                return json.loads(json.dumps(content, allow_nan=False, default=_as_plain))
        return self._job.turns[index * self._job.samples].text

    def _checksum(self, body: bytes) -> str:
        return hashlib.sha256(self._digest.encode() + body).hexdigest()[:16]

    def _parse(self, line: bytes) -> tuple[int, Generation]:
        """Returns the row and the text of a line.

        Raises:
            ValueError: the line is invalid; the message says why.
        """
        parts = _LINE.fullmatch(line)
        if parts is None:
            raise ValueError("it is not a line of a results file")
        body, checksum = parts.groups()
        if self._checksum(body) != checksum.decode():
            raise ValueError("it does not match its checksum, so it was edited or written by another job")
        record = json.loads(body + b"}")
        values = {name: typed(record[name], hint, name) for name, hint in _fields().items() if name != "prompt"}
        index, job = typed(record["index"], int, "index"), self._job
        row = index * job.samples + values["sample"]
        if not (0 <= index < len(job.prompts) and 0 <= values["sample"] < job.samples):
            raise ValueError(
                f"it belongs to prompt {index}, sample {values['sample']}; there are {len(job.prompts)} prompts with "
                f"{job.samples} samples each"
            )
        return row, Generation(prompt=index, prompt_tokens=job.prompt(row), **values)

    def _sort(self) -> None:
        """Sorts the lines by prompt, once all texts are written."""
        order = sorted(self._lines)
        if len(order) < self._job.rows or order == list(self._lines):
            return

        def write(file: Any) -> None:
            with self._path.open("rb") as source:
                for row in order:
                    begin, size = self._lines[row]
                    source.seek(begin)
                    file.write(source.read(size))

        try:
            mode = self._path.stat().st_mode
            writing.write_whole(self._path, write)
            self._path.chmod(mode)
        except (OSError, StorageError) as error:
            raise StorageError(f"all texts are written, but not sorted by prompt: {error}") from None
        begin = 0
        for row in order:
            size = self._lines.pop(row)[1]
            self._lines[row] = begin, size
            begin += size


def _resolve(path: Any) -> pathlib.Path:
    """Returns the path of a results file, with links resolved."""
    try:
        resolved = check_path(path, "out").resolve()
        if resolved.exists() and not resolved.is_file():
            raise InvalidConfig(f"out must be the path of a file, but {path} is not a file")
        if not resolved.parent.is_dir():
            raise InvalidConfig(f"out={str(path)!r}: there is no folder {resolved.parent}; create it first")
    except OSError as error:  # a directory without permission
        raise InvalidConfig(f"out={shown(str(path))} cannot be used: {error.strerror}") from None
    return resolved


def _as_plain(value: Any) -> Any:
    """Returns mappings and sequences of any type as dicts and lists, for JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError


def _is_truncated(line: bytes) -> bool:
    """Returns whether this may be a line that a killed process wrote in part."""
    return _BEGIN.startswith(line[: len(_BEGIN)]) and not _END.search(line)


@functools.cache
def _fields() -> dict[str, Any]:
    """Returns the types of the fields of a `Generation` that a line contains."""
    hints = typing.get_type_hints(Generation)
    return {f.name: hints[f.name] for f in dataclasses.fields(Generation) if f.name != "prompt_tokens"}
