"""Sampling settings: temperature, top-k, top-p, min-p, a bias and processors, with the same meaning for every drafter.

The order is: bias, processors, temperature, top-k, top-p of what remains, min-p. Each truncation keeps all tokens at
or above some score, so tokens of equal score are kept or dropped together. A token is kept by top-k if fewer than k
tokens have a higher score, by top-p if the mass of the tokens with a higher score is below p, and by min-p if its
probability is at least min_p times the highest.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec.core.checks import index, whole
from jaxspec.core.processor import check_processors
from jaxspec.core.sizes import MAX_INT32
from jaxspec.errors import InvalidConfig, TokenOutOfRange, shown

MIN_TEMPERATURE = 1e-6
"""Temperatures below this mean exact greedy decoding."""

MAX_ROWS = 1 << 24
"""The largest number of rows that have settings of their own; their arrays take 256 MB."""
_FLOATS, _LOWEST = "iuf", float(np.finfo(np.float32).min)
_TINY = float(np.finfo(np.float32).tiny)
"""The least positive number that devices compute with in float32: they flush smaller numbers to 0."""
Limits = tuple[Any, Callable[[np.ndarray], Any], str]
"""The dtype of a setting, a function that tells which values are valid, and a description of them for messages."""
_LIMITS: dict[str, Limits] = {
    "temperature": (np.float32, lambda v: (v >= 0) & (v <= np.finfo(np.float32).max), "finite and at least 0"),
    "top_k": (np.int32, lambda v: (v >= 0) & (v < 2**31), "a whole number, 0 (off) or more"),
    "top_p": (np.float32, lambda v: (v >= _TINY) & (v <= 1), f"above 0 and at most 1 (from {_TINY:.2g}, as float32)"),
    "min_p": (np.float32, lambda v: (v >= 0) & (v <= 1), "between 0 and 1"),
}


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, repr=False)
class Sampling:
    """Sampling settings, each a number for all rows or an array `[B]`.

    Attributes:
        temperature: the divisor of the logits; 0 (below 1e-6) is exact greedy decoding.
        top_k: number of most likely tokens to keep; 0 keeps all tokens.
        top_p: total probability of the most likely tokens to keep; 1 keeps all tokens.
        min_p: least probability of a token to keep, relative to the most likely token; 0 keeps all tokens.
        logit_bias: added to the logits before anything else; a mapping from token id to bias, or an array [V].
        processors: change the biased logits by the text so far, one after another, such as
            `[RepetitionPenalty(1.1), MinNewTokens(20)]`; see `jaxspec.core.processor.Processor`.

    Raises:
        InvalidConfig: a value is outside its range, is NaN, or is not a number. Traced values and the leaves that JAX
            puts into this pytree are not checked.
    """

    temperature: Any = 0.0
    top_k: Any = 0
    top_p: Any = 1.0
    min_p: Any = 0.0
    logit_bias: Any = None
    processors: Any = ()

    def __post_init__(self):
        for name in _LIMITS:
            if not is_abstract(getattr(self, name)):
                check_setting(name, getattr(self, name), _LIMITS[name])
        bias = self.logit_bias
        if isinstance(bias, Mapping):
            for token, value in bias.items():
                _check_bias(token, value)
        elif bias is not None and not is_abstract(bias) and _array(bias).dtype.kind not in _FLOATS:
            raise InvalidConfig(f"logit_bias must be a mapping or an array of numbers, got {shown(bias)}")
        if self.processors != ():
            object.__setattr__(self, "processors", check_processors(self.processors))

    def tree_flatten_with_keys(self) -> tuple[tuple, None]:
        """Returns the fields, for JAX."""
        names = [field.name for field in dataclasses.fields(self)]
        return tuple((jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names), None

    @classmethod
    def tree_unflatten(cls, _: None, fields: Any) -> "Sampling":
        """Makes settings from unchecked fields, because JAX may pass axes and sentinels."""
        made = object.__new__(cls)
        for field, value in zip(dataclasses.fields(cls), fields, strict=True):
            object.__setattr__(made, field.name, value)
        return made

    def __repr__(self) -> str:
        given = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not field.default]
        return f"Sampling({', '.join(f'{name}={_brief(getattr(self, name))}' for name in given)})"

    def check(self, batch: int, vocab: int) -> dict[str, Any]:
        """Checks the settings for a batch and a vocabulary.

        Only the shape of traced values is checked.

        Returns:
            The settings by name, each one value or one for each row; the bias `[V]`, `[B, V]` or None; and the
            processors, whose settings have an axis of rows.

        Raises:
            InvalidConfig: a value is outside its range, is NaN, or is not one value per row; or a size is not a whole
                number.
            TokenOutOfRange: a bias is for a token that does not exist.
        """
        batch, vocab = whole("batch", batch, 0, MAX_ROWS), whole("vocab", vocab)
        checked: dict[str, Any] = {}
        for name in _LIMITS:
            checked[name] = check_setting(name, getattr(self, name), _LIMITS[name], batch)
        processors = tuple(one.rows(batch, vocab) for one in self.processors)
        return checked | {"logit_bias": self._bias(batch, vocab), "processors": processors}

    def rows(self, batch: int, vocab: int) -> "Sampling":
        """Returns the checked settings as arrays: `[B]` each, and the bias `[B, V]` or None.

        Raises:
            InvalidConfig, TokenOutOfRange: see `check`.
        """
        checked = self.check(batch, vocab)
        bias, processors = checked.pop("logit_bias"), checked.pop("processors")
        fields = {name: _broadcast(value, (batch,)) for name, value in checked.items()}
        bias = None if bias is None else _broadcast(bias, (batch, vocab))
        return Sampling(**fields, logit_bias=bias, processors=processors)

    def _bias(self, batch: int, vocab: int) -> np.ndarray | Array | None:
        """Returns the checked bias `[V]` or `[B, V]`."""
        if self.logit_bias is None:
            return None
        if isinstance(self.logit_bias, Mapping):
            bias = np.zeros(vocab, np.float32)
            for token, value in self.logit_bias.items():
                number = _check_bias(token, value)
                if number >= vocab:
                    raise TokenOutOfRange(f"logit_bias has a token id {shown(token)}; ids go from 0 to {vocab - 1}")
                bias[number] = max(float(value), -np.inf if value == -np.inf else _LOWEST)
        elif isinstance(self.logit_bias, jax.core.Tracer):
            bias = jnp.asarray(self.logit_bias, np.float32)
        else:
            with np.errstate(over="ignore"):  # values that overflow are refused below
                bias = _array(self.logit_bias).astype(np.float32)
        if bias.shape not in ((vocab,), (batch, vocab)):
            raise InvalidConfig(f"logit_bias must have shape [{vocab}], got {list(bias.shape)}")
        if isinstance(bias, jax.core.Tracer):
            return bias
        if np.isnan(bias).any() or np.isposinf(bias).any():
            raise InvalidConfig("logit_bias must not be NaN or +inf (use -inf to ban a token)")
        if np.isneginf(bias).all(-1).any():
            raise InvalidConfig("logit_bias bans every token; leave at least one token without -inf")
        return bias


def check_setting(name: str, given: Any, limits: Limits, batch: int | None = None) -> np.ndarray | Array:
    """Returns the checked values of a setting: one value, or one per row. Only the shape of traced values is checked.

    Args:
        name: the name of the setting, for messages.
        given: the setting.
        limits: the values that are valid.
        batch: the number of rows; None if it is not known.

    Raises:
        InvalidConfig: a value is not valid, or there is not one value per row.
    """
    dtype, valid, expected = limits
    if isinstance(given, jax.core.Tracer):
        value = jnp.asarray(given, dtype)
    else:
        value = _array(given)
        if value.dtype.kind not in ("iu" if dtype is np.int32 else _FLOATS) or not np.all(valid(value)):
            raise InvalidConfig(f"{name} must be {expected}, got {shown(given)}")
        if value.ndim > 1:
            raise InvalidConfig(f"{name} must be one value, or one for each row; got shape {value.shape}")
        value = value.astype(dtype)
    if batch is not None and value.shape not in ((), (batch,)):
        raise InvalidConfig(f"{name} must be one value, or one for each of the {batch} rows; got shape {value.shape}")
    return value


def spread_setting(name: str, given: Any, limits: Limits, batch: int) -> Array:
    """Returns the checked value of a setting for each row; see `check_setting`."""
    return _broadcast(check_setting(name, given, limits, batch), (batch,))


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, repr=False)
class PreparedSampling(Sampling):
    """The settings of all rows, with what every round reads of them, which the loop computes once.

    Attributes:
        any_sampled: a scalar; whether any row samples.
        any_top_k: a scalar; whether any row has a top-k.
        checks: `[B]`; 0 if a row samples without top-p and min-p, or not at all; else a number above any vocabulary's
            size, from which `jaxspec.core.laws.choose` counts down.
    """

    any_sampled: Any = None
    any_top_k: Any = None
    checks: Any = None

    @classmethod
    def of(cls, rows: Sampling) -> "PreparedSampling":
        """Returns the prepared settings of rows; see `Sampling.rows`."""
        if isinstance(rows, PreparedSampling):
            return rows
        sampled = rows.temperature >= MIN_TEMPERATURE
        truncated = sampled & ((rows.top_p < 1) | (rows.min_p > 0))
        checks = jnp.where(truncated, np.int32(MAX_INT32), np.int32(0))
        fields = {field.name: getattr(rows, field.name) for field in dataclasses.fields(Sampling)}
        return cls(**fields, any_sampled=sampled.any(), any_top_k=(rows.top_k > 0).any(), checks=checks)


def _broadcast(value: Any, shape: tuple[int, ...]) -> Array:
    """Broadcasts a value, with NumPy if possible: NumPy compiles nothing, but it cannot read traced values."""
    module = jnp if isinstance(value, jax.core.Tracer) else np
    return jnp.asarray(module.broadcast_to(value, shape))


def is_abstract(value: Any) -> bool:
    """Returns whether a value cannot be read: traced, a shape without data, or on devices of other processes."""
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        return not value.is_fully_addressable
    return isinstance(value, (jax.core.Tracer, jax.ShapeDtypeStruct))


def _array(value: Any) -> np.ndarray:
    """Returns the value as an array; an array of objects if it is not one (ragged lists, deleted arrays)."""
    try:
        array = np.asarray(value)
    except Exception:
        return np.asarray(None)
    return array.astype(np.float32) if jnp.issubdtype(array.dtype, jnp.bfloat16) else array


def _check_bias(token: Any, value: Any) -> int:
    """Returns the id of a biased token, checked as far as possible without the vocabulary."""
    number = index(token)
    if number is None or number < 0:
        raise TokenOutOfRange(f"logit_bias has a token id {shown(token)}; ids are whole numbers from 0")
    array = _array(value)
    if array.ndim or array.dtype.kind not in _FLOATS or not array < np.finfo(np.float32).max:  # NaN included
        raise InvalidConfig(f"logit_bias of token {number} must not be NaN or +inf (-inf bans it), got {shown(value)}")
    return number


def _brief(value: Any) -> str:
    """Describes any value of a setting in a few characters."""
    if isinstance(value, Mapping):
        return f"{{{len(value)} tokens}}"
    shape = getattr(value, "shape", None)
    return f"{value.dtype}{list(shape)}" if shape else shown(value, 40)
