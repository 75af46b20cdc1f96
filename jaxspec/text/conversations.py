"""Reads files of prompts and conversations, and reports the rows that cannot be read.

A `.jsonl` file has one object per line, a `.json` file a list of them: `{"messages": [{"role": ..., "content": ...}]}`,
ShareGPT's `{"conversations": [{"from": "human", "value": ...}]}`, Spec-Bench's `{"turns": ["...", ...]}`, or
`{"prompt": "..."}`, optionally with an `"answer"` or `"response"`. Prompt and answer may be lists of token ids, which
need no tokenizer. A `.txt` file has one text per line, or is split as described in `jaxspec.storage.prompt_files`.
"""

import codecs
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from jaxspec.errors import TrainingError
from jaxspec.storage.prompt_files import split_text

MAX_LINE = 1 << 22  # bytes of a line
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A conversation, a plain text, or token ids.

    Attributes:
        messages: the messages, `{"role": ..., "content": ...}` each; () for a plain text and for token ids.
        text: the plain text, or None.
        where: file and line.
        ids: token ids of a prompt and, if there is one, of its answer; () for text.
    """

    messages: tuple[dict[str, str], ...]
    text: str | None
    where: str
    ids: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class BadRow:
    """A row that could not be read, and the reason."""

    where: str
    why: str


def read(
    paths: Sequence[str | os.PathLike], strict: bool = False, split: str = "line"
) -> tuple[list[Conversation], list[BadRow]]:
    """Reads the conversations of all files, in order.

    Args:
        paths: the files.
        strict: whether to raise at the first bad row instead of listing it.
        split: the texts of a `.txt` file: each "line", each paragraph between "blank" lines, or the whole "file".

    Returns:
        The conversations, and the bad rows.

    Raises:
        TrainingError: a file cannot be read or has no good row, or `strict` is set and a row is bad.
    """
    good: list[Conversation] = []
    bad: list[BadRow] = []
    for path in map(pathlib.Path, paths):
        before = len(good)
        for where, row in _rows(path, split):
            try:
                good.append(_conversation(row, where))
            except _Bad as error:
                if strict:
                    raise TrainingError(f"{where}: {error}; correct or remove the row") from None
                bad.append(BadRow(where, str(error)))
        if len(good) == before:
            why = f"; the first row: {bad[-1].why}" if bad else ""
            raise TrainingError(f"{path}: contains no conversation{why}")
    return good, bad


class _Bad(Exception):
    """The reason why a row cannot be read."""


def _rows(path: pathlib.Path, split: str) -> Iterator[tuple[str, Any]]:
    """Yields each row with its location: the bytes of a line, a parsed object, or a text."""
    kind = path.suffix.lower()
    try:
        if kind == ".jsonl":
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                    if line.strip():
                        yield f"{path}:{number}", line
        elif kind == ".json":
            rows = json.loads(path.read_bytes())
            if not isinstance(rows, list):
                raise TrainingError(f"{path}: expected a list of conversations, got {type(rows).__name__}")
            for number, row in enumerate(rows):
                yield f"{path}[{number}]", row
        elif kind == ".txt":
            for line, text in split_text(path.read_bytes(), split):
                yield f"{path}:{line}", text
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
        return Conversation((), _text("a text", row), where)
    if isinstance(row, bytes):
        if len(row) > MAX_LINE:
            raise _Bad(f"a line of {len(row)} bytes, expected at most {MAX_LINE}")
        try:
            row = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise _Bad(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise _Bad(f"expected an object, got {type(row).__name__}")
    if isinstance(row.get("prompt"), list):
        answer = row.get("answer", row.get("response"))
        parts = {"prompt": row["prompt"]} | ({} if answer is None else {"answer": answer})
        return Conversation((), None, where, tuple(_ids(name, value) for name, value in parts.items()))
    return Conversation(tuple(_messages(row)), None, where)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one < 1 << 31 for one in value):
        raise _Bad(f"{name} must be a list of token ids, got {value!r:.40}")
    if not value:
        raise _Bad(f"{name} is empty")
    return tuple(value)


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
            if not isinstance(role, str) or role not in _ROLES:
                got = f"{role!r:.40}" if isinstance(role, str) else type(role).__name__
                raise _Bad(f"a message's role must be one of {', '.join(_ROLES)}, got {got}")
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
            f"expected messages, conversations, turns or prompt, got {', '.join(map(ascii, row))[:80] or 'nothing'}"
        )
    if messages and messages[0]["role"] == "assistant":
        messages = messages[1:]  # ShareGPT splits conversations anywhere
    if not any(message["role"] == "user" for message in messages):
        raise _Bad("there is no message of a user")
    return messages


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _Bad(f"{name} must be text, got {type(value).__name__}")
    if not value.strip():
        raise _Bad(f"{name} is empty")
    if "\0" in value:
        raise _Bad(f"{name} contains a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _Bad(f"{name} contains a lone surrogate, which is not a character") from None
    return value
