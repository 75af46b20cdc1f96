"""What each rule keeps of one position, and the most that any could of the same candidates."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxspec.analysis import laws
from jaxspec.analysis.optimum import optimal_acceptance

DRAWS = 32
"""Samples per position of what has no formula."""


class Kept(NamedTuple):
    """One rule's acceptance with 1, 2, ... candidates, and the most that any rule could have with the same."""

    acceptance: Float[Array, "*b K"]
    optimum: Float[Array, "*b K"]

    @property
    def gap(self) -> Float[Array, "*b K"]:
        """The optimality gap: what the rule leaves on the table."""
        return self.optimum - self.acceptance


def deterministic_acceptance(
    target: Float[Array, "*b V"], draft: Float[Array, "*b V"], children: int
) -> Float[Array, "*b K"]:
    """The rule "deterministic" on the draft's likeliest tokens: the target's probability of them.

    No rule keeps more of the same tokens.
    """
    laws.check(target, draft, children)
    drafted, tokens = lax.top_k(draft, children)
    return jnp.cumsum(jnp.where(drafted > 0, jnp.take_along_axis(target, tokens, -1), 0.0), -1)


def match(target: Float[Array, "*b V"], draft: Float[Array, "*b V"]) -> Float[Array, "*b V"]:
    """The probability that two draws with one noise are both this token; their sum is that they agree.

    `1 / sum_y max(target[y] / target[x], draft[y] / draft[x])` (Daliri, Musco and Suresh 2025, arXiv:2408.07978), in
    O(V log V): in the order of target/draft each maximum is decided.
    """
    laws.check(target, draft, 1)
    found, order = _matches(target, draft)
    return jnp.put_along_axis(jnp.zeros_like(found), order, found, axis=-1, inplace=False)


def _matches(target: Float[Array, "*b V"], draft: Float[Array, "*b V"]) -> tuple[Array, Array]:
    """`match` in another order, and the tokens in it."""
    order = jnp.argsort(laws.ratio(target, draft), axis=-1)
    mass, drafted = (jnp.take_along_axis(law, order, -1) for law in (target, draft))
    above = mass + laws.after(mass)
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
    laws.check(target, draft, children)
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
    laws.check(target, draft, children)
    if key is None:
        return jnp.cumsum(laws.batched(functools.partial(_tried, count=children, key=None), target, draft), -1)

    def one(key: Array) -> Array:
        return laws.batched(lambda p, q, key: _tried(p, q, children, key), target, draft, key=key)

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
        return _tried(laws.normal(rest), laws.normal(draft.at[token].set(0.0)), count - 1, later)

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
