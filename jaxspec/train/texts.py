"""From conversations to token ids with a mask, and from those to packed rows."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.errors import CheckpointError, InvalidConfig, MissingTokenizer, TrainingError
from jaxspec.models.model import Model
from jaxspec.text.conversations import BadRow, Conversation


class Text(NamedTuple):
    """Token ids, and which of them the assistant wrote: those are learnt from."""

    ids: np.ndarray  # [n] int32
    mask: np.ndarray  # [n] bool


class Rows(NamedTuple):
    """Texts packed into rows of one length; R rows of T tokens."""

    tokens: np.ndarray  # [R, T] int32, 0 for padding
    segments: np.ndarray  # [R, T] int32, the text's number in its row from 1, 0 for padding
    mask: np.ndarray  # [R, T] bool


def prompts_of(model: Model, conversations: Sequence[Conversation], most: int) -> tuple[list[list[int]], list[BadRow]]:
    """The ids up to where the target is to answer: up to a conversation's first answer, or all of a plain text.

    A plain text is what a user says, as in `generate`, or is continued as it is where the target has no chat template.

    Args:
        model: the target.
        conversations: as read.
        most: tokens of a prompt; longer ones are reported.
    """
    _need_tokenizer(model, conversations)
    found, bad = [], []
    for one in conversations:
        try:
            if one.ids:
                ids = _known(model, one.ids[0])
            elif one.text is not None:
                said = {"role": "user", "content": one.text}
                ids = model.encode(one.text) if model.chat_template is None else model.encode_chat([said])
            else:
                first = next((i for i, m in enumerate(one.messages) if m["role"] == "assistant"), len(one.messages))
                asked = one.messages[:first]
                plain = model.chat_template is None and len(asked) == 1  # as `generate` reads a prompt
                ids = model.encode(asked[0]["content"]) if plain else model.encode_chat(asked)
        except (InvalidConfig, CheckpointError) as error:
            bad.append(BadRow(one.where, str(error)))
            continue
        if not 0 < len(ids) <= most:
            bad.append(BadRow(one.where, f"a prompt of {len(ids)} tokens, at most {most} are taken"))
            continue
        found.append(ids)
    return found, bad


def texts_of(model: Model, conversations: Sequence[Conversation]) -> tuple[list[Text], list[BadRow]]:
    """The given answers as they stand. A plain text is learnt from as a whole."""
    _need_tokenizer(model, conversations)
    found, bad = [], []
    for one in conversations:
        try:
            if one.ids:
                ids = np.asarray([i for part in one.ids for i in _known(model, part)], np.int32)
                text = Text(ids, np.arange(ids.size) >= len(one.ids[0]))
            elif one.text is not None:
                ids = np.asarray(model.encode(one.text), np.int32)
                text = Text(ids, np.ones(ids.size, bool))
            else:
                text = _masked(model, one.messages)
        except (InvalidConfig, CheckpointError) as error:
            bad.append(BadRow(one.where, str(error)))
            continue
        if not text.mask.any():
            bad.append(BadRow(one.where, "the assistant says nothing; let the target answer (distill)"))
            continue
        found.append(text)
    return found, bad


def _need_tokenizer(model: Model, conversations: Sequence[Conversation]) -> None:
    if model.tokenizer is None and (text := next((one for one in conversations if not one.ids), None)):
        raise MissingTokenizer(
            f"{text.where}: is text, and {model.name} has no tokenizer; give token ids, as in "
            '{"prompt": [1, 2, 3]}, or a Model with a tokenizer'
        )


def _known(model: Model, ids: Sequence[int]) -> list[int]:
    """The ids, all of the model's vocabulary."""
    if (largest := max(ids)) >= model.lm.vocab:
        raise InvalidConfig(f"token id {largest} is not of the vocabulary, whose ids go from 0 to {model.lm.vocab - 1}")
    return list(ids)


