"""How much of a draft each rule keeps, and how much any rule could: pure functions of the two laws.

Laws are probabilities `[*b, V]` that sum to 1. Nothing here decodes; what a decode kept is in its `Stats`. Everything
may be jitted (`children`, `draws` and `head` static), and is computed in the laws' precision.

A position with K distinct candidates is *kept* if the token that is emitted is among them. Results `[*b, K]` are for
the first 1, 2, ..., K candidates; their differences are the acceptance by rank that `jaxspec.best_tree` takes.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxspec.core.draw import Noise
from jaxspec.core.protocols import Rule
from jaxspec.core.tree import Topology
from jaxspec.errors import InvalidConfig, ShapeMismatch
from jaxspec.prepare import check_counts
from jaxspec.testing.exact import Law, accepted_length

HEAD = 1024
"""Likeliest draft tokens that `optimal_acceptance` takes one by one."""

DRAWS = 32
"""Samples per position of what has no formula."""

_GROUPS = 8
"""As many as the other tokens of a prefix count for."""

_LOG_TIMES = np.arange(-24.0, 26.0, 0.4)


class Kept(NamedTuple):
    """One rule's acceptance with 1, 2, ... candidates, and the most that any rule could have with the same."""

    acceptance: Float[Array, "*b K"]
    optimum: Float[Array, "*b K"]

    @property
    def gap(self) -> Float[Array, "*b K"]:
        """The optimality gap: what the rule leaves on the table."""
        return self.optimum - self.acceptance


# The most that can be kept.


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
    _check(target, draft, children)
    if replacement:
        order = jnp.argsort(_ratio(target, draft), axis=-1)
        mass, drafted = (_from_none(jnp.take_along_axis(law, order, -1)) for law in (target, draft))
        bounds = [1 + (mass - drafted**count).min(-1) for count in range(1, children + 1)]
        return jnp.stack(bounds, -1)
    return _batched(functools.partial(_race, children=children, head=min(head, target.shape[-1])), target, draft)


def _race(target: Float[Array, "V"], draft: Float[Array, "V"], children: int, head: int) -> Float[Array, "K"]:
    drafted, tokens = lax.top_k(draft, head)
    ratio = _ratio(target[tokens], drafted)
    order = jnp.argsort(ratio)
    drafted, mass, ratio = drafted[order], target[tokens[order]], ratio[order]

    # A token of the tail joins with the first prefix whose threshold it is below; the last bin joins none.
    rest = [law.at[tokens].set(0.0) for law in (target, draft)]
    bins = jnp.searchsorted(ratio, _ratio(*rest))
    tail_mass = jnp.zeros(head + 1, target.dtype).at[bins].add(rest[0])
    tail = jnp.zeros((head + 1, _GROUPS), draft.dtype).at[bins, jnp.arange(draft.size) % _GROUPS].add(rest[1])
    inside = jnp.cumsum(mass) + jnp.cumsum(tail_mass)[:-1]
    outside = _after(drafted) + _after(tail.sum(-1))[:-1]
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


# What the rules keep of one position.


def deterministic_acceptance(
    target: Float[Array, "*b V"], draft: Float[Array, "*b V"], children: int
) -> Float[Array, "*b K"]:
    """The rule "deterministic" on the draft's likeliest tokens: the target's probability of them.

    No rule keeps more of the same tokens.
    """
    _check(target, draft, children)
    drafted, tokens = lax.top_k(draft, children)
    return jnp.cumsum(jnp.where(drafted > 0, jnp.take_along_axis(target, tokens, -1), 0.0), -1)


def match(target: Float[Array, "*b V"], draft: Float[Array, "*b V"]) -> Float[Array, "*b V"]:
    """The probability that two draws with one noise are both this token; their sum is that they agree.

    `1 / sum_y max(target[y] / target[x], draft[y] / draft[x])` (Daliri, Musco and Suresh 2025, arXiv:2408.07978), in
    O(V log V): in the order of target/draft each maximum is decided.
    """
    _check(target, draft, 1)
    found, order = _matches(target, draft)
    return jnp.put_along_axis(jnp.zeros_like(found), order, found, axis=-1, inplace=False)


def _matches(target: Float[Array, "*b V"], draft: Float[Array, "*b V"]) -> tuple[Array, Array]:
    """`match` in another order, and the tokens in it."""
    order = jnp.argsort(_ratio(target, draft), axis=-1)
    mass, drafted = (jnp.take_along_axis(law, order, -1) for law in (target, draft))
    above = mass + _after(mass)
    below = jnp.cumsum(drafted, -1) - drafted
    some = (mass > 0) & (drafted > 0)
    odds = jnp.where(some, mass / jnp.where(some, drafted, 1.0), 0.0)
    return jnp.where(some, mass / jnp.where(some, above + below * odds, 1.0), 0.0), order


