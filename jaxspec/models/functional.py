"""Any model that maps whole texts to logits, as target or draft: a plain function, an NNX or a Linen module.

Such a model keeps no keys: what is cached are the tokens, and every node's path is a row of its own. Right for
toys and for a first experiment; a model that is to be fast implements `LanguageModel` itself.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.core import cache as caches
from jaxspec.core.records import KV, Cache, Params, Window
from jaxspec.errors import InvalidConfig

Logits = Callable[[Params, Array, Array], Array]
"""`(params, tokens [R, S], lengths [R]) -> [R, V]`: the logits after each row's first `lengths` tokens."""


@dataclasses.dataclass(frozen=True)
class FunctionLM:
    """A `LanguageModel` made of a function of whole texts.

    Attributes:
        function: hashable; tokens past a row's length are padding, and must not matter to it.
        vocab: V.
        context: the longest text it takes.
    """

    function: Logits
    vocab: int
    context: int = 1 << 20

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Keys hold tokens, values their positions."""
        return caches.empty_cache(1, batch, 1, capacity, 1, jnp.int32)

    def apply(
        self, params: Params, window: Window, cache: Cache, past: KV | None = None
    ) -> tuple[Float[Array, "B T V"], KV]:
        batch, size = window.tokens.shape
        new = KV(*(a[None, :, None, :, None] for a in (window.tokens, window.positions)))
        seen = new if past is None else jax.tree.map(lambda a, b: jnp.concatenate([a, b], 3), past, new)
        tokens, positions = (a[0, :, 0, :, 0] for a in seen)
        prefix = cache.kv.keys[0, :, 0, :, 0]
        prefix = jnp.where(jnp.arange(prefix.shape[1]) < cache.length[:, None], prefix, 0)

        def path(prefix: Array, mask: Array, tokens: Array, positions: Array) -> Array:
            return prefix.at[jnp.where(mask, positions, prefix.size)].set(tokens, mode="drop")

        rows = jax.vmap(jax.vmap(path, (None, 0, None, None)))(prefix, window.mask, tokens, positions)
        rows = rows.reshape(batch * size, -1)
        logits = self.function(params, rows, window.positions.reshape(-1) + 1)
        return logits.reshape(batch, size, -1), new

    def head(self, params: Params, features: Float[Array, "*b V"]) -> Float[Array, "*b V"]:
        return features.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Module:
    """A Flax module without its parameters, called on whole texts."""

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
    """A causal Flax module `tokens [R, S] -> logits [R, S, V]` as a language model, and its parameters.

    Args:
        module: an NNX module with its parameters, or a Linen module.
        vocab: V.
        variables: what `apply` of a Linen module takes.
        context: the longest text it takes.

    Raises:
        InvalidConfig: it is neither, or the variables are missing or too many.
    """
    from flax import linen, nnx

    if isinstance(module, nnx.Module):
        if variables is not None:
            raise InvalidConfig("an NNX module holds its parameters; do not give variables")
        graph, params = nnx.split(module)
        return FunctionLM(_Module(_NNX(graph)), vocab, context), params
    if isinstance(module, linen.Module):
        if variables is None:
            raise InvalidConfig("a Linen module needs its variables, as module.init returns them")
        return FunctionLM(_Module(module.apply), vocab, context), variables
    raise InvalidConfig(f"expected a flax.nnx or flax.linen module, got {type(module).__name__}")
