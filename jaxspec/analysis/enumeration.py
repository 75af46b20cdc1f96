"""The exact law of what a rule emits in a round, by enumeration: the proof that it is lossless.

A round is summed over every proposal the drafter can make, every end of the walk and every token after it, with the
very code that decodes. A rule is lossless if what follows the round, completed by the target, is the target's law:
the identity that Sun et al. 2025 (arXiv:2403.10444), definition 2, ask of a verification algorithm.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core.draw import Noise
from jaxspec.core.protocols import Schedule, WeighingRule
from jaxspec.core.records import Proposal
from jaxspec.core.schedule import Constant
from jaxspec.core.tree import Topology
from jaxspec.errors import InvalidConfig

Law = Callable[[tuple[int, ...]], np.ndarray]
"""The probabilities `[V]` of the next token after the tokens since the root."""

BLOCK = 256
"""Proposals weighed at once. The last block is padded, so that only the tree's sizes and V decide what compiles."""


def bias(rule: WeighingRule, topology: Topology, target: Law, draft: Law, **options: Any) -> float:
    """How far a round of this rule is from the target's law, in total variation: 0 if it is lossless.

    Takes what `round_law` takes.
    """
    law = round_law(rule, topology, target, draft, **options)
    return total_variation(law, joint_law(target, topology.shape.depth + 1))


def round_law(
    rule: WeighingRule,
    topology: Topology,
    target: Law,
    draft: Law,
    dtype: Any = np.float64,
    noise: Noise | None = None,
    schedule: Schedule = Constant(),
) -> np.ndarray:
    """The law of the next D + 1 tokens if they begin with a round of this rule, `[V] * (D + 1)`.

    Mass that a wrong rule lets end where nothing is proposed is left out: no text has it.

    Args:
        rule: not a coupled one, whose text is that of plain decoding by construction.
        topology: small: all draws of all nodes are enumerated.
        target: the target's law after every text.
        draft: the drafter's.
        dtype: of the rule's arithmetic.
        noise: what the drafter draws with, the rule's own by default; with `Noise.NONE` its likeliest tokens are
            proposed as point masses.
        schedule: of the drafts; it is in its first round.

    Raises:
        InvalidConfig: a coupled rule, or a tree that the rule does not take.
    """
    found = enumerate_proposals(topology, target, draft, rule.noise if noise is None else noise, schedule)
    chances, after = weigh(rule, topology, found, dtype)
    vocab, longest = found.target.shape[-1], topology.shape.depth + 1
    ended = [np.zeros((vocab**depth, vocab)) for depth in range(longest)]
    for node, depth in enumerate(np.asarray(topology.tree.depths).tolist()):
        text = found.tokens[:, topology.tree.paths[node, 1 : depth + 1]]
        mass = found.chances * chances[:, node]
        some = (mass != 0) & (text >= 0).all(-1)
        codes = text[some] @ vocab ** np.arange(depth)[::-1]
        np.add.at(ended[depth], codes, mass[some, None] * after[some, node])
    law = np.zeros(1)
    for depth in range(longest):  # rounds that ended before are gone on with by the target
        law = (law[:, None] * _level(target, vocab, depth) + ended[depth]).ravel()
    return law.reshape((vocab,) * longest)


def joint_law(target: Law, length: int, stops: Sequence[int] = ()) -> np.ndarray:
    """The law of the next `length` tokens, `[V] * length`; a text that met one of `stops` repeats it to the end."""
    vocab, law = len(target(())), np.ones(1)
    for depth in range(length):
        level = _level(target, vocab, depth)
        for stop in stops if depth else ():
            level[stop::vocab] = np.eye(vocab)[stop]
        law = (law[:, None] * level).ravel()
    return law.reshape((vocab,) * length)


def _level(target: Law, vocab: int, depth: int) -> np.ndarray:
    """The target's law after every text of this many tokens, `[V**depth, V]`."""
    return np.array([target(text) for text in itertools.product(range(vocab), repeat=depth)])


