"""From logits to laws: tempering, limits (top-k, top-p, min-p), log-probabilities, and the choice of a token."""

from collections.abc import Callable

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.sampling import GREEDY, Sampling

_BLOCK = 128


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
        best, index = lax.top_k(values, count)
        return best, index
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
