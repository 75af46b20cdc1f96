"""Reads files of prompts and conversations, and reports the rows that cannot be read.

A `.jsonl` file has one object per line, and a `.json` file is a list of objects. A row has one of these layouts;
columns with the value null count as absent:

- `{"messages": [{"role": "user", "content": "..."}, ...]}`, optionally with `tool_calls`, tool results and `"tools"`
- ShareGPT's `{"conversations": [{"from": "human", "value": "..."}, ...]}`
- Spec-Bench's `{"turns": ["...", ...]}`, the messages of the user
- a prompt, optionally with its answer: `{"prompt": ...}` with `"completion"`, `"answer"` or `"response"`, each a text
  or a list of messages; `{"question": ...}` with `"answer"`; `{"instruction": ..., "input": ...}` with `"output"`
  (Alpaca); all of them optionally with `"system"`
- preferences, whose `"chosen"` answer is read: `{"prompt": ..., "chosen": ..., "rejected": ...}`
- `{"text": "..."}`, a plain text

Prompt and answer can also be lists of token ids, which do not need a tokenizer. A `.txt` file has one text per line, or
is split as described in `jaxspec.storage.prompt_files`.
"""

import codecs
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxspec.errors import JaxspecError, TrainingError
from jaxspec.storage.prompt_files import split_text
from jaxspec.storage.reading import check_regular
from jaxspec.text.messages import check_tools

MAX_LINE_BYTES = 1 << 22  # bytes of a line
ROLES = {
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant",
    "system": "system", "developer": "developer",
    "tool": "tool", "observation": "tool", "tool_response": "tool", "function_response": "tool",
    "function": "function", "ipython": "ipython", "function_call": "function_call", "tool_call": "function_call",
}  # fmt: skip
"""The role of a message by the name that data sets use; a "function_call" becomes a message that calls a tool."""
MESSAGE_COLUMNS = ("messages", "conversations", "conversation", "dialogue")
"""Columns that contain a list of messages."""
ANSWER_COLUMNS = {
    "prompt": ("completion", "answer", "response", "chosen"),
    "question": ("answer", "response", "output", "chosen"),
    "query": ("answer", "response", "output", "chosen"),
    "instruction": ("output", "response", "answer", "completion", "chosen"),
    "input": ("output", "response", "answer"),
    "inputs": ("targets", "outputs"),
}
"""Columns that contain a prompt, and for each of them the columns that can contain its answer."""
DatasetMessage = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A conversation, a plain text, or token ids.

    Attributes:
        messages: the messages, `{"role": ..., "content": ...}` each; () for a plain text and for token ids.
        text: the plain text, or None.
        where: file and line, for messages.
        ids: token ids of a prompt and, if there is one, of its answer; () for text.
        tools: JSON schemas of the tools that the assistant may call; () for none.
        asked: number of messages before the answer; None for all messages before the first message of the assistant.
        turns: the user's texts, one after another, if the layout is Spec-Bench's; `messages` then has the first text.
            () in other layouts.
        about: the row's other columns, such as `question_id` and `category`.
    """

    messages: tuple[DatasetMessage, ...]
    text: str | None
    where: str
    ids: tuple[tuple[int, ...], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    asked: int | None = None
    turns: tuple[str, ...] = ()
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def prompt(self) -> Any:
        """The prompt in the form that `generate` takes: a text, token ids, the messages before the answer, or messages
        with tools."""
        if self.ids:
            return list(self.ids[0])
        if self.text is not None:
            return self.text
        first = next((i for i, m in enumerate(self.messages) if m["role"] == "assistant"), len(self.messages))
        messages = list(self.messages[: first if self.asked is None else self.asked])
        return {"messages": messages, "tools": list(self.tools)} if self.tools else messages


@dataclasses.dataclass(frozen=True)
class BadRow:
    """A row that could not be read, and the reason."""

    where: str
    why: str


def read_conversations(
    paths: Sequence[str | os.PathLike], strict: bool = False, split: str = "line"
) -> tuple[list[Conversation], list[BadRow]]:
    """Reads the conversations of all files, in order.

    Args:
        paths: the files.
        strict: whether to raise at the first bad row instead of listing it.
        split: how to split a `.txt` file: "line" (each line), "blank" (paragraphs between blank lines) or "file".

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
            except _RowError as error:
                if strict:
                    raise TrainingError(f"{where}: {error}; correct or remove the row") from None
                bad.append(BadRow(where, str(error)))
        if len(good) == before:
            why = f"; the first row: {bad[-1].why}" if bad else ""
            raise TrainingError(f"{path}: contains no prompt{why}")
    return good, bad


