"""What a decode carries from round to round, and what a caller hands in and gets back."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

from jaxspec.core.records import Cache, Params
from jaxspec.core.sampling import Sampling


class Weights(NamedTuple):
    """The parameters of the two models; `draft` is whatever the drafter takes, None if nothing."""

    target: Params
    draft: Params = None


class Request(NamedTuple):
    """Prompts and settings, per row; without the batch axis it is one prompt, and may be vmapped."""

    tokens: Int[Array, "*b P"]  # right-padded
    count: Int[Array, "*b"]  # tokens of the prompt
    new_tokens: Int[Array, "*b"]  # emitted at most
    key: Array  # typed PRNG key, [*b]
    stop_ids: Int[Array, "*b M"]  # padded with -1
    sampling: Sampling  # arrays [*b], the bias [*b V] or None


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
    logprobs: Float[Array, "B S"] | None  # of the emitted tokens, where asked for


class Result(NamedTuple):
    """What `generate` gives back: the state without caches."""

    tokens: Int[Array, "*b S"]
    length: Int[Array, "*b"]
    start: Int[Array, "*b"]
    status: Int[Array, "*b"]
    log: Int[Array, "*b S columns"]
    logprobs: Float[Array, "*b S"] | None
