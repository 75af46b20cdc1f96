"""What a decode carries from round to round, and what a caller hands in and gets back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.records import Cache, Params
from jaxspec.core.sampling import Sampling


def _brief(held: Any) -> str:
    """The fields of a tuple in one line: an array by its shape, a tree of them by its size."""

    def of(value: Any) -> str:
        leaves = jax.tree.leaves(value)
        if len(leaves) == 1 and hasattr(leaves[0], "shape"):
            return f"{leaves[0].dtype}{list(leaves[0].shape)}"
        return f"{len(leaves)} arrays" if leaves else "None"

    return f"{type(held).__name__}({', '.join(f'{name}={of(getattr(held, name))}' for name in held._fields)})"


class Weights(NamedTuple):
    """The parameters of the two models; `draft` is whatever the drafter takes, None if nothing."""

    target: Params
    draft: Params = None

    def __repr__(self) -> str:
        return _brief(self)


class Request(NamedTuple):
    """Prompts and settings, per row; without the batch axis it is one prompt, and may be vmapped."""

    tokens: Int[Array, "*b P"]  # right-padded
    count: Int[Array, "*b"]  # tokens of the prompt  # pyright: ignore[reportIncompatibleMethodOverride]
    new_tokens: Int[Array, "*b"]  # emitted at most
    key: Array  # typed PRNG key, [*b]
    stop_ids: Int[Array, "*b M"]  # padded with -1
    sampling: Sampling  # arrays [*b], the bias [*b V] or None
    # Which rows record log-probabilities: traced, so that asking for them compiles nothing. None: no row ever does,
    # and nothing of it is compiled or kept.
    logprobs: Bool[Array, "*b"] | None = None


class Logprobs(NamedTuple):
    """Log-probabilities of emitted tokens; a token's are at the token's own position.

    All are the target's, after the text before the token; a draft has no part in them.
    """

    raw: Float[Array, "*b S"]  # of the logits as they are
    sampled: Float[Array, "*b S"]  # of the law that is sampled: bias, temperature, top-k, top-p, min-p; greedy: 0
    top: Float[Array, "*b S K"]  # of the K likeliest tokens by the raw logits, falling
    top_tokens: Int[Array, "*b S K"]  # those tokens

    def __repr__(self) -> str:
        return _brief(self)


class RoundLog(NamedTuple):
    """What each round of each row did; zeros for rounds that a row did not run.

    All counts are in one array, so that a round is recorded by one update. The leading axes are rows and rounds.
    """

    counts: Any  # [*b, 3 + D], int32: an array of JAX, or of NumPy on the host

    @classmethod
    def empty(cls, batch: int, rounds: int, depth: int) -> "RoundLog":
        """Returns the log of rows that ran no round."""
        return cls(jnp.zeros((batch, rounds, 3 + depth), jnp.int32))

    @classmethod
    def of(cls, emitted: Array, accepted: Array, drafted: Array, tested: Array) -> "RoundLog":
        """Packs counts `[*b]`, and `tested` `[*b, D]`."""
        return cls(jnp.concatenate([jnp.stack([emitted, accepted, drafted], axis=-1), tested], axis=-1))

    def part(self, index: Any) -> "RoundLog":
        """Returns the log of some rows and rounds, by an index of the leading axes."""
        return RoundLog(self.counts[index])

    @property
    def emitted(self) -> Int[Array | np.ndarray, "*b"]:
        """Tokens committed."""
        return self.counts[..., 0]

    @property
    def accepted(self) -> Int[Array | np.ndarray, "*b"]:
        """Drafted tokens among the emitted ones; they come first."""
        return self.counts[..., 1]

    @property
    def drafted(self) -> Int[Array | np.ndarray, "*b"]:
        """Drafted tokens."""
        return self.counts[..., 2]

    @property
    def tested(self) -> Int[Array | np.ndarray, "*b D"]:
        """Drafted tokens that the target's choice was compared with, at depth 1, 2, ..., D."""
        return self.counts[..., 3:]

    def __repr__(self) -> str:
        return _brief(self)


class State(NamedTuple):
    """One row per prompt. `tokens[:length]` is text; what stands past it is scratch."""

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]
    start: Int[Array, "B"]  # where the emitted tokens begin
    limit: Int[Array, "B"]  # the length at which the budget is used up
    status: Int[Array, "B"]
    key: Array  # [B]
    stop_ids: Int[Array, "B M"]
    sampling: Sampling
    cache: Cache
    absorbed: Int[Array, "B"]  # tokens the drafter was told of
    draft: Any
    schedule: Any  # what it has learned of the row
    log: RoundLog  # counts of each round, [B, S, 3 + D]
    round: Int[Array, "B"]  # rounds that the row ran
    recorded: Bool[Array, "B"] | None  # which rows record log-probabilities
    logprobs: Logprobs | None  # of the emitted tokens of those rows

    def __repr__(self) -> str:
        return _brief(self)


class Result(NamedTuple):
    """What `generate` gives back: the state without caches.

    S are the slots of the cache, D the depth of the tree. Row b's prompt is `tokens[b, :start[b]]`, its new text
    `tokens[b, start[b]:length[b]]`, the stop token included; what is past `length` is undefined. The log-probabilities
    of the new text are `logprobs.raw[b, start[b]:length[b]]`.
    """

    tokens: Int[Array, "*b S"]  # prompt and text
    length: Int[Array, "*b"]  # where the text ends
    start: Int[Array, "*b"]  # where the prompt ends, and the new text begins
    status: Int[Array, "*b"]  # why it ended: a `Status`
    log: RoundLog  # of each round; `log.emitted`, `log.accepted` and `log.drafted` are [*b, S], `log.tested` [*b, S, D]
    logprobs: Logprobs | None  # of rows that asked for them; None: the request's `logprobs` was None

    def __repr__(self) -> str:
        return _brief(self)