class _RowError(Exception):
    """The reason why a row cannot be read."""


def parse_lines(lines: Iterable[bytes], name: str) -> list[Conversation]:
    """Reads the lines of a `.jsonl` file in memory; `name` is the name of the file in messages.

    Raises:
        TrainingError: a row is bad, or there is none.
    """
    conversations = []
    for where, line in _lines(lines, name):
        try:
            conversations.append(_conversation(line, where))
        except _RowError as error:
            raise TrainingError(f"{where}: {error}; correct or remove the row") from None
    if not conversations:
        raise TrainingError(f"{name}: contains no prompt")
    return conversations


def _lines(lines: Iterable[bytes], name: str) -> Iterator[tuple[str, bytes]]:
    """Yields each line that is not blank, with its location."""
    for number, line in enumerate(lines, start=1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if line.strip():
            yield f"{name}:{number}", line


def _rows(path: pathlib.Path, split: str) -> Iterator[tuple[str, Any]]:
    """Yields each row with its location: the bytes of a line, a parsed object, or a text."""
    kind = path.suffix.lower()
    try:
        check_regular(path, TrainingError)
        if kind == ".jsonl":
            with path.open("rb") as file:
                yield from _lines(file, str(path))
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
        if len(row) > MAX_LINE_BYTES:
            raise _RowError(f"the line has {len(row)} bytes, expected at most {MAX_LINE_BYTES}")
        try:
            row = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise _RowError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise _RowError(f"expected an object, got {type(row).__name__}")
    row = {name: value for name, value in row.items() if value is not None}
    about = {name: row[name] for name in ("question_id", "task_id", "category") if name in row}
    tools = _tools(row.get("tools"))
    for name in (*MESSAGE_COLUMNS, "turns"):
        if name in row and (name != "turns" or _are_objects(row[name])):
            messages = _begin_with_user(_messages(name, row[name]))
            return Conversation(tuple(messages), None, where, tools=tools, about=about)
    if "turns" in row:
        turns = _turns(row["turns"])
        return Conversation(({"role": "user", "content": turns[0]},), None, where, (), tools, 1, turns, about)
    asked = next((name for name in ANSWER_COLUMNS if name in row), None)
    if asked is not None:
        return dataclasses.replace(_pair(row, asked, where), tools=tools, about=about)
    if "chosen" in row:
        messages = _begin_with_user(_messages("chosen", row["chosen"]))
        last = len(messages) - (messages[-1]["role"] == "assistant")
        return Conversation(tuple(messages), None, where, (), tools, last, (), about)
    if "text" in row:
        return Conversation((), _text("text", row["text"]), where, about=about)
    raise _RowError(
        "expected messages, conversations, turns, prompt, question, instruction or text, got "
        f"{', '.join(map(ascii, row))[:80] or 'nothing'}"
    )


def _pair(row: Mapping[str, Any], asked: str, where: str) -> Conversation:
    """Reads a prompt, and its answer if there is one: both texts, lists of messages, or lists of token ids."""
    prompt, name = row[asked], next((name for name in ANSWER_COLUMNS[asked] if name in row), None)
    answer = None if name is None else row[name]
    if isinstance(prompt, list) and not _are_objects(prompt):
        parts = {asked: prompt} | ({} if name is None else {name: answer})
        return Conversation((), None, where, tuple(_ids(key, value) for key, value in parts.items()))
    if isinstance(prompt, list):
        messages = _begin_with_user(_messages(asked, prompt))
    else:
        messages = [{"role": "user", "content": _text(asked, prompt)}]
        if asked == "instruction" and (context := row.get("input") or row.get("context")):
            messages[0]["content"] += "\n\n" + _text("input", context)
    system = row.get("system", row.get("system_prompt"))
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": _text("system", system)}, *messages]
    count = len(messages)
    if isinstance(answer, list):
        answered = _messages(str(name), answer)
        messages = answered if answered[: len(messages)] == messages else [*messages, *answered]
    elif answer is not None:
        messages = [*messages, {"role": "assistant", "content": _text(str(name), answer)}]
    return Conversation(tuple(messages), None, where, asked=count)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in value):
        raise _RowError(f"{name} must be a list of token ids, got {value!r:.40}")
    if not value:
        raise _RowError(f"{name} is empty")
    return tuple(value)


