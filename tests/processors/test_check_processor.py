"""Tests of the kit for processors: all members pass, and each broken processor is named."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from helpers.tiers import with_slow
from jaxspec.core.bias import LogitBias
from jaxspec.core.processor import count_tokens, last_tokens, place
from jaxspec.processors.budget import ThinkingBudget
from jaxspec.processors.masks import AllowedTokens, SuppressTokens
from jaxspec.processors.minimum import MinNewTokens
from jaxspec.processors.penalties import FrequencyPenalty, PresencePenalty, RepetitionPenalty
from jaxspec.processors.watermark import Watermark
from jaxspec.processors.words import BadWords, NoRepeatNgram
from jaxspec.testing import check_processor

pytestmark = pytest.mark.quick

MEMBERS = {
    "logit-bias": LogitBias({3: -1.0, 5: 2.0}),
    "repetition": RepetitionPenalty(1.3),
    "presence": PresencePenalty(0.5),
    "frequency": FrequencyPenalty(0.3),
    "no-repeat-ngram": NoRepeatNgram(2),
    "bad-words": BadWords([[3], [1, 2], [4, 4, 5]]),
    "min-new-tokens": MinNewTokens(2),
    "allowed-tokens": AllowedTokens([0, 1, 2, 3, 5, 8]),
    "suppress-tokens": SuppressTokens([4, 7]),
    "thinking-budget": ThinkingBudget(5, [7, 3]),
    "watermark": Watermark(7, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, context=2),
}


def test_every_member_is_here():
    from jaxspec.registry import PROCESSORS

    others = {"grammar"}  # accepts texts of its automaton only; tests/grammar
    assert MEMBERS.keys() == {name for name in PROCESSORS if PROCESSORS.own(name)} - others


@pytest.mark.parametrize("name", with_slow(MEMBERS, MEMBERS.keys() - {"min-new-tokens", "thinking-budget"}))
def test_members_have_the_properties(name):
    check_processor(MEMBERS[name], stop_ids=[5])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counting:
    """A penalty for tokens of the text, which its subclasses break."""

    def rows(self, batch, vocab):
        return self

    def init(self, beginning):
        return jnp.zeros((len(beginning.stop_ids), beginning.vocab), jnp.int32)

    def absorb(self, state, tokens, count, start):
        return count_tokens(state, tokens, jnp.arange(tokens.shape[1]) < count[:, None])

    def apply(self, state, path, logits):
        again = (path[..., None] == jnp.arange(logits.shape[2])).sum(2)
        return logits - 0.5 * (state[:, None] + again)


def broken(**methods):
    """A class like `Counting` with other methods."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(type("Broken", (Counting,), methods)))()


BROKEN = {
    "rejected nodes are kept": (
        broken(absorb=lambda self, state, tokens, count, start: count_tokens(state, tokens, tokens >= 0)),
        "gives a path other logits|depends on the tokens behind a text|changes its state although",
    ),
    "the path is ignored": (
        broken(apply=lambda self, state, path, logits: logits - 0.5 * state[:, None]),
        "gives a path other logits than the absorbed text",
    ),
    "the last token of a round alone counts": (
        broken(
            absorb=lambda self, state, tokens, count, start: count_tokens(
                state, tokens, jnp.arange(tokens.shape[1]) == count[:, None] - 1
            )
        ),
        "gives a path other logits",
    ),
    "rounds are counted": (
        broken(absorb=lambda self, state, tokens, count, start: state + 1),
        "gives a path other logits|changes its state although",
    ),
    "nodes see one another": (
        broken(apply=lambda self, state, path, logits: logits - logits.mean(1, keepdims=True) - 0.0 * state[:, None]),
        "gives a path other logits|gives a node other logits",
    ),
    "padding counts": (
        broken(
            apply=lambda self, state, path, logits: logits - 0.5 * state[:, None] - 0.5 * (
                jnp.maximum(path, 0)[..., None] == jnp.arange(logits.shape[2])
            ).sum(2)
        ),
        "gives a path other logits|depends on the padding",
    ),
    "NaN": (broken(apply=lambda self, state, path, logits: logits + jnp.nan), "writes NaN"),
    "another answer for some tokens": (
        broken(apply_to=lambda self, state, path, tokens, logits: logits),
        "has an apply_to that differs from apply",
    ),
    "a forced token that is forbidden": (
        broken(
            apply=lambda self, state, path, logits: jnp.where(jnp.arange(logits.shape[2]) == 0, -jnp.inf, logits),
            step=lambda self, states, tokens: states,
            forced=lambda self, states: jnp.zeros(states.shape[:2], jnp.int32),
        ),
        "forbids the token that it forces",
    ),
    "rows see one another": (
        broken(apply=lambda self, state, path, logits: Counting.apply(self, state, path, logits) - logits.mean(0)),
        "gives a path other logits|gives a row another text beside other rows",  # a mean may be rounded in two ways
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_each_fault_is_named(name):
    processor, words = BROKEN[name]
    with pytest.raises(AssertionError, match=f"Broken ({words})"):
        check_processor(processor)


def test_a_processor_like_those_passes():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class NoStutter(Counting):
        def init(self, beginning):
            return jnp.full((len(beginning.stop_ids), 1), -1, jnp.int32)

        def absorb(self, state, tokens, count, start):
            path = jnp.where(jnp.arange(tokens.shape[1]) < count[:, None], tokens, -1)
            return last_tokens(state, path[:, None])[:, 0]

        def apply(self, state, path, logits):
            return place(logits, last_tokens(state, path), -jnp.inf)

    check_processor(NoStutter())
