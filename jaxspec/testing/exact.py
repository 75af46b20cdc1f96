"""The exact law of what a rule emits in a round, by enumeration: the proof that it is lossless.

A round is summed over every proposal the drafter can make, every end of the walk and every token after it, with the
very code that decodes. A rule is lossless if what follows the round, completed by the target, is the target's law:
the identity that Sun et al. 2025 (arXiv:2403.10444), definition 2, ask of a verification algorithm.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core.draw import Noise
from jaxspec.core.protocols import WeighingRule
from jaxspec.core.records import Proposal
from jaxspec.core.tree import Topology
from jaxspec.errors import InvalidConfig

Law = Callable[[tuple[int, ...]], np.ndarray]
"""The probabilities `[V]` of the next token after the tokens since the root."""


class Enumeration(NamedTuple):
    """All proposals of a drafter below one root."""

    chances: np.ndarray  # [M], of each proposal
    tokens: np.ndarray  # [M, N]
    target: np.ndarray  # [M, N, V], probabilities after every node
    draft: np.ndarray | None  # [M, N, V], None for point masses


def ordered(law: np.ndarray, count: int) -> list[tuple[float, tuple[int, ...]]]:
    """Every draw of `count` tokens without replacement, in order, with its probability; -1 where none are left."""
    draws: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for _ in range(count):
        longer = []
        for chance, drawn in draws:
            rest = np.array(law, np.float64)
            rest[[token for token in drawn if token >= 0]] = 0.0
            if rest.sum() <= 0:
                longer.append((chance, (*drawn, -1)))
            longer += [(chance * rest[t] / rest.sum(), (*drawn, int(t))) for t in np.flatnonzero(rest)]
        draws = longer
    return draws


def likeliest(law: np.ndarray, count: int) -> tuple[int, ...]:
    """The tokens of highest probability, the lowest id first among equals; -1 where none are left."""
    order = np.argsort(-law, kind="stable")[:count]
    found = [int(t) if law[t] > 0 else -1 for t in order]
    return (*found, *[-1] * (count - len(found)))


def enumerate_proposals(topology: Topology, target: Law, draft: Law, noise: Noise = Noise.FRESH) -> Enumeration:
    """What a drafter of these laws may propose; with `Noise.NONE` one proposal, of the likeliest tokens."""
    nodes, vocab = topology.shape.nodes, len(target(()))
    kids = [[c for c in row if c >= 0] for row in topology.tree.children]
    above = topology.parents
    partial: list[tuple[float, dict[int, tuple[int, ...] | None]]] = [(1.0, {0: ()})]
    for node in range(nodes):
        if not kids[node]:
            continue
        grown = []
        for chance, paths in partial:
            path = paths[node]
            if path is None:
                draws = [(1.0, (-1,) * len(kids[node]))]
            elif noise is Noise.NONE:
                draws = [(1.0, likeliest(draft(path), len(kids[node])))]
            else:
                draws = ordered(draft(path), len(kids[node]))
            for more, drawn in draws:
                below = {c: None if t < 0 or path is None else (*path, t) for c, t in zip(kids[node], drawn)}
                grown.append((chance * more, paths | below))
        partial = grown
    size = len(partial)
    found = Enumeration(
        np.array([chance for chance, _ in partial]),
        np.full((size, nodes), -1, np.int32),
        np.full((size, nodes, vocab), 1 / vocab),
        None if noise is Noise.NONE else np.full((size, nodes, vocab), 1 / vocab),
    )
    for m, (_, paths) in enumerate(partial):
        for node, path in paths.items():
            if path is None:
                continue
            found.tokens[m, node] = path[-1] if path else 0
            found.target[m, node] = target(path)
            if found.draft is not None and kids[node]:
                found.draft[m, node] = draft(path)
    assert len(above) == nodes
    return found


@functools.lru_cache(maxsize=256)
def _weigher(rule: WeighingRule, topology: Topology, sampled: bool) -> Callable:
    def one(law: Any, tokens: Any, draft: Any) -> tuple[Any, Any]:
        tree = jax.tree.map(jnp.asarray, topology.tree)
        ends = rule(law, Proposal(tokens, tree, draft if sampled else None))
        return ends.chances, jax.nn.softmax(jax.vmap(ends.after)(jnp.arange(topology.shape.nodes)), -1)

    return jax.jit(jax.vmap(one))


def weigh(rule: WeighingRule, topology: Topology, found: Enumeration, dtype: Any = np.float64) -> tuple:
    """The rule's ends of every proposal: chances `[M, N]`, and the laws of the token after each `[M, N, V]`."""
    rule.check(topology.shape)
    with np.errstate(divide="ignore"), jax.enable_x64(dtype == np.float64):
        target = jnp.asarray(np.log(found.target), dtype)
        draft = target if found.draft is None else jnp.asarray(np.log(found.draft), dtype)
        chances, after = _weigher(rule, topology, found.draft is not None)(target, jnp.asarray(found.tokens), draft)
        return np.asarray(chances, np.float64), np.asarray(after, np.float64)


