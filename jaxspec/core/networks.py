"""Protocols of networks: what every target and draft model provides, and what some models provide in addition."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core.records import Cache, Entries, Params, Window
from jaxspec.errors import InvalidConfig


@runtime_checkable
class LanguageModel(Protocol):
    """A network that reads a window of new tokens on top of a cache; it does not know that the window is a tree."""

    @property
    def vocab(self) -> int:
        """V, the number of logits per token."""
        ...

    @property
    def context(self) -> int:
        """The length of the longest text that it can read, in tokens."""
        ...

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Returns an empty cache of at least `capacity` slots per row."""
        ...

    def apply(
        self, params: Params, window: Window, cache: Cache, past: Entries | None = None
    ) -> tuple[Float[Array, "B T E"], Entries]:
        """Reads a window, without writing to the cache.

        Args:
            params: the parameters.
            window: T new tokens per row.
            cache: the text before them.
            past: the entries [L, B, H, P, K] of P earlier tokens of the same window.

        Returns:
            The features, and the entries of the new tokens, such as their keys and values. The caller commits the
            entries of the tokens that stay in the text.
        """
        ...

    def commit(
        self,
        cache: Cache,
        entries: Entries,
        nodes: Int[Array, "B M"] | None,
        count: Int[Array, "B"],
        after: Array | int = 0,
    ) -> Cache:
        """Returns the cache after some tokens of a window have become text.

        `jaxspec.append_to_cache` is this method for a model whose cache is made by `jaxspec.empty_cache`.

        Args:
            cache: the cache that the window was read on.
            entries: the entries of the window's T tokens, as from `apply`.
            nodes: the indices in the window of the tokens that follow the text, in the order of the text, -1 for
                padding; None for the window's tokens in their own order.
            count: the number of tokens to commit in each row, 0 to M. A row of count 0 must not change.
            after: an array that is computed before the cache is written, `[B, ...]`. XLA updates a cache in place if
                the update depends on this array; see `jaxspec.append_to_cache`. The array does not change the result.
        """
        ...

    def head(self, params: Params, features: Float[Array, "*b E"]) -> Float[Array, "*b V"]:
        """Returns the logits of the next token, in float32."""
        ...


@runtime_checkable
class ProjectedTarget(LanguageModel, Protocol):
    """A language model whose logits are the product of its features and a matrix."""

    def unembedding(self, params: Params) -> Float[Array, "V E"]:
        """Returns the matrix of `head`: `head(params, x) == x @ unembedding(params).T`, without a bias."""
        ...


@runtime_checkable
class HeadTarget(ProjectedTarget, Protocol):
    """A language model that draft heads can be trained for.

    Heads read the features that `apply` returns, and map their own to logits with `unembedding`. Only heads that also
    read tokens (inputs "path" or "recurrent") need `embedding`.
    """

    def embedding(self, params: Params) -> Float[Array, "V E"]:
        """Returns the embedding of every token, as wide as the features."""
        ...


@runtime_checkable
class LayeredTarget(LanguageModel, Protocol):
    """A language model that can run its first layers alone, as the drafter "early-exit" requires.

    It is a frozen dataclass: `dataclasses.replace(model, layers=n)` is the model that stops after n layers.
    """

    @property
    def depth(self) -> int:
        """The number of layers."""
        ...

    @property
    def layers(self) -> int | None:
        """The number of layers that are run; None if all layers are run."""
        ...


