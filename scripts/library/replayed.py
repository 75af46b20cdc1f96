"""Drafters without training, replayed on kept answers in NumPy; see `replay.py`."""

import collections
import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.drafters._match import MATCH_ACCURACY

KEPT = 8


class Text(NamedTuple):
    """An answer and its prompt, and the likeliest tokens after each place."""

    tokens: list[int]
    start: int
    ids: np.ndarray
    probs: np.ndarray


class Table:
    """What followed each token, with its share; `bigrams` is what is assumed of tokens that were not seen."""

    def __init__(self, bigrams: dict[int, dict[int, float]] | None = None):
        self.rows: dict[int, dict[int, float]] = {}
        self.bigrams = bigrams or {}

    def __getitem__(self, token: int) -> dict[int, float]:
        return self.rows.get(token) or self.bigrams.get(token, {})

    def learn(self, text: Text, place: int) -> None:
        """Replaces a token's entry by what the target holds for likely after it."""
        probs = text.probs[place, :KEPT]
        self.rows[text.tokens[place]] = dict(zip(text.ids[place, :KEPT].tolist(), (probs / probs.sum()).tolist()))

    def pair(self, token: int, follower: int) -> None:
        """Gives a follower half of the weight."""
        old = {t: p / 2 for t, p in self[token].items()}
        entry = {follower: 0.5 + old.pop(follower, 0.0), **old}
        self.rows[token] = dict(list(entry.items())[:KEPT])

    def read_prompt(self, text: Text, fill: Sequence[str]) -> None:
        for place in range(text.start - 1):
            if "prompt" in fill:
                self.learn(text, place)
            if "pairs" in fill:
                self.pair(text.tokens[place], text.tokens[place + 1])


def matches(tokens: list[int], place: int, most: int = 16) -> list[tuple[int, int]]:
    """Returns (match, place) of every earlier place whose tokens equal the last ones, the longest and latest first."""
    found = []
    for other in range(place):
        if tokens[other] == tokens[place]:
            match = 1
            while match < most and match <= other and tokens[other - match] == tokens[place - match]:
                match += 1
            found.append((-match, -other))
    return [(-match, -other) for match, other in sorted(found)]


class Drafter(NamedTuple):
    """What a drafter uses.

    Attributes:
        rows: weight of the recycled tokens; 0 for none.
        copies: places of the longest matches that are followed.
        least: least match that is followed.
        guesses: weight of the second guesses; 0 for none.
        chain: a match of so many tokens is copied as a chain; 0 for never.
        bigrams: whether the table starts with the target's own bigrams.
        alone: from a match of so many tokens on, only copies are drafted, to a depth of 15; 0 for never.
        ring: the number of tokens of earlier answers that are copied from, too; they count where tables are warm.
        costs: `(nodes, cost)`: each round has the number of nodes that promises most; none for all.
    """

    rows: float = 0.0
    copies: int = 0
    least: int = 1
    guesses: float = 0.0
    chain: int = 0
    bigrams: bool = False
    alone: int = 0
    ring: int = 0
    depth: int = 8
    costs: tuple[tuple[int, float], ...] = ()


def draft(
    drafter: Drafter, nodes: int, text: Text, place: int, table: Table, earlier: list[int]
) -> list[tuple[int, ...]]:
    """Returns the paths of the nodes that are likeliest to be accepted. `earlier` stands before the text."""
    others = [t for t in text.ids[place - 1].tolist() if t != text.tokens[place]] if place >= text.start else []
    tokens, place = [*earlier, *text.tokens], place + len(earlier)
    found = matches(tokens, place)
    if drafter.alone and found and found[0][0] >= drafter.alone:
        drafter = drafter._replace(rows=0.0, guesses=0.0, depth=15)
    if drafter.chain and found and found[0][0] >= drafter.chain:
        other = found[0][1]
        copied = [tokens[other + 1 + i % (place - other)] for i in range(nodes - 1)]
        return [tuple(copied[: i + 1]) for i in range(nodes - 1)]
    followed, seen = [], set()
    for match, other in found:
        if match >= drafter.least and tokens[other + 1] not in seen and len(followed) < drafter.copies:
            followed.append((match, other))
            seen.add(tokens[other + 1])
    heap: list[Any] = [(-1.0, 0, (), followed)]
    kept: list[tuple[tuple[int, ...], float]] = []
    made = 0
    while heap and len(kept) < nodes:
        worth, _, path, followed = heapq.heappop(heap)
        kept.append((path, -worth))
        if len(path) == drafter.depth:
            continue
        rest, probs, further = 1.0, {}, collections.defaultdict(list)
        for match, other in followed:
            follower = tokens[other + 1] if other < place else path[other - place]
            trust = MATCH_ACCURACY[min(match, len(MATCH_ACCURACY) - 1)]
            probs[follower] = probs.get(follower, 0.0) + rest * trust
            further[follower].append((match + 1, other + 1))
            rest *= 1 - trust
        for token, share in table[path[-1] if path else tokens[place]].items() if drafter.rows else ():
            probs[token] = probs.get(token, 0.0) + rest * drafter.rows * share
        for i, token in enumerate(others[:KEPT]) if drafter.guesses and not path else ():
            probs[token] = probs.get(token, 0.0) + rest * drafter.guesses / (i + 2)
        for token, prob in probs.items():
            made += 1
            heapq.heappush(heap, (worth * min(prob, 0.999), made, (*path, token), further[token]))
    if drafter.costs:
        sums = np.cumsum([worth for _, worth in kept])
        kept = kept[: 1 + max(drafter.costs, key=lambda nc: sums[min(nc[0], len(sums) - 1)] / nc[1])[0]]
    return [path for path, _ in kept if path]


def rounds(drafter: Drafter, nodes: int, texts: list[Text], bigrams: dict, warm: bool) -> list[collections.Counter]:
    """Returns for each text how many rounds had so many nodes, and under "tokens" its tokens."""
    found, table, earlier = [], Table(), list[int]()
    for index, text in enumerate(texts):
        if index == 0 or not warm:
            table, earlier = Table(bigrams if drafter.bigrams else None), []
        table.read_prompt(text, ("pairs",))
        place = text.start - 1
        counts: collections.Counter = collections.Counter({"tokens": len(text.tokens) - text.start})
        while place < len(text.tokens) - 1:
            paths = set(draft(drafter, nodes, text, place, table, earlier))
            counts[len(paths) + 1] += 1
            end = place + 1
            while end < len(text.tokens) - 1 and tuple(text.tokens[place + 1 : end + 1]) in paths:
                end += 1
            for learnt in range(place, end):
                table.learn(text, learnt)
            place = end
        if drafter.ring:
            earlier = [*earlier, *text.tokens[text.start :], -1][-drafter.ring :]
        found.append(counts)
    return found
