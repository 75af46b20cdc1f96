"""Growing a tree level by level with a language model: what model and early-exit drafters share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.cache import held
from jaxspec.core.draw import Draw, Noise
from jaxspec.core.protocols import LanguageModel
from jaxspec.core.records import KV, Cache, Params, Proposal, Window
from jaxspec.core.tree import Dynamic, Topology, build
from jaxspec.errors import InvalidConfig


class Grown(NamedTuple):
    """A proposal, and what was read to make it."""

    proposal: Proposal
    entries: KV  # keys and values of the nodes that were read, [L, B, H, slots, K]
    slots: Int[Array, "B N"]  # where each node's stand, -1: the node was not read here


def check(model: LanguageModel, tree: Topology | Dynamic) -> None:
    """Refuses trees that no model's draws can fill."""
    width = tree.beam if isinstance(tree, Dynamic) else tree.shape.width
    if tree.shape.depth < 1:
        raise InvalidConfig("a drafting model needs a draft length of at least 1")
    if width > model.vocab:
        raise InvalidConfig(f"the tree has nodes of {width} children, the model a vocabulary of {model.vocab} tokens")


def buffer(model: LanguageModel, batch: int, tree: Topology | Dynamic) -> KV:
    """Room for the keys and values of every node that is read, and one slot more for padding."""
    shapes = jax.eval_shape(lambda: model.init_cache(batch, 1)).kv
    slots = tree.beam * tree.depth if isinstance(tree, Dynamic) else tree.shape.nodes + 1
    return KV(*(jnp.zeros((*a.shape[:3], slots, a.shape[4]), held(a.dtype)) for a in shapes))


def grow(
    model: LanguageModel,
    params: Params,
    topology: Topology | Dynamic,
    cache: Cache,
    entries: KV,
    root: Int[Array, "B"],
    draw: Draw,
    features: Float[Array, "B E"] | None = None,
) -> Grown:
    """The whole tree; the keys and values of what is read are written into `entries`.

    With `features` the model has already read the root, which is then the cache's last token; without, the root
    is read here. One loop over the levels, each padded to the widest, so that one model call is compiled
    whatever the depth. It ends with the last level that has a child to draw in some row: of a draft that is not
    wanted nothing is computed, not even the head.
    """
    if isinstance(topology, Dynamic):
        return _grow_dynamic(model, params, topology, cache, entries, root, draw, features)
    shape, tree = topology.shape, topology.tree
    spare = shape.nodes  # where padding is written
    children = np.where(tree.children >= 0, tree.children, spare)
    tokens = jnp.full((root.shape[0], shape.nodes + 1), -1, jnp.int32).at[:, 0].set(root)
    law = jnp.full((*tokens.shape, model.vocab), -jnp.inf) if draw.kind is Noise.FRESH else None
    drawn = tokens, law

    def place(drawn: tuple, nodes: Array, features: Array, depth: Array | int) -> tuple:
        tokens, law = drawn
        below, own = draw(model.head(params, features), nodes, depth, shape.width)
        law = None if law is None or own is None else law.at[:, nodes].set(own)
        return tokens.at[:, jnp.asarray(children)[nodes]].set(below), law

    first = 0 if features is None else 1
    if features is not None:
        at_root = features[:, None]
        drawn = lax.cond(
            draw.below(0).any(), lambda: place(drawn, jnp.zeros((1,), jnp.int32), at_root, 0), lambda: drawn
        )
    read = jnp.int32(0)
    levels = topology.parents_by_level[first:]
    if levels:
        widest = max(map(len, levels))
        table = np.stack([np.pad(level, (0, widest - len(level)), constant_values=spare) for level in levels])
        children = np.concatenate([children, np.full((1, shape.width), spare)])
        above = np.zeros((shape.nodes + 1, shape.nodes + 1), bool)
        above[:-1, :-1] = tree.ancestors & ~np.eye(shape.nodes, dtype=bool)
        above[:, :first] = False
        start = cache.length - first

        def wanted(carry: tuple[tuple, KV, Array]) -> Array:
            (tokens, _), _, i = carry
            nodes = jnp.asarray(table)[jnp.minimum(i, len(levels) - 1)]
            there = (tokens[:, nodes] >= 0) & (nodes < spare)
            return (i < len(levels)) & (there & draw.below(i + first)[:, None]).any()

        def level(carry: tuple[tuple, KV, Array]) -> tuple[tuple, KV, Array]:
            drawn, entries, i = carry
            nodes, depth = jnp.asarray(table)[i], i + first
            mask = jnp.concatenate([jnp.asarray(above)[nodes], jnp.eye(widest, dtype=bool)], axis=1)
            batch = (root.shape[0], *mask.shape)
            positions = jnp.broadcast_to((start + depth)[:, None], (root.shape[0], widest))
            window = Window(jnp.maximum(drawn[0][:, nodes], 0), positions, jnp.broadcast_to(mask, batch))
            features, new = model.apply(params, window, cache, entries)
            new = jax.tree.map(lambda a: jnp.where(jnp.isfinite(a), a, 0), new)  # a masked NaN would stay
            entries = KV(*(a.at[:, :, :, nodes].set(b) for a, b in zip(entries, new)))
            return place(drawn, nodes, features, depth), entries, i + 1

        drawn, entries, read = lax.while_loop(wanted, level, (drawn, entries, jnp.int32(0)))
    tokens, law = drawn
    inner = tree.children[:, :1].max(-1, initial=-1) >= 0
    slots = jnp.where(jnp.asarray(inner) & (tree.depths < read + first), jnp.arange(shape.nodes), -1)
    slots = jnp.broadcast_to(slots.astype(jnp.int32), (root.shape[0], shape.nodes))
    return Grown(Proposal(tokens[:, :-1], tree, None if law is None else law[:, :-1]), entries, slots)


