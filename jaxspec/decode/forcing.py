"""Drafts of tokens that processors force: where a single token is allowed, a correct draft costs nothing."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxspec.core.processor import ForcingProcessor, Processor
from jaxspec.core.records import Proposal


def path_tokens(proposal: Proposal, tokens: Int[Array, "B N"]) -> Int[Array, "B N D"]:
    """Returns the tokens from below the root to each node, the node included; -1 after the end of a path."""
    nodes = proposal.tree.paths[..., 1:]
    found = tokens[jnp.arange(len(nodes))[:, None, None], jnp.maximum(nodes, 0)]
    return jnp.where(nodes < 0, -1, jnp.maximum(found, 0))


def draft_forced(
    processors: Sequence[Processor], states: Sequence[Any], proposal: Proposal, limit: Int[Array, "B"]
) -> Proposal:
    """Returns the proposal with forced tokens: below a node after which one token is allowed, that token alone.

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

    def forced(tokens: Int[Array, "B N"]) -> Int[Array, "B N"]:
        """Returns the only token that is allowed after each drafted node; -1 if there are several."""
        path = path_tokens(proposal, tokens)
        only = jnp.stack([one.forced(state, path) for one, state in pairs]).max(0)
        return jnp.where((tokens >= 0) & (tree.depths < limit[:, None]), only, -1)

    def write(level: Array, tokens: Int[Array, "B N"]) -> Int[Array, "B N"]:
        above = jnp.take_along_axis(forced(tokens), jnp.maximum(tree.parents, 0), 1)
        here = (tree.depths == level) & (above >= 0) & (tree.parents >= 0)
        return jnp.where(here, jnp.where(tree.ranks == 0, above, -1), tokens)

    tokens = lax.fori_loop(1, depth + 1, write, proposal.tokens)
    law = proposal.law
    if law is not None:
        only = forced(tokens)[..., None]
        point = jnp.where(jnp.arange(law.shape[2]) == only, 0.0, -jnp.inf)
        law = jnp.where(only >= 0, point, law)
    return Proposal(tokens, tree, law)
