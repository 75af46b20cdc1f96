"""Converts the messages of a conversation to the form that a chat template reads.

Systems write the same message in several forms: the content is a text, a list of parts, or null in a message with tool
calls; the arguments of a tool call are an object or JSON text. A template often reads only one of these forms.
`MessageForms` renders short conversations to find out which form a template reads, and converts messages to this form.
"""

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspec.errors import InvalidConfig, ignored_refusals, shown

MARK = "271828"  # a text that templates do not change
MEDIA = ("image", "audio", "video", "file")  # prefixes of the types of parts that are not text
ABSENT = object()
TemplateMessage = Mapping[str, Any]


def check_messages(messages: Any) -> None:
    """Raises InvalidConfig unless the messages are a list of dicts with a role; the template checks everything else."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidConfig(
            f'messages must be a non-empty list of {{"role": ..., "content": ...}}, got {messages!r:.80}'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidConfig(f"messages[{i}] must be a dict, got {message!r:.80}")
        if not isinstance(message.get("role"), str):
            raise InvalidConfig(f"messages[{i}]['role'] must be a str, got {message.get('role')!r:.80}")


def check_tools(tools: Any) -> list[Mapping[str, Any]] | None:
    """Returns the descriptions of tools as a list; None for None.

    Raises:
        InvalidConfig: the tools are not a list of dicts.
    """
    if tools is None:
        return None
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise InvalidConfig(f"tools must be a list of dicts, each the JSON schema of a function; got {shown(tools)}")
    for i, tool in enumerate(tools):
        if callable(tool):
            raise InvalidConfig(
                f"tools[{i}] is the function {getattr(tool, '__name__', shown(tool))!r}; pass its JSON schema "
                "instead, for example transformers.utils.get_json_schema(function)"
            )
        if not isinstance(tool, Mapping):
            raise InvalidConfig(f"tools[{i}] must be a dict, the JSON schema of a function; got {shown(tool)}")
    return list(tools)


def check_variables(variables: Any) -> dict[str, Any]:
    """Returns the further variables of a template as a dict; {} for None.

    Raises:
        InvalidConfig: the variables are not a mapping from names, or one of them has its own argument.
    """
    if variables is None:
        return {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise InvalidConfig(
            f'template_variables must be a dict such as {{"enable_thinking": False}}, got {shown(variables)}'
        )
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in variables:
            raise InvalidConfig(f"template_variables must not contain {name!r}; it has its own argument")
    return dict(variables)


class MessageForms:
    """The forms of messages that one chat template reads."""

    def __init__(self, render: Callable[[list[TemplateMessage]], str], may_read_parts: bool = True):
        """Stores the renderer. Short conversations are rendered only when a message needs them.

        Args:
            render: renders messages that are already converted, without the beginning of a reply.
            may_read_parts: whether the template may read content as a list of parts.
        """
        self._render, self._may_read_parts = render, may_read_parts
        self._read_by_role: dict[str, tuple[bool, bool]] = {}

    def convert(self, messages: Sequence[TemplateMessage]) -> list[dict[str, Any]]:
        """Returns copies of the messages in the form that the template reads.

        Entries with the value None count as absent. None as content becomes the form that the template reads in a
        message with tool calls, and "" in other messages. If the template does not read lists of parts, the texts of a
        list are joined by newlines, as in vLLM.

        Raises:
            InvalidConfig: the messages are malformed, or have a part that is not text.
        """
        check_messages(messages)
        return [self._convert(message, f"messages[{i}]") for i, message in enumerate(messages)]

    def _convert(self, message: TemplateMessage, where: str) -> dict[str, Any]:
        converted = {key: value for key, value in message.items() if value is not None or key == "content"}
        if not converted.get("tool_calls", True):
            del converted["tool_calls"]
        content, empty = converted.get("content", ABSENT), ""
        if calls := converted.get("tool_calls"):
            as_text, empty = self._call_form
            converted["tool_calls"] = _with_arguments(calls, as_text)
            content = empty if content is ABSENT else content
        content = empty if content is None else content
        role, parts = str(converted["role"]), _as_parts(content)
        if parts is not None:
            content = self._content(parts, role, where)
        elif isinstance(content, str) and self._may_read_parts and self._reads(role) == (False, True):
            content = [{"type": "text", "text": content}]
        if content is not ABSENT:
            return converted | {"content": content}
        converted.pop("content", None)
        return converted

    def _content(self, parts: list[Any], role: str, where: str) -> Any:
        """Returns a list of parts as the template reads it."""
        for i, part in enumerate(parts):
            kind = part.get("type", "text")
            if not isinstance(kind, str) or kind.removeprefix("input_").startswith(MEDIA):
                raise InvalidConfig(f"{where}['content'][{i}] is of type {kind!r:.40}, but only text is supported")
        if self._may_read_parts and self._reads(role)[1]:
            return [_as_text_part(part) for part in parts]
        for i, part in enumerate(parts):
            if not isinstance(part.get("text"), str):
                kind = shown(part.get("type"), 40)
                raise InvalidConfig(f"{where}['content'][{i}] is of type {kind}, but the chat template only reads text")
        return "\n".join(part["text"] for part in parts)

    def _reads(self, role: str) -> tuple[bool, bool]:
        """Returns whether the template reads content of a role as text, and whether as a list of parts."""
        role = role if role in ("user", "assistant", "system", "tool") else "user"
        if role not in self._read_by_role:
            self._read_by_role[role] = self._try_content(role)
        return self._read_by_role[role]

    def _try_content(self, role: str) -> tuple[bool, bool]:
        """Renders content of a role as text and as a list of parts; returns which of them the template reads."""

        def rendered(content: Any) -> str | None:
            message = {"role": role, "content": content}
            before = {"assistant": [_example("user")], "tool": [_example("user"), *self._call(*self._call_form)]}
            after = [_example("user")] if role == "system" else []
            return self._try([*before.get(role, []), message, *after])

        text, parts = rendered(MARK), rendered([{"type": "text", "text": MARK}])
        reads_text = text is not None and MARK in text
        clean = parts is not None and MARK in parts and "'text'" not in parts and '"text"' not in parts
        return reads_text, (parts == text if reads_text else clean)

    @functools.cached_property
    def _call_form(self) -> tuple[bool, Any]:
        """Whether the template reads the arguments of a tool call as JSON text, and the content of such a message:
        None, "" or ABSENT."""
        for as_text, content in itertools.product((False, True), (None, "", ABSENT)):
            text = self._try([_example("user"), *self._call(as_text, content)])
            wrong = ("None", "'a'", '\\"') if text is not None and MARK in text else ("",)
            if text is not None and not any(sign in text for sign in wrong):
                return as_text, content
        return False, ""

    def _call(self, as_text: bool, content: Any) -> list[TemplateMessage]:
        """Returns a message that calls a tool."""
        arguments: Any = {"a": MARK}
        function = {"name": "f", "arguments": json.dumps(arguments) if as_text else arguments}
        call = {"id": "call00001", "type": "function", "function": function}
        return [{"role": "assistant", "tool_calls": [call]} | ({} if content is ABSENT else {"content": content})]

    def _try(self, messages: list[TemplateMessage]) -> str | None:
        """Renders messages; returns None if the template fails or rejects them."""
        with ignored_refusals():
            return self._render(messages)
        return None


def _example(role: str) -> TemplateMessage:
    return {"role": role, "content": "a"}


def _as_parts(content: Any) -> list[Mapping[str, Any]] | None:
    """Returns content as a list of parts with a type or a text; None for other content."""
    if isinstance(content, str) or not isinstance(content, Sequence) or not content:
        return None
    parts: list[Mapping[str, Any]] = [
        {"type": "text", "text": part} if isinstance(part, str) else part for part in content
    ]
    good = all(isinstance(part, Mapping) and ("type" in part or "text" in part) for part in parts)
    return parts if good else None


def _as_text_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a part as templates expect it: parts with a text, such as `input_text` and `output_text`, have the type
    "text"."""
    return {"type": "text", "text": part["text"]} if isinstance(part.get("text"), str) else dict(part)


def _with_arguments(calls: Any, as_text: bool) -> Any:
    """Returns tool calls with their arguments as JSON text, or as the object that the text describes."""
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        return calls
    converted_calls = []
    for call in calls:
        function = call.get("function", call)
        if isinstance(function, Mapping) and "arguments" in function:
            function = {**function, "arguments": _arguments(function["arguments"], as_text)}
            call = {**call, "function": function} if "function" in call else function
        converted_calls.append(call)
    return converted_calls


def _arguments(arguments: Any, as_text: bool) -> Any:
    try:
        if as_text and isinstance(arguments, Mapping):
            return json.dumps(arguments, ensure_ascii=False)
        if not as_text and isinstance(arguments, str):
            value = json.loads(arguments or "{}")
            return value if isinstance(value, dict) else arguments
    except (ValueError, TypeError, RecursionError):  # not JSON: the template decides
        pass
    return arguments
