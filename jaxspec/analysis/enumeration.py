"""The exact law of the tokens that a rule emits in a round, by enumeration.

The law is a sum over every proposal of the drafter, every node where the walk can stop and every token after it,
computed with the rule's own code. A rule is lossless if this law, continued by the target, equals the target's law:
the identity that defines a valid verification algorithm in Sun et al. 2025 (arXiv:2403.10444), definition 2.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec.core.draw import Noise
from jaxspec.core.records import Proposal
from jaxspec.core.rule import WeighingRule
from jaxspec.core.schedule import Constant, Schedule
from jaxspec.core.topology import Topology
from jaxspec.errors import InvalidConfig

Law = Callable[[tuple[int, ...]], np.ndarray]
"""Maps the tokens since the root to the probabilities of the next token, `[V]`."""

PROPOSALS_PER_CALL = 256
"""Proposals per call of a rule. The last block is padded, so compilation depends on the tree's sizes and V alone."""


def bias(rule: WeighingRule, topology: Topology, target: Law, draft: Law, **options: Any) -> float:
    """Returns the total variation between the law of a round with this rule and the target's law: 0 if the rule is
    lossless.

    Arguments as in `round_law`.
    """
    law = round_law(rule, topology, target, draft, **options)
    return total_variation(law, joint_law(target, topology.shape.depth + 1))


def round_law(
    rule: WeighingRule,
    topology: Topology,
    target: Law,
    draft: Law,
    dtype: DTypeLike = np.float64,
    noise: Noise | None = None,
    schedule: Schedule = Constant(),
) -> np.ndarray:
    """Returns the law of the next D + 1 tokens, which begin with the tokens that a round of this rule emits.

    If a round emits fewer tokens, the target continues its text. An incorrect rule may stop at nodes without a proposed
    token; the probability of such stops is dropped, so the law sums to less than 1.

    Args:
        rule: a rule that compares laws. (Coupled rules emit the text of plain decoding by construction.)
        topology: the tree; small, because all draws of all nodes are enumerated.
        target: the target's law.
        draft: the drafter's law.
        dtype: the precision of the rule's arithmetic.
        noise: the kind of noise that the drafter draws with; None for the kind that the rule needs. With `Noise.NONE`,
            the most likely tokens are proposed as point masses.
        schedule: the schedule of the drafts, in its initial state.

    Returns:
        Probabilities, an array of shape `[V] * (D + 1)`.

    Raises:
        InvalidConfig: the rule is coupled, or does not support the tree.
    """
    proposals = enumerate_proposals(topology, target, draft, rule.noise if noise is None else noise, schedule)
    chances, after = apply_to_all(rule, topology, proposals, dtype)
    vocab, longest = proposals.target.shape[-1], topology.shape.depth + 1
    ended = [np.zeros((vocab**depth, vocab)) for depth in range(longest)]
    for node, depth in enumerate(np.asarray(topology.tree.depths).tolist()):
        text = proposals.tokens[:, topology.tree.paths[node, 1 : depth + 1]]
        mass = proposals.probs * chances[:, node]
        possible = (mass != 0) & (text >= 0).all(-1)
        codes = text[possible] @ vocab ** np.arange(depth)[::-1]
        np.add.at(ended[depth], codes, mass[possible, None] * after[possible, node])
    law = np.zeros(1)
    for depth in range(longest):  # the target continues the rounds that stopped above this depth
        law = (law[:, None] * _level(target, vocab, depth) + ended[depth]).ravel()
    return law.reshape((vocab,) * longest)


def joint_law(target: Law, length: int, stops: Sequence[int] = ()) -> np.ndarray:
    """Returns the law of the next `length` tokens, `[V] * length`.

    A text that reaches a token of `stops` repeats it to the end.
    """
    vocab, law = len(target(())), np.ones(1)
    for depth in range(length):
        level = _level(target, vocab, depth)
        for stop in stops if depth else ():
            level[stop::vocab] = np.eye(vocab)[stop]
        law = (law[:, None] * level).ravel()
    return law.reshape((vocab,) * length)


def _level(target: Law, vocab: int, depth: int) -> np.ndarray:
    """Returns the target's law after every text of `depth` tokens, `[V**depth, V]`."""
    return np.array([target(text) for text in itertools.product(range(vocab), repeat=depth)])