class _Found(NamedTuple):
    """All nodes that were found, level by level, the root first; F of them."""

    tokens: Int[Array, "B F"]
    worth: Float[Array, "B F"]  # logarithm of the product along the path
    parents: Int[Array, "B F"]
    slots: Int[Array, "B F"]


class _Beam(NamedTuple):
    """The nodes of one level that are expanded, the best first."""

    nodes: Int[Array, "B M"]  # among those found; past their end for padding
    sees: Bool[Array, "B M slots"]  # the slots of each one's ancestors


def _grow_dynamic(
    model: LanguageModel,
    params: Params,
    topology: Dynamic,
    cache: Cache,
    entries: KV,
    root: Int[Array, "B"],
    draw: Draw,
    features: Float[Array, "B E"] | None,
) -> Grown:
    """Level by level the best nodes are read; the best of all that were found are the tree.

    A node is worth no more than its parent, which stands before it, and `top_k` takes the first among equals: so
    whatever is picked, its ancestors are.
    """
    beam, batch, first = topology.beam, root.shape[0], 0 if features is None else 1
    room = max(topology.found, 1 + beam**2)  # every level is written as if its whole beam had been expanded
    found = _Found(
        jnp.full((batch, room), -1, jnp.int32).at[:, 0].set(root),
        jnp.full((batch, room), -jnp.inf).at[:, 0].set(0.0),
        jnp.full((batch, room), -1, jnp.int32),
        jnp.full((batch, room), -1, jnp.int32),
    )

    def expand(found: _Found, at: _Beam, features: Array, depth: Array | int) -> tuple[_Found, Array, Array]:
        """With the children of the beam, `[B, M, E]`; and the children and parents that the next beam is made of."""
        tokens, worth = draw.ranked(model.head(params, features), depth, beam)
        worth = worth + jnp.take_along_axis(found.worth, jnp.minimum(at.nodes, room - 1), 1)[:, :, None]
        worth = jnp.where((at.nodes < room)[:, :, None], worth, -jnp.inf)
        start = jnp.where(depth == 0, 1, 1 + beam + (depth - 1) * beam**2)  # a padded root's are written over

        def put(old: Array, new: Array) -> Array:
            return lax.dynamic_update_slice(old, new.reshape(batch, -1).astype(old.dtype), (0, start))

        parents = jnp.broadcast_to(at.nodes[:, :, None], worth.shape)
        found = found._replace(
            tokens=put(found.tokens, tokens), worth=put(found.worth, worth), parents=put(found.parents, parents)
        )
        best = lax.top_k(worth.reshape(batch, -1), beam)[1]
        return found, start + best, best // beam

    def level(carry: tuple[_Found, _Beam, KV, Array]) -> tuple[_Found, _Beam, KV, Array]:
        found, at, entries, i = carry
        depth = i + first
        tokens = jnp.take_along_axis(found.tokens, jnp.minimum(at.nodes, room - 1), 1)
        own = jnp.broadcast_to(jnp.eye(beam, dtype=bool), (batch, beam, beam))
        positions = jnp.broadcast_to((cache.length - first + depth)[:, None], (batch, beam))
        window = Window(jnp.maximum(tokens, 0), positions, jnp.concatenate([at.sees, own], axis=2))
        features, new = model.apply(params, window, cache, entries)
        new = jax.tree.map(lambda a: jnp.where(jnp.isfinite(a), a, 0), new)  # a masked NaN would stay
        entries = KV(*(lax.dynamic_update_slice_in_dim(a, b, i * beam, 3) for a, b in zip(entries, new)))
        slots = jnp.broadcast_to(i * beam + jnp.arange(beam), (batch, beam))
        rows = jnp.arange(batch)[:, None]
        found = found._replace(slots=found.slots.at[rows, at.nodes].set(slots, mode="drop"))
        found, nodes, parents = expand(found, at, features, depth)
        sees = at.sees | (jnp.arange(at.sees.shape[2]) == slots[:, :, None])
        return found, _Beam(nodes, jnp.take_along_axis(sees, parents[:, :, None], 1)), entries, i + 1

    sees = jnp.zeros((batch, beam, entries.keys.shape[3]), bool)
    if features is None:
        at = _Beam(jnp.full((batch, beam), room, jnp.int32).at[:, 0].set(0), sees)
    else:
        start = _Beam(jnp.zeros((batch, 1), jnp.int32), sees[:, :1])
        at_root = features[:, None]
        nothing = found, jnp.full((batch, beam), room, jnp.int32), jnp.zeros((batch, beam), jnp.int32)
        found, nodes, _ = lax.cond(draw.below(0).any(), lambda: expand(found, start, at_root, 0), lambda: nothing)
        at = _Beam(nodes, sees)
    if topology.depth > first:

        def wanted(carry: tuple[_Found, _Beam, KV, Array]) -> Array:
            return (carry[3] < topology.depth - first) & draw.below(carry[3] + first).any()

        found, _, entries, _ = lax.while_loop(wanted, level, (found, at, entries, jnp.int32(0)))

    best = lax.top_k(found.worth[:, 1 : topology.found], topology.nodes - 1)[1] + 1
    kept = jnp.pad(jnp.sort(best, axis=1), ((0, 0), (1, 0)))  # in level order, with the root
    ids = jnp.broadcast_to(jnp.arange(topology.nodes), kept.shape)
    new = jnp.zeros((batch, room), jnp.int32).at[jnp.arange(batch)[:, None], kept].set(ids)
    above = jnp.take_along_axis(found.parents, kept, 1)
    parents = jnp.where(above >= 0, jnp.take_along_axis(new, jnp.maximum(above, 0), 1), -1)
    tree = jax.vmap(lambda parents: build(parents, topology.shape))(parents)
    tokens, slots = (jnp.take_along_axis(a, kept, 1) for a in (found.tokens, found.slots))
    return Grown(Proposal(tokens, tree), entries, slots)
