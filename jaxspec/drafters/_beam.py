"""EAGLE-2's tree of a draft, level by level (Li et al. 2024, arXiv:2406.16858, section 4); see `Dynamic`.

A node is worth no more than its parent, which stands before it, and `top_k` takes the first among equals: so
whatever is picked, its ancestors are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core.records import Proposal
from jaxspec.core.tree import Dynamic, build


class Found(NamedTuple):
    """All nodes that were found, level by level, the root first; F of them."""

    tokens: Int[Array, "B F"]
    worth: Float[Array, "B F"]  # logarithm of the product along the path
    parents: Int[Array, "B F"]


class Beam(NamedTuple):
    """The nodes of one level that are expanded, the best first."""

    nodes: Int[Array, "B M"]  # among those found; past their end for padding
    parents: Int[Array, "B M"]  # places in the beam above


def root_alone(topology: Dynamic, root: Int[Array, "B"]) -> tuple[Found, Beam]:
    """What is found before the first level, and the beam that holds it."""
    # Every level is written as if its whole beam had been expanded.
    shape = root.shape[0], max(topology.found, 1 + topology.beam**2)
    found = Found(
        jnp.full(shape, -1, jnp.int32).at[:, 0].set(root),
        jnp.full(shape, -jnp.inf).at[:, 0].set(0.0),
        jnp.full(shape, -1, jnp.int32),
    )
    return found, padded(found, topology)._replace(nodes=jnp.full((shape[0], topology.beam), shape[1]).at[:, 0].set(0))


def padded(found: Found, topology: Dynamic) -> Beam:
    """A beam without nodes."""
    shape = found.tokens.shape[0], topology.beam
    return Beam(jnp.full(shape, found.tokens.shape[1], jnp.int32), jnp.zeros(shape, jnp.int32))


def tokens_of(found: Found, beam: Beam) -> Int[Array, "B M"]:
    """The beam's tokens; 0 for padding."""
    own = jnp.take_along_axis(found.tokens, jnp.minimum(beam.nodes, found.tokens.shape[1] - 1), 1)
    return jnp.maximum(own, 0)


def expand(
    topology: Dynamic,
    found: Found,
    nodes: Int[Array, "B m"],
    tokens: Int[Array, "B m E"],
    worth: Float[Array, "B m E"],
    depth: Array | int,
) -> tuple[Found, Beam]:
    """With the children of the beam's first nodes, which stand at `depth`, and the beam they make.

    `tokens` and `worth` are what `Draw.ranked` says of them.
    """
    width, (batch, room) = topology.beam, found.tokens.shape
    worth = worth + jnp.take_along_axis(found.worth, jnp.minimum(nodes, room - 1), 1)[:, :, None]
    worth = jnp.where((nodes < room)[:, :, None], worth, -jnp.inf)
    start = jnp.where(depth == 0, 1, 1 + width + (depth - 1) * width**2)  # a padded root's are written over

    def put(old: Array, new: Array) -> Array:
        return lax.dynamic_update_slice(old, new.reshape(batch, -1).astype(old.dtype), (0, start))

    parents = jnp.broadcast_to(nodes[:, :, None], worth.shape)
    found = Found(put(found.tokens, tokens), put(found.worth, worth), put(found.parents, parents))
    best = lax.top_k(worth.reshape(batch, -1), width)[1]
    return found, Beam(start + best, best // width)


def harvest(topology: Dynamic, found: Found) -> tuple[Proposal, Int[Array, "B N"]]:
    """The best of all nodes as a proposal, and which they are."""
    batch, room = found.tokens.shape
    best = lax.top_k(found.worth[:, 1 : topology.found], topology.nodes - 1)[1] + 1
    kept = jnp.pad(jnp.sort(best, axis=1), ((0, 0), (1, 0)))  # in level order, with the root
    ids = jnp.broadcast_to(jnp.arange(topology.nodes), kept.shape)
    new = jnp.zeros((batch, room), jnp.int32).at[jnp.arange(batch)[:, None], kept].set(ids)
    above = jnp.take_along_axis(found.parents, kept, 1)
    parents = jnp.where(above >= 0, jnp.take_along_axis(new, jnp.maximum(above, 0), 1), -1)
    tree = jax.vmap(lambda parents: build(parents, topology.shape))(parents)
    return Proposal(jnp.take_along_axis(found.tokens, kept, 1), tree), kept
