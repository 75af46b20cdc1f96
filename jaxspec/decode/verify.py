"""Verification of a proposal, between the drafter and the commit: the only place where a rule is called."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.draw import Noise
from jaxspec.core.laws import highest, log_law, scores, temper_logits, widened
from jaxspec.core.noise import RoundNoise
from jaxspec.core.processor import PointwiseProcessor, process, process_some
from jaxspec.core.records import Proposal, Seen, Verdict
from jaxspec.core.rule import CoupledRule, Rule, WeighingRule
from jaxspec.core.sampling import MIN_TEMPERATURE, Sampling
from jaxspec.core.tree import Tree
from jaxspec.decode.forcing import path_tokens

Finite = Callable[[Int[Array, "B D1"], Int[Array, "B D1"]], Bool[Array, "B D1"]]
"""Returns whether the target's scores after nodes of a path are finite, given the nodes and the token after each."""


def complete_proposal(
    proposal: Proposal, text: Int[Array, "B S"], length: Int[Array, "B"], limit: Int[Array, "B"], vocab: int
) -> Proposal:
    """Returns the proposal with the root's token, one tree per row, and no token deeper than the row's limit.

    Tokens outside the vocabulary become -1.
    """
    batch = length.shape[0]
    root = jnp.take_along_axis(text, length[:, None] - 1, axis=1)
    tokens = proposal.tokens.astype(jnp.int32).at[:, :1].set(root)
    tokens = jnp.where((tokens < 0) | (tokens >= vocab), -1, tokens)

    def per_row(leaf: Array, rank: int) -> Array:
        leaf = jnp.asarray(leaf)
        return leaf if leaf.ndim > rank else jnp.broadcast_to(leaf, (batch, *leaf.shape))

    tree = Tree(*(per_row(leaf, rank) for leaf, rank in zip(proposal.tree, (1, 1, 1, 2, 2, 2))))
    tokens = jnp.where(tree.depths > limit[:, None], -1, tokens)
    return Proposal(tokens, tree, proposal.law)


def drop_invalid_children(proposal: Proposal) -> Proposal:
    """Removes children that no rule may accept.

    Such a child repeats the token of an earlier sibling, or has probability 0 or NaN under the law it should have been
    drawn from.
    """
    tree, tokens = proposal.tree, proposal.tokens
    siblings = (tree.parents[..., :, None] == tree.parents[..., None, :]) & (
        tree.ranks[..., None, :] < tree.ranks[..., :, None]
    )
    dropped = (siblings & (tokens[..., :, None] == tokens[..., None, :])).any(-1)
    if proposal.law is not None:
        rows = jnp.arange(tokens.shape[0])[:, None]
        drawn_from = proposal.law[rows, jnp.maximum(tree.parents, 0), jnp.maximum(tokens, 0)]
        dropped |= ~(drawn_from > -jnp.inf)
    return proposal._replace(tokens=jnp.where(dropped, -1, tokens))


