"""Reading a drafted tree with a language model, whose cache ends before the tree: what drafters with keys share."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.core.cache import value_dtype
from jaxspec.core.networks import LanguageModel
from jaxspec.core.records import KV, Cache, Params, Window
from jaxspec.core.topology import Dynamic, Topology
from jaxspec.drafters._level import Level, count_slots
from jaxspec.errors import InvalidConfig


def check_tree(tree: Topology | Dynamic, vocab: int) -> None:
    """Refuses trees that a model of this vocabulary cannot draft.

    Raises:
        InvalidConfig: the tree has only its root, or nodes with more children than the vocabulary has tokens.
    """
    width = tree.beam if isinstance(tree, Dynamic) else tree.shape.width
    if tree.shape.depth < 1:
        raise InvalidConfig("a drafting model needs a draft length of at least 1")
    if width > vocab:
        raise InvalidConfig(f"the tree has nodes of {width} children, the model a vocabulary of {vocab} tokens")


def empty_entries(cache: Cache, tree: Topology | Dynamic) -> KV:
    """Returns room for the keys and values of every node that is read, `[L, B, H, S, K]`; only shapes are read."""
    slots = count_slots(tree)
    return KV(*(jnp.zeros((*a.shape[:3], slots, a.shape[4]), value_dtype(a.dtype)) for a in cache.kv))


def as_window(level: Level, start: Int[Array, "B"]) -> Window:
    """Returns the window of a level; each node sees its ancestors' entries and itself.

    Args:
        level: the nodes.
        start: position of the root in each row's text.
    """
    batch, nodes = level.tokens.shape
    own = jnp.broadcast_to(jnp.eye(nodes, dtype=bool), (batch, nodes, nodes))
    positions = jnp.broadcast_to((start + level.depth)[:, None], (batch, nodes))
    return Window(level.tokens, positions, jnp.concatenate([level.ancestors, own], axis=2))


def put_entries(entries: KV, level: Level, new: KV) -> KV:
    """Writes the keys and values of a level's nodes; non-finite values as zeros, because a masked NaN would leak."""
    finite = (jnp.where(jnp.isfinite(a), a, 0) for a in new)
    return KV(*(level.put(a, b, axis=3) for a, b in zip(entries, finite)))


ModelRead = Callable[[Level, KV], tuple[Array, KV]]


def model_reader(model: LanguageModel, params: Params, cache: Cache, start: Int[Array, "B"]) -> ModelRead:
    """Returns the `read` of a language model; the carry is the entries of the nodes (`empty_entries`)."""

    def read(level: Level, entries: KV) -> tuple[Array, KV]:
        features, new = model.apply(params, as_window(level, start), cache, entries)
        return model.head(params, features), put_entries(entries, level, new)

    return read
