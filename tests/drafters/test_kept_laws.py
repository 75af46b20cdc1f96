"""Tests the law of texts whose rounds depend on what a drafter has kept, by enumeration over several rounds.

What is proposed comes from the text and from a table of what the target saw in earlier rounds, rejected nodes included,
how much of it from a balance of what earlier rounds cost and saved, and both decide how many tokens a round emits. The
sum over all sequences of rounds must be the target's law.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import WEIGHING
from helpers.costs import COST
from jaxspec.analysis.enumeration import stop_laws, total_variation
from jaxspec.core.draw import Draw
from jaxspec.core.noise import RoundNoise
from jaxspec.core.records import Advance, Context, RoundResult, StopLaw
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import dynamic
from jaxspec.decode.verify import complete_proposal, drop_invalid_children, select_likeliest
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.drafters.recycling import TOKENS_PER_ENTRY, Recycling
from jaxspec.rules.deterministic import Deterministic
from jaxspec.schedules.best_width import BestWidth
from jaxspec.testing import TableLM, joint_law, model_law

V, LENGTH, PROMPT, ROOM = 4, 4, [2, 1, 2], 16
ROWS = 512  # texts of one call, padding included, so that it is compiled once
LM = TableLM(V)
PARAMS, SAMPLING = LM.init_params(jax.random.key(1)), Sampling(temperature=0.8)
KEEPS = Recycling(dynamic(2, 2, 4), 3)
SCHEDULE = BestWidth((1, 2), COST)
LAW = model_law(LM, PARAMS, PROMPT, SAMPLING)


@functools.partial(jax.jit, static_argnums=(0, 1))
def propose(drafter, noise, state, tokens, length):
    random = RoundNoise(jax.random.split(jax.random.key(0), ROWS), length, jnp.asarray(True), V)
    limit = jnp.full((ROWS,), drafter.shape.depth)
    draft, balance = state
    count = functools.partial(SCHEDULE.count_nodes, balance)
    draw = Draw(noise, random, SAMPLING.rows(ROWS, V), limit, count=count)
    context: Any = Context(tokens, length, None, None)  # pyright: ignore[reportArgumentType]
    return drop_invalid_children(
        complete_proposal(drafter.propose(None, draft, context, draw)[0], tokens, length, limit, V)
    )


@functools.partial(jax.jit, static_argnums=0)
def absorb(drafter, state, text, start, length, round=None):
    """Commits what stands behind `start`; `round` has the nodes of the path, and the proposal's tokens and logits."""
    size = drafter.shape.depth + 1 if round else ROOM
    tokens = jnp.take_along_axis(text, jnp.minimum(start[:, None] + jnp.arange(size), ROOM - 1), 1)
    path, seen, (draft, balance) = None, None, state
    if round:
        path, drafted, logits = round
        nodes = jnp.where(drafted[:, 1:] >= 0, jnp.arange(1, drafted.shape[1]), 0).max(-1) + 1
        accepted = (path >= 0).sum(-1)
        balance = SCHEDULE.update(balance, RoundResult(accepted, accepted, nodes, length - start))
        seen = (
            select_likeliest(drafted, logits, TOKENS_PER_ENTRY, drafter.shape.nodes)
            if isinstance(drafter, Recycling)
            else None
        )
    new = Advance(tokens, jnp.zeros((ROWS, size, 1)), length - start, path, text, start, None, seen)
    return drafter.absorb(None, draft, new), balance


def padded(texts):
    """The texts behind the prompt, and their lengths."""
    tokens, length = np.zeros((ROWS, ROOM), np.int32), np.full(ROWS, len(PROMPT), np.int32)
    for row, text in enumerate(texts):
        length[row] += len(text)
        tokens[row, : length[row]] = [*PROMPT, *text]
    return tokens, length


def law_of_rounds(drafter, rule) -> tuple[np.ndarray, set[int]]:
    """The law of the first tokens, and the numbers of tokens that rounds emit."""
    law, emitted, texts, probs = np.zeros((V,) * LENGTH), set(), [()], [1.0]
    tokens, length = padded(texts)
    state = jax.jit(lambda: (drafter.init(None, ROWS, ROOM), SCHEDULE.init(ROWS, drafter.shape)))()
    state = absorb(drafter, state, tokens, np.zeros_like(length), length)
    while texts:
        proposal = jax.device_get(propose(drafter, rule.noise, state, tokens, length))
        paths = [[tuple(own[n] for n in path[1:] if n >= 0) for path in row]
                 for own, row in zip(proposal.tokens.tolist(), proposal.tree.paths.tolist())]  # fmt: skip
        target = np.full((ROWS, drafter.shape.nodes, V), 1 / V)
        for row, text in enumerate(texts):
            for node, path in enumerate(paths[row]):
                target[row, node] = LAW(text + path) if -1 not in path else 1 / V
        with jax.enable_x64(True):
            chances, after = jax.device_get(stop_laws(rule, np.log(target), proposal))
        mass = np.array(chances)[..., None] * after
        mass[len(texts) :] = 0
        rows, grown, more, nodes = [], [], [], np.full((ROWS, drafter.shape.depth + 1), -1, np.int32)
        for row, node, token in np.argwhere(mass > 0).tolist():
            text, chance = (*texts[row], *paths[row][node], token), probs[row] * mass[row, node, token]
            emitted.add(len(paths[row][node]) + 1)
            if len(text) >= LENGTH:
                law[text[:LENGTH]] += chance
                continue
            path = [n for n in proposal.tree.paths[row, node, 1:] if n >= 0]
            nodes[len(rows), : len(path)] = path
            rows, grown, more = [*rows, row], [*grown, text], [*more, chance]
        texts, probs, at, before = grown, more, np.resize(rows or [0], ROWS), length
        tokens, length = padded(texts)
        state = jax.tree.map(lambda a, at=at: np.asarray(a)[at], state)
        round = nodes, proposal.tokens[at], np.log(target[at]).astype(np.float32)
        state = absorb(drafter, state, tokens, np.minimum(before[at], length), length, round)
    return law, emitted


@pytest.mark.parametrize(("drafter", "rule"), [
    (KEEPS, "deterministic"),
    (PromptLookup(dynamic(2, 2, 4)), "deterministic"),
])  # fmt: skip
def test_texts_follow_the_targets_law_whatever_is_kept(drafter, rule):
    """Total variation below 1e-12. The table has a slot less than there are tokens, so some take others' places."""
    law, emitted = law_of_rounds(drafter, WEIGHING[rule])
    assert total_variation(law, joint_law(LAW, LENGTH)) < 1e-12
    assert emitted == {1, 2, 3}


def test_the_enumeration_sees_a_rule_that_prefers_what_is_kept():
    """The instrument itself: the first child is accepted twice as often as it should be."""

    class Prefers(Deterministic):
        def __call__(self, law, proposal):
            found = super().__call__(law, proposal)
            more = jnp.minimum(found.node_probs[1], found.node_probs[0])
            return StopLaw(found.node_probs.at[0].add(-more).at[1].add(more), found.next_logits)

    law, _ = law_of_rounds(KEEPS, Prefers())
    assert total_variation(law, joint_law(LAW, LENGTH)) > 0.05