def total_variation(first: np.ndarray, second: np.ndarray) -> float:
    """Returns half the sum of the absolute differences of two laws."""
    return float(np.abs(first - second).sum() / 2)


def accepted_length(
    rule: WeighingRule, topology: Topology, target: Law, draft: Law, dtype: DTypeLike = np.float64
) -> float:
    """Returns the exact expected number of drafted tokens that a round accepts; arguments as in `round_law`."""
    proposals = enumerate_proposals(topology, target, draft, rule.noise)
    chances, _ = apply_to_all(rule, topology, proposals, dtype)
    return float((proposals.probs[:, None] * chances * topology.tree.depths).sum())


class Enumeration(NamedTuple):
    """All M proposals that a drafter can make below one root."""

    probs: np.ndarray  # [M], the probability of each proposal
    tokens: np.ndarray  # [M, N], -1 where nothing is proposed
    target: np.ndarray  # [M, N, V], the target's probabilities after every node
    draft: np.ndarray | None  # [M, N, V], the draft's probabilities after every node; None for point masses


def enumerate_proposals(
    topology: Topology, target: Law, draft: Law, noise: Noise = Noise.FRESH, schedule: Schedule = Constant()
) -> Enumeration:
    """Returns every proposal of a drafter with this law; with `Noise.NONE`, only the proposal of the most likely
    tokens.

    Below a node where the schedule stops the draft, tokens are -1 and the laws are placeholders that no rule may read.

    Raises:
        InvalidConfig: `noise` is `Noise.SHARED`.
    """
    if noise is Noise.SHARED:
        raise InvalidConfig(
            "coupled rules cannot be enumerated; compare their texts with those of plain decoding under the same key"
        )
    tree, vocab = topology.tree, len(target(()))
    probs, tokens = np.ones(1), np.full((1, topology.shape.nodes), -1, np.int32)
    tokens[:, 0] = 0

    limit = int(schedule.limit(schedule.init(1, topology.shape))[0])

    def stopped(node: int, text: tuple[int, ...]) -> bool:
        with np.errstate(divide="ignore"):
            stopped = schedule.stop_after(jnp.asarray(np.log(draft(text))))
        return bool(tree.depths[node] >= limit) or (stopped is not None and bool(stopped))

    def texts(node: int) -> tuple[list[tuple[int, ...] | None], np.ndarray]:
        """Returns the distinct texts up to a node (None where a token is missing), and each proposal's index."""
        distinct_texts, which = np.unique(
            tokens[:, tree.paths[node, 1 : tree.depths[node] + 1]], axis=0, return_inverse=True
        )
        return [None if (text < 0).any() else tuple(text.tolist()) for text in distinct_texts], which.ravel()

    for node in range(topology.shape.nodes):
        children = tree.children[node][tree.children[node] >= 0]
        if not children.size:
            continue
        draws = []
        distinct, which = texts(node)
        for text in distinct:
            if text is None or stopped(node, text):
                draws.append([(1.0, (-1,) * children.size)])
            elif noise is Noise.NONE:
                draws.append([(1.0, top_tokens(draft(text), children.size))])
            else:
                draws.append(ordered_draws(draft(text), children.size))
        probs = np.concatenate([p * np.array([prob for prob, _ in draws[i]]) for p, i in zip(probs, which)])
        tokens = np.repeat(tokens, [len(draws[i]) for i in which], axis=0)
        tokens[:, children] = np.concatenate([[drawn for _, drawn in draws[i]] for i in which])

    def laws(law: Law) -> np.ndarray:
        table = np.full((*tokens.shape, vocab), 1 / vocab)
        for node in range(topology.shape.nodes):
            distinct, which = texts(node)
            table[:, node] = np.array([np.full(vocab, 1 / vocab) if t is None else law(t) for t in distinct])[which]
        return table

    sampled = None
    if noise is not Noise.NONE:
        proposed = np.stack([(tokens[:, below] >= 0).any(-1) & (below >= 0).any() for below in tree.children], axis=1)
        sampled = np.where(proposed[..., None], laws(draft), 0.0)
    return Enumeration(probs, tokens, laws(target), sampled)


