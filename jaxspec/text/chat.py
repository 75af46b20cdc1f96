"""Chat templates, which format a conversation as a model's prompt."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.text.messages import MessageForms
from jaxspec.text.sandbox import RaisedByTemplate, TemplateSandbox

MAX_SOURCE = 1 << 16  # characters; the longest published templates have about 30,000
MAX_OUTPUT = 1 << 20  # characters that a template may add to those of its input
MAX_NESTED = 90  # levels of nested lists and dicts in a template's input
BUDGET = 1 << 24  # units for any rendering: about 0.2 seconds
PER_CHARACTER = 64  # additional units per character of input
RECORD = 512  # characters that a list or dict counts for, besides its contents


class ChatTemplate:
    """A template that formats a conversation as the text a model was trained on.

    Attributes:
        source: the Jinja source.
        special_tokens: the template's variables, such as `bos_token`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        """Compiles a template.

        Raises:
            CheckpointError: the source is too long, or it cannot be compiled.
        """
        if not isinstance(source, str) or len(source) > MAX_SOURCE:
            raise CheckpointError(f"chat template: must be a str of at most {MAX_SOURCE} characters")
        self.source, self.special_tokens = source, dict(special_tokens or {})
        knows_parts = "'text'" in source or '"text"' in source
        self._forms = MessageForms(functools.partial(self._render, add_generation_prompt=False), knows_parts)
        try:
            self._sandbox = TemplateSandbox()
            self._template = self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"chat template, line {error.lineno}: {_line(error)}") from None
        except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise CheckpointError(f"chat template: cannot be compiled: {_line(error)}") from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Formats a conversation.

        Args:
            messages: the messages, `{"role": ..., "content": ...}` each, at least one; templates may read other keys.
                Content may be a text, a list of parts such as `{"type": "text", "text": ...}`, or None beside
                `tool_calls`, see `jaxspec.text.messages`.
            add_generation_prompt: whether to end with the beginning of the assistant's reply.
            **variables: further variables of the template, such as `tools` or `enable_thinking`.

        Raises:
            InvalidConfig: the messages are malformed, or the template rejects them.
            CheckpointError: the template fails, or exceeds its limits.
        """
        return self._render(self._forms.convert(messages), add_generation_prompt, **variables)

    def _render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **variables: Any) -> str:
        """Renders messages as they are."""
        inputs = {"tools": None, "documents": None, **self.special_tokens, **variables}
        inputs |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        size = 0
        for name, value in inputs.items():
            inputs[name], added = _plain(value, name)
            size += added
        room = MAX_OUTPUT + size
        parts = []
        try:
            with self._sandbox.budget(BUDGET + PER_CHARACTER * size):
                for part in self._template.generate(inputs):
                    parts.append(part)
                    room -= len(part)
                    if room < 0:
                        raise CheckpointError(f"chat template: its output exceeds {MAX_OUTPUT + size} characters")
        except CheckpointError:
            raise
        except RaisedByTemplate as error:
            raise InvalidConfig(f"the chat template rejects these messages: {_line(error)}") from None
        except Exception as error:  # a template may divide by zero, or raise anything else
            raise CheckpointError(f"chat template: {_line(error)}") from None
        return "".join(parts)


def _plain(value: Any, name: str, depth: int = 0) -> tuple[Any, int]:
    """Copies a value to Python's built-in types, as in JSON; returns the copy and its size in characters."""
    if depth > MAX_NESTED:
        raise InvalidConfig(f"{name}: lists and dicts nested more than {MAX_NESTED} levels deep")
    if value is None or isinstance(value, bool):
        return value, 1
    if isinstance(value, str):
        return str.__str__(value), len(value)
    if isinstance(value, int | float):
        return (int(value) if isinstance(value, int) else float(value)), 1
    if isinstance(value, Mapping):
        pairs = [(_plain(k, name, depth + 1), _plain(v, name, depth + 1)) for k, v in value.items()]
        return {k: v for (k, _), (v, _) in pairs}, RECORD + sum(m + n for (_, m), (_, n) in pairs)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        items = [_plain(item, name, depth + 1) for item in value]
        plain = [item for item, _ in items]
        return tuple(plain) if isinstance(value, tuple) else plain, RECORD + sum(size for _, size in items)
    raise InvalidConfig(f"{name} may contain only strings, numbers, lists and dicts, got {type(value).__name__!r}")


def _line(error: BaseException) -> str:
    """Formats an exception as one line."""
    text = " ".join(str(error).split())
    return f"{text[:200]}" if text else type(error).__name__
