"""Laws of the next token: temperature, truncation (top-k, top-p, min-p), log-probabilities, and drawing a token."""

import functools
from collections.abc import Callable

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.backend.layout import gpu_dependent
from jaxspec.core.sampling import MIN_TEMPERATURE, PreparedSampling, Sampling

_BLOCK = 128
_HALVINGS = 6


def widened(logits: Float[Array, "*b V"]) -> Float[Array, "*b V"]:
    """Returns logits in float32 at least."""
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def temper_logits(logits: Float[Array, "B N V"], sampling: Sampling) -> Float[Array, "B N V"]:
    """Returns tempered log-scores. Greedy rows keep their logits. Processors are not applied."""
    logits = widened(logits)
    temperature = sampling.temperature[:, None, None]
    return jnp.where(temperature < MIN_TEMPERATURE, logits, logits / jnp.maximum(temperature, MIN_TEMPERATURE))


def scores(logits: Float[Array, "B N V"], sampling: Sampling) -> Float[Array, "B N V"]:
    """Returns scores of `temper_logits`, with tokens outside the top k at -inf."""
    score = temper_logits(logits, sampling)

    def find_lowest() -> Array:
        k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, score.shape[-1]), score.shape[-1])[:, None]
        return kth_highest(temper_logits(logits, sampling), k)

    # The conditional neither reads nor returns the scores, because XLA would write all of them to memory for it.
    unlimited = jnp.full(score.shape[:2], -jnp.inf, score.dtype)
    lowest = lax.cond(PreparedSampling.of(sampling).any_top_k, find_lowest, lambda: unlimited)
    # NaN must stay in the scores, because the health check of the loop looks for it.
    return jnp.where(score < lowest[..., None], -jnp.inf, score)


def kth_highest(values: Float[Array, "*b V"], k: Int[Array, "*c"]) -> Float[Array, "*b"]:
    """Returns the k-th highest value of each row."""
    return _highest_where(values, lambda above: above.sum(-1) >= k, jnp.ones_like, unroll=True)


def log_law(scores: Float[Array, "B N V"], sampling: Sampling) -> Float[Array, "B N V"]:
    """Returns the log-law that `choose` samples: `scores` truncated by top-p and min-p, and normalised.

    Greedy rows are point masses at the first of the highest scores.
    """
    greedy = (sampling.temperature < MIN_TEMPERATURE)[:, None, None]
    limited = jnp.where(_kept(scores, sampling), scores, -jnp.inf)
    point = jnp.arange(scores.shape[-1]) == scores.argmax(-1)[..., None]
    return jnp.where(greedy, jnp.where(point, 0.0, -jnp.inf), jax.nn.log_softmax(limited, -1))


def log_prob(
    scores: Float[Array, "B N V"], tokens: Int[Array, "B N"], sampling: Sampling, drawn: bool
) -> Float[Array, "B N"]:
    """Returns the log-probability of one token after every node: its entry of `log_law`, without computing the others.

    `drawn` states that each token was drawn from this law. Such a token counts as kept by top-p, because the sum that
    decides may have been rounded differently in the program that drew the token.
    """
    greedy = (sampling.temperature < MIN_TEMPERATURE)[:, None]
    score = jnp.take_along_axis(scores, tokens[..., None], -1)

    def sampled() -> Array:
        top, kept = scores.max(-1, keepdims=True), _kept(scores, sampling)
        kept |= drawn & (scores >= score)
        mass = total(jnp.where(kept, jnp.exp(scores - top), 0.0))
        inside = jnp.take_along_axis(kept, tokens[..., None], -1)
        return jnp.where(inside, score - top, -jnp.inf)[..., 0] - jnp.log(mass)

    law = lax.cond(jnp.all(greedy), lambda: jnp.zeros_like(score[..., 0]), sampled)
    point = 0.0 if drawn else jnp.where(scores.argmax(-1) == tokens, 0.0, -jnp.inf)
    return jnp.where(greedy, point, law)


def total(values: Float[Array, "*b V"]) -> Float[Array, "*b"]:
    """Sums over the last axis.

    It adds the two halves of the axis repeatedly, because the order in which XLA sums depends on the shape and on the
    program. Except on CPUs, a barrier follows every `_HALVINGS` additions: each thread of a kernel on a GPU adds 64
    values, and without the barriers one thread would add all of them.
    """

    on_cpu, elsewhere = (functools.partial(_add_halves, barriers=barriers) for barriers in (False, True))
    return lax.platform_dependent(values, cpu=on_cpu, default=elsewhere)


