"""How a drafter's logits become the children of its nodes: the loop hands every drafter a `Draw`.

A drafter knows no rule. It asks for children, and is given the tokens, and the law they were drawn from where the
rule weighs it; whoever draws `width` tokens as the highest of `log law + noise` draws without replacement, in that
order (Gumbel top-k; Kool, van Hoof and Welling 2019, arXiv:1903.06059).
"""

import dataclasses
import enum
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.laws import log_law, scores, tempered
from jaxspec.core.noise import RoundNoise
from jaxspec.core.sampling import GREEDY, Sampling


class Noise(enum.Enum):
    """What a rule wants its drafts to be drawn with."""

    SHARED = "shared"
    """The target's own noise of the same position, so that both agree as often as coupling allows."""
    FRESH = "fresh"
    """Noise that nobody else sees, so that the children are a sample of the drafter's law, which the rule weighs."""
    NONE = "none"
    """No noise, so that the children are the most likely tokens, a point mass."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """Draws children for the rows of one round.

    Attributes:
        kind: of the noise; static.
        noise: of the round. A draft of fewer tokens than the target's shares the noise of those it has.
        sampling: the rows' settings.
        limit: the depth to which each row may draft; None for any.
        stop_after: the schedule's: returns the nodes after whose law nothing is drafted.
    """

    kind: Noise
    noise: RoundNoise
    sampling: Sampling
    limit: Int[Array, "B"] | None = None
    stop_after: Callable[[Array], Array | None] = lambda law: None

    @property
    def roots(self) -> Int[Array, "B"]:
        """The length of each row's text; the root is its last token."""
        return self.noise.roots

    def below(self, depth: Array | int) -> Bool[Array, "B"]:
        """The rows that may draft children of nodes at `depth`."""
        return jnp.full(self.roots.shape, True) if self.limit is None else depth < self.limit

    def empty_law(self, nodes: int) -> Float[Array, "B n V"] | None:
        """The law of a proposal of `nodes` nodes before any is drawn: -inf; None where the rule reads no law."""
        return jnp.full((*self.roots.shape, nodes, self.noise.vocab), -jnp.inf) if self.kind is Noise.FRESH else None

    def __call__(
        self,
        logits: Float[Array, "B n R"],
        nodes: Int[Array, "n"],
        depth: Array | int,
        width: int,
        ids: Int[Array, "R"] | None = None,
    ) -> tuple[Int[Array, "B n C"], Float[Array, "B n V"] | None]:
        """The `width` children of `nodes`, which all stand at `depth`, and the log-law they were drawn from.

        `ids` are the tokens that the logits are of, of a draft that knows but some; None: the first ones.

        A token is -1 where the law has no more, below the row's limit, and where the schedule doubts the node: that
        depends on the law alone, never on a token drawn from it, so that what is drawn is a sample. The law is None
        where the rule does not ask for it. Where it does, it is limited as the target's is; a coupled draft need not
        be, and accepts more if it is not. Children of greedy rows are always the likeliest.
        """
        law, sampling = None, self._of(ids)
        if self.kind is Noise.FRESH:
            # Greedy targets are point masses: a draft of them may come from any law, see `Rule`.
            score, greedy = scores(logits, sampling), self._greedy
            law = jnp.where(greedy, jax.nn.log_softmax(score, -1), log_law(score, sampling))
            extra = self.noise.fresh(nodes, logits.shape[-1])
            perturbed = law + jnp.where(greedy, 0.0, extra)
            stopped = self.stop_after(law)
        else:
            perturbed = self._perturbed(logits, depth, ids)
            stopped = self.stop_after(jax.nn.log_softmax(tempered(logits, sampling), -1))
        tokens = self._allowed(*_highest(perturbed, width), stopped, depth)[0]
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
    ) -> tuple[Int[Array, "B n C"], Float[Array, "B n C"]]:
        """The children as above, where no law is asked for, and how likely each is to be kept, as a logarithm.

        That is the draft's log-probability without noise. With the target's own the draft's scores are known but for
        what the models differ by, so the softmax of the perturbed scores is taken: a token may be likely, and still
        be out of the race at this position.
        """
        perturbed = self._perturbed(logits, depth, ids)
        stopped = self.stop_after(jax.nn.log_softmax(tempered(logits, self._of(ids)), -1))
        tokens, best = self._allowed(*_highest(perturbed, width), stopped, depth)
        worth = best - jax.nn.logsumexp(perturbed, -1, keepdims=True)
        worth = jnp.where((tokens >= 0) & (worth <= 0), worth, -jnp.inf)
        return tokens if ids is None else jnp.where(tokens >= 0, ids[tokens], -1), worth

    @property
    def _greedy(self) -> Bool[Array, "B 1 1"]:
        return (self.sampling.temperature < GREEDY)[:, None, None]

    def _of(self, ids: Int[Array, "R"] | None) -> Sampling:
        """The settings, for logits of these tokens alone."""
        bias = self.sampling.logit_bias
        return (
            self.sampling
            if ids is None or bias is None
            else dataclasses.replace(self.sampling, logit_bias=bias[:, ids])
        )

    def _perturbed(
        self, logits: Float[Array, "B n R"], depth: Array | int, ids: Int[Array, "R"] | None = None
    ) -> Float[Array, "B n R"]:
        """Scores with the target's noise, or with none."""
        score = tempered(logits, self._of(ids))
        if self.kind is not Noise.SHARED:
            return score
        extra = self.noise.target(depth)
        extra = extra[..., : logits.shape[-1]] if ids is None else extra[..., ids]
        return score + jnp.where(self._greedy, 0.0, extra)

    def _allowed(self, tokens: Array, best: Array, stopped: Array | None, depth: Array | int) -> tuple[Array, Array]:
        """The tokens, -1 where there is none or none is to be drafted, and their scores."""
        allowed = (best > -jnp.inf) & self.below(depth)[:, None, None]
        if stopped is not None:
            allowed = allowed & ~stopped[..., None]
        return jnp.where(allowed, tokens, -1).astype(jnp.int32), best


def _highest(scores: Float[Array, "B n V"], width: int) -> tuple[Int[Array, "B n C"], Float[Array, "B n C"]]:
    """The tokens of the highest scores, the lowest id first among equals, and the scores."""
    if width == 1:
        tokens = scores.argmax(-1, keepdims=True)
        return tokens, jnp.take_along_axis(scores, tokens, -1)
    best, tokens = lax.top_k(scores, width)
    return tokens, best
