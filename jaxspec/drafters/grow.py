"""Growing a tree level by level with a language model: what model and early-exit drafters share."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core.cache import held
from jaxspec.core.protocols import LanguageModel, Noise
from jaxspec.core.records import KV, Cache, Params, Window
from jaxspec.core.sampling import GREEDY
from jaxspec.core.tree import Topology


def buffer(model: LanguageModel, batch: int, topology: Topology) -> KV:
    """Room for the keys and values of every node, and one slot more for padding."""
    shapes = jax.eval_shape(lambda: model.init_cache(batch, 1)).kv
    nodes = topology.shape.nodes + 1
    return KV(*(jnp.zeros((*a.shape[:3], nodes, a.shape[4]), held(a.dtype)) for a in shapes))


def draw_children(
    logits: Float[Array, "B n V"], noise: Float[Array, "B 1 V"], temperature: Float[Array, "B"], width: int
) -> Int[Array, "B n C"]:
    """The `width` highest perturbed tokens after each node, -1 where the score is -inf or NaN.

    The law is tempered only: a draft need not be truncated as the target is, and accepts more if it is not.
    """
    scale = jnp.where(temperature < GREEDY, 1.0, temperature)[:, None, None]
    # Greedy rows in a batch with sampling ones must not see noise.
    perturbed = logits / scale + jnp.where(temperature < GREEDY, 0.0, 1.0)[:, None, None] * noise
    if width == 1:
        tokens = perturbed.argmax(-1, keepdims=True)
        scores = jnp.take_along_axis(perturbed, tokens, -1)
    else:
        scores, tokens = lax.top_k(perturbed, width)
    return jnp.where(scores > -jnp.inf, tokens, -1).astype(jnp.int32)


def grow(
    model: LanguageModel,
    params: Params,
    topology: Topology,
    cache: Cache,
    entries: KV,
    root: Int[Array, "B"],
    noise: Noise,
    temperature: Float[Array, "B"],
    features: Float[Array, "B E"] | None = None,
) -> tuple[Int[Array, "B N"], KV]:
    """Tokens of the whole tree, and the keys and values of its inner nodes (written into `entries`).

    With `features` the model has already read the root, which is then the cache's last token; without, the root
    is read here. One loop over the levels, each padded to the widest, so that one model call is compiled
    whatever the depth.
    """
    shape, tree = topology.shape, topology.tree
    spare = shape.nodes  # where padding is written
    children = np.where(tree.children >= 0, tree.children, spare)
    tokens = jnp.full((root.shape[0], shape.nodes + 1), -1, jnp.int32).at[:, 0].set(root)

    def place(tokens: Array, nodes: Array, features: Array, depth: Array | int) -> Array:
        drawn = draw_children(model.head(params, features), noise(depth), temperature, shape.width)
        return tokens.at[:, jnp.asarray(children)[nodes]].set(drawn)

    first = 0 if features is None else 1
    if features is not None:
        tokens = place(tokens, jnp.zeros((1,), jnp.int32), features[:, None], 0)
    levels = topology.parents_by_level[first:]
    if levels:
        widest = max(map(len, levels))
        table = np.stack([np.pad(level, (0, widest - len(level)), constant_values=spare) for level in levels])
        children = np.concatenate([children, np.full((1, shape.width), spare)])
        above = np.zeros((shape.nodes + 1, shape.nodes + 1), bool)
        above[:-1, :-1] = tree.ancestors & ~np.eye(shape.nodes, dtype=bool)
        above[:, :first] = False
        start = cache.length - first

        def level(i: Array, carry: tuple[Array, KV]) -> tuple[Array, KV]:
            tokens, entries = carry
            nodes, depth = jnp.asarray(table)[i], i + first
            mask = jnp.concatenate([jnp.asarray(above)[nodes], jnp.eye(widest, dtype=bool)], axis=1)
            batch = (root.shape[0], *mask.shape)
            positions = jnp.broadcast_to((start + depth)[:, None], (root.shape[0], widest))
            window = Window(jnp.maximum(tokens[:, nodes], 0), positions, jnp.broadcast_to(mask, batch))
            features, new = model.apply(params, window, cache, entries)
            new = jax.tree.map(lambda a: jnp.where(jnp.isfinite(a), a, 0), new)  # a masked NaN would stay
            entries = KV(*(a.at[:, :, :, nodes].set(b) for a, b in zip(entries, new)))
            return place(tokens, nodes, features, depth), entries

        tokens, entries = lax.fori_loop(0, len(levels), level, (tokens, entries))
    return tokens[:, :-1], entries
