"""How logits become tokens: temperature, top-k, top-p, min-p, the same for every drafter and for none.

The order is: temperature, then top-k, then top-p over what remains, then min-p. Each keeps all tokens at or
above some score, so equal scores are kept or dropped together: a token is kept by top-k if fewer than k tokens
have a higher score, by top-p if the mass of the tokens of higher score is below p, by min-p if its probability
is at least min_p times the highest.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.checks import index
from jaxspec.errors import InvalidConfig, TokenOutOfRange, shown

GREEDY = 1e-6
"""Temperatures below this are exact greedy decoding."""
_BLOCK = 128

_FLOATS, _LOWEST = "iuf", float(np.finfo(np.float32).min)
_LIMITS: dict[str, tuple[Any, Callable[[np.ndarray], Any], str]] = {
    "temperature": (np.float32, lambda v: (v >= 0) & (v <= np.finfo(np.float32).max), "finite and at least 0"),
    "top_k": (np.int32, lambda v: (v >= 0) & (v < 2**31), "a whole number, 0 (off) or more"),
    "top_p": (np.float32, lambda v: (v > 0) & (v <= 1), "above 0 and at most 1"),
    "min_p": (np.float32, lambda v: (v >= 0) & (v <= 1), "between 0 and 1"),
}


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, repr=False)
class Sampling:
    """The settings, for all rows (a number) or per row (an array `[B]`).

    Attributes:
        temperature: 0 (below 1e-6) is exact greedy decoding.
        top_k: 0 keeps all tokens.
        top_p: 1 keeps all tokens.
        min_p: 0 keeps all tokens.
        logit_bias: added to the logits before anything else; a mapping from token id to bias, or an array [V].

    Raises:
        InvalidConfig: a value outside its range (NaN included), or none at all. Traced values are not looked at, nor is
            what JAX puts into a pytree of this kind.
    """

    temperature: Any = 0.0
    top_k: Any = 0
    top_p: Any = 1.0
    min_p: Any = 0.0
    logit_bias: Any = None

    def __post_init__(self):
        for name in _LIMITS:
            if not _is_abstract(getattr(self, name)):
                self._checked(name)
        bias = self.logit_bias
        if isinstance(bias, Mapping):
            for token, value in bias.items():
                _check_bias(token, value)
        elif bias is not None and not _is_abstract(bias) and _array(bias).dtype.kind not in _FLOATS:
            raise InvalidConfig(f"logit_bias must be a mapping or an array of numbers, got {shown(bias)}")

    def tree_flatten_with_keys(self) -> tuple[tuple, None]:
        """The fields, for JAX."""
        names = [field.name for field in dataclasses.fields(self)]
        return tuple((jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names), None

    @classmethod
    def tree_unflatten(cls, _: None, fields: Any) -> "Sampling":
        """Puts fields together unchecked: JAX may hand in anything, axes and sentinels among it."""
        made = object.__new__(cls)
        for field, value in zip(dataclasses.fields(cls), fields, strict=True):
            object.__setattr__(made, field.name, value)
        return made

    def __repr__(self) -> str:
        given = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not field.default]
        return f"Sampling({', '.join(f'{name}={_brief(getattr(self, name))}' for name in given)})"

    def _checked(self, name: str) -> np.ndarray:
        """The values of a setting: one, or one per row."""
        dtype, valid, wanted = _LIMITS[name]
        given = getattr(self, name)
        value = _array(given)
        if value.dtype.kind not in ("iu" if dtype is np.int32 else _FLOATS) or not np.all(valid(value)):
            raise InvalidConfig(f"{name} must be {wanted}, got {shown(given)}")
        if value.ndim > 1:
            raise InvalidConfig(f"{name} must be one value, or one for each row; got shape {value.shape}")
        return value.astype(dtype)

    def rows(self, batch: int, vocab: int) -> "Sampling":
        """Checked, and as arrays: `[B]` each, and the bias `[B, V]` or None.

        Raises:
            InvalidConfig: a value outside its range (NaN included), or not one per row.
            TokenOutOfRange: a bias for a token that does not exist.
        """
        fields: dict[str, Any] = {}
        for name in _LIMITS:
            value = self._checked(name)
            if value.ndim == 1 and value.shape != (batch,):
                raise InvalidConfig(
                    f"{name} must be one value, or one for each of the {batch} rows; got shape {value.shape}"
                )
            fields[name] = jnp.asarray(np.broadcast_to(value, (batch,)))
        return Sampling(**fields, logit_bias=self._bias(batch, vocab))

    def _bias(self, batch: int, vocab: int) -> Array | None:
        if self.logit_bias is None:
            return None
        if isinstance(self.logit_bias, Mapping):
            bias = np.zeros(vocab, np.float32)
            for token, value in self.logit_bias.items():
                number = _check_bias(token, value)
                if number >= vocab:
                    raise TokenOutOfRange(f"logit_bias for token {shown(token)}; ids go from 0 to {vocab - 1}")
                bias[number] = max(float(value), -np.inf if value == -np.inf else _LOWEST)
        else:
            with np.errstate(over="ignore"):  # what becomes infinite is refused below
                bias = _array(self.logit_bias).astype(np.float32)
        if bias.shape not in ((vocab,), (batch, vocab)):
            raise InvalidConfig(f"logit_bias must have shape [{vocab}], got {list(bias.shape)}")
        if np.isnan(bias).any() or np.isposinf(bias).any():
            raise InvalidConfig("logit_bias must not be NaN or +inf (use -inf to ban a token)")
        if np.isneginf(bias).all(-1).any():
            raise InvalidConfig("logit_bias bans every token")
        return jnp.asarray(np.broadcast_to(bias, (batch, vocab)))


def _is_abstract(value: Any) -> bool:
    """Whether there is no value to be looked at: traced, a shape alone, or on devices of other processes."""
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        return not value.is_fully_addressable
    return isinstance(value, (jax.core.Tracer, jax.ShapeDtypeStruct))


def _array(value: Any) -> np.ndarray:
    """The value as an array; of a kind that is no number's where it cannot be one (ragged lists, deleted arrays)."""
    try:
        array = np.asarray(value)
    except Exception:
        return np.asarray(None)
    return array.astype(np.float32) if jnp.issubdtype(array.dtype, jnp.bfloat16) else array