def round_law(
    rule: WeighingRule, topology: Topology, target: Law, draft: Law, dtype: Any = np.float64, noise: Noise | None = None
) -> np.ndarray:
    """The law of the next D + 1 tokens if they begin with a round of this rule, `[V] * (D + 1)`.

    Args:
        rule: not a coupled one, whose text is that of plain decoding by construction.
        topology: small: all draws of all nodes are enumerated.
        target: the target's law after every text.
        draft: the drafter's.
        dtype: of the rule's arithmetic.
        noise: what the drafter draws with; the rule's own by default.
    """
    if rule.noise is Noise.SHARED:
        raise InvalidConfig("a coupled rule is proved by comparing texts with plain decoding, not by enumeration")
    found = enumerate_proposals(topology, target, draft, rule.noise if noise is None else noise)
    chances, after = weigh(rule, topology, found, dtype)
    vocab, longest = found.target.shape[-1], topology.shape.depth + 1
    law = np.zeros((vocab,) * longest)
    emitted: dict[tuple[int, ...], np.ndarray] = {}
    for node in range(topology.shape.nodes):
        path = [n for n in topology.tree.paths[node] if n >= 0]
        mass = (found.chances * chances[:, node])[:, None] * after[:, node]
        for m in np.flatnonzero(found.chances * chances[:, node]):
            text = tuple(found.tokens[m, path[1:]].tolist())
            emitted[text] = emitted.get(text, 0.0) + mass[m]
    for text, mass in emitted.items():
        for token in range(vocab):
            law[(*text, token)] += mass[token] * joint_law(target, (*text, token), longest - len(text) - 1)
    return law


def joint_law(target: Law, text: Sequence[int], length: int) -> np.ndarray:
    """The law of the next `length` tokens after `text`, `[V] * length`."""
    if not length:
        return np.ones(())
    first = target(tuple(text))
    return np.stack([first[t] * joint_law(target, (*text, t), length - 1) for t in range(len(first))])


def total_variation(one: np.ndarray, other: np.ndarray) -> float:
    """Half the sum of the absolute differences."""
    return float(np.abs(one - other).sum() / 2)


def bias(rule: WeighingRule, topology: Topology, target: Law, draft: Law, **options: Any) -> float:
    """How far a round of this rule is from the target's law, in total variation: 0 if it is lossless."""
    law = round_law(rule, topology, target, draft, **options)
    return total_variation(law, joint_law(target, (), topology.shape.depth + 1))


def accepted_length(rule: WeighingRule, topology: Topology, target: Law, draft: Law, dtype: Any = np.float64) -> float:
    """The exact mean of the tokens a round accepts, besides the target's own."""
    found = enumerate_proposals(topology, target, draft, rule.noise)
    chances, _ = weigh(rule, topology, found, dtype)
    return float((found.chances[:, None] * chances * topology.tree.depths).sum())


def random_laws(seed: int, vocab: int, kind: str = "dense") -> Law:
    """A law that depends on the whole text since the root, the same for the same seed.

    `kind`: "dense", "sparse" (about half the tokens impossible), "point" (one token), "peaked".
    """

    @functools.cache
    def law(text: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([seed, len(text), *text])
        weights = rng.dirichlet(np.full(vocab, 0.15 if kind == "peaked" else 1.0)) + 1e-9
        if kind == "sparse":
            weights *= rng.permutation(np.arange(vocab) < max(1, (vocab + 1) // 2))
        if kind == "point":
            weights = np.eye(vocab)[rng.integers(vocab)]
        return weights / weights.sum()

    return law
