"""Growing a tree level by level with a language model: what model and early-exit drafters share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core.cache import value_dtype
from jaxspec.core.draw import Draw
from jaxspec.core.networks import LanguageModel
from jaxspec.core.records import KV, Cache, Params, Proposal, Window
from jaxspec.core.tree import Dynamic, Topology
from jaxspec.drafters._beam import Beam, Found, expand, harvest, padded, root_alone, tokens_of
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
    return KV(*(jnp.zeros((*a.shape[:3], slots, a.shape[4]), value_dtype(a.dtype)) for a in shapes))


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
    drawn = tokens, draw.empty_law(spare + 1)

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
    """Level by level the best nodes are read; the best of all that were found are the tree."""
    width, batch, first = topology.beam, root.shape[0], 0 if features is None else 1
    found, at = root_alone(topology, root)
    rows, room = jnp.arange(batch)[:, None], found.tokens.shape[1]
    sees = jnp.zeros((batch, width, entries.keys.shape[3]), bool)  # the slots of each one's ancestors
    stands = jnp.full((batch, room), -1, jnp.int32)  # the slot of each one found

    def children(found: Found, nodes: Array, features: Array, depth: Array | int) -> tuple[Found, Beam]:
        return expand(topology, found, nodes, *draw.ranked(model.head(params, features), depth, width), depth)

    def level(carry: tuple[Found, Beam, Array, Array, KV, Array]) -> tuple[Found, Beam, Array, Array, KV, Array]:
        found, at, sees, stands, entries, i = carry
        depth = i + first
        own = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
        positions = jnp.broadcast_to((cache.length - first + depth)[:, None], (batch, width))
        window = Window(tokens_of(found, at), positions, jnp.concatenate([sees, own], axis=2))
        features, new = model.apply(params, window, cache, entries)
        new = jax.tree.map(lambda a: jnp.where(jnp.isfinite(a), a, 0), new)  # a masked NaN would stay
        entries = KV(*(lax.dynamic_update_slice_in_dim(a, b, i * width, 3) for a, b in zip(entries, new)))
        slots = jnp.broadcast_to(i * width + jnp.arange(width), (batch, width))
        stands = stands.at[rows, at.nodes].set(slots, mode="drop")
        found, at = children(found, at.nodes, features, depth)
        sees = sees | (jnp.arange(sees.shape[2]) == slots[:, :, None])
        return found, at, jnp.take_along_axis(sees, at.parents[:, :, None], 1), stands, entries, i + 1

    if features is not None:
        at_root, only = features[:, None], at.nodes[:, :1]
        found, at = lax.cond(
            draw.below(0).any(), lambda: children(found, only, at_root, 0), lambda: (found, padded(found, topology))
        )
    if topology.depth > first:

        def wanted(carry: tuple[Found, Beam, Array, Array, KV, Array]) -> Array:
            return (carry[5] < topology.depth - first) & draw.below(carry[5] + first).any()

        carry = found, at, sees, stands, entries, jnp.int32(0)
        found, _, _, stands, entries, _ = lax.while_loop(wanted, level, carry)
    proposal, kept = harvest(topology, found)
    return Grown(proposal, entries, jnp.take_along_axis(stands, kept, 1))
