"""Texts packed into rows of one length."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Text(NamedTuple):
    """Token ids, and which of them the assistant wrote: those are learnt from."""

    ids: np.ndarray  # [n] int32
    mask: np.ndarray  # [n] bool


class Rows(NamedTuple):
    """Texts packed into rows of one length; R rows of T tokens."""

    tokens: np.ndarray  # [R, T] int32, 0 for padding
    segments: np.ndarray  # [R, T] int32, the text's number in its row from 1, 0 for padding
    mask: np.ndarray  # [R, T] bool


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


def pack_supervised_spans(rows: Rows, heads: int) -> tuple[Rows, np.ndarray]:
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
