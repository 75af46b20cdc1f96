"""The highest acceptance that any lossless rule can reach with sampled candidates."""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxspec.analysis import laws
from jaxspec.analysis.laws import AnyArray
from jaxspec.core.checks import flag, whole

HEAD = 1024
"""The number of most likely draft tokens that `optimal_acceptance` treats one by one."""

_GROUPS = 8
"""The number of groups that stand for the other tokens of a prefix."""

_LOG_TIMES = np.arange(-24.0, 26.0, 0.4)
"""The integration grid over the logarithm of time."""


def optimal_acceptance(
    target: Float[AnyArray, "*b V"],
    draft: Float[AnyArray, "*b V"],
    children: int,
    replacement: bool = False,
    head: int = HEAD,
) -> Float[Array, "*b K"]:
    """Returns the highest acceptance of any lossless rule with 1 to `children` tokens sampled from the draft's law.

    A rule couples the sample D of drafted tokens with the target's token. By max-flow min-cut, the acceptance of the
    best coupling is `min over sets H of target(H) + 1 - Pr(D within H)` (Sun et al. 2023, arXiv:2310.15141; Hu et al.
    2025, arXiv:2502.18779). Every set H bounds every rule, so a minimum over some sets is an upper bound.

    With replacement, the minimiser is a prefix of the tokens by decreasing draft / target (Hu et al., section 4), and
    `Pr = draft(H)^K`: the result is exact, in O(V log V).

    Without replacement, the minimum over the same prefixes is an upper bound, exact for one child. For more children it
    is not proven that a prefix attains the minimum, but it did in every case where all sets were enumerated. Let each
    token arrive after an exponential time with its draft probability as the rate: then `Pr` is the probability that K
    tokens of H arrive before the first token outside H, a smooth integral over the logarithm of time. The trapezoidal
    rule computes it with an error below 1e-9 in float64. Tokens of a prefix that are not among the `head` most likely
    tokens are merged into a few groups, which can only raise the bound.

    Args:
        target: the target's law, `[*b, V]`.
        draft: the law the children are drawn from, `[*b, V]`.
        children: the largest number of children, K.
        replacement: draw the children with replacement.
        head: the number of most likely draft tokens that are treated one by one; unused with replacement.

    Returns:
        The acceptance with 1, 2, ..., K children, `[*b, K]`.

    Raises:
        InvalidConfig: `children` is not an integer from 1 to V.
        ShapeMismatch: the laws differ in shape.
    """
    children = laws.check_laws(target, draft, children)
    whole("head", head)
    if flag("replacement", replacement):
        order = jnp.argsort(laws.ratio(target, draft), axis=-1)
        mass, drafted = (laws.prefix_sums(jnp.take_along_axis(law, order, -1)) for law in (target, draft))
        bounds = [1 + (mass - drafted**count).min(-1) for count in range(1, children + 1)]
        return jnp.stack(bounds, -1)
    race = functools.partial(_race, children=children, head=min(head, target.shape[-1]))
    return laws.map_positions(race, target, draft)


def _race(target: Float[Array, "V"], draft: Float[Array, "V"], children: int, head: int) -> Float[Array, "K"]:
    """Returns `optimal_acceptance` without replacement at a single position."""
    drafted, tokens = lax.top_k(draft, head)
    ratio = laws.ratio(target[tokens], drafted)
    order = jnp.argsort(ratio)
    drafted, mass, ratio = drafted[order], target[tokens[order]], ratio[order]

    # A tail token joins the first prefix whose threshold exceeds its ratio; the last bin is in no prefix.
    rest = [law.at[tokens].set(0.0) for law in (target, draft)]
    bins = jnp.searchsorted(ratio, laws.ratio(*rest))
    tail_mass = jnp.zeros(head + 1, target.dtype).at[bins].add(rest[0])
    tail = jnp.zeros((head + 1, _GROUPS), draft.dtype).at[bins, jnp.arange(draft.size) % _GROUPS].add(rest[1])
    inside = jnp.cumsum(mass) + jnp.cumsum(tail_mass)[:-1]
    outside = laws.sums_after(drafted) + laws.sums_after(tail.sum(-1))[:-1]
    times = jnp.exp(jnp.asarray(_LOG_TIMES, target.dtype))
    step = _LOG_TIMES[1] - _LOG_TIMES[0]

    def join(counts: Array, mass: Array) -> Array:
        """Adds a token; `counts[t, k]` is the probability that exactly (or at most) k tokens have arrived by time t."""
        arrived = -jnp.expm1(-mass * times)[:, None]
        return counts * (1 - arrived) + jnp.pad(counts[:, :-1], ((0, 0), (1, 0))) * arrived

    def add(counts: Array, prefix: tuple[Array, ...]) -> tuple[Array, Array]:
        token_mass, groups, outside = prefix
        counts = join(counts, token_mass)
        fewer = functools.reduce(join, groups, jnp.cumsum(counts, 1)) if head < draft.size else jnp.cumsum(counts, 1)
        density = step * outside * times * jnp.exp(-outside * times)  # of the first arrival outside the prefix
        late = jnp.where(outside > 0, jnp.exp(-outside * times[-1]), 0.0) * fewer[-1]
        return counts, density @ fewer + late

    start = jnp.zeros((times.size, children), target.dtype).at[:, 0].set(1.0)
    _, lost = lax.scan(add, start, (drafted, jnp.cumsum(tail, 0)[:-1], outside))
    return jnp.minimum((inside[:, None] + lost).min(0), 1.0)
