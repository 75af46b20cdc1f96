"""Chat templates, which format a conversation as a prompt of a model.

A template is a program that comes with a checkpoint. It runs in the confined process, see `jaxspec.confined`.
"""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.confined.process import Limits, RemoteError, RemoteObject
from jaxspec.errors import CheckpointError, InvalidConfig, UnknownName, shown
from jaxspec.text.messages import MessageForms

TOOL_USE = "tool_use"  # the name of the template for conversations with tools, as in transformers
MAX_SOURCE = 1 << 18  # characters; the longest published templates have about 30,000
MAX_OUTPUT = 1 << 20  # characters that a template may add to the characters of its input
MAX_VALUE_DEPTH = 90  # levels of nested lists and dicts in a template's input
SECONDS, MEMORY = 0.75, 96 << 20  # processor time and bytes for compiling a template and for every rendering
COMPILE_SECONDS, COMPILE_MEMORY = 6e-5, 1280  # in addition, per character of source; measured: 5e-6 s and 300 bytes,
# and for the costliest kind of expression 1.2e-5 s and 1550 bytes; a busy machine needs twice the time
TRIAL_SECONDS = 0.1  # for rendering the short conversations of `MessageForms`, at most 14 of them
SECONDS_PER_CHARACTER, MEMORY_PER_CHARACTER = 2e-6, 64  # in addition, per character of input
CONTAINER_SIZE = 512  # characters that a list or dict counts, in addition to its contents


