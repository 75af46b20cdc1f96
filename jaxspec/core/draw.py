"""Draws drafted tokens from a drafter's logits; the loop passes a `Draw` to the drafter in every round.

Drafters do not depend on the rule: a `Draw` returns the children's tokens, and the law they were drawn from if the rule
reads it. The `width` highest entries of `log law + noise` are a sample without replacement, in draw order (Gumbel
top-k; Kool, van Hoof and Welling 2019, arXiv:1903.06059).
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.laws import first_highest, highest, log_law, scores, temper_logits, widened
from jaxspec.core.noise import RoundNoise
from jaxspec.core.processor import process, process_some, read_texts
from jaxspec.core.sampling import MIN_TEMPERATURE, Sampling


class Noise(enum.Enum):
    """The noise with which a rule needs its drafts to be drawn."""

    SHARED = "shared"
    """The target's noise at the same position, so that target and drafter agree as often as coupling allows."""
    FRESH = "fresh"
    """Independent noise, so that the children are a sample of the drafter's law, which the rule reads."""
    NONE = "none"
    """No noise, so that the children are the most likely tokens, each of them a point mass."""


class Candidates(NamedTuple):
    """The few tokens that a drafter considers after each node, in place of logits of its whole vocabulary."""

    ids: Int[Array, "B n R"]  # distinct; the logit at -1 stands for all tokens that are not listed
    logits: Float[Array, "B n R"]


class Judged(NamedTuple):
    """Logits of a drafter that also estimates how much of its law after each node the target shares."""

    logits: Float[Array, "B n R"]
    estimate: Float[Array, "B n"]  # 0 to 1; does not depend on tokens below the node