def total_variation(one: np.ndarray, other: np.ndarray) -> float:
    """Half the sum of the absolute differences."""
    return float(np.abs(one - other).sum() / 2)


def accepted_length(rule: WeighingRule, topology: Topology, target: Law, draft: Law, dtype: Any = np.float64) -> float:
    """The exact mean of the tokens a round accepts, besides the target's own; arguments as in `round_law`."""
    found = enumerate_proposals(topology, target, draft, rule.noise)
    chances, _ = weigh(rule, topology, found, dtype)
    return float((found.chances[:, None] * chances * topology.tree.depths).sum())


class Enumeration(NamedTuple):
    """All M proposals of a drafter below one root."""

    chances: np.ndarray  # [M], of each proposal
    tokens: np.ndarray  # [M, N]
    target: np.ndarray  # [M, N, V], probabilities after every node
    draft: np.ndarray | None  # [M, N, V], None for point masses


def enumerate_proposals(
    topology: Topology, target: Law, draft: Law, noise: Noise = Noise.FRESH, schedule: Schedule = Constant()
) -> Enumeration:
    """What a drafter of these laws may propose; with `Noise.NONE` one proposal, of the likeliest tokens.

    Below a node that the schedule withholds nothing is proposed, and no law is known, as when it is not computed.
    """
    if noise is Noise.SHARED:
        raise InvalidConfig("a coupled rule is proved by comparing texts with plain decoding, not by enumeration")
    tree, vocab = topology.tree, len(target(()))
    chances, tokens = np.ones(1), np.full((1, topology.shape.nodes), -1, np.int32)
    tokens[:, 0] = 0

    limit = int(schedule.limit(schedule.init(1, topology.shape))[0])

    def withheld(node: int, text: tuple[int, ...]) -> bool:
        with np.errstate(divide="ignore"):
            doubted = schedule.doubts(jnp.asarray(np.log(draft(text))))
        return bool(tree.depths[node] >= limit) or (doubted is not None and bool(doubted))

    def texts(node: int) -> tuple[list[tuple[int, ...] | None], np.ndarray]:
        """The different texts up to a node, None where a token is missing, and which one each proposal has."""
        found, which = np.unique(tokens[:, tree.paths[node, 1 : tree.depths[node] + 1]], axis=0, return_inverse=True)
        return [None if (text < 0).any() else tuple(text.tolist()) for text in found], which.ravel()

    for node in range(topology.shape.nodes):
        children = tree.children[node][tree.children[node] >= 0]
        if not children.size:
            continue
        draws = []
        different, which = texts(node)
        for text in different:
            if text is None or withheld(node, text):
                draws.append([(1.0, (-1,) * children.size)])
            elif noise is Noise.NONE:
                draws.append([(1.0, likeliest(draft(text), children.size))])
            else:
                draws.append(ordered(draft(text), children.size))
        chances = np.concatenate([c * np.array([chance for chance, _ in draws[i]]) for c, i in zip(chances, which)])
        tokens = np.repeat(tokens, [len(draws[i]) for i in which], axis=0)
        tokens[:, children] = np.concatenate([[drawn for _, drawn in draws[i]] for i in which])

    def laws(law: Law) -> np.ndarray:
        found = np.full((*tokens.shape, vocab), 1 / vocab)
        for node in range(topology.shape.nodes):
            different, which = texts(node)
            found[:, node] = np.array([np.full(vocab, 1 / vocab) if t is None else law(t) for t in different])[which]
        return found

    sampled = None
    if noise is not Noise.NONE:
        proposed = np.stack([(tokens[:, below] >= 0).any(-1) & (below >= 0).any() for below in tree.children], axis=1)
        sampled = np.where(proposed[..., None], laws(draft), 0.0)
    return Enumeration(chances, tokens, laws(target), sampled)


