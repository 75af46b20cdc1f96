"""Functions that read a drafted tree with a language model whose cache ends before the tree."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.core.networks import LanguageModel
from jaxspec.core.records import Cache, Entries, Params, Window
from jaxspec.core.topology import Dynamic, Topology
from jaxspec.drafters._level import Level
from jaxspec.errors import InvalidConfig


def check_tree(tree: Topology | Dynamic, vocab: int) -> None:
    """Refuses trees that a model of this vocabulary cannot draft.

    Raises:
        InvalidConfig: the tree has only its root, or nodes with more children than the vocabulary has tokens.
    """
    width = tree.beam if isinstance(tree, Dynamic) else tree.shape.width
    if tree.shape.depth < 1:
        raise InvalidConfig("a drafting model needs a tree of at least one drafted token; got the root alone")
    if width > vocab:
        raise InvalidConfig(
            f"the tree has nodes with {width} children, but the draft has a vocabulary of only {vocab} tokens"
        )


def as_window(level: Level, start: Int[Array, "B"]) -> Window:
    """Returns the window of a level; each node sees its ancestors' entries and itself.

    Args:
        level: the nodes.
        start: the position of the root in each row's text.
    """
    batch, nodes = level.tokens.shape
    itself = jnp.broadcast_to(jnp.eye(nodes, dtype=bool), (batch, nodes, nodes))
    positions = jnp.broadcast_to((start + level.depth)[:, None], (batch, nodes))
    return Window(level.tokens, positions, jnp.concatenate([level.ancestors, itself], axis=2))


def put_entries(entries: Entries, level: Level, new: Entries) -> Entries:
    """Writes the entries of a level's nodes, with zeros for non-finite values, because a masked NaN would leak."""
    return jax.tree.map(lambda a, b: level.put(a, jnp.where(jnp.isfinite(b), b, 0), axis=3), entries, new)


ModelRead = Callable[[Level, Entries], tuple[Array, Entries]]


def model_reader(model: LanguageModel, params: Params, cache: Cache, start: Int[Array, "B"]) -> ModelRead:
    """Returns the `read` of a language model, whose carry is the entries of the nodes, at first `empty_entries`."""

    def read(level: Level, entries: Entries) -> tuple[Array, Entries]:
        features, new = model.apply(params, as_window(level, start), cache, entries)
        return model.head(params, features), put_entries(entries, level, new)

    return read
