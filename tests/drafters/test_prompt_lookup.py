"""Tests prompt lookup against its definition in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.costs import COST, counting
from helpers.tiers import with_slow
from helpers.toy_text import go, tokens
from jaxspec.core.draw import Draw, Noise
from jaxspec.core.noise import RoundNoise
from jaxspec.core.records import Context
from jaxspec.core.sampling import Sampling
from jaxspec.core.theory import assumed_cost
from jaxspec.core.topology import branching, chain, dynamic
from jaxspec.core.tree import build
from jaxspec.drafters._match import MATCH_ACCURACY
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.errors import InvalidConfig
from jaxspec.schedules.best_width import BestWidth

ROWS, SLOTS, LENGTHS = 24, 64, np.random.default_rng(0).integers(1, 64, 24)


def paths_by_hand(drafter, text, limit):
    """The paths of the likeliest tokens and their worth, best first."""
    places = []
    for place in range(1, len(text)):
        match = 0
        while match < min(drafter.max_match, place) and text[place - 1 - match] == text[-1 - match]:
            match += 1
        if match >= drafter.min_match and text[place] >= 0:
            places.append((-match, -place))
    found, rest, seen = {}, 1.0, set()
    for match, place in ((-m, -p) for m, p in sorted(places)):
        if text[place] in seen or len(seen) == getattr(drafter.tree, "beam", 1):
            continue
        seen.add(text[place])
        worth, path = rest, ()
        for step in range(min(drafter.shape.depth, limit)):
            worth *= MATCH_ACCURACY[min(match + step, len(MATCH_ACCURACY) - 1)]
            path = (*path, text[place + step % (len(text) - place)])
            if path[-1] < 0:
                break
            found[path] = worth
        rest *= 1 - MATCH_ACCURACY[match]
    best = sorted(found, key=lambda path: -found[path])[: drafter.shape.nodes - 1]
    return {path: found[path] for path in best}


def width_by_hand(drafter, schedule, drafts):
    """The width at which rows that decide together expect the most tokens for their time."""
    widths = [*(w for w in schedule.widths if w < drafter.shape.nodes), drafter.shape.nodes]
    tokens = [sum(1 + sum(list(found.values())[: width - 1]) for found in drafts) for width in widths]
    speed = [n / assumed_cost(width, COST, len(drafts)) for n, width in zip(tokens, widths)]
    return widths[int(np.argmax(speed))]


@pytest.mark.parametrize("letters", [2, 5, 12])
@pytest.mark.parametrize(("drafter", "kind", "widths", "history"), [
    (PromptLookup(), Noise.NONE, (1, 4, 8), 0),
    (PromptLookup(), Noise.SHARED, (1, 4, 8), 0),
    (PromptLookup(chain(5), min_match=2, max_match=3), Noise.NONE, (1, 4, 8), 0),
    (PromptLookup(dynamic(3, 2, 6)), Noise.NONE, (1,), 0),
    (PromptLookup(earlier=40), Noise.SHARED, (1, 4, 8), 0),
    (PromptLookup(), Noise.NONE, (1, 4, 8), 30),
    (PromptLookup(earlier=40), Noise.SHARED, (1, 4, 8), 30),
], ids=["default", "rows together", "chain", "small", "earlier", "history", "earlier and history"])  # fmt: skip
def test_the_likeliest_copies_are_proposed(drafter, kind, widths, history, letters):
    rng, rows = np.random.default_rng(letters), ROWS if kind is Noise.NONE else 3
    schedule = BestWidth(widths, COST)
    lengths = LENGTHS[-rows:]
    text = rng.integers(0, letters, (rows, SLOTS))
    text[: rows // 3] = np.arange(SLOTS) % 7  # periodic
    limits = rng.integers(0 if kind is Noise.NONE else 1, drafter.shape.depth + 1, rows)
    noise = RoundNoise(jax.random.split(jax.random.key(0), rows), jnp.asarray(lengths), jnp.asarray(False), letters)
    count = counting(rows, drafter.shape, schedule=schedule)
    draw = Draw(kind, noise, Sampling().rows(rows, letters), jnp.asarray(limits), count=count)
    params: Any = {"earlier": jnp.full(drafter.earlier, -1)}
    for count in (3, 9, 11, 13) if drafter.earlier else ():
        params = drafter.remember(params, rng.integers(0, letters, count).tolist())
    earlier = np.asarray(params["earlier"]).tolist()
    assert earlier.count(-1) == (4 if drafter.earlier else 0)
    ends = np.isin(np.arange(history), (4, 11, history - 1)) | (np.arange(history) < 3)  # of texts of the same prompt
    before = np.where(ends, -1, rng.integers(0, letters, (rows, history)))
    histories = jnp.asarray(before) if history else None
    context = Context(jnp.asarray(text), jnp.asarray(lengths), None, None, histories)  # pyright: ignore
    proposal = jax.device_get(jax.jit(lambda: drafter.propose(params, (), context, draw)[0])())
    sizes = set()
    texts = [earlier + before[row].tolist() + text[row, : lengths[row]].tolist() for row in range(rows)]
    found = [paths_by_hand(drafter, texts[row], limits[row]) for row in range(rows)]
    for row in range(rows):
        width = width_by_hand(drafter, schedule, found if kind is Noise.SHARED else [found[row]])
        tree = type(proposal.tree)(*(a[row] if len(proposal.tokens) == len(a) else a for a in proposal.tree))
        expected = build(tree.parents, drafter.shape, np)
        assert all(np.array_equal(a, b) for a, b in zip(tree, expected))
        drafted = np.flatnonzero(proposal.tokens[row, 1:] >= 0) + 1
        assert (drafted == np.arange(1, len(drafted) + 1)).all(), "what is not proposed comes last"
        paths = [tuple(proposal.tokens[row, node] for node in tree.paths[n][1:] if node >= 0) for n in drafted]
        assert len(set(paths)) == len(paths)
        assert set(paths) == set(list(found[row])[: width - 1]), row
        sizes.add(len(paths))
    assert len(sizes) > 1 if kind is Noise.NONE else max(sizes) > 0


@pytest.mark.parametrize(("given", "what"), [
    ({"tree": branching(2, 1)}, "static tree"),
    ({"tree": chain(0)}, "at least one token"),
    ({"tree": dynamic(3, 2, 8)}, "at most 7"),
    ({"min_match": 0}, "min_match"),
    ({"min_match": 17}, "min_match"),
    ({"earlier": -1}, "earlier"),
    ({"earlier": 1 << 17}, "earlier"),
])  # fmt: skip
def test_what_cannot_be_looked_up_is_refused(given, what):
    with pytest.raises(InvalidConfig, match=what):
        PromptLookup(**given)


@pytest.mark.parametrize("rule", with_slow(["coupled", "deterministic"], ("deterministic",)))
def test_ended_answers_are_copied_only_where_they_change_no_text(rule):
    """The same prompt again and again, with one key: after the first answer the drafts are its copies."""
    given: dict[str, Any] = {"batch": 1, "rule": rule, "tree": 3, "max_new_tokens": 24}
    keys = jnp.stack([jax.random.key(5)] * 3)
    without, with_earlier = (
        go([[1, 2, 3]] * 3, "prompt-lookup", key=keys, drafter_options={"earlier": count}, **given) for count in (0, 64)
    )
    assert tokens(without) == tokens(with_earlier)
    rounds = [[row.stats.rounds for row in output] for output in (without, with_earlier)]
    assert rounds[0] == [rounds[0][0]] * 3
    if rule == "deterministic":
        assert rounds[1] == rounds[0]
    else:
        assert tokens(without) == tokens(go([[1, 2, 3]] * 3, key=keys, max_new_tokens=24))
        assert rounds[1][0] == rounds[0][0]
        assert max(rounds[1][1:]) < rounds[0][0] / 2
