"""Calls of the target that XLA compiles apart from the operations around them, and at one width for every drafter.

Without barriers, XLA fuses the first and the last operations of a network with operations of the drafter and the rule,
and moves slices of the results into the network. The order of sums in the network would then depend on the drafter.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxspec.core.networks import LanguageModel
from jaxspec.core.records import Cache, Entries, Params, Window

MAX_PATH = 32
"""The largest number of tokens in a path of a widened window. Attention sums the tokens of a path apart from the rest
of the text, so the bits depend on this number."""


def read(network: LanguageModel, params: Params, window: Window, cache: Cache) -> tuple[Float[Array, "B T E"], Entries]:
    """Returns what `network.apply` returns."""
    window, cache = lax.optimization_barrier((window, cache))
    features, entries = network.apply(params, window, cache)
    if getattr(network, "kernels_write_entries", False):  # XLA may then copy entries into the cache in one kernel
        return lax.optimization_barrier(features), entries
    return lax.optimization_barrier((features, entries))


def score(network: LanguageModel, params: Params, features: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
    """Returns what `network.head` returns, for features that `read` has returned."""
    return lax.optimization_barrier(network.head(params, features))


def widen(window: Window, width: int) -> Window:
    """Pads a window to `width` tokens, and its paths to min(`width`, `MAX_PATH`) tokens.

    The shapes of the result do not depend on the window. A token of the padding follows the cached text directly, and
    sees only that text and itself, so no sum is empty.

    Args:
        window: a window with paths, of at most `width` tokens.
        width: the number of tokens of the result.
    """
    tokens = window.tokens.shape[1]
    more, number = width - tokens, jnp.arange(width)
    is_padding = number >= tokens
    first = jnp.broadcast_to(window.positions[:, :1], (len(window.positions), more))
    mask = jnp.pad(window.mask, ((0, 0), (0, more), (0, more))) | (jnp.eye(width, dtype=bool) & is_padding)
    assert window.paths is not None
    longer = ((0, 0), (0, more), (0, min(width, MAX_PATH) - window.paths.shape[2]))
    paths = jnp.pad(window.paths, longer, constant_values=-1)
    paths = paths.at[:, :, 0].set(jnp.where(is_padding, number, paths[:, :, 0]))
    return Window(
        jnp.pad(window.tokens, ((0, 0), (0, more))), jnp.concatenate([window.positions, first], 1), mask, paths
    )