class ChatTemplate:
    """A template that formats a conversation as the text a model was trained on.

    The text is a function of the source and the variables, with one exception: a template that calls `strftime_now`
    writes today's date. The variable `strftime_now="2026-11-27"` sets a fixed date.

    Some checkpoints have several templates. Conversations with tools are formatted by the template named "tool_use",
    and all others by the default template; `choose` returns a template by its name.

    Attributes:
        source: the Jinja source of the default template; None if the checkpoint has only named templates.
        special_tokens: the template's variables, such as `bos_token`.
        named: the sources of further templates, by name.
    """

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str] | None = None,
        named: Mapping[str, str] | None = None,
    ):
        """Compiles the default template.

        Raises:
            CheckpointError: the source is too long, it cannot be compiled, or compiling exceeds its limits.
        """
        self.named, self._chosen = dict(named or {}), dict[str, ChatTemplate]()
        if source is None and self.named:
            self.source, self.special_tokens = None, dict(special_tokens or {})
            return
        if not isinstance(source, str) or len(source) > MAX_SOURCE:
            raise CheckpointError(f"chat template: must be a str of at most {MAX_SOURCE} characters")
        self.source, self.special_tokens = source, dict(special_tokens or {})
        knows_parts = "'text'" in source or '"text"' in source
        self._renderer = _Renderer(source, self.special_tokens)
        self._forms = MessageForms(self._renderer.try_messages, knows_parts)

    def choose(self, name: str) -> "ChatTemplate":
        """Returns a template by its name.

        Raises:
            UnknownName: there is no template of this name.
            CheckpointError: see `__init__`.
        """
        if name not in self.named:
            raise UnknownName("chat template", name, self.named)
        if name not in self._chosen:
            self._chosen[name] = ChatTemplate(self.named[name], self.special_tokens)
        return self._chosen[name]

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Formats a conversation.

        Args:
            messages: the messages, `{"role": ..., "content": ...}` each, at least one; templates may read other keys.
                Content is a text, a list of parts such as `{"type": "text", "text": ...}`, or None in a message with
                `tool_calls`; see `jaxspec.text.messages`.
            add_generation_prompt: whether to end with the beginning of the assistant's reply.
            **variables: further variables of the template, such as `tools` or `enable_thinking`. `strftime_now`, a
                date or a time in ISO format such as "2026-11-27", replaces the current time.

        Raises:
            InvalidConfig: the messages are malformed, or the template rejects them.
            CheckpointError: the template fails, or exceeds its limits of time and memory.
        """
        return self.render_all([messages], add_generation_prompt, **variables)[0]

    def render_all(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        add_generation_prompt: bool | Sequence[bool] = True,
        **variables: Any,
    ) -> list[str]:
        """Formats several conversations, faster than one at a time.

        Args:
            conversations: the messages of each, see `render`.
            add_generation_prompt: whether to end with the beginning of the assistant's reply: one value, or one for
                each conversation.
            **variables: see `render`.

        Raises:
            InvalidConfig: messages are malformed, or the template rejects them.
            CheckpointError: the template fails, or exceeds its limits of time and memory.
        """
        if variables.get("tools") and TOOL_USE in self.named:
            return self.choose(TOOL_USE).render_all(conversations, add_generation_prompt, **variables)
        if self.source is None:
            names = ", ".join(map(repr, self.named))
            raise InvalidConfig(
                f"the checkpoint has no default chat template, only {names}; select one with "
                "dataclasses.replace(model, chat_template=model.chat_template.choose(name)), or pass chat=False"
            )
        same_for_all = isinstance(add_generation_prompt, bool)
        ends = [add_generation_prompt] * len(conversations) if same_for_all else list(add_generation_prompt)
        if len(ends) != len(conversations):
            raise InvalidConfig(
                f"add_generation_prompt has {len(ends)} values for {len(conversations)} conversations; pass one value "
                "for each"
            )
        converted = [self._forms.convert(messages) for messages in conversations]
        return self._renderer.render(converted, ends, variables, SECONDS)


class _Renderer:
    """A compiled template in the confined process, which renders messages without converting them."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self._special_tokens = special_tokens
        size = len(source)
        limits = Limits(SECONDS + COMPILE_SECONDS * size, MEMORY + COMPILE_MEMORY * size)
        try:
            self._template = RemoteObject("chat template", "template", (source,), limits)
        except RemoteError as error:
            raise _typed(error) from None

    def render(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        ends: Sequence[bool],
        variables: Mapping[str, Any],
        seconds: float,
    ) -> list[str]:
        """Renders conversations; see `ChatTemplate.render_all`."""
        now = _now(variables.get("strftime_now"))
        given = {"tools": None, "documents": None, **self._special_tokens, **variables}
        given.pop("strftime_now", None)
        shared, each = _plain_all(given)
        inputs, size = [], 0
        for messages, end in zip(conversations, ends):
            variables_of_each, added = _plain_all({"messages": messages, "add_generation_prompt": end})
            inputs.append(shared | variables_of_each)  # `marshal` writes the shared objects once
            size += each + added
        limits = Limits(seconds + SECONDS_PER_CHARACTER * size, MEMORY + MEMORY_PER_CHARACTER * size)
        try:
            texts = self._template.call("render", inputs, now, MAX_OUTPUT + size, limits=limits)
        except RemoteError as error:
            raise _typed(error) from None
        if not isinstance(texts, list) or len(texts) != len(inputs) or not all(isinstance(t, str) for t in texts):
            raise CheckpointError(f"chat template: its process answered {shown(texts)}, expected texts")
        return texts

    def try_messages(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Renders one of the short conversations of `MessageForms`."""
        return self.render([messages], [False], {}, TRIAL_SECONDS)[0]


def _typed(error: RemoteError) -> CheckpointError | InvalidConfig:
    if error.kind == "RaisedByTemplate":
        return InvalidConfig(f"the chat template rejects these messages: {error.text[:200]}")
    return CheckpointError(f"chat template: {error.text[:200] or error.kind}")


def _now(given: Any) -> str:
    """Returns the date and time of a rendering in ISO format."""
    try:
        return (datetime.datetime.now() if given is None else datetime.datetime.fromisoformat(given)).isoformat()
    except (TypeError, ValueError):
        raise InvalidConfig(f'strftime_now must be a date such as "2026-11-27", got {given!r:.80}') from None


def _plain_all(variables: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Copies variables as `_plain` does; returns the copies and their size in characters."""
    copies = {name: _plain(value, name) for name, value in variables.items()}
    return {name: value for name, (value, _) in copies.items()}, sum(size for _, size in copies.values())


def _plain(value: Any, name: str, depth: int = 0) -> tuple[Any, int]:
    """Copies a value to Python's built-in types, as in JSON; returns the copy and its size in characters."""
    if depth > MAX_VALUE_DEPTH:
        raise InvalidConfig(f"{name}: lists and dicts are nested more than {MAX_VALUE_DEPTH} levels deep; flatten them")
    if value is None or isinstance(value, bool):
        return value, 1
    if isinstance(value, str):
        return str.__str__(value), len(value)
    if isinstance(value, int | float):
        return (int(value) if isinstance(value, int) else float(value)), 1
    if isinstance(value, Mapping):
        pairs = [(_plain(k, name, depth + 1), _plain(v, name, depth + 1)) for k, v in value.items()]
        return {k: v for (k, _), (v, _) in pairs}, CONTAINER_SIZE + sum(m + n for (_, m), (_, n) in pairs)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        items = [_plain(item, name, depth + 1) for item in value]
        plain = [item for item, _ in items]
        return tuple(plain) if isinstance(value, tuple) else plain, CONTAINER_SIZE + sum(size for _, size in items)
    raise InvalidConfig(f"{name} must contain only strings, numbers, lists and dicts, got {type(value).__name__!r}")
