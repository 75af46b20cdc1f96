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
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.errors import InvalidConfig, TokenOutOfRange

GREEDY = 1e-6
"""Temperatures below this are exact greedy decoding."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """The settings, for all rows (a number) or per row (an array `[B]`).

    Attributes:
        temperature: 0 (below 1e-6) is exact greedy decoding.
        top_k: 0 keeps all tokens.
        top_p: 1 keeps all tokens.
        min_p: 0 keeps all tokens.
        logit_bias: added to the logits before anything else; a mapping from token id to bias, or an array [V].
    """

    temperature: Any = 0.0
    top_k: Any = 0
    top_p: Any = 1.0
    min_p: Any = 0.0
    logit_bias: Any = None

    def rows(self, batch: int, vocab: int) -> "Sampling":
        """Checked, and as arrays: `[B]` each, and the bias `[B, V]` or None.

        Raises:
            InvalidConfig: a value outside its range (NaN included), or not one per row.
            TokenOutOfRange: a bias for a token that does not exist.
        """
        limits = {
            "temperature": (np.float32, lambda v: (v >= 0) & np.isfinite(v), "finite and at least 0"),
            "top_k": (np.int32, lambda v: (v >= 0) & (v < 2**31), "a whole number, 0 (off) or more"),
            "top_p": (np.float32, lambda v: (v > 0) & (v <= 1), "above 0 and at most 1"),
            "min_p": (np.float32, lambda v: (v >= 0) & (v <= 1), "between 0 and 1"),
        }
        fields: dict[str, Any] = {}
        for name, (dtype, valid, wanted) in limits.items():
            value = np.asarray(getattr(self, name))
            if value.dtype.kind not in "iuf" or (dtype is np.int32 and value.dtype.kind == "f"):
                raise InvalidConfig(f"{name} must be {wanted}, got {getattr(self, name)!r}")
            if value.ndim > 1 or (value.ndim == 1 and value.shape != (batch,)):
                raise InvalidConfig(
                    f"{name} must be one value, or one for each of the {batch} rows; got shape {value.shape}"
                )
            if not np.all(valid(value)):
                raise InvalidConfig(f"{name} must be {wanted}, got {getattr(self, name)!r}")
            fields[name] = jnp.asarray(np.broadcast_to(value.astype(dtype), (batch,)))
        return Sampling(**fields, logit_bias=self._bias(batch, vocab))

    def _bias(self, batch: int, vocab: int) -> Array | None:
        if self.logit_bias is None:
            return None
        if isinstance(self.logit_bias, Mapping):
            bias = np.zeros(vocab, np.float32)
            for token, value in self.logit_bias.items():
                if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < vocab:
                    raise TokenOutOfRange(f"logit_bias for token {token!r}; ids go from 0 to {vocab - 1}")
                if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
                    raise InvalidConfig(f"logit_bias of token {token} must be a number, got {value!r}")
                bias[token] = value
        else:
            bias = np.asarray(self.logit_bias)
            if bias.dtype.kind not in "iuf":
                raise InvalidConfig(f"logit_bias must be a mapping or an array of numbers, got {self.logit_bias!r:.80}")
            bias = bias.astype(np.float32)
        if bias.shape not in ((vocab,), (batch, vocab)):
            raise InvalidConfig(f"logit_bias must have shape [{vocab}], got {list(bias.shape)}")
        if np.isnan(bias).any() or np.isposinf(bias).any():
            raise InvalidConfig("logit_bias must not be NaN or +inf (use -inf to ban a token)")
        if np.isneginf(bias).all(-1).any():
            raise InvalidConfig("logit_bias bans every token")
        return jnp.asarray(np.broadcast_to(bias, (batch, vocab)))


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
    top = scores.max(-1, keepdims=True)

    def limited() -> Array:
        weights = jnp.exp(scores - top)
        budget = jnp.where(sampling.top_p < 1, sampling.top_p, jnp.inf)[:, None] * weights.sum(-1)
        lowest = _highest_where(scores, lambda above: above.sum(-1) >= budget, lambda _: weights)
        # `lowest` is the highest score at which the budget is spent: it is the last that is kept.
        return jnp.where(scores < lowest[..., None], -jnp.inf, scores)

    kept = lax.cond(jnp.any(sampling.top_p < 1), limited, lambda: scores)
    kept = jnp.where(kept < top + jnp.log(sampling.min_p)[:, None, None], -jnp.inf, kept)
    point = jnp.arange(scores.shape[-1]) == scores.argmax(-1)[..., None]
    return jnp.where(greedy, jnp.where(point, 0.0, -jnp.inf), jax.nn.log_softmax(kept, -1))


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
