"""What a decode carries from round to round, and what a caller hands in and gets back."""

from typing import Any, NamedTuple

import jax
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
    log: Int[Array, "B S columns"]  # of each round: emitted, accepted, drafted, children tested at each depth
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
    log: Int[Array, "*b S 3+D"]  # of each round: emitted, accepted, drafted, children tested at each depth; then zeros
    logprobs: Logprobs | None  # of rows that asked for them; None: the request's `logprobs` was None

    def __repr__(self) -> str:
        return _brief(self)
