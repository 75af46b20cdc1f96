"""Packs texts into rows of one length."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Text(NamedTuple):
    """A text of n tokens.

    Attributes:
        ids: token ids `[n]`, int32.
        mask: the tokens `[n]` that the assistant wrote, which are trained on; bool.
    """

    ids: np.ndarray
    mask: np.ndarray


class Rows(NamedTuple):
    """R rows of T tokens. Each row holds several texts.

    Attributes:
        tokens: token ids `[R, T]`, int32; 0 for padding.
        segments: the number of each token's text in its row, from 1, `[R, T]`, int32; 0 for padding.
        mask: the tokens `[R, T]` that are trained on; bool.
    """

    tokens: np.ndarray
    segments: np.ndarray
    mask: np.ndarray


def pack_texts(texts: Iterable[Text], length: int) -> tuple[Rows, int]:
    """Packs each text into the first row with room for it.

    Args:
        texts: the texts; each is cut at `length`, and left out if no answer remains.
        length: number of tokens of each row.

    Returns:
        The rows, and the number of texts that were cut.
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


def pack_supervised_spans(rows: Rows, drafted: int) -> tuple[Rows, np.ndarray]:
    """Keeps the answers and the positions that predict them, and packs these into fewer rows.

    Args:
        rows: R rows of T tokens.
        drafted: number of tokens that are guessed from each position. Guess i predicts the token 2 + i positions
            ahead, so the drafted + 1 tokens before an answer predict tokens of the answer.

    Returns:
        Fewer rows of T tokens, and the origin of each of their tokens in `rows`: `[R', T]`, row times T plus position.
    """
    guessing = rows.mask.copy()
    for steps in range(1, drafted + 2):
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
    packed, _ = pack_texts(spans, rows.tokens.shape[1])
    tokens = np.where(packed.segments > 0, rows.tokens.reshape(-1)[packed.tokens], 0)
    return packed._replace(tokens=tokens), packed.tokens