def _add_halves(values: Float[Array, "*b V"], barriers: bool) -> Float[Array, "*b"]:
    """Computes `total` for a CPU, or with barriers for another platform; the bits are the same."""
    halvings = 0
    while (size := values.shape[-1]) > 1:
        rest = jnp.zeros((*values.shape[:-1], size % 2), values.dtype)
        values = values[..., : (size + 1) // 2] + jnp.concatenate([values[..., (size + 1) // 2 :], rest], -1)
        halvings += 1
        if barriers and halvings % _HALVINGS == 0:
            values = lax.optimization_barrier(values)
    return values[..., 0]


def log_total(scores: Float[Array, "*b V"]) -> Float[Array, "*b 1"]:
    """Computes `logsumexp` over the last axis of finite scores, summed by `total`."""
    top = scores.max(-1, keepdims=True)
    return top + jnp.log(total(jnp.exp(scores - top)))[..., None]


def highest(values: Float[Array, "*b V"], count: int) -> tuple[Float[Array, "*b K"], Int[Array, "*b K"]]:
    """Computes `lax.top_k`, with the same values and indices, several times faster on a CPU for large V.

    The highest K values are in the K blocks of the highest maxima. Among equal maxima the earlier block is taken, and
    blocks keep their order. So among equal values the first is taken, as in `lax.top_k`.
    """
    size = values.shape[-1]
    blocks = -(-size // _BLOCK)
    if blocks < 2 * count:
        best, index = lax.top_k(values, count)
        return best, index
    split = _in_blocks(values)
    chosen = jnp.sort(lax.top_k(split.max(-1), count)[1], -1)
    candidates = jnp.take_along_axis(split, chosen[..., None], -2)
    best, index = lax.top_k(candidates.reshape(*values.shape[:-1], -1), count)
    return best, jnp.take_along_axis(chosen, index // _BLOCK, -1) * _BLOCK + index % _BLOCK


def first_highest(values: Float[Array, "*b V"]) -> Int[Array, "*b"]:
    """Computes `argmax` over the last axis, on a CPU several times faster for large V.

    Except on a GPU, it finds the block with the highest maximum first, and then the token in that block.
    """
    return gpu_dependent(values, gpu=_argmax, default=_argmax_in_blocks)


def _argmax(values: Float[Array, "*b V"]) -> Int[Array, "*b"]:
    return values.argmax(-1).astype(jnp.int32)


def _argmax_in_blocks(values: Float[Array, "*b V"]) -> Int[Array, "*b"]:
    split = _in_blocks(values)
    block = split.max(-1).argmax(-1)
    inside = jnp.take_along_axis(split, block[..., None, None], -2)[..., 0, :]
    return (block * _BLOCK + inside.argmax(-1)).astype(jnp.int32)


def _in_blocks(values: Float[Array, "*b V"]) -> Float[Array, "*b K W"]:
    """Returns the values in blocks, the last one padded with -inf."""
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % _BLOCK)]
    return jnp.pad(values, padding, constant_values=-jnp.inf).reshape(*values.shape[:-1], -1, _BLOCK)


def _kept(scores: Float[Array, "B N V"], sampling: Sampling) -> Bool[Array, "B N V"]:
    """Returns the tokens that top-p and min-p keep."""
    top = scores.max(-1, keepdims=True)

    def limited() -> Array:
        weights = jnp.exp(scores - top)
        budget = _budget(sampling)[:, None] * total(weights)
        # The lowest score that is kept is the highest score at which the budget is used up. It is NaN if the budget is
        # never used up.
        lowest = _highest_where(scores, lambda above: total(above) >= budget, lambda _: weights)
        return ~(scores < lowest[..., None])

    kept = lax.cond(jnp.any(sampling.top_p < 1), limited, lambda: jnp.ones_like(scores, bool))
    return kept & ~(scores < top + _log_min_p(sampling)[:, None, None])


def _budget(sampling: Sampling) -> Float[Array, "*b"]:
    """Returns the share of the mass that top-p keeps; infinite where top-p is off.

    The share is always above 0, because with 0 not even the likeliest token would be kept. Traced values are not
    checked, and devices flush denormal numbers to 0.
    """
    share = jnp.maximum(sampling.top_p, jnp.finfo(jnp.float32).tiny)
    return jnp.where(sampling.top_p < 1, share, jnp.inf)


def _log_min_p(sampling: Sampling) -> Float[Array, "*b"]:
    """Returns the logarithm of min-p, at most 0, so that the likeliest token is kept."""
    return jnp.log(jnp.minimum(sampling.min_p, 1.0))


def _highest_where(
    values: Float[Array, "*b V"], spent: Callable, weigh: Callable, unroll: bool = False
) -> Float[Array, "*b"]:
    """Returns the highest x such that `spent` is true of the weights of all values at or above x.

    Exact and without a sort: a binary search over the floats' bits. GPUs test four bits in each iteration, because the
    cost of an iteration there is kernel launches rather than work. Returns NaN if there is no such x. With `unroll`,
    GPUs run the search without a loop, and test five bits in each iteration, which saves launches, but compiles every
    iteration by itself.
    """
    integer = jnp.int64 if values.dtype == jnp.float64 else jnp.int32
    limits, bits = jnp.iinfo(integer), lax.bitcast_convert_type(values, integer)
    order = bits ^ ((bits >> (limits.bits - 1)) & limits.max)  # integers in the order of the floats
    weights = weigh(values)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        enough = spent(jnp.where(order >= middle[..., None], weights, 0))
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    def digit(low: Array, place: Array | int, width: int) -> Array:
        """Finds the `width` bits of the result from the bit `place` on."""
        step = lax.shift_left(integer(1), integer(place))
        thresholds = low + step * jnp.arange(1, 2**width, dtype=integer).reshape(-1, *[1] * low.ndim)
        enough = spent(jnp.where(order >= thresholds[..., None], weights, 0))
        return low + step * enough.sum(0, dtype=integer)

    def find_digits(low: Array) -> Array:
        if not unroll:
            return lax.fori_loop(0, limits.bits // 4, lambda i, low: digit(low, limits.bits - 4 * (i + 1), 4), low)
        places = range(0, limits.bits, 5)
        for place, above in zip(reversed(places), (limits.bits, *reversed(places))):
            low = digit(low, place, above - place)
        return low

    lowest = jnp.full(values.shape[:-1], limits.min, integer)
    highest = jnp.full(values.shape[:-1], limits.max, integer)
    low = gpu_dependent(
        lowest,
        highest,
        gpu=lambda low, _: find_digits(low),
        default=lambda *bounds: lax.fori_loop(0, limits.bits, halve, bounds)[0],
    )
    return lax.bitcast_convert_type(low ^ ((low >> (limits.bits - 1)) & limits.max), values.dtype)


def choose(scores: Float[Array, "B N V"], noise: Float[Array, "B N V"], sampling: Sampling) -> Int[Array, "B N"]:
    """Draws the token after every node: the highest `scores + noise` among the tokens that top-p and min-p keep.

    Top-p and min-p are checked for the drawn token alone. If it fails, it and all tokens without a higher score are
    excluded, and another token is drawn. The result is the same as if the law were truncated first. Most draws need
    only one check, while sorting a large vocabulary costs more than a step of a small model. `noise` is not read in
    greedy rows.

    Every check excludes at least one more token, so a node has at most V checks. They are counted down, so that the
    loop ends after V + 1 checks, whatever the scores and settings are.
    """
    greedy = (sampling.temperature < MIN_TEMPERATURE)[:, None]
    perturbed = jnp.where(greedy[..., None], scores, scores + noise)

    def check(state: tuple[Array, ...]) -> tuple[Array, ...]:
        # Without the barrier, XLA would compute in every call what only truncated laws need.
        scores, perturbed, (token, pending) = lax.optimization_barrier((*laws, state))
        top = scores.max(-1)
        weights = jnp.exp(scores - top[..., None])
        score = jnp.take_along_axis(scores, token[..., None], -1)[..., 0]
        # The weights above the token and all weights are summed together, which saves launches on a GPU.
        bounds = jnp.stack([score, jnp.full_like(score, -jnp.inf)])
        above, whole = total(jnp.where(scores > bounds[..., None], weights, 0.0))
        kept = (above < _budget(sampling)[:, None] * whole) & (score >= top + _log_min_p(sampling)[:, None])
        # A node whose scores are not finite draws only once; the loop's health check then ends the row.
        done = kept | (score >= top) | ~jnp.isfinite(top) | jnp.isnan(score)
        pending = lax.min(pending - 1, jnp.where(done, 0, scores.shape[-1]))
        drawn = first_highest(jnp.where(scores > score[..., None], perturbed, -jnp.inf))
        return jnp.where(pending > 0, drawn, token), pending

    laws, nodes = (scores, perturbed), scores.shape[:2]
    start = first_highest(perturbed), jnp.broadcast_to(PreparedSampling.of(sampling).checks[:, None], nodes)
    return lax.while_loop(lambda state: (state[1] > 0).any(), check, start)[0]
