"""Growing a tree level by level with a language model: what model and early-exit drafters share."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core.cache import held
from jaxspec.core.draw import Draw, Noise
from jaxspec.core.protocols import LanguageModel
from jaxspec.core.records import KV, Cache, Params, Proposal, Window
from jaxspec.core.tree import Topology


def buffer(model: LanguageModel, batch: int, topology: Topology) -> KV:
    """Room for the keys and values of every node, and one slot more for padding."""
    shapes = jax.eval_shape(lambda: model.init_cache(batch, 1)).kv
    nodes = topology.shape.nodes + 1
    return KV(*(jnp.zeros((*a.shape[:3], nodes, a.shape[4]), held(a.dtype)) for a in shapes))


def grow(
    model: LanguageModel,
    params: Params,
    topology: Topology,
    cache: Cache,
    entries: KV,
    root: Int[Array, "B"],
    draw: Draw,
    features: Float[Array, "B E"] | None = None,
) -> tuple[Proposal, KV, Int[Array, ""]]:
    """The tree, the keys and values of its inner nodes (written into `entries`), and the number of levels read for it.

    With `features` the model has already read the root, which is then the cache's last token; without, the root
    is read here. One loop over the levels, each padded to the widest, so that one model call is compiled
    whatever the depth. It ends with the last level that has a child to draw in some row: of a draft that is not
    wanted nothing is computed, not even the head.
    """
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
    return Proposal(tokens[:, :-1], tree, None if law is None else law[:, :-1]), entries, read