@runtime_checkable
class TappedTarget(LanguageModel, Protocol):
    """A language model that returns the residual stream after chosen layers, for heads to read.

    It is a frozen dataclass: `dataclasses.replace(model, taps=(2, 6, 9))` is the model whose `apply` returns features
    `[B, T, (1 + n) E]`: the model's own features, then the n taps. Tap i is the residual stream after i layers, without
    a norm. The taps may be in any order, and may repeat. `head` reads the first E of these features.
    """

    @property
    def depth(self) -> int:
        """The number of layers, which is also the largest possible tap."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """The numbers of layers, from 1 to `depth`, after which the residual stream is returned."""
        ...


@runtime_checkable
class TypedTarget(LanguageModel, Protocol):
    """A language model that declares the dtype of its matrix products, which its heads then use as well."""

    @property
    def dtype(self) -> str:
        """The name of a dtype."""
        ...


@runtime_checkable
class CompiledTarget(LanguageModel, Protocol):
    """A language model whose bits do not depend on the drafter, if XLA compiles its programs with certain options."""

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """XLA's options for every program that calls the model; empty for a model that promises nothing."""
        ...

    @property
    def max_exact_depth(self) -> int | None:
        """The depth of the deepest tree for which the promise holds; None for any depth."""
        ...


NETWORK_MEMBERS = ("vocab", "context", "init_cache", "apply", "commit", "head")
"""The methods and properties of a `LanguageModel`."""


def need_members(model: object, names: Iterable[str], why: str) -> None:
    """Refuses an object that lacks a method or property of a protocol.

    Args:
        model: the object.
        names: names of the methods and properties.
        why: the start of the message; the missing name follows.

    Raises:
        InvalidConfig: a method or property is missing; the message names the first that is.
    """
    for name in names:
        if not hasattr(model, name):
            raise InvalidConfig(f"{why} {name!r}, which {type(model).__name__} does not have; see docs/own-model.md")


def check_taps(taps: tuple[int, ...], depth: int) -> None:
    """Refuses taps of layers that a target of `depth` layers does not have.

    Raises:
        InvalidConfig: a tap is not from 1 to `depth`.
    """
    if not all(type(tap) is int and 1 <= tap <= depth for tap in taps):
        raise InvalidConfig(
            f"taps must be whole numbers from 1 to {depth}, since the target has {depth} layers; got {taps}"
        )


def with_taps(model: LanguageModel, taps: tuple[int, ...]) -> LanguageModel:
    """Returns the model whose features hold these taps, see `TappedTarget`; the model itself without taps.

    Raises:
        InvalidConfig: the model does not return taps, or has too few layers.
    """
    if not taps:
        return model
    if not isinstance(model, TappedTarget):
        raise InvalidConfig(
            f"the drafter reads the target's residual stream, but {type(model).__name__} has no 'taps' and 'depth'; "
            "see docs/own-model.md"
        )
    check_taps(taps, model.depth)
    tapped: Any = model
    return dataclasses.replace(tapped, taps=taps)


def empty_feature(model: LanguageModel, params: Params, cache: Cache) -> Float[Array, "B E"]:
    """Returns the feature before the first token: zeros of the width of the model's features."""
    feature = _shapes(model, params, cache)[0]
    return jnp.zeros((feature.shape[0], feature.shape[2]), feature.dtype)


def empty_entries(model: LanguageModel, params: Params, cache: Cache, slots: int) -> Entries:
    """Returns zeros with the shape of the entries of `slots` tokens per row, `[L, B, H, S, K]`."""
    entries = _shapes(model, params, cache)[1]
    return jax.tree.map(lambda a: jnp.zeros((*a.shape[:3], slots, *a.shape[4:]), a.dtype), entries)


def _shapes(model: LanguageModel, params: Params, cache: Cache) -> tuple[Any, Any]:
    """Returns the shapes of the features and of the entries of one token per row."""
    token = jnp.zeros((cache.length.shape[0], 1), jnp.int32)
    window = Window(token, token, jnp.ones((*token.shape, 1), bool))
    return _apply.eval_shape(model, params, window, cache)


@functools.partial(jax.jit, static_argnums=0)  # so that JAX caches its shapes
def _apply(model: LanguageModel, params: Params, window: Window, cache: Cache) -> tuple[Array, Entries]:
    return model.apply(params, window, cache)
