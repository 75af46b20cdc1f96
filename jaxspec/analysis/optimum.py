"""The most that any lossless rule could keep of sampled candidates."""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxspec.analysis import laws

HEAD = 1024
"""Likeliest draft tokens that `optimal_acceptance` takes one by one."""

_GROUPS = 8
"""As many as the other tokens of a prefix count for."""

_LOG_TIMES = np.arange(-24.0, 26.0, 0.4)


def optimal_acceptance(
    target: Float[Array, "*b V"],
    draft: Float[Array, "*b V"],
    children: int,
    replacement: bool = False,
    head: int = HEAD,
) -> Float[Array, "*b K"]:
    """The most that any lossless rule can keep of 1 to `children` tokens sampled from the draft's law.

    A rule couples the sample D with the target's token; by max-flow and min-cut the best one keeps
    `min over sets H of target(H) + 1 - Pr(D within H)` (Sun et al. 2023, arXiv:2310.15141; Hu et al. 2025,
    arXiv:2502.18779). Every single H bounds every rule, so a minimum over some sets is still an upper bound.

    With replacement the minimiser is a prefix of the tokens by falling draft/target (Hu et al., section 4), and
    `Pr = draft(H)^K`: exact, O(V log V).

    Without, the minimum over the prefixes of the same order is taken: an upper bound, and exact for one child. That a
    prefix attains the minimum for more children is not proven; it did wherever all sets were enumerated. `Pr` is the
    chance that K tokens of H come before the first other one where each token comes after an exponential time of its
    own: a smooth integral over the logarithm of time, by the trapezoidal rule, with an error below 1e-9 in float64.
    Beyond the `head` likeliest tokens those of a prefix count as a few in this race, which only raises the bound.

    Args:
        target: the target's law.
        draft: the law the children are drawn from.
        children: K.
        replacement: children may repeat.
        head: see above; not read where tokens are drawn with replacement.
    """
    laws.check(target, draft, children)
    if replacement:
        order = jnp.argsort(laws.ratio(target, draft), axis=-1)
        mass, drafted = (laws.from_none(jnp.take_along_axis(law, order, -1)) for law in (target, draft))
        bounds = [1 + (mass - drafted**count).min(-1) for count in range(1, children + 1)]
        return jnp.stack(bounds, -1)
    return laws.batched(functools.partial(_race, children=children, head=min(head, target.shape[-1])), target, draft)


def _race(target: Float[Array, "V"], draft: Float[Array, "V"], children: int, head: int) -> Float[Array, "K"]:
    drafted, tokens = lax.top_k(draft, head)
    ratio = laws.ratio(target[tokens], drafted)
    order = jnp.argsort(ratio)
    drafted, mass, ratio = drafted[order], target[tokens[order]], ratio[order]

    # A token of the tail joins with the first prefix whose threshold it is below; the last bin joins none.
    rest = [law.at[tokens].set(0.0) for law in (target, draft)]
    bins = jnp.searchsorted(ratio, laws.ratio(*rest))
    tail_mass = jnp.zeros(head + 1, target.dtype).at[bins].add(rest[0])
    tail = jnp.zeros((head + 1, _GROUPS), draft.dtype).at[bins, jnp.arange(draft.size) % _GROUPS].add(rest[1])
    inside = jnp.cumsum(mass) + jnp.cumsum(tail_mass)[:-1]
    outside = laws.after(drafted) + laws.after(tail.sum(-1))[:-1]
    times = jnp.exp(jnp.asarray(_LOG_TIMES, target.dtype))
    step = _LOG_TIMES[1] - _LOG_TIMES[0]

    def join(came: Array, mass: Array) -> Array:
        """With one token more; `came[t, k]`: the probability that exactly, or at most, k tokens have come by then."""
        arrived = -jnp.expm1(-mass * times)[:, None]
        return came * (1 - arrived) + jnp.pad(came[:, :-1], ((0, 0), (1, 0))) * arrived

    def add(came: Array, prefix: tuple[Array, ...]) -> tuple[Array, Array]:
        own, groups, outside = prefix
        came = join(came, own)
        fewer = functools.reduce(join, groups, jnp.cumsum(came, 1)) if head < draft.size else jnp.cumsum(came, 1)
        first = step * outside * times * jnp.exp(-outside * times)  # when the first other token comes
        late = jnp.where(outside > 0, jnp.exp(-outside * times[-1]), 0.0) * fewer[-1]
        return came, first @ fewer + late

    start = jnp.zeros((times.size, children), target.dtype).at[:, 0].set(1.0)
    _, lost = lax.scan(add, start, (drafted, jnp.cumsum(tail, 0)[:-1], outside))
    return jnp.minimum((inside[:, None] + lost).min(0), 1.0)
