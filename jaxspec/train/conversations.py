"""What is trained on: conversations and texts out of files, and what in them cannot be read.

A `.jsonl` file has an object per line, a `.json` file a list of them: `{"messages": [{"role": ..., "content": ...}]}`,
ShareGPT's `{"conversations": [{"from": "human", "value": ...}]}`, Spec-Bench's `{"turns": ["...", ...]}`, or
`{"prompt": "..."}`, an `"answer"` or `"response"` beside it where there is one. A `.txt` file is texts, with an empty
line between two of them.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from jaxspec.errors import TrainingError

MAX_LINE = 1 << 22  # bytes; longer ones are no conversation
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One conversation, or a plain text.

    Attributes:
        messages: what was said, `{"role": ..., "content": ...}` each; () for a plain text.
        text: the plain text, or None.
        where: file and line.
    """

    messages: tuple[dict[str, str], ...]
    text: str | None
    where: str


@dataclasses.dataclass(frozen=True)
class BadRow:
    """What could not be read, and why."""

    where: str
    why: str


def read(paths: Sequence[str | os.PathLike], refuse: bool = False) -> tuple[list[Conversation], list[BadRow]]:
    """All conversations of the files, in order, and the rows that are none.

    Args:
        paths: the files.
        refuse: raise at the first bad row instead of listing it.

    Raises:
        TrainingError: a file cannot be read, or has no good row at all; or a row is bad and `refuse` is set.
    """
    good: list[Conversation] = []
    bad: list[BadRow] = []
    for path in map(pathlib.Path, paths):
        before = len(good)
        for where, row in _rows(path):
            try:
                good.append(_conversation(row, where))
            except _Bad as error:
                if refuse:
                    raise TrainingError(f"{where}: {error}; mend it, or let bad rows be reported") from None
                bad.append(BadRow(where, str(error)))
        if len(good) == before:
            why = f"; the first row: {bad[-1].why}" if bad else ""
            raise TrainingError(f"{path}: holds no conversation{why}")
    return good, bad


class _Bad(Exception):
    pass


def _rows(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    """Every row with its place: raw bytes of a line, a parsed object, or a text."""
    try:
        if path.suffix == ".jsonl":
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield f"{path}:{number}", line
        elif path.suffix == ".json":
            rows = json.loads(path.read_bytes())
            if not isinstance(rows, list):
                raise TrainingError(f"{path}: expected a list of conversations, got {type(rows).__name__}")
            for number, row in enumerate(rows):
                yield f"{path}[{number}]", row
        elif path.suffix == ".txt":
            texts = [text.strip() for text in path.read_text("utf-8").split("\n\n")]
            for number, text in enumerate(filter(None, texts), start=1):
                yield f"{path}, text {number}", text
        else:
            raise TrainingError(f"{path}: expected .jsonl, .json or .txt")
    except OSError as error:
        raise TrainingError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, TrainingError):
            raise
        raise TrainingError(f"{path}: {error}") from None


def _conversation(row: Any, where: str) -> Conversation:
    if isinstance(row, str):
        return Conversation((), row, where)
    if isinstance(row, bytes):
        if len(row) > MAX_LINE:
            raise _Bad(f"a line of {len(row)} bytes, at most {MAX_LINE} are read")
        try:
            row = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise _Bad(f"no JSON: {error}") from None
    if not isinstance(row, dict):
        raise _Bad(f"expected an object, got {type(row).__name__}")
    return Conversation(tuple(_messages(row)), None, where)


def _messages(row: dict) -> list[dict[str, str]]:
    if "messages" in row or "conversations" in row:
        turns = row.get("messages", row.get("conversations"))
        if not isinstance(turns, list):
            raise _Bad(f"messages must be a list, got {type(turns).__name__}")
        messages = []
        for turn in turns:
            if not isinstance(turn, dict):
                raise _Bad(f"a message must be an object, got {type(turn).__name__}")
            role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
            if role not in _ROLES:
                raise _Bad(f"a message's role must be one of {', '.join(_ROLES)}, got {role!r:.40}")
            messages.append({"role": _ROLES[role], "content": _text("content", content)})
    elif "turns" in row:
        if not isinstance(row["turns"], list):
            raise _Bad(f"turns must be a list, got {type(row['turns']).__name__}")
        messages = [{"role": "user", "content": _text("a turn", turn)} for turn in row["turns"][:1]]
    elif "prompt" in row:
        messages = [{"role": "user", "content": _text("prompt", row["prompt"])}]
        answer = row.get("answer", row.get("response"))
        if answer is not None:
            messages.append({"role": "assistant", "content": _text("answer", answer)})
    else:
        raise _Bad(
            f"expected messages, conversations, turns or prompt; it has {', '.join(map(str, row))[:80] or 'nothing'}"
        )
    if messages and messages[0]["role"] == "assistant":
        messages = messages[1:]  # ShareGPT cuts conversations anywhere
    if not any(message["role"] == "user" for message in messages):
        raise _Bad("nobody asks anything")
    return messages


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _Bad(f"{name} must be text, got {type(value).__name__}")
    if not value.strip():
        raise _Bad(f"{name} is empty")
    if "\0" in value:
        raise _Bad(f"{name} has a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _Bad(f"{name} has a lone surrogate, which is no character") from None
    return value
