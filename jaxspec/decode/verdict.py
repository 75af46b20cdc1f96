"""How far a proposal is kept, for all rows: the one place where a rule is called."""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import noise as noises
from jaxspec.core.draw import Noise
from jaxspec.core.laws import log_law
from jaxspec.core.protocols import CoupledRule, Rule, WeighingRule
from jaxspec.core.records import Proposal, Verdict
from jaxspec.core.sampling import GREEDY, Sampling
from jaxspec.decode.proposal import distinct


def judge(
    rule: Rule,
    keys: Array,
    length: Int[Array, "B"],
    sampling: Sampling,
    tempered: Float[Array, "B N V"],
    finite: Bool[Array, "B N"],
    proposal: Proposal,
    wanted: Bool[Array, ""],
    shared: Float[Array, "B D1 V"] | None = None,
) -> Verdict:
    """Where each row's walk ends, and the token after it.

    Args:
        rule: see `Rule`.
        keys: one per row.
        length: of the rows' texts; the roots are their last tokens.
        sampling: the rows' settings.
        tempered: the target's log-scores after every node.
        finite: where they are; the caller ends a walk that comes to another place.
        proposal: its tree per row.
        wanted: some row is not greedy.
        shared: the noise of a coupled rule by depth, where the drafter saw it, too; None: it is drawn here.
    """
    vocab, tree = tempered.shape[-1], proposal.tree
    rows = dataclasses.replace(sampling, logit_bias=None)
    if rule.noise is Noise.SHARED:
        depths = tree.paths.shape[-1]
        if shared is None:
            shared = noises.gumbel(keys, length[:, None] + jnp.arange(depths), vocab, wanted)
        noise = shared[:, :depths]
        return jax.vmap(cast(CoupledRule, rule))(tempered, noise, rows, proposal)

    law = log_law(jnp.where(finite[..., None], tempered, 0.0), rows)
    number = noises.uniform(keys, length)
    weigh = functools.partial(_weigh, cast(WeighingRule, rule))
    node, weights = jax.vmap(weigh)(law, distinct(proposal), number)
    # The noise of the token's position, as without a draft: no drafter of such a rule has seen it.
    position = length + jnp.take_along_axis(tree.depths, node[:, None], 1)[:, 0]
    noise = noises.gumbel(keys, position[:, None], vocab, wanted)[:, 0]
    noise = jnp.where((sampling.temperature < GREEDY)[:, None], 0.0, noise)
    return Verdict(node, (weights + noise).argmax(-1).astype(jnp.int32))


def _weigh(
    rule: WeighingRule, law: Float[Array, "N V"], proposal: Proposal, number: Float[Array, ""]
) -> tuple[Array, Array]:
    ends = rule(law, proposal)
    node = pick(ends.chances, number)
    return node, ends.after(node)


def pick(chances: Float[Array, "N"], number: Float[Array, ""]) -> Int[Array, ""]:
    """The entry that a number of [0, 1) draws; never one whose chance is 0."""
    sums = jnp.cumsum(chances)
    return jnp.argmax(sums > jnp.minimum(number * sums[-1], jnp.nextafter(sums[-1], 0.0))).astype(jnp.int32)