def ordered(law: np.ndarray, count: int) -> list[tuple[float, tuple[int, ...]]]:
    """Every draw of `count` tokens without replacement, in order, with its probability; -1 where none are left."""
    draws: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    tokens = [(int(t), float(law[t])) for t in np.flatnonzero(law)]
    for _ in range(count):
        longer = []
        for chance, drawn in draws:
            left = [(token, weight) for token, weight in tokens if token not in drawn]
            total = sum(weight for _, weight in left)
            longer += [(chance * w / total, (*drawn, t)) for t, w in left] or [(chance, (*drawn, -1))]
        draws = longer
    return draws


def likeliest(law: np.ndarray, count: int) -> tuple[int, ...]:
    """The tokens of highest probability, the lowest id first among equals; -1 where none are left."""
    order = np.argsort(-law, kind="stable")[:count]
    found = [int(t) if law[t] > 0 else -1 for t in order]
    return (*found, *[-1] * (count - len(found)))


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def ends(rule: WeighingRule, law: jax.Array, proposal: Proposal) -> tuple[jax.Array, jax.Array]:
    """A rule's ends of many proposals, each with its own tree: chances `[M, N]` and laws after `[M, N, V]`."""

    def one(law: jax.Array, proposal: Proposal) -> tuple[jax.Array, jax.Array]:
        found = rule(law, proposal)
        return found.chances, jax.nn.softmax(jax.vmap(found.after)(jnp.arange(law.shape[0])), -1)

    return jax.vmap(one)(law, proposal)


def weigh(rule: WeighingRule, topology: Topology, found: Enumeration, dtype: Any = np.float64) -> tuple:
    """The rule's ends of every proposal: chances `[M, N]`, and the laws of the token after each `[M, N, V]`."""
    rule.check(topology.shape)
    size = len(found.tokens)
    # Padding repeats the last proposal.
    blocks = np.minimum(np.arange(-(-size // BLOCK) * BLOCK), size - 1).reshape(-1, BLOCK)
    tree = jax.tree.map(lambda a: np.broadcast_to(a, (BLOCK, *a.shape)), topology.tree)
    parts = []
    with np.errstate(divide="ignore"), jax.enable_x64(dtype == np.float64):
        for rows in blocks:
            law = jnp.asarray(np.log(found.target[rows]), dtype)
            draft = None if found.draft is None else jnp.asarray(np.log(found.draft[rows]), dtype)
            proposal = Proposal(jnp.asarray(found.tokens[rows]), tree, draft)
            parts.append(jax.device_get(ends(rule, law, proposal)))
    chances, after = (np.concatenate(part)[:size].astype(np.float64) for part in zip(*parts))
    return chances, after


def random_laws(seed: int, vocab: int, kind: str = "dense") -> Law:
    """A law that depends on the whole text since the root, the same for the same seed.

    `kind`: "dense", "sparse" (about half the tokens impossible), "point" (one token), "peaked" (most of the mass on
    one or two).

    Raises:
        InvalidConfig: another kind.
    """
    if kind not in ("dense", "sparse", "point", "peaked"):
        raise InvalidConfig(f"laws are dense, sparse, point or peaked, got {kind!r}")
    rng, rows = np.random.default_rng(seed), 61
    table = rng.dirichlet(np.full(vocab, 0.15 if kind == "peaked" else 1.0), rows) + 1e-9
    if kind == "sparse":
        table *= rng.permuted(np.tile(np.arange(vocab) < max(1, (vocab + 1) // 2), (rows, 1)), axis=1)
    if kind == "point":
        table = np.eye(vocab)[rng.integers(vocab, size=rows)]
    table /= table.sum(-1, keepdims=True)

    def law(text: tuple[int, ...]) -> np.ndarray:
        code = 0
        for token in text:  # texts that share a row are far apart
            code = (code * 31 + token + 1) % rows
        return table[code]

    return law
