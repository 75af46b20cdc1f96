"""Turns: what a prompt appends to a row's text, and how the conversation of a session continues.

A chat template renders a whole conversation. The text that it writes once, such as a system prompt, and the text
between an answer and the next message therefore depend on all messages so far, which `RowRecord` keeps for a row of a
session.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.errors import InvalidConfig
from jaxspec.generation.output import Generation
from jaxspec.models.model import Model

ChatMessage = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Turn:
    """What a prompt appends to a row.

    Attributes:
        ids: the token ids to append.
        messages: the conversation up to the answer; None for raw text and token ids.
        text: the conversation as the chat template writes it.
        tools: the tools that the template was given, or None.
        variables: further variables that the template was given.
        prefix: the tokens of the row that stay before `ids`; [] outside a session.
    """

    ids: list[int]
    messages: tuple[ChatMessage, ...] | None = None
    text: str = ""
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prefix: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class RowRecord:
    """What a session knows about one of its rows.

    Attributes:
        turn: the last turn of the row.
        answer: the answer, which grows while the row is decoded.
    """

    turn: Turn
    answer: Generation

    @property
    def tokens(self) -> list[int]:
        """The row's whole text."""
        return [*self.turn.prefix, *self.turn.ids, *self.answer.tokens]

    @property
    def messages(self) -> tuple[ChatMessage, ...] | None:
        """The conversation with its last answer; None if the row is not a conversation."""
        asked = self.turn.messages
        return None if asked is None else (*asked, {"role": "assistant", "content": self.answer.text or ""})

    def join(self, new: Sequence[ChatMessage], where: str) -> list[ChatMessage]:
        """Returns the conversation with further messages, which may also be the whole conversation.

        Messages are the whole conversation if they begin with the earlier messages, and an answer of the assistant
        follows.

        Raises:
            InvalidConfig: the row is not a conversation.
        """
        asked, said = self.turn.messages, self.messages
        if asked is None or said is None:
            raise InvalidConfig(
                f"{where}: the session's text was given as token ids or raw text, which a chat template cannot "
                "continue; pass token ids or chat=False, or start a session with the whole conversation as messages"
            )
        repeats = list(new[: len(asked)]) == list(asked) and len(new) > len(asked)
        return list(new) if repeats and new[len(asked)].get("role") == "assistant" else [*said, *new]


def continue_turn(target: Model, record: RowRecord, turn: Turn) -> Turn:
    """Returns the turn of a session's row, given the turn of its whole conversation.

    Turns of raw text and ids are returned unchanged. The text that was read stays in the cache if the template's text
    continues it, and no token crosses its end. The answer then keeps its own tokens. Otherwise the row is cut where its
    tokens and the tokens of the template's text first differ, which happens with templates that drop or reformat
    earlier messages, such as earlier reasoning.
    """
    if turn.messages is None:
        return turn
    before = record.turn.text + _decode(target, record.answer.tokens)
    if turn.text.startswith(before):
        known = target.encode(before)
        if turn.ids[: len(known)] == known:
            return dataclasses.replace(turn, ids=turn.ids[len(known) :], prefix=record.tokens)
    same = 0
    for old, new in zip(record.tokens, turn.ids):
        if old != new:
            break
        same += 1
    return dataclasses.replace(turn, ids=turn.ids[same:], prefix=turn.ids[:same])


def _decode(target: Model, tokens: Sequence[int]) -> str:
    """Returns the text of tokens with special tokens; bytes of an incomplete character become surrogates."""
    assert target.tokenizer is not None
    return b"".join(target.tokenizer.pieces(tokens, skip_special=False)).decode("utf-8", "surrogateescape")