def coupled_acceptance(
    target: Float[Array, "*b V"], draft: Float[Array, "*b V"], children: int, key: Array, draws: int = DRAWS
) -> Float[Array, "*b K"]:
    """The rule "coupled": the target's draw is among the draft's best under the same noise.

    Exact for one child (`match`), by Monte Carlo for more: every sample is one noise for all positions of the call, so
    the standard error of a mean over positions is found by repeating calls (or prompts), not from the positions.
    """
    _check(target, draft, children)
    logs = [jnp.log(law) for law in (target, draft)]

    def one(key: Array) -> Array:
        noise = jax.random.gumbel(key, target.shape[-1:], target.dtype, mode="high")
        theirs, ours = (law + noise for law in logs)
        token = theirs.argmax(-1)[..., None]
        rank = (ours > jnp.take_along_axis(ours, token, -1)).sum(-1)
        proposed = jnp.take_along_axis(draft, token, -1)[..., 0] > 0
        return proposed[..., None] & (rank[..., None] < jnp.arange(1, children + 1))

    exact = _matches(target, draft)[0].sum(-1)[..., None]
    if children == 1:
        return exact
    kept = lax.scan(lambda sum, key: (sum + one(key), None), jnp.zeros((*exact.shape[:-1], children), target.dtype),
                    jax.random.split(key, draws))[0] / draws  # fmt: skip
    return jnp.concatenate([exact, kept[..., 1:]], -1)


def rejection_acceptance(
    target: Float[Array, "*b V"],
    draft: Float[Array, "*b V"],
    children: int,
    key: Array | None = None,
    draws: int = DRAWS,
) -> Float[Array, "*b K"]:
    """The rule "rejection": children drawn without replacement, tried one after the other.

    The first is kept with probability `sum min(target, draft)`, which is exact; the others depend on which tokens
    were rejected before: summed over all of them without a key (V^(K-1) terms), with one by Monte Carlo, where only the
    rejected tokens are sampled and every chance to keep one is summed.
    """
    _check(target, draft, children)
    if key is None:
        return jnp.cumsum(_batched(functools.partial(_tried, count=children, key=None), target, draft), -1)

    def one(key: Array) -> Array:
        return _batched(lambda p, q, key: _tried(p, q, children, key), target, draft, key=key)

    ranks = lax.scan(lambda sum, key: (sum + one(key), None), jnp.zeros((*target.shape[:-1], children), target.dtype),
                     jax.random.split(key, draws if children > 1 else 1))[0]  # fmt: skip
    return jnp.cumsum(ranks / (draws if children > 1 else 1), -1)


def _tried(target: Float[Array, "V"], draft: Float[Array, "V"], count: int, key: Array | None) -> Float[Array, "K"]:
    """By rank: the probability that it is this child that is kept."""
    kept = jnp.minimum(target, draft).sum()[None]
    if count == 1:
        return kept
    rejected, rest = jnp.maximum(draft - target, 0.0), jnp.maximum(target - draft, 0.0)
    if key is None:
        tokens, weights, later = jnp.arange(target.size), rejected, None
    else:
        sums = jnp.cumsum(rejected)
        now, later = jax.random.split(key)
        tokens = jnp.argmax(sums > jax.random.uniform(now, dtype=sums.dtype) * sums[-1])[None]
        weights = rejected.sum()[None]

    def go_on(token: Array) -> Array:
        return _tried(_normal(rest), _normal(draft.at[token].set(0.0)), count - 1, later)

    return jnp.concatenate([kept, weights @ jax.vmap(go_on)(tokens)])


def one_step(
    target: Float[Array, "*b V"],
    draft: Float[Array, "*b V"],
    children: int,
    key: Array,
    draws: int = DRAWS,
    coupled: Float[Array, "*b V"] | None = None,
) -> dict[str, Kept]:
    """Every rule at every position: its acceptance and the optimum for its candidates.

    Args:
        target: the target's law, limited as its tokens are.
        draft: the law that sampled drafts are drawn from, limited as well.
        children: K.
        key: of the Monte Carlo samples.
        draws: their number.
        coupled: the law that coupled and deterministic drafts come from, where it is another: they need no limits.
    """
    free = draft if coupled is None else coupled
    keys = jax.random.split(key)
    optimum = optimal_acceptance(target, draft, children)
    of_free = optimum if coupled is None else optimal_acceptance(target, coupled, children)
    fixed = deterministic_acceptance(target, free, children)
    return {
        "rejection": Kept(rejection_acceptance(target, draft, children, keys[0], draws), optimum),
        "coupled": Kept(coupled_acceptance(target, free, children, keys[1], draws), of_free),
        "deterministic": Kept(fixed, fixed),
    }


