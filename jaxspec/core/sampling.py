"""Sampling settings: temperature, top-k, top-p, min-p and processors, with the same meaning for every drafter.

The order is: processors, temperature, top-k, top-p of what remains, min-p. Each truncation keeps all tokens at
or above some score, so tokens of equal score are kept or dropped together. A token is kept by top-k if fewer than k
tokens have a higher score, by top-p if the mass of the tokens with a higher score is below p, and by min-p if its
probability is at least min_p times the highest.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core.bias import LogitBias
from jaxspec.core.checks import whole
from jaxspec.core.processor import check_processors, draws_tokens
from jaxspec.core.row_settings import Limits, broadcast, check_setting, is_abstract
from jaxspec.core.sizes import MAX_INT32
from jaxspec.errors import InvalidConfig, shown

MIN_TEMPERATURE = 1e-6
"""Temperatures below this mean exact greedy decoding."""

MAX_ROWS = 1 << 24
"""The largest number of rows that have settings of their own; their arrays take 256 MB."""
_TINY = float(np.finfo(np.float32).tiny)
"""The least positive number that devices compute with in float32: they flush smaller numbers to 0."""
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
        processors: change the logits before anything else, one after another, such as
            `[RepetitionPenalty(1.1), MinNewTokens(20)]`; see `jaxspec.core.processor.Processor`.
        logit_bias: an argument only, for the processor `LogitBias`, which becomes the first of the processors.

    Raises:
        InvalidConfig: a value is outside its range, is NaN, or is not a number. Traced values and the leaves that JAX
            puts into this pytree are not checked.
    """

    temperature: Any = 0.0
    top_k: Any = 0
    top_p: Any = 1.0
    min_p: Any = 0.0
    logit_bias: dataclasses.InitVar[Any] = None
    processors: Any = ()

    def __post_init__(self, logit_bias: Any):
        for name in _LIMITS:
            if not is_abstract(getattr(self, name)):
                check_setting(name, getattr(self, name), _LIMITS[name])
        if self.processors != ():
            object.__setattr__(self, "processors", check_processors(self.processors))
        if logit_bias is not None:
            object.__setattr__(self, "processors", (LogitBias(logit_bias), *self.processors))

    def tree_flatten_with_keys(self) -> tuple[tuple, Any]:
        """Returns the fields, and the classes of the processors, for JAX.

        To JAX 0.10 to 0.12, objects of two classes that `jax.tree_util.register_dataclass` registers are of the same
        structure if they have equally many fields. Without the classes, a program that was compiled for one processor
        would sometimes run for another.
        """
        names = [field.name for field in dataclasses.fields(self)]
        classes = tuple(map(type, self.processors)) if isinstance(self.processors, tuple) else None
        return tuple((jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names), classes

    @classmethod
    def tree_unflatten(cls, _: Any, fields: Any) -> "Sampling":
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
            The settings by name, each one value or one for each row, and the processors, whose settings have an axis
            of rows.

        Raises:
            InvalidConfig: a value is outside its range, is NaN, or is not one value per row; or a size is not a whole
                number.
            TokenOutOfRange: a processor has a token that does not exist.
        """
        batch, vocab = whole("batch", batch, 0, MAX_ROWS), whole("vocab", vocab)
        checked: dict[str, Any] = {}
        for name in _LIMITS:
            checked[name] = check_setting(name, getattr(self, name), _LIMITS[name], batch)
        last = type(self.processors[-1]).__name__ if draws_tokens(self.processors) else None
        if last and not is_abstract(self.temperature) and np.any(np.asarray(checked["temperature"]) >= MIN_TEMPERATURE):
            raise InvalidConfig(
                f"temperature must be 0 with {last}, which draws the tokens; pass the temperature to {last} instead"
            )
        return checked | {"processors": tuple(one.rows(batch, vocab) for one in self.processors)}

    def rows(self, batch: int, vocab: int) -> "Sampling":
        """Returns the checked settings as arrays with an axis of rows.

        Raises:
            InvalidConfig, TokenOutOfRange: see `check`.
        """
        checked = self.check(batch, vocab)
        processors = jax.tree.map(jnp.asarray, checked.pop("processors"))
        return Sampling(**{name: broadcast(value, (batch,)) for name, value in checked.items()}, processors=processors)


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


def _brief(value: Any) -> str:
    """Describes any value of a setting in a few characters."""
    if isinstance(value, Mapping):
        return f"{{{len(value)} tokens}}"
    shape = getattr(value, "shape", None)
    return f"{value.dtype}{list(shape)}" if shape else shown(value, 40)
