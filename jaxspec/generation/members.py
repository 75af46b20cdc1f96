"""Looks up rules and schedules by name, and checks members, alone and together."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxspec.core.checks import check_member
from jaxspec.core.drafter import Drafter
from jaxspec.core.draw import Noise
from jaxspec.core.noise import RoundNoise
from jaxspec.core.records import Proposal, Verdict
from jaxspec.core.rule import Rule
from jaxspec.core.sampling import Sampling
from jaxspec.core.schedule import Schedule
from jaxspec.core.tree import TreeShape, build
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Request, Weights
from jaxspec.decode.verify import Processing, apply_rule
from jaxspec.errors import InvalidConfig, JaxspecError
from jaxspec.registry import find


def make_rule(rule: str | Rule) -> Rule:
    """Returns the rule of this name, or the rule itself.

    Raises:
        JaxspecError: there is no rule of this name, or `rule` is not a rule.
    """
    return _make("rule", rule, Rule)


def make_schedule(schedule: str | Schedule) -> Schedule:
    """Returns the schedule of this name, or the schedule itself.

    Raises:
        JaxspecError: there is no schedule of this name, or `schedule` is not a schedule.
    """
    return _make("schedule", schedule, Schedule)


def _make(kind: str, member: Any, protocol: type) -> Any:
    """Returns the registered member of a name with its default settings, or the member itself after a check."""
    if isinstance(member, str):
        return find(kind, member)()
    check_member(kind, member, protocol)
    return member


def check_together(rule: Rule, drafter: Drafter, vocab: int) -> None:
    """Checks that a rule supports the drafts of a drafter, which are tokens with or without a law.

    The shape of the drafter's tree must be one that the rule supports.

    The rule is traced as the loop calls it, and nothing is compiled.

    Raises:
        InvalidConfig: the rule refuses the drafts, or cannot be traced for them.
    """
    law = rule.noise is Noise.FRESH and drafter.draws and not drafter.needs.observed
    _trace_rule(rule, drafter.shape, law, vocab)


@functools.lru_cache(maxsize=256)
def _trace_rule(rule: Rule, shape: TreeShape, law: bool, vocab: int) -> None:
    """Traces verification of one row by a rule, for a tree that is known only when the program runs.

    Args:
        rule: the rule.
        shape: the sizes of the tree.
        law: whether the proposal has the law that its tokens were drawn from.
        vocab: V, the size of the vocabulary.

    Raises:
        InvalidConfig: the rule refuses the proposal, or cannot be traced.
    """

    def verify(logits: Array, tokens: Array, parents: Array, drawn: Array) -> Verdict:
        tree = jax.tree.map(lambda leaf: leaf[None], build(parents, shape))
        key, roots = jax.random.key(0)[None], jnp.ones(1, jnp.int32)
        noise, settings = RoundNoise(key, roots, jnp.bool_(True), vocab), Sampling(temperature=1.0).rows(1, vocab)
        proposal = Proposal(tokens, tree, drawn if law else None)
        return apply_rule(rule, noise, Processing.of(settings, (), proposal), logits, proposal)[0]

    ids = jax.ShapeDtypeStruct((1, shape.nodes), jnp.int32)
    scores = jax.ShapeDtypeStruct((1, shape.nodes, vocab), jnp.float32)
    with _in_one_line(f"the rule {type(rule).__name__}"):
        jax.eval_shape(verify, scores, ids, jax.ShapeDtypeStruct(ids.shape[1:], jnp.int32), scores)


def check_round(decoder: Decoder, weights: Weights) -> None:
    """Traces a prefill and a round with members of other packages, so that their errors come before a compilation.

    jaxspec's own members are not traced: tests combine all of them.

    Raises:
        InvalidConfig: a member cannot be traced; the message names the members of other packages.
    """
    members = {type(member) for member in (decoder.drafter, decoder.rule, decoder.schedule)}
    others = sorted(member.__name__ for member in members if member.__module__.partition(".")[0] != "jaxspec")
    if others:
        leaves, structure = jax.tree.flatten(jax.eval_shape(lambda weights: weights, weights))
        _trace_round(decoder, tuple(leaves), structure, " and ".join(others))


@functools.lru_cache(maxsize=64)
def _trace_round(decoder: Decoder, leaves: tuple, structure: Any, names: str) -> None:
    """Traces a prefill and a round of one row, for weights of these shapes."""
    vocab, capacity = decoder.target.vocab, decoder.slots(2)

    def decode(weights: Weights) -> Any:
        ones, key = jnp.ones(1, jnp.int32), jax.random.key(0)[None]
        settings = Sampling(temperature=1.0).rows(1, vocab)
        request = Request(ones[None], ones, ones, key, ones[None], settings, jnp.ones(1, bool))
        state = decoder.prefill(weights, decoder.init(weights, request, capacity))
        return decoder.step(weights, state)

    with _in_one_line(names):
        jax.eval_shape(decode, jax.tree.unflatten(structure, leaves))


@contextlib.contextmanager
def _in_one_line(who: str) -> Iterator[None]:
    """Turns errors of tracing into one line, with the error as its cause.

    Raises:
        InvalidConfig: there was an error.
    """
    try:
        yield
    except JaxspecError:
        raise
    except Exception as error:  # whatever the code of a member raises
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.300}"
        raise InvalidConfig(f"{who} cannot be traced for this decoder: {reason}") from error