# What they keep of a whole draft.


class ChainLengths(NamedTuple):
    """Accepted tokens of a chain, given what was drafted."""

    token: Float[Array, "*b"]
    block: Float[Array, "*b"]
    bound: Float[Array, "*b"]


def chain_lengths(log_ratio: Float[Array, "*b D"]) -> ChainLengths:
    """The expected accepted length of a drafted chain; the mean over drafts from the draft's law is the rule's.

    The rule "rejection" keeps i tokens with the product of `min(1, ratio)`, "block" (and "traversal") with
    `w_i = min(1, w_(i-1) ratio_i)` (Sun et al. 2025, arXiv:2403.10444). No lossless rule keeps a text more often than
    the smaller of its two probabilities, on average `min(1, product of the ratios)`: the bound.

    Args:
        log_ratio: log of target/draft at each drafted token.
    """
    sums = jnp.cumsum(log_ratio, -1)
    weights = sums - jnp.maximum(lax.cummax(sums, axis=sums.ndim - 1), 0.0)
    return ChainLengths(
        jnp.exp(jnp.cumsum(jnp.minimum(log_ratio, 0.0), -1)).sum(-1),
        jnp.exp(weights).sum(-1),
        jnp.exp(jnp.minimum(sums, 0.0)).sum(-1),
    )


def expected_length(rule: Rule, topology: Topology, target: Law, draft: Law) -> float:
    """The exact mean of the tokens that a round accepts, for small vocabularies: all drafts are enumerated.

    Args:
        rule: any; a coupled one on chains, where its walk has a formula: the sum over all texts of the products of
            `match`.
        topology: the tree.
        target: the target's law after the tokens since the root.
        draft: the draft's.

    Raises:
        InvalidConfig: a coupled rule on a tree.
    """
    if rule.noise is not Noise.SHARED:
        return accepted_length(rule, topology, target, draft)  # pyright: ignore[reportArgumentType]
    if not topology.is_chain:
        raise InvalidConfig(
            "the coupled rule has no formula on trees with branches; decode, and look at the statistics"
        )

    def below(text: tuple[int, ...], depth: int) -> float:
        if not depth:
            return 0.0
        with jax.enable_x64(True):
            both = np.asarray(match(jnp.asarray(target(text)), jnp.asarray(draft(text))))
        return float(sum(share * (1 + below((*text, token), depth - 1)) for token, share in enumerate(both) if share))

    return below((), topology.shape.depth)


# Helpers.


def _check(target: Array, draft: Array, children: int) -> None:
    check_counts(children=children)
    if target.shape != draft.shape or not target.ndim:
        raise ShapeMismatch(f"target and draft must be laws [*b, V] of one shape, got {target.shape} and {draft.shape}")
    if children > target.shape[-1]:
        raise InvalidConfig(f"{children} children of a vocabulary of {target.shape[-1]} tokens")


def _batched(one: Callable[..., Array], *laws: Array, key: Array | None = None) -> Array:
    """A function of laws `[V]` on `[*b, V]`, with a key for each."""
    flat: list[Array] = [law.reshape(-1, law.shape[-1]) for law in laws]
    if key is not None:
        flat.append(jax.random.split(key, flat[0].shape[0]))
    found = jax.vmap(one)(*flat)
    return found.reshape(*laws[0].shape[:-1], -1)


def _ratio(target: Array, draft: Array) -> Array:
    """target/draft, infinite where nothing is drafted."""
    return jnp.where(draft > 0, target / jnp.where(draft > 0, draft, 1.0), jnp.inf)


def _after(values: Float[Array, "*b n"]) -> Float[Array, "*b n"]:
    """The sum of what comes after each."""
    sums = jnp.flip(jnp.cumsum(jnp.flip(values, -1), -1), -1)
    return jnp.concatenate([sums[..., 1:], jnp.zeros_like(sums[..., :1])], -1)


def _from_none(values: Float[Array, "*b n"]) -> Float[Array, "*b n1"]:
    """The sums of the first 0, 1, ... values."""
    return jnp.concatenate([jnp.zeros_like(values[..., :1]), jnp.cumsum(values, -1)], -1)


def _normal(weights: Float[Array, "V"]) -> Float[Array, "V"]:
    """The law of weights; zeros where there are none."""
    total = weights.sum()
    return weights / jnp.where(total > 0, total, 1.0)