def _turns(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _RowError(f"turns must be a list, got {type(value).__name__}")
    if not value:
        raise _RowError("turns is empty")
    return tuple(_text("a turn", turn) for turn in value)


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Reads the tools of a row: a list of dicts, or the JSON text of such a list."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _RowError(f"tools is not JSON: {error}") from None
    try:
        return tuple(check_tools(value or None) or ())
    except JaxspecError as error:
        raise _RowError(str(error)) from None


def _messages(name: str, turns: Any) -> list[DatasetMessage]:
    """Reads a list of messages, each with `role` and `content`, or with `from` and `value`."""
    if not isinstance(turns, list):
        raise _RowError(f"{name} must be a list, got {type(turns).__name__}")
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise _RowError(f"a message must be an object, got {type(turn).__name__}")
        role = turn.get("role", turn.get("from"))
        if not isinstance(role, str) or role.lower() not in ROLES:
            got = f"{role!r:.40}" if isinstance(role, str) else type(role).__name__
            raise _RowError(f"a message's role must be one of {', '.join(ROLES)}, got {got}")
        if ROLES[role.lower()] != "system" or (turn.get("content") or turn.get("value")):  # many are empty
            messages.append(_message(turn, ROLES[role.lower()]))
    return messages


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _message(turn: Mapping[str, Any], role: str) -> DatasetMessage:
    """Reads a message; other keys of the message are passed to chat templates."""
    content = turn.get("content", turn.get("value"))
    if role == "function_call":
        return {"role": "assistant", "content": None, "tool_calls": [_call(content)]}
    known = ("role", "from", "content", "value")
    more = {key: value for key, value in turn.items() if key not in known and value is not None}
    if role == "assistant" and more.get("tool_calls") and not content:
        return {"role": role, "content": None} | more
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        for part in content:
            if part.get("type", "text") != "text":
                raise _RowError(f"content has a part of type {part.get('type')!r:.40}; only text is supported")
            _text("content", part.get("text"))
    elif role in ("tool", "function", "ipython") and isinstance(content, (dict, list)):
        content = json.dumps(content, ensure_ascii=False)
    else:
        _text("content", content)
    return {"role": role, "content": content} | more


def _call(content: Any) -> dict[str, Any]:
    """Reads the call of a tool, `{"name": ..., "arguments": {...}}` as JSON text."""
    try:
        call = json.loads(content) if isinstance(content, str) else content
    except (ValueError, RecursionError) as error:
        raise _RowError(f"the call of a tool is not JSON: {error}") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise _RowError(f'the call of a tool must be {{"name": ..., "arguments": ...}}, got {content!r:.40}')
    return {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments") or {}}}


def _begin_with_user(messages: list[DatasetMessage]) -> list[DatasetMessage]:
    """Returns a conversation without a leading answer; ShareGPT splits conversations at any message."""
    if messages and messages[0]["role"] == "assistant":
        messages = messages[1:]
    if not any(message["role"] == "user" for message in messages):
        raise _RowError("the conversation has no message from the user")
    return messages


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _RowError(f"{name} must be text, got {type(value).__name__}")
    if not value.strip():
        raise _RowError(f"{name} is empty")
    if "\0" in value:
        raise _RowError(f"{name} contains a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _RowError(f"{name} contains a lone surrogate, which is not a character") from None
    return value
