"""Drafts of tokens that processors name: the only allowed token, or one that very likely follows."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxspec.core.processor import ForcingProcessor, Processor, spread_states
from jaxspec.core.records import Proposal


def path_tokens(proposal: Proposal, tokens: Int[Array, "B N"]) -> Int[Array, "B N D"]:
    """Returns the tokens from below the root to each node, the node included; -1 after the end of a path."""
    nodes = proposal.tree.paths[..., 1:]
    found = tokens[jnp.arange(len(nodes))[:, None, None], jnp.maximum(nodes, 0)]
    return jnp.where(nodes < 0, -1, jnp.maximum(found, 0))


def draft_forced(
    processors: Sequence[Processor], states: Sequence[Any], proposal: Proposal, limit: Int[Array, "B"]
) -> Proposal:
    """Returns the proposal with the tokens that processors name; see `ForcingProcessor`.

    A forced token is written into the first child of the node, and below it the next one, as deep as the tree and the
    limit allow. The drafter's law after such a node becomes a point mass.

    Args:
        processors: the processors, with a setting for each row.
        states: their states after the committed text.
        proposal: the proposal, with one tree per row.
        limit: the greatest depth of a drafted token of each row.
    """
    pairs = [(one, state) for one, state in zip(processors, states) if isinstance(one, ForcingProcessor)]
    tree, depth = proposal.tree, proposal.tree.paths.shape[-1] - 1
    if not pairs or not depth:
        return proposal
    forcing, parents = [one for one, _ in pairs], jnp.maximum(tree.parents, 0)

    def forced(tokens: Int[Array, "B N"], states: Sequence[Any]) -> Int[Array, "B N"]:
        """Returns the token to draft after each drafted node; -1 for none."""
        only = functools.reduce(jnp.maximum, (one.forced(state) for one, state in zip(forcing, states)))
        return jnp.where((tokens >= 0) & (tree.depths < limit[:, None]), only, -1)

    def write(level: Array, carry: tuple[Array, list[Any]]) -> tuple[Array, list[Any]]:
        """Writes the forced tokens of a level, and then the states after the tokens of the level."""
        tokens, states = carry
        here = (tree.depths == level) & (tree.parents >= 0)
        above = jnp.where(here, _gather(forced(tokens, states), parents), -1)
        tokens = jnp.where(above >= 0, jnp.where(tree.ranks == 0, above, -1), tokens)
        before = jax.tree.map(lambda leaf: _gather(leaf, parents), states)
        after = [one.step(state, jnp.where(here, tokens, -1)) for one, state in zip(forcing, before)]
        return tokens, jax.tree.map(lambda new, old: _select(here, new, old), after, states)

    given = [spread_states(state, parents.shape[1]) for _, state in pairs]
    tokens, after = lax.fori_loop(1, depth + 1, write, (proposal.tokens, given))
    law = proposal.law
    if law is not None:
        only = forced(tokens, after)[..., None]
        point = jnp.where(jnp.arange(law.shape[2]) == only, 0.0, -jnp.inf)
        law = jnp.where(only >= 0, point, law)
    return Proposal(tokens, tree, law)


def _gather(values: Array, nodes: Int[Array, "B N"]) -> Array:
    """Returns the values of nodes, of each row its own."""
    return jnp.take_along_axis(values, nodes.reshape(*nodes.shape, *[1] * (values.ndim - 2)), 1)


def _select(here: Bool[Array, "B N"], new: Array, old: Array) -> Array:
    return jnp.where(here.reshape(*here.shape, *[1] * (new.ndim - 2)), new, old)
