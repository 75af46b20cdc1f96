"""The data of a decode: request, state between rounds, log of the rounds, result."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.records import Cache, Params
from jaxspec.core.sampling import Sampling


def _brief(record: Any) -> str:
    """Returns the fields of a tuple in one line: an array by dtype and shape, a pytree by its number of arrays."""

    def of(value: Any) -> str:
        leaves = jax.tree.leaves(value)
        if len(leaves) == 1 and hasattr(leaves[0], "shape"):
            return f"{leaves[0].dtype}{list(leaves[0].shape)}"
        return f"{len(leaves)} arrays" if leaves else "None"

    return f"{type(record).__name__}({', '.join(f'{name}={of(getattr(record, name))}' for name in record._fields)})"


class Weights(NamedTuple):
    """The parameters of target and drafter; `draft` is None if the drafter has none."""

    target: Params
    draft: Params = None

    def __repr__(self) -> str:
        return _brief(self)


class DraftPrompts(NamedTuple):
    """Prompts in the tokens of a drafter with tokens of its own; see `PromptReader`."""

    tokens: Int[Array, "*b P"]  # padded on the right
    count: Int[Array, "*b"]  # tokens past P are missing  # pyright: ignore[reportIncompatibleMethodOverride]


class Request(NamedTuple):
    """Prompts and settings of a batch, or of one prompt without the batch axis; may be vmapped."""

    tokens: Int[Array, "*b P"]  # prompts, padded on the right
    count: Int[Array, "*b"]  # the length of the prompt  # pyright: ignore[reportIncompatibleMethodOverride]
    new_tokens: Int[Array, "*b"]  # the budget: the largest number of emitted tokens
    key: Array  # typed PRNG keys, [*b]
    stop_ids: Int[Array, "*b M"]  # padded with -1
    sampling: Sampling  # arrays [*b], the bias [*b V] or None; settings of processors have leading axes [*b]
    # Which rows record log-probabilities. It is traced, so that another value does not compile again. None: no row
    # records them, and the program neither computes nor stores them.
    logprobs: Bool[Array, "*b"] | None = None
    draft_prompts: DraftPrompts | None = None  # None: a drafter with tokens of its own spells the target's tokens
    history: Int[Array, "*b H"] | None = None  # earlier texts of each prompt to copy from, see `Context`


class Logprobs(NamedTuple):
    """Log-probabilities of emitted tokens under the target, each at the position of its token."""

    raw: Float[Array, "*b S"]  # under the raw logits
    # Under the sampled law: after bias, processors, temperature, top-k, top-p, min-p. In greedy rows it is 0.
    sampled: Float[Array, "*b S"]
    top: Float[Array, "*b S K"]  # the K highest under the raw logits, in descending order
    top_tokens: Int[Array, "*b S K"]  # their tokens

    def __repr__(self) -> str:
        return _brief(self)


class RoundLog(NamedTuple):
    """What each round of each row did; the counts are zero for rounds that a row did not run.

    All counts are in one array, so that one update records a round. The leading axes are rows and rounds.
    """

    counts: Any  # [*b, 3 + D], int32: an array of JAX, or of NumPy on the host

    @classmethod
    def empty(cls, batch: int, rounds: int, depth: int) -> "RoundLog":
        """Returns the log of rows that have not run a round."""
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
        """The number of committed tokens."""
        return self.counts[..., 0]

    @property
    def accepted(self) -> Int[Array | np.ndarray, "*b"]:
        """The number of drafted tokens among the emitted tokens; the drafted tokens come first."""
        return self.counts[..., 1]

    @property
    def drafted(self) -> Int[Array | np.ndarray, "*b"]:
        """The number of drafted tokens."""
        return self.counts[..., 2]

    @property
    def tested(self) -> Int[Array | np.ndarray, "*b D"]:
        """The number of drafted tokens that the target's choice was compared with, at depth 1, 2, ..., D."""
        return self.counts[..., 3:]

    def __repr__(self) -> str:
        return _brief(self)


class State(NamedTuple):
    """The state of a batch between rounds, one row per prompt. `tokens[b, :length[b]]` is text, the rest scratch."""

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]
    start: Int[Array, "B"]  # the position of the first emitted token
    limit: Int[Array, "B"]  # the length at which the budget is used up
    status: Int[Array, "B"]  # a `Status`
    key: Array  # [B]
    stop_ids: Int[Array, "B M"]
    sampling: Sampling
    cache: Cache
    absorbed: Int[Array, "B"]  # the number of tokens that the drafter has absorbed
    draft: Any  # the drafter's state
    schedule: Any  # the schedule's state
    log: RoundLog  # counts of each round, [B, S, 3 + D]
    round: Int[Array, "B"]  # the number of rounds that each row has run
    recorded: Bool[Array, "B"] | None  # which rows record log-probabilities
    logprobs: Logprobs | None  # log-probabilities of the emitted tokens of those rows
    processed: tuple[Any, ...]  # the states of the processors in `sampling`, after the text
    history: Int[Array, "B H"] | None  # earlier texts of each row's prompt to copy from, see `Context`

    def __repr__(self) -> str:
        return _brief(self)


class Result(NamedTuple):
    """The result of `Decoder.generate`: the state without caches.

    S is the number of cache slots, D the depth of the tree. Row b's prompt is `tokens[b, :start[b]]` and its new text
    `tokens[b, start[b]:length[b]]`, a stop token included; tokens past `length` are undefined. The log-probabilities of
    the new text are `logprobs.raw[b, start[b]:length[b]]`.
    """

    tokens: Int[Array, "*b S"]  # prompt and new text
    length: Int[Array, "*b"]  # the end of the new text
    start: Int[Array, "*b"]  # the end of the prompt, where the new text begins
    status: Int[Array, "*b"]  # why the row finished: a `Status`
    log: RoundLog  # of each round; `log.emitted`, `log.accepted` and `log.drafted` are [*b, S], `log.tested` [*b, S, D]
    logprobs: Logprobs | None  # of the rows that asked for them; None if the request's `logprobs` was None

    def __repr__(self) -> str:
        return _brief(self)
