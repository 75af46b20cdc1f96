"""What a target or a draft model must do, and what some can do besides: protocols of networks."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.core.records import KV, Cache, Params, Window
from jaxspec.errors import InvalidConfig


@runtime_checkable
class LanguageModel(Protocol):
    """A network that reads a window of new tokens on top of a cache. It knows nothing of trees."""

    @property
    def vocab(self) -> int:
        """V, the number of logits per token."""
        ...

    @property
    def context(self) -> int:
        """The longest text it may read, in tokens."""
        ...

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache of at least `capacity` slots."""
        ...

    def apply(
        self, params: Params, window: Window, cache: Cache, past: KV | None = None
    ) -> tuple[Float[Array, "B T E"], KV]:
        """Reads the window; the cache is only read.

        `past` [L, B, H, P, K] are earlier tokens of the same window, already read. Returns the features and
        the keys and values of the T new tokens, for the caller to commit or drop.
        """
        ...

    def head(self, params: Params, features: Float[Array, "*b E"]) -> Float[Array, "*b V"]:
        """The next-token logits, in float32."""
        ...


@runtime_checkable
class ProjectedTarget(LanguageModel, Protocol):
    """A language model whose logits are its features times a matrix."""

    def unembedding(self, params: Params) -> Float[Array, "V E"]:
        """The matrix that `head` multiplies with: `head(params, x) == x @ unembedding(params).T`, no bias added."""
        ...


@runtime_checkable
class HeadTarget(ProjectedTarget, Protocol):
    """A language model that draft heads can be trained for.

    Heads read the features that `apply` returns and guess with `unembedding`. `embedding` is needed by heads that also
    read tokens (inputs "path" or "recurrent"), and not by others.
    """

    def embedding(self, params: Params) -> Float[Array, "V E"]:
        """The embedding of every token, as wide as the features."""
        ...


@runtime_checkable
class LayeredTarget(LanguageModel, Protocol):
    """A language model that can stop after its first layers; the drafter "early-exit" drafts with those.

    It is a frozen dataclass, so that `dataclasses.replace(model, layers=n)` is the one that stops after n.
    """

    @property
    def depth(self) -> int:
        """Layers in all."""
        ...

    @property
    def layers(self) -> int | None:
        """The number of layers that are run; None if all are."""
        ...


@runtime_checkable
class TypedTarget(LanguageModel, Protocol):
    """A language model that says in which type it multiplies, so that heads multiply in the same."""

    @property
    def dtype(self) -> str:
        """A type of JAX, by name."""
        ...


NETWORK = ("vocab", "context", "init_cache", "apply", "head")
"""What a `LanguageModel` must have."""


def need_members(model: object, names: Iterable[str], why: str) -> None:
    """Refuses an object that lacks a method or property of a protocol.

    Args:
        model: the object.
        names: of the methods and properties.
        why: the sentence that the missing name completes.

    Raises:
        InvalidConfig: naming the first one that is missing.
    """
    for name in names:
        if not hasattr(model, name):
            raise InvalidConfig(f"{why} {name!r}, which {type(model).__name__} does not have; see docs/own-model.md")


def no_feature(model: LanguageModel, params: Params, cache: Cache) -> Float[Array, "B E"]:
    """The feature before the first token: zeros of the model's feature width."""
    token = jnp.zeros((cache.length.shape[0], 1), jnp.int32)
    window = Window(token, token, jnp.ones((*token.shape, 1), bool))
    feature = jax.eval_shape(model.apply, params, window, cache)[0]
    return jnp.zeros((feature.shape[0], feature.shape[2]), feature.dtype)
