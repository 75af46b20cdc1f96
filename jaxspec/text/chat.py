"""Chat templates: how a conversation is written down for a model."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.text.sandbox import Refused, TemplateSandbox

MAX_SOURCE = 1 << 18  # characters; the longest published templates have some 20,000
MAX_OUTPUT = 1 << 20  # characters a template may add to those of the messages


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
        given = _check(messages)
        room = MAX_OUTPUT + given
        variables = {"tools": None, "documents": None, **self.special_tokens, **variables}
        self._sandbox.begin(given)
        parts, size = [], 0
        try:
            for part in self._template.generate(
                messages=[dict(m) for m in messages], add_generation_prompt=add_generation_prompt, **variables
            ):
                parts.append(part)
                size += len(part)
                if size > room:
                    raise CheckpointError(f"chat template: more than {room} characters come out")
        except CheckpointError:
            raise
        except Refused as error:
            raise InvalidConfig(f"the chat template refuses these messages: {_line(error)}") from None
        except Exception as error:  # a template may divide by zero, or do anything else
            raise CheckpointError(f"chat template: {_line(error)}") from None
        return "".join(parts)


def _check(messages: Sequence[Mapping[str, Any]]) -> int:
    """Refuses what is no conversation; returns its size in characters."""
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
    return sum(len(m["role"]) + len(m["content"]) for m in messages)


def _line(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{text[:200]}" if text else type(error).__name__
