"""Acceptance of each rule at one position, and the optimum over all rules with the same candidates."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxspec.analysis import laws
from jaxspec.analysis.laws import AnyArray
from jaxspec.analysis.optimum import optimal_acceptance
from jaxspec.core.checks import whole
from jaxspec.core.noise import as_key

DRAWS = 32
"""The default number of Monte Carlo samples per position, where there is no closed form."""


class RuleAcceptance(NamedTuple):
    """One rule's acceptance with 1, 2, ..., K candidates, and the highest acceptance of any rule with the same
    candidates."""

    acceptance: Float[Array, "*b K"]
    optimum: Float[Array, "*b K"]

    @property
    def gap(self) -> Float[Array, "*b K"]:
        """The optimality gap, optimum minus acceptance."""
        return self.optimum - self.acceptance


def deterministic_acceptance(
    target: Float[AnyArray, "*b V"], draft: Float[AnyArray, "*b V"], children: int
) -> Float[Array, "*b K"]:
    """Returns the acceptance of the rule "deterministic" with the draft's 1 to `children` most likely tokens.

    It is the target's probability of these tokens. No rule can accept more.

    Args:
        target: the target's law, `[*b, V]`.
        draft: the draft's law, `[*b, V]`.
        children: the largest number of children, K.

    Returns:
        The acceptance with 1, 2, ..., K children, `[*b, K]`.
    """
    children = laws.check_laws(target, draft, children)
    drafted, tokens = lax.top_k(draft, children)
    return jnp.cumsum(jnp.where(drafted > 0, jnp.take_along_axis(target, tokens, -1), 0.0), -1)


def match_probability(target: Float[AnyArray, "*b V"], draft: Float[AnyArray, "*b V"]) -> Float[Array, "*b V"]:
    """Returns the probability, for each token, that two draws with the same Gumbel noise are both that token.

    It is `1 / sum_y max(target[y] / target[x], draft[y] / draft[x])` (Daliri, Musco and Suresh 2025,
    arXiv:2408.07978), computed in O(V log V): sorting by target / draft decides every maximum. The sum over tokens is
    the acceptance of the rule "coupled" with one child.

    Args:
        target: the target's law, `[*b, V]`.
        draft: the draft's law, `[*b, V]`.
    """
    laws.check_laws(target, draft, 1)
    matches, order = _sorted_match(target, draft)
    return jnp.put_along_axis(jnp.zeros_like(matches), order, matches, axis=-1, inplace=False)


def _sorted_match(target: Float[AnyArray, "*b V"], draft: Float[AnyArray, "*b V"]) -> tuple[Array, Array]:
    """Returns the probabilities of `match_probability` sorted by target / draft, and the tokens in that order."""
    order = jnp.argsort(laws.ratio(target, draft), axis=-1)
    mass, drafted = (jnp.take_along_axis(law, order, -1) for law in (target, draft))
    above = mass + laws.sums_after(mass)
    below = jnp.cumsum(drafted, -1) - drafted
    positive = (mass > 0) & (drafted > 0)
    odds = jnp.where(positive, mass / jnp.where(positive, drafted, 1.0), 0.0)
    return jnp.where(positive, mass / jnp.where(positive, above + below * odds, 1.0), 0.0), order


def coupled_acceptance(
    target: Float[AnyArray, "*b V"],
    draft: Float[AnyArray, "*b V"],
    children: int,
    key: Array,
    draws: int = DRAWS,
) -> Float[Array, "*b K"]:
    """Returns the acceptance of the rule "coupled" with 1 to `children` tokens.

    It is the probability that the target's draw is among the draft's highest perturbed scores under the same noise. The
    result is exact for one child (`match_probability`), and a Monte Carlo estimate for more children. Each sample uses
    one noise vector for all positions of the call, so the samples of different positions are correlated: estimate the
    standard error of a mean over positions from repeated calls or prompts.

    Args:
        target: the target's law, `[*b, V]`.
        draft: the draft's law, `[*b, V]`.
        children: the largest number of children, K.
        key: key of the Monte Carlo samples.
        draws: the number of samples.

    Returns:
        The acceptance with 1, 2, ..., K children, `[*b, K]`.
    """
    children = laws.check_laws(target, draft, children)
    key, draws = as_key(key), whole("draws", draws)
    logs = [jnp.log(law) for law in (target, draft)]

    def sample(key: Array) -> Array:
        noise = jax.random.gumbel(key, target.shape[-1:], target.dtype, mode="high")
        target_scores, draft_scores = (law + noise for law in logs)
        token = target_scores.argmax(-1)[..., None]
        rank = (draft_scores > jnp.take_along_axis(draft_scores, token, -1)).sum(-1)
        proposed = jnp.take_along_axis(draft, token, -1)[..., 0] > 0
        return proposed[..., None] & (rank[..., None] < jnp.arange(1, children + 1))

    exact = _sorted_match(target, draft)[0].sum(-1)[..., None]
    if children == 1:
        return exact
    zeros = jnp.zeros((*exact.shape[:-1], children), target.dtype)
    hits, _ = lax.scan(lambda sum, key: (sum + sample(key), None), zeros, jax.random.split(key, draws))
    sampled = hits / draws
    return jnp.concatenate([exact, sampled[..., 1:]], -1)


def rejection_acceptance(
    target: Float[AnyArray, "*b V"],
    draft: Float[AnyArray, "*b V"],
    children: int,
    key: Array | None = None,
    draws: int = DRAWS,
) -> Float[Array, "*b K"]:
    """Returns the acceptance of the rule "rejection" with 1 to `children` tokens drawn without replacement.

    The first child is accepted with probability `sum min(target, draft)`. The acceptance of later children depends on
    the tokens rejected before them. Without a key it is the exact sum over all rejected tokens (V^(K-1) terms); with
    a key, rejected tokens are sampled and the acceptance given each sample is exact.

    Args:
        target: the target's law, `[*b, V]`.
        draft: the law the children are drawn from, `[*b, V]`.
        children: the largest number of children, K.
        key: key of the Monte Carlo samples; None for the exact sum.
        draws: the number of samples; unused without a key.

    Returns:
        The acceptance with 1, 2, ..., K children, `[*b, K]`.
    """
    children = laws.check_laws(target, draft, children)
    draws = whole("draws", draws)
    if key is None:
        return jnp.cumsum(
            laws.map_positions(functools.partial(_acceptance_by_rank, count=children, key=None), target, draft), -1
        )

    def sample(key: Array) -> Array:
        def by_rank(target: Array, draft: Array, key: Array) -> Array:
            return _acceptance_by_rank(target, draft, children, key)

        return laws.map_positions(by_rank, target, draft, key=key)

    draws = draws if children > 1 else 1
    zeros = jnp.zeros((*target.shape[:-1], children), target.dtype)
    ranks, _ = lax.scan(lambda sum, key: (sum + sample(key), None), zeros, jax.random.split(as_key(key), draws))
    return jnp.cumsum(ranks / draws, -1)


def _acceptance_by_rank(
    target: Float[Array, "V"], draft: Float[Array, "V"], count: int, key: Array | None
) -> Float[Array, "K"]:
    """Returns, for each rank, the probability that the child of this rank is accepted."""
    accepted = jnp.minimum(target, draft).sum()[None]
    if count == 1:
        return accepted
    rejected, rest = jnp.maximum(draft - target, 0.0), jnp.maximum(target - draft, 0.0)
    if key is None:
        tokens, weights, later = jnp.arange(target.size), rejected, None
    else:
        sums = jnp.cumsum(rejected)
        now, later = jax.random.split(key)
        tokens = jnp.argmax(sums > jax.random.uniform(now, dtype=sums.dtype) * sums[-1])[None]
        weights = rejected.sum()[None]

    def after_rejecting(token: Array) -> Array:
        return _acceptance_by_rank(laws.normalise(rest), laws.normalise(draft.at[token].set(0.0)), count - 1, later)

    return jnp.concatenate([accepted, weights @ jax.vmap(after_rejecting)(tokens)])


def acceptance_by_rule(
    target: Float[AnyArray, "*b V"],
    draft: Float[AnyArray, "*b V"],
    children: int,
    key: Array,
    draws: int = DRAWS,
    coupled: Float[Array, "*b V"] | None = None,
) -> dict[str, RuleAcceptance]:
    """Returns acceptance and optimum of the rules "rejection", "coupled" and "deterministic" at every position.

    Args:
        target: the target's law after temperature and truncation, `[*b, V]`.
        draft: the law that sampled drafts are drawn from, truncated in the same way, `[*b, V]`.
        children: the largest number of children, K.
        key: key of the Monte Carlo samples.
        draws: the number of samples.
        coupled: the law of coupled and deterministic drafts if it differs from `draft`: these need no truncation.

    Returns:
        Acceptance and optimum `[*b, K]` by the rule's name.
    """
    untruncated = draft if coupled is None else coupled
    keys = jax.random.split(as_key(key))
    optimum = optimal_acceptance(target, draft, children)
    coupled_optimum = optimum if coupled is None else optimal_acceptance(target, coupled, children)
    fixed = deterministic_acceptance(target, untruncated, children)
    return {
        "rejection": RuleAcceptance(rejection_acceptance(target, draft, children, keys[0], draws), optimum),
        "coupled": RuleAcceptance(coupled_acceptance(target, untruncated, children, keys[1], draws), coupled_optimum),
        "deterministic": RuleAcceptance(fixed, fixed),
    }