def ordered_draws(law: np.ndarray, count: int) -> list[tuple[float, tuple[int, ...]]]:
    """Returns every ordered draw of `count` tokens without replacement, with its probability; -1 if no token is
    left."""
    draws: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    tokens = [(int(t), float(law[t])) for t in np.flatnonzero(law)]
    for _ in range(count):
        longer = []
        for prob, drawn in draws:
            left = [(token, weight) for token, weight in tokens if token not in drawn]
            total = sum(weight for _, weight in left)
            longer += [(prob * w / total, (*drawn, t)) for t, w in left] or [(prob, (*drawn, -1))]
        draws = longer
    return draws


def top_tokens(law: np.ndarray, count: int) -> tuple[int, ...]:
    """Returns the `count` most likely tokens; ties go to the lowest id, and -1 fills places without a token of positive
    probability."""
    order = np.argsort(-law, kind="stable")[:count]
    top = [int(t) if law[t] > 0 else -1 for t in order]
    return (*top, *[-1] * (count - len(top)))


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def stop_laws(rule: WeighingRule, law: jax.Array, proposal: Proposal) -> tuple[jax.Array, jax.Array]:
    """Applies a rule to proposals, each with its own tree; returns stop probabilities `[M, N]` and laws of the next
    token `[M, N, V]`.

    Raises:
        AssertionError: the results of the rule have the wrong shapes.
    """

    def apply(law: jax.Array, proposal: Proposal) -> tuple[jax.Array, jax.Array]:
        result = rule(law, proposal)
        logits = jax.vmap(result.next_logits)(jnp.arange(law.shape[0]))
        name = type(rule).__name__
        chex.assert_shape(
            result.node_probs, law.shape[:1], custom_message=f"{name} returns node_probs of a wrong shape"
        )
        chex.assert_shape(logits, law.shape, custom_message=f"{name} returns next_logits of a wrong shape")
        return result.node_probs, jax.nn.softmax(logits, -1)

    return jax.vmap(apply)(law, proposal)


def apply_to_all(
    rule: WeighingRule, topology: Topology, proposals: Enumeration, dtype: DTypeLike = np.float64
) -> tuple:
    """Applies a rule to all enumerated proposals; returns the results of `stop_laws` as NumPy arrays in float64."""
    rule.check(topology.shape)
    size = len(proposals.tokens)
    # The last proposal pads the last block.
    blocks = np.minimum(np.arange(-(-size // PROPOSALS_PER_CALL) * PROPOSALS_PER_CALL), size - 1).reshape(
        -1, PROPOSALS_PER_CALL
    )
    tree = jax.tree.map(lambda a: np.broadcast_to(a, (PROPOSALS_PER_CALL, *a.shape)), topology.tree)
    parts = []
    with np.errstate(divide="ignore"), jax.enable_x64(dtype == np.float64):
        for rows in blocks:
            law = jnp.asarray(np.log(proposals.target[rows]), dtype)
            draft = None if proposals.draft is None else jnp.asarray(np.log(proposals.draft[rows]), dtype)
            proposal = Proposal(jnp.asarray(proposals.tokens[rows]), tree, draft)
            parts.append(jax.device_get(stop_laws(rule, law, proposal)))
    chances, after = (np.concatenate(part)[:size].astype(np.float64) for part in zip(*parts))
    return chances, after


def random_laws(seed: int, vocab: int, kind: str = "dense") -> Law:
    """Returns a random law that depends on the whole text since the root.

    Args:
        seed: seed of the law; the same seed gives the same law.
        vocab: the size of the vocabulary.
        kind: "dense", "sparse" (about half of the tokens have probability 0), "point" (a single token) or "peaked"
            (most of the mass on one or two tokens).

    Raises:
        InvalidConfig: `kind` is not one of these.
    """
    if kind not in ("dense", "sparse", "point", "peaked"):
        raise InvalidConfig(f"kind must be 'dense', 'sparse', 'point' or 'peaked', got {kind!r}")
    rng, rows = np.random.default_rng(seed), 61
    table = rng.dirichlet(np.full(vocab, 0.15 if kind == "peaked" else 1.0), rows) + 1e-9
    if kind == "sparse":
        table *= rng.permuted(np.tile(np.arange(vocab) < max(1, (vocab + 1) // 2), (rows, 1)), axis=1)
    if kind == "point":
        table = np.eye(vocab)[rng.integers(vocab, size=rows)]
    table /= table.sum(-1, keepdims=True)

    def law(text: tuple[int, ...]) -> np.ndarray:
        code = 0
        for token in text:  # hash the text to a row
            code = (code * 31 + token + 1) % rows
        return table[code]

    return law
