"""Chat templates: how a conversation is written down for a model."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.text.sandbox import Refused, TemplateSandbox

MAX_SOURCE = 1 << 16  # characters; the longest published templates have some 30,000
MAX_OUTPUT = 1 << 20  # characters that a template may add to those of the messages
MAX_NESTED = 90  # lists and dicts inside one another, in what a template is given
BUDGET = 1 << 24  # units that any rendering may spend: about a fifth of a second
PER_CHARACTER = 64  # units more for each character that a template is given
RECORD = 512  # characters that a list or dict counts for, beside what is in it


class ChatTemplate:
    """Turns a conversation into the text a model was trained on."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        """Compiles the template `source`; `special_tokens` are its variables, such as `bos_token`."""
        if not isinstance(source, str) or len(source) > MAX_SOURCE:
            raise CheckpointError(f"chat template: must be a str of at most {MAX_SOURCE} characters")
        self.source, self.special_tokens = source, dict(special_tokens or {})
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
        """The text of `messages`, each `{"role": ..., "content": ...}`, ready for the assistant's next turn.

        Args:
            messages: the conversation, at least one message; other keys are the template's to read.
            add_generation_prompt: end with what begins an answer.
            **variables: what else this template knows, such as `tools` or `enable_thinking`.
        """
        _check(messages)
        given = {"tools": None, "documents": None, **self.special_tokens, **variables}
        given |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        size = 0
        for name, value in given.items():
            given[name], more = _plain(value, name)
            size += more
        room = MAX_OUTPUT + size
        parts = []
        try:
            with self._sandbox.budget(BUDGET + PER_CHARACTER * size):
                for part in self._template.generate(given):
                    parts.append(part)
                    room -= len(part)
                    if room < 0:
                        raise CheckpointError(f"chat template: more than {MAX_OUTPUT + size} characters come out")
        except CheckpointError:
            raise
        except Refused as error:
            raise InvalidConfig(f"the chat template refuses these messages: {_line(error)}") from None
        except Exception as error:  # a template may divide by zero, or do anything else
            raise CheckpointError(f"chat template: {_line(error)}") from None
        return "".join(parts)


def _check(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuses what is no conversation."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidConfig(
            f'messages must be a list of {{"role": ..., "content": ...}}, at least one, got {messages!r:.80}'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidConfig(f"messages[{i}] must be a dict, got {message!r:.80}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InvalidConfig(f"messages[{i}][{key!r}] must be a str, got {message.get(key)!r:.80}")


def _plain(value: Any, name: str, depth: int = 0) -> tuple[Any, int]:
    """A copy of `value` made of Python's own types alone, as JSON has them, and its size in characters."""
    if depth > MAX_NESTED:
        raise InvalidConfig(f"{name}: lists and dicts more than {MAX_NESTED} deep inside one another")
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
    raise InvalidConfig(f"{name} must be made of str, numbers, lists and dicts, got {type(value).__name__!r} in it")


def _line(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{text[:200]}" if text else type(error).__name__