@dataclasses.dataclass(frozen=True)
class Draw:
    """Draws the children of nodes, for all rows of one round.

    Attributes:
        kind: the kind of noise; static.
        noise: the round's random numbers. A drafter with a smaller vocabulary uses the noise of the tokens that it has.
        sampling: the rows' settings.
        limit: the depth to which each row may draft; None for no limit.
        stop_after: the method `Schedule.stop_after`: given the law after each node and the drafter's own estimate, if
            it has one, it returns the nodes below which nothing is drafted.
        count: the method `Schedule.count_nodes` for the schedule's state.
        states: the states of the processors after the committed text. The drafter's logits are changed as the target's
            logits are, so that the draft contains only allowed tokens.
    """

    kind: Noise
    noise: RoundNoise
    sampling: Sampling
    limit: Int[Array, "B"] | None = None
    stop_after: Callable[..., Array | None] = lambda law, estimate=None: None
    count: Callable[..., Array | None] = lambda log_acceptance, drafting, together: None
    states: tuple[Any, ...] = ()

    @property
    def reads_paths(self) -> bool:
        """Whether logits are changed by the path to their node, which the caller must then pass."""
        return read_texts(self.states)

    @property
    def roots(self) -> Int[Array, "B"]:
        """The length of each row's text; the root is its last token."""
        return self.noise.roots

    def below(self, depth: Array | int) -> Bool[Array, "B"]:
        """Returns the rows that may draft children of nodes at `depth`."""
        return jnp.full(self.roots.shape, True) if self.limit is None else depth < self.limit

    def count_nodes(self, log_acceptance: Float[Array, "B N1"]) -> Int[Array, "B"]:
        """Returns how many of its best nodes each row proposes, root excluded: a part of them, if the schedule chooses.

        A drafter may ask if it can propose any number of its best nodes, as point masses or as a pruned tree. The
        number may depend on the tokens, so it must not be asked for samples of a law.

        Args:
            log_acceptance: the log-probability that each node is accepted, in descending order; -inf for nodes that
                cannot be drafted.
        """
        count = self.count(log_acceptance, self.below(0), self.kind is Noise.SHARED)
        return jnp.full(self.roots.shape, log_acceptance.shape[1]) if count is None else count

    def empty_law(self, nodes: int) -> Float[Array, "B n V"] | None:
        """Returns the law of `nodes` nodes before tokens are drawn, all -inf; None if the rule does not read laws."""
        return jnp.full((*self.roots.shape, nodes, self.noise.vocab), -jnp.inf) if self.kind is Noise.FRESH else None

    def __call__(
        self,
        logits: Float[Array, "B n R"],
        nodes: Int[Array, "n"],
        depth: Array | int,
        width: int,
        ids: Int[Array, "R"] | None = None,
        estimate: Float[Array, "B n"] | None = None,
        paths: Int[Array, "B m D"] | None = None,
    ) -> tuple[Int[Array, "B m C"], Float[Array, "B m V"] | None]:
        """Draws the children of nodes, and returns their tokens and the log-law they were drawn from.

        Children of greedy rows are the most likely tokens.

        Args:
            logits: the logits of the drafter's R tokens after each node.
            nodes: the ids of nodes of one depth.
            depth: the depth of these nodes.
            width: C, the number of children per node.
            ids: the target's id of each of the drafter's tokens; None if these are the target's first R tokens.
            estimate: see `Judged`; None if the drafter does not make an estimate.
            paths: the tokens from below the root to each node; -1 after the end of a path. If `reads_paths`, logits of
                a single node serve the nodes of all paths. None: the logits are changed by processors that do not
                depend on the text, and by no others.

        Returns:
            The tokens, and the log-law, which is None if the rule does not read laws. A token is -1 if the law has no
            further token, if the row may not draft at this depth, or if the schedule stops at the node. The schedule
            sees the law, but not the tokens that are drawn from it, so drafts remain a sample. The law is truncated as
            the target's law is. Drafts with shared noise are drawn from the tempered law without truncation, because
            more of them are accepted.
        """
        law, sampling, logits = None, self.sampling, self._processed(logits, ids, paths)
        if self.kind is Noise.FRESH:
            # The law of a greedy target is a point mass, and its draft may come from any law; see `WeighingRule`.
            score, greedy = scores(logits, sampling), self._greedy
            law = self._of_allowed(score, jnp.where(greedy, jax.nn.log_softmax(score, -1), log_law(score, sampling)))
            extra = self.noise.fresh(nodes, logits.shape[-1])
            perturbed = law + jnp.where(greedy, 0.0, extra)
            stopped = self.stop_after(law, estimate)
        else:
            perturbed = self._perturbed(logits, depth, ids)
            stopped = self.stop_after(self._untruncated(logits), estimate)
        tokens = self._allowed(*_take_highest(perturbed, width), stopped, depth)[0]
        if ids is None:
            return tokens, law
        if law is not None:
            law = jnp.full((*law.shape[:-1], self.noise.vocab), -jnp.inf).at[..., ids].set(law)
        return jnp.where(tokens >= 0, ids[tokens], -1), law

    def ranked(
        self,
        logits: Float[Array, "B n R"],
        depth: Array | int,
        width: int,
        ids: Int[Array, "R"] | None = None,
        estimate: Float[Array, "B n"] | None = None,
        paths: Int[Array, "B m D"] | None = None,
    ) -> tuple[Int[Array, "B m C"], Float[Array, "B m C"]]:
        """Draws children for a rule that does not read laws, and scores how likely each child is to be accepted.

        The arguments are those of `__call__`. Without noise, the score of a child is its log-probability under the
        draft. With the target's noise, it is the log-softmax of the perturbed scores, because the noise at this
        position may already rule out a likely token.

        Returns:
            The tokens, and their scores as logarithms.
        """
        logits = self._processed(logits, ids, paths)
        perturbed = self._perturbed(logits, depth, ids)
        stopped = self.stop_after(self._untruncated(logits), estimate)
        tokens, best = self._allowed(*_take_highest(perturbed, width), stopped, depth)
        scores = best - jax.nn.logsumexp(perturbed, -1, keepdims=True)
        scores = jnp.where((tokens >= 0) & (scores <= 0), scores, -jnp.inf)
        return tokens if ids is None else jnp.where(tokens >= 0, ids[tokens], -1), scores

    def among(
        self,
        candidates: Candidates,
        depth: Array | int,
        width: int,
        paths: Int[Array, "B n D"] | None = None,
    ) -> tuple[Int[Array, "B n C"], Float[Array, "B n C"]]:
        """Draws children as `ranked` does, from the candidates of each node."""
        ids, at = candidates.ids, jnp.maximum(candidates.ids, 0)

        def entries(table: Float[Array, "B 1 V"]) -> Float[Array, "B n R"]:
            return jnp.take_along_axis(table, at.reshape(len(at), 1, -1), -1).reshape(at.shape)

        logits = candidates.logits
        for one, state, path in self._applied(paths, ids.shape[1]):
            logits = process_some([one], [state], path, ids, widened(logits), self.noise.vocab)
        score = temper_logits(logits, self.sampling)
        stopped = self.stop_after(jax.nn.log_softmax(score, -1))
        if self.kind is Noise.SHARED:
            score = score + jnp.where(self._greedy | (ids < 0), 0.0, entries(self.noise.target(depth)))
        indices, best = self._allowed(*_take_highest(jnp.where(ids >= 0, score, -jnp.inf), width), stopped, depth)
        scores = best - jax.nn.logsumexp(score, -1, keepdims=True)
        scores = jnp.where((indices >= 0) & (scores <= 0), scores, -jnp.inf)
        tokens = jnp.take_along_axis(ids, jnp.maximum(indices, 0), -1)
        return jnp.where(indices >= 0, tokens, -1), scores

    @property
    def _greedy(self) -> Bool[Array, "B 1 1"]:
        return (self.sampling.temperature < MIN_TEMPERATURE)[:, None, None]

    def _applied(self, paths: Int[Array, "B m D"] | None, nodes: int) -> list[tuple[Any, Any, Array]]:
        """Returns the processors to apply, with their states and the paths of the nodes."""
        nothing = jnp.zeros((len(self.roots), nodes, 0), jnp.int32) if paths is None else paths
        pairs = zip(self.sampling.processors, self.states)
        return [(one, state, nothing) for one, state in pairs if paths is not None or not read_texts([state])]

    def _processed(
        self, logits: Float[Array, "B n R"], ids: Int[Array, "R"] | None, paths: Int[Array, "B m D"] | None
    ) -> Float[Array, "B m R"]:
        """Returns the logits that processors have changed."""
        if paths is not None:
            logits = jnp.broadcast_to(logits, (len(logits), paths.shape[1], logits.shape[2]))
        size, vocab = logits.shape[2], self.noise.vocab
        for one, state, path in self._applied(paths, logits.shape[1]):
            if ids is None and size == vocab:
                logits = process([one], [state], path, widened(logits))
            else:
                tokens = jnp.broadcast_to(jnp.arange(size) if ids is None else ids, logits.shape)
                logits = process_some([one], [state], path, tokens, widened(logits), vocab)
        return logits

    def _untruncated(self, logits: Float[Array, "B n R"]) -> Float[Array, "B n R"]:
        """Returns the log-law of changed logits without truncation."""
        score = temper_logits(logits, self.sampling)
        return self._of_allowed(score, jax.nn.log_softmax(score, -1))

    def _of_allowed(self, score: Float[Array, "B n R"], law: Float[Array, "B n R"]) -> Float[Array, "B n R"]:
        """Returns the law; -inf after a node at which processors forbid every token, where the law is not a number."""
        return jnp.where(score.max(-1, keepdims=True) > -jnp.inf, law, -jnp.inf) if self.states else law

    def _perturbed(
        self, logits: Float[Array, "B n R"], depth: Array | int, ids: Int[Array, "R"] | None = None
    ) -> Float[Array, "B n R"]:
        """Returns scores of changed logits with the target's noise, or without noise."""
        score = temper_logits(logits, self.sampling)
        if self.kind is not Noise.SHARED:
            return score
        extra = self.noise.target(depth)
        extra = extra[..., : logits.shape[-1]] if ids is None else extra[..., ids]
        return score + jnp.where(self._greedy, 0.0, extra)

    def _allowed(self, tokens: Array, best: Array, stopped: Array | None, depth: Array | int) -> tuple[Array, Array]:
        """Returns the tokens and their scores; a token is -1 if it does not exist or may not be drafted."""
        allowed = (best > -jnp.inf) & self.below(depth)[:, None, None]
        if stopped is not None:
            allowed = allowed & ~stopped[..., None]
        return jnp.where(allowed, tokens, -1).astype(jnp.int32), best


def _take_highest(scores: Float[Array, "B n V"], width: int) -> tuple[Int[Array, "B n C"], Float[Array, "B n C"]]:
    """Returns the tokens of the highest scores, the lowest id first among equal scores, and the scores."""
    if width == 1:
        tokens = first_highest(scores)[..., None]
        return tokens, jnp.take_along_axis(scores, tokens, -1)
    best, tokens = highest(scores, width)
    return tokens, best