def accepted_path(proposal: Proposal, verdict: Verdict) -> tuple[Int[Array, "B M"], Int[Array, "B M"]]:
    """Returns the nodes from the root to the verdict's node, padded with -1, and the token after each node.

    After the last node comes the verdict's token, which is repeated as padding.
    """
    path = jnp.take_along_axis(proposal.tree.paths, verdict.node[:, None, None], axis=1)[:, 0]
    below = jnp.pad(path[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    tokens = jnp.take_along_axis(proposal.tokens, jnp.maximum(below, 0), axis=1)
    return path, jnp.where(below >= 0, tokens, verdict.token[:, None])


def take_first_nodes(proposal: Proposal, width: int) -> Proposal:
    """Returns the proposal's first `width` nodes; nodes are in level order, so the first nodes are a tree."""
    tree, depths = proposal.tree, min(width, proposal.tree.paths.shape[-1])
    below = tree.children[:, :width]
    kept = Tree(
        tree.parents[:, :width],
        tree.depths[:, :width],
        tree.ranks[:, :width],
        tree.ancestors[:, :width, :width],
        jnp.where(below < width, below, -1),
        tree.paths[:, :width, :depths],
    )
    return Proposal(proposal.tokens[:, :width], kept, None if proposal.law is None else proposal.law[:, :width])


def select_likeliest(tokens: Int[Array, "B W"], logits: Float[Array, "B W V"], count: int, nodes: int) -> Seen:
    """Returns the `count` highest logits after each of the first W nodes, padded to `nodes` nodes.

    The shapes depend neither on the width of the target call nor on the vocabulary, which may have fewer tokens.
    """
    values, ids = highest(logits, min(count, logits.shape[-1]))
    rest = (0, 0), (0, nodes - tokens.shape[1])
    more = (*rest, (0, count - ids.shape[-1]))
    return Seen(
        jnp.pad(tokens, rest, constant_values=-1),
        jnp.pad(ids, more, constant_values=-1),
        jnp.pad(values.astype(jnp.float32), more, constant_values=-jnp.inf),
    )


class Processing(NamedTuple):
    """The processors of a round's rows.

    Attributes:
        sampling: the rows' settings.
        states: the states of the processors after the committed text.
        paths: the tokens from below the root to each node, the node included; -1 after the end of a path.
    """

    sampling: Sampling
    states: tuple[Any, ...]
    paths: Int[Array, "B N D"]

    @classmethod
    def of(cls, sampling: Sampling, states: tuple[Any, ...], proposal: Proposal) -> "Processing":
        """Returns the processors for the nodes of a proposal."""
        return cls(sampling, states, path_tokens(proposal, proposal.tokens))

    @property
    def rest(self) -> Sampling:
        """The settings that are applied to the changed logits: temperature, top-k, top-p and min-p."""
        return dataclasses.replace(self.sampling, processors=())

    def change(self, logits: Float[Array, "B M V"], nodes: Int[Array, "B M"]) -> Float[Array, "B M V"]:
        """Returns the changed logits after nodes, each by the node's own path."""
        paths = jnp.take_along_axis(self.paths, nodes[..., None], 1)
        return process(self.sampling.processors, self.states, paths, widened(logits))

    def change_some(
        self, logits: Float[Array, "B N V"], nodes: Int[Array, "B M"], tokens: Int[Array, "B M"]
    ) -> Float[Array, "B M"]:
        """Returns the changed logit of one token after each of some nodes, given the logits after all nodes."""
        processors = self.sampling.processors
        if not all(isinstance(one, PointwiseProcessor) for one in processors):
            after = self.change(jnp.take_along_axis(logits, nodes[..., None], 1), nodes)
            return jnp.take_along_axis(after, tokens[..., None], 2)[..., 0]
        raw = logits[jnp.arange(len(nodes))[:, None], nodes, tokens]
        if not processors:
            return raw
        paths = jnp.take_along_axis(self.paths, nodes[..., None], 1)
        some = tokens[..., None], widened(raw)[..., None]
        return process_some(processors, self.states, paths, *some, logits.shape[2])[..., 0]


def apply_rule(
    rule: Rule,
    noise: RoundNoise,
    processing: Processing,
    logits: Float[Array, "B N V"],
    proposal: Proposal,
) -> tuple[Verdict, Finite]:
    """Returns where each row's walk ends and the token after it, and whether the logits of a path are finite.

    Args:
        rule: the rule; see `Rule`.
        noise: the noise of the round.
        processing: the rows' settings and processors.
        logits: the target's logits after every node.
        proposal: the proposal, with one tree per row.
    """
    tree, rows = proposal.tree, processing.rest
    if rule.noise is Noise.SHARED:

        def after(nodes: Array) -> Array:
            return scores(processing.change(jnp.take_along_axis(logits, nodes[..., None], 1), nodes), rows)

        def drawn_are_finite(path: Array, tokens: Array) -> Array:
            # If a score is NaN or +inf, argmax draws such a token, so checking the drawn token is enough.
            drawn = processing.change_some(logits, path, tokens)
            return jnp.isfinite(temper_logits(drawn[..., None], rows)[..., 0])

        return cast(CoupledRule, rule)(after, noise.target_at, rows, proposal), drawn_are_finite

    nodes = jnp.broadcast_to(jnp.arange(logits.shape[1]), logits.shape[:2])
    score = scores(processing.change(logits, nodes), rows)
    finite = jnp.isfinite(score.max(-1))
    law = log_law(jnp.where(finite[..., None], score, 0.0), rows)
    number = noise.uniform()
    stop = functools.partial(_stop, cast(WeighingRule, rule))
    node, weights = jax.vmap(stop)(law, drop_invalid_children(proposal), number)
    # The token is drawn with the noise of its position, as without a draft. No drafter reads it under such a rule.
    extra = noise.target_at(jnp.take_along_axis(tree.depths, node[:, None], 1))[:, 0]
    extra = jnp.where((rows.temperature < MIN_TEMPERATURE)[:, None], 0.0, extra)
    verdict = Verdict(node, (weights + extra).argmax(-1).astype(jnp.int32))
    return verdict, lambda path, tokens: jnp.take_along_axis(finite, path, 1)


def _stop(
    rule: WeighingRule, target: Float[Array, "N V"], proposal: Proposal, number: Float[Array, ""]
) -> tuple[Array, Array]:
    """Returns the node at which a row's walk ends, and the log-weights of the token after it."""
    law = rule(target, proposal)
    node = pick(law.node_probs, number)
    return node, law.next_logits(node)


def pick(probs: Float[Array, "N"], number: Float[Array, ""]) -> Int[Array, ""]:
    """Returns the index that a number in [0, 1) draws; never an index of probability 0."""
    sums = jnp.cumsum(probs)
    return jnp.argmax(sums > jnp.minimum(number * sums[-1], jnp.nextafter(sums[-1], 0.0))).astype(jnp.int32)