def _masked(model: Model, messages: Sequence[dict[str, str]]) -> Text:
    """Each answer is encoded by itself, as it is when it is decoded after its prompt."""
    template, tokenizer = model.chat_template, model.tokenizer
    if template is None or tokenizer is None:
        raise InvalidConfig(f"{model.name} has no chat template; give .txt files")
    ids: list[int] = []
    mask: list[bool] = []
    written = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = template.render(messages[:i])
        after = template.render(messages[: i + 1], add_generation_prompt=False)
        if not (before.startswith(written) and after.startswith(before)):
            raise InvalidConfig("the chat template rewrites what was said before; give single turns")
        for part, own in ((before[len(written) :], False), (after[len(before) :], True)):
            new = tokenizer.encode(part, special=not ids)
            ids += new
            mask += [own] * len(new)
        written = after
    return Text(np.asarray(ids, np.int32), np.asarray(mask, bool))


def split(count: int, held_out: float) -> tuple[np.ndarray, np.ndarray]:
    """The indices of the texts to train on, and of those held out: evenly spread, the same every time.

    Raises:
        TrainingError: there would be none held out, where a share is wanted.
    """
    every = np.arange(count)
    apart = np.floor((every + 1) * held_out) > np.floor(every * held_out)
    if held_out > 0 and not apart.any():
        share = f" or make held_out (--held-out) at least {math.ceil(1000 / count) / 1000}" if count > 1 else ""
        raise TrainingError(
            f"{count} usable {'prompt is' if count == 1 else 'prompts are'} too few to hold out a share of {held_out}: "
            f"give at least {max(2, math.ceil(1 / held_out))}{share}"
        )
    return every[~apart], every[apart]


def pack(texts: Iterable[Text], length: int) -> tuple[Rows, int]:
    """The texts in rows of `length`, each in the first row with room for it; and how many had to be cut.

    A text is cut at `length`; what is then without an answer is left out.
    """
    open_rows: list[list[Text]] = []
    room: list[int] = []
    cut = 0
    for text in texts:
        cut += text.ids.size > length
        text = Text(text.ids[:length], text.mask[:length])
        if not text.mask.any():
            continue
        at = next((i for i, free in enumerate(room) if free >= text.ids.size), None)
        if at is None:
            open_rows.append([])
            room.append(length)
            at = len(room) - 1
        open_rows[at].append(text)
        room[at] -= text.ids.size
    rows = Rows(*(np.zeros((len(open_rows), length), dtype) for dtype in (np.int32, np.int32, bool)))
    for r, members in enumerate(open_rows):
        at = 0
        for number, text in enumerate(members, start=1):
            place = slice(at, at + text.ids.size)
            rows.tokens[r, place], rows.segments[r, place], rows.mask[r, place] = text.ids, number, text.mask
            at = place.stop
    return rows, cut


def learnt(rows: Rows, heads: int) -> tuple[Rows, np.ndarray]:
    """What heads learn from alone: every answer with the tokens before it that guess into it, packed anew.

    Args:
        rows: R rows of T tokens.
        heads: head i guesses 2 + i tokens ahead, so heads + 1 tokens before an answer guess tokens of it.

    Returns:
        Fewer rows of T tokens, and where each of their tokens stands in `rows`: `[R', T]`, row times T plus place.
    """
    guessing = rows.mask.copy()
    for steps in range(1, heads + 2):
        same = (rows.segments[:, steps:] == rows.segments[:, :-steps]) & (rows.segments[:, steps:] > 0)
        guessing[:, :-steps] |= rows.mask[:, steps:] & same
    spans = []
    for r, (wanted, segments) in enumerate(zip(guessing, rows.segments)):
        number = np.where(wanted, segments, 0)
        edges = np.flatnonzero(np.diff(number, prepend=0, append=0))
        spans += [
            Text(np.arange(a, b) + r * number.size, rows.mask[r, a:b])
            for a, b in itertools.pairwise(edges)
            if number[a]
        ]
    packed, _ = pack(spans, rows.tokens.shape[1])
    tokens = np.where(packed.segments > 0, rows.tokens.reshape(-1)[packed.tokens], 0)
    return packed._replace(tokens=tokens), packed.tokens


def frequent(texts: Iterable[Text], vocab: int, count: int) -> np.ndarray:
    """The `count` tokens that answers use most, ascending; among equals the lowest ids."""
    used = np.zeros(vocab, np.int64)
    for text in texts:
        np.add.at(used, text.ids[text.mask], 1)
    return np.sort(np.argsort(-used, kind="stable")[:count]).astype(np.int32)