def _check_bias(token: Any, value: Any) -> int:
    """The id of a biased token, as far as it can be told without the vocabulary."""
    number = index(token)
    if number is None or number < 0:
        raise TokenOutOfRange(f"logit_bias for token {shown(token)}; ids go from 0")
    array = _array(value)
    if array.ndim or array.dtype.kind not in _FLOATS or not array < np.finfo(np.float32).max:  # NaN is not, either
        raise InvalidConfig(f"logit_bias of token {number} must be a number below infinity, no NaN; got {shown(value)}")
    return number


def _brief(value: Any) -> str:
    """A setting in a few characters, whatever it holds."""
    if isinstance(value, Mapping):
        return f"{{{len(value)} tokens}}"
    shape = getattr(value, "shape", None)
    return f"{value.dtype}{list(shape)}" if shape else shown(value, 40)


def tempered(logits: Float[Array, "B N V"], sampling: Sampling) -> Float[Array, "B N V"]:
    """Biased and tempered log-scores, in float32 at least. Greedy rows keep their biased logits."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if sampling.logit_bias is not None:
        logits = logits + sampling.logit_bias[:, None, :]
    temperature = sampling.temperature[:, None, None]
    return jnp.where(temperature < GREEDY, logits, logits / jnp.maximum(temperature, GREEDY))


def scores(logits: Float[Array, "B N V"], sampling: Sampling) -> Float[Array, "B N V"]:
    """`tempered`, with the tokens outside the top k at -inf."""
    score = tempered(logits, sampling)

    def limited() -> Array:
        k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, score.shape[-1]), score.shape[-1])[:, None]
        # NaN must stay: the health check of the loop looks for it.
        return jnp.where(score < kth_highest(score, k)[..., None], -jnp.inf, score)

    return lax.cond(jnp.any(sampling.top_k > 0), limited, lambda: score)


def kth_highest(values: Float[Array, "*b V"], k: Int[Array, "*c"]) -> Float[Array, "*b"]:
    """The k-th highest of each row."""
    return _highest_where(values, lambda above: above.sum(-1) >= k, jnp.ones_like)


def log_law(scores: Float[Array, "B N V"], sampling: Sampling) -> Float[Array, "B N V"]:
    """The log-probabilities that `choose` draws by: `scores` limited by top-p and min-p, normalised.

    Greedy rows are point masses at the first of the highest scores.
    """
    greedy = (sampling.temperature < GREEDY)[:, None, None]
    limited = jnp.where(_kept(scores, sampling), scores, -jnp.inf)
    point = jnp.arange(scores.shape[-1]) == scores.argmax(-1)[..., None]
    return jnp.where(greedy, jnp.where(point, 0.0, -jnp.inf), jax.nn.log_softmax(limited, -1))


def log_prob(
    scores: Float[Array, "B N V"], tokens: Int[Array, "B N"], sampling: Sampling, drawn: bool
) -> Float[Array, "B N"]:
    """The log-probability of one token after every node: the entry of `log_law`, without that array.

    `drawn` says that each token was drawn from this law. It then counts as kept, because the sum that top-p is
    decided by may round differently in the program that drew it.
    """
    greedy = (sampling.temperature < GREEDY)[:, None]
    own = jnp.take_along_axis(scores, tokens[..., None], -1)

    def sampled() -> Array:
        top, kept = scores.max(-1, keepdims=True), _kept(scores, sampling)
        kept |= drawn & (scores >= own)
        mass = jnp.where(kept, jnp.exp(scores - top), 0.0).sum(-1)
        inside = jnp.take_along_axis(kept, tokens[..., None], -1)
        return jnp.where(inside, own - top, -jnp.inf)[..., 0] - jnp.log(mass)

    law = lax.cond(jnp.all(greedy), lambda: jnp.zeros_like(own[..., 0]), sampled)
    point = 0.0 if drawn else jnp.where(scores.argmax(-1) == tokens, 0.0, -jnp.inf)
    return jnp.where(greedy, point, law)


def highest(values: Float[Array, "*b V"], count: int) -> tuple[Float[Array, "*b K"], Int[Array, "*b K"]]:
    """`lax.top_k`, the same values and indices, several times faster on a CPU where V is large.

    The highest K are among the blocks of the K highest maxima. Equal maxima prefer the earlier block, and blocks
    keep their order, so among equal values the first is still preferred.
    """
    size = values.shape[-1]
    blocks = -(-size // _BLOCK)
    if blocks < 2 * count:
        return lax.top_k(values, count)
    padding = [(0, 0)] * (values.ndim - 1) + [(0, blocks * _BLOCK - size)]
    split = jnp.pad(values, padding, constant_values=-jnp.inf).reshape(*values.shape[:-1], blocks, _BLOCK)
    chosen = jnp.sort(lax.top_k(split.max(-1), count)[1], -1)
    candidates = jnp.take_along_axis(split, chosen[..., None], -2)
    best, index = lax.top_k(candidates.reshape(*values.shape[:-1], -1), count)
    return best, jnp.take_along_axis(chosen, index // _BLOCK, -1) * _BLOCK + index % _BLOCK


def _kept(scores: Float[Array, "B N V"], sampling: Sampling) -> Bool[Array, "B N V"]:
    """The tokens that top-p and min-p leave."""
    top = scores.max(-1, keepdims=True)

    def limited() -> Array:
        weights = jnp.exp(scores - top)
        budget = jnp.where(sampling.top_p < 1, sampling.top_p, jnp.inf)[:, None] * weights.sum(-1)
        # The highest score at which the budget is spent is the last that is kept; a NaN where it never is.
        lowest = _highest_where(scores, lambda above: above.sum(-1) >= budget, lambda _: weights)
        return ~(scores < lowest[..., None])

    kept = lax.cond(jnp.any(sampling.top_p < 1), limited, lambda: jnp.ones_like(scores, bool))
    return kept & ~(scores < top + jnp.log(sampling.min_p)[:, None, None])


def _highest_where(values: Float[Array, "*b V"], spent: Callable, weigh: Callable) -> Float[Array, "*b"]:
    """The highest x for which `spent` holds of the weights of the values at or above x, the others zero.

    Exactly and without a sort: a binary search over the floats' bits. The lowest float where it never holds.
    """
    whole = jnp.int64 if values.dtype == jnp.float64 else jnp.int32
    limits, bits = jnp.iinfo(whole), lax.bitcast_convert_type(values, whole)
    order = bits ^ ((bits >> (limits.bits - 1)) & limits.max)  # whole numbers in the order of the floats
    weights = weigh(values)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        enough = spent(jnp.where(order >= middle[..., None], weights, 0))
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    lowest = jnp.full(values.shape[:-1], limits.min, whole)
    highest = jnp.full(values.shape[:-1], limits.max, whole)
    low, _ = lax.fori_loop(0, limits.bits, halve, (lowest, highest))
    return lax.bitcast_convert_type(low ^ ((low >> (limits.bits - 1)) & limits.max), values.dtype)


def choose(scores: Float[Array, "N V"], noise: Float[Array, "N V"], sampling: Sampling) -> Int[Array, "N"]:
    """The token drawn after every node of one row: the highest of `scores + noise` that is kept.

    Top-p and min-p are checked for the token that was drawn; only if it fails are it and everything below it
    excluded, and another drawn. Equal to limiting first, and most draws need one look: a sort of a large
    vocabulary costs more than a small model's step. `noise` is not read where the row is greedy.
    """
    noise = jnp.where(sampling.temperature < GREEDY, 0.0, noise)
    top = scores.max(-1)
    weights = jnp.exp(scores - top[:, None])
    budget = jnp.where(sampling.top_p < 1, sampling.top_p * weights.sum(-1), jnp.inf)
    floor = top + jnp.log(sampling.min_p)

    def draw(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        excluded, token, done = state
        drawn = jnp.where(scores > excluded[:, None], scores + noise, -jnp.inf)
        new = drawn.argmax(-1).astype(jnp.int32)
        score = jnp.take_along_axis(scores, new[:, None], -1)[:, 0]
        above = jnp.where(scores > score[:, None], weights, 0.0).sum(-1)
        # What is not finite is drawn once and left to the health check of the loop.
        kept = ((above < budget) & (score >= floor)) | ~jnp.isfinite(top) | jnp.isnan(score)
        token = jnp.where(done, token, new)
        return jnp.where(done, excluded, score), token, done | kept

    start = (jnp.full(top.shape, -jnp.inf), jnp.zeros(top.shape, jnp.int32), jnp.zeros(top.shape, bool))
    return lax.while_loop(lambda state: ~state[2].all(), draw, draw(start))[1]
