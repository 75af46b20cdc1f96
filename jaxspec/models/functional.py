"""Language models made of functions that map whole texts to logits: plain functions, NNX modules, Linen modules.

Such a model has no keys and values: the cache holds tokens, and each node's path is evaluated as a row of its own. This
suits toy models and first experiments. A model that must be fast implements `LanguageModel` itself.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.core import cache as caches
from jaxspec.core.checks import check_callable, whole
from jaxspec.core.records import KV, Cache, Params, Window
from jaxspec.errors import InvalidConfig, shown

Logits = Callable[[Params, Array, Array], Array]
"""`(params, tokens [R, S], lengths [R]) -> [R, V]`: the logits after each row's first `lengths` tokens."""


@dataclasses.dataclass(frozen=True)
class FunctionLM:
    """A `LanguageModel` that calls a function of whole texts.

    Attributes:
        function: a hashable function, see `Logits`. Tokens past a row's length are padding and must not affect its
            result.
        vocab: V, size of the vocabulary.
        context: context length in tokens.

    Raises:
        InvalidConfig: the function is not callable, or a size is not a whole number from 1.
    """

    function: Logits
    vocab: int
    context: int = 1 << 20

    def __post_init__(self):
        if self.function is None:
            raise InvalidConfig("function must be callable, got None")
        check_callable("function", self.function)
        whole("vocab", self.vocab)
        whole("context", self.context)

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Makes an empty cache, whose keys hold tokens and whose values hold their positions."""
        return caches.empty_cache(1, batch, 1, capacity, 1, jnp.int32)

    def apply(
        self, params: Params, window: Window, cache: Cache, past: KV | None = None
    ) -> tuple[Float[Array, "B T V"], KV]:
        batch, size = window.tokens.shape
        new = KV(*(a[None, :, None, :, None] for a in (window.tokens, window.positions)))
        seen = new if past is None else jax.tree.map(lambda a, b: jnp.concatenate([a, b], 3), past, new)
        tokens, positions = (a[0, :, 0, :, 0] for a in seen)
        prefix = cache.stores.keys[0, :, 0, :, 0]
        prefix = prefix if prefix.shape[1] else jnp.zeros((batch, size), prefix.dtype)  # a cache without slots
        prefix = jnp.where(jnp.arange(prefix.shape[1]) < cache.length[:, None], prefix, 0)

        def path(prefix: Array, mask: Array, tokens: Array, positions: Array) -> Array:
            return prefix.at[jnp.where(mask, positions, prefix.size)].set(tokens, mode="drop")

        rows = jax.vmap(jax.vmap(path, (None, 0, None, None)))(prefix, window.mask, tokens, positions)
        rows = rows.reshape(batch * size, -1)
        logits = self.function(params, rows, window.positions.reshape(-1) + 1)
        return logits.reshape(batch, size, -1), new

    commit = staticmethod(caches.append_to_cache)

    def head(self, params: Params, features: Float[Array, "*b V"]) -> Float[Array, "*b V"]:
        return features.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Module:
    """Calls a Flax module on whole texts and selects each row's last logits."""

    call: Callable[..., Any]

    def __call__(self, params: Params, tokens: Array, lengths: Array) -> Array:
        logits = self.call(params, tokens)
        return jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)[:, 0]


@dataclasses.dataclass(frozen=True)
class _NNX:
    graph: Any

    def __call__(self, params: Params, tokens: Array) -> Array:
        from flax import nnx

        return nnx.merge(self.graph, params)(tokens)


def from_flax(
    module: Any, vocab: int, *, variables: Params = None, context: int = 1 << 20
) -> tuple[FunctionLM, Params]:
    """Wraps a causal Flax module `tokens [R, S] -> logits [R, S, V]` as a language model.

    Args:
        module: an NNX module with its parameters, or a Linen module.
        vocab: V, size of the vocabulary.
        variables: the variables of a Linen module, as `module.init` returns them; None for an NNX module.
        context: context length in tokens.

    Returns:
        The language model and its parameters.

    Raises:
        InvalidConfig: `module` is neither an NNX nor a Linen module, a Linen module lacks `variables`, or `variables`
            were passed for an NNX module.
    """
    from flax import linen, nnx

    if isinstance(module, nnx.Module):
        if variables is not None:
            raise InvalidConfig("an NNX module holds its own parameters; leave out variables")
        graph, params = nnx.split(module)
        return FunctionLM(_Module(_NNX(graph)), vocab, context), params
    if isinstance(module, linen.Module):
        if variables is None:
            raise InvalidConfig("a Linen module needs its variables, as module.init returns them")
        return FunctionLM(_Module(module.apply), vocab, context), variables
    raise InvalidConfig(f"expected a flax.nnx or flax.linen module, got {shown(module)}")
