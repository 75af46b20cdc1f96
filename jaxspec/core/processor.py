"""The protocol of processors: changes of the target's logits by the text so far.

A processor is a penalty, a list of forbidden words, or another function of the text before a token. The decoder applies
it to the logits after every node of a drafted tree, each by the node's own path. The text is therefore that of plain
decoding with the same processors, and a rejected branch leaves no trace.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxspec.errors import InvalidConfig, shown

_UNROLLED = 2  # the largest number of tokens that are walked without a loop


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared:
    """An array that all rows of a batch share, such as the table of an automaton. It has no axis of rows."""

    value: Any


def map_rows(
    function: Callable[..., Any], settings: Any, *others: Any, shared: Callable[..., Any] | None = None
) -> Any:
    """Applies a function to the leaves of settings that have an axis of rows, and keeps every `Shared` array.

    Args:
        function: takes a leaf, and the leaves of `others` at the same place.
        settings: a pytree, such as a request or processors.
        others: pytrees of the same structure.
        shared: is applied to every `Shared` array; None to keep them.
    """

    def change(leaf: Any, *more: Any) -> Any:
        if not isinstance(leaf, Shared):
            return function(leaf, *more)
        return leaf if shared is None else Shared(shared(leaf.value))

    return jax.tree.map(change, settings, *others, is_leaf=lambda leaf: isinstance(leaf, Shared))


class Beginning(NamedTuple):
    """What a processor knows before it has read any text.

    Attributes:
        vocab: the size of the vocabulary, V.
        slots: the largest number of tokens of a row's text, S.
        stop_ids: the stop tokens of each row, padded with -1.
    """

    vocab: int
    slots: int
    stop_ids: Int[Array, "B M"]


@runtime_checkable
class Processor(Protocol):
    """Changes the logits after a text: an immutable pytree (`jax.tree_util.register_dataclass`) of settings.

    Leaves are arrays, so that another value does not compile again. Everything else is static. Sampling settings hold
    processors (`jaxspec.Sampling(processors=...)`). An array that all rows share is wrapped in `Shared`.
    """

    def rows(self, batch: int, vocab: int) -> Self:
        """Returns the checked settings with a leading axis of `batch` rows in every leaf that is not `Shared`.

        Raises:
            InvalidConfig, TokenOutOfRange: a setting is out of range; the message names it. Traced values are not
                checked.
        """
        ...

    def init(self, beginning: Beginning) -> Any:
        """Returns the state of an empty text; every leaf has a leading axis of rows."""
        ...

    def absorb(self, state: Any, tokens: Int[Array, "B M"], count: Int[Array, "B"], start: Int[Array, "B"]) -> Any:
        """Returns the state after more text.

        Args:
            state: the state before.
            tokens: the text that follows, padded.
            count: the number of tokens of each row that are text.
            start: the index in `tokens` of the first new token; tokens before it belong to the prompt. It may be
                negative or greater than `count`.
        """
        ...

    def apply(self, state: Any, path: Int[Array, "B N D"], logits: Float[Array, "B N V"]) -> Float[Array, "B N V"]:
        """Returns the changed logits after some texts: the absorbed text of the row, and then a path.

        The result for a text must not depend on how the text is divided into absorbed text and path, not even in its
        bits. -inf forbids a token.

        Args:
            state: the state of the absorbed text.
            path: the tokens after the absorbed text; -1 after the end of a path.
            logits: the logits after each path, in float32 at least.
        """
        ...


@runtime_checkable
class PointwiseProcessor(Processor, Protocol):
    """A processor whose change of a token's logit depends on the text and on this logit alone.

    Drafters and checks use `apply_to` where they need the logits of few tokens.
    """

    def apply_to(
        self, state: Any, path: Int[Array, "B N D"], tokens: Int[Array, "B N R"], logits: Float[Array, "B N R"]
    ) -> Float[Array, "B N R"]:
        """Returns the changed logits of some tokens: entries of what `apply` returns.

        Args:
            state: the state of the absorbed text.
            path: the tokens after the absorbed text; -1 after the end of a path.
            tokens: the tokens of the logits; the logit of a token below 0 is not changed.
            logits: the logits of these tokens after each path.
        """
        ...


@runtime_checkable
class ForcingProcessor(Processor, Protocol):
    """A processor after which some tokens are known, or nearly so. The decoder drafts such tokens, for any drafter.

    A token after which others are allowed, too, is verified as every draft is. It is worth drafting where it is likely.

    Both methods take the states of the nodes of a tree: states as `absorb` returns them, in which every leaf has an
    axis of nodes after the axis of rows.
    """

    def step(self, states: Any, tokens: Int[Array, "B N"]) -> Any:
        """Returns the states after one more new token each; a token below 0 changes nothing."""
        ...

    def forced(self, states: Any) -> Int[Array, "B N"]:
        """Returns the token to draft in each state, such as the only one that is allowed; -1 for none."""
        ...


@runtime_checkable
class DrawingProcessor(Processor, Protocol):
    """A processor that draws the token after a text: the token with the highest of its logits.

    It is the last processor, and the temperature of the sampling settings is 0.
    """

    draws: ClassVar[bool]


def check_processors(processors: Any) -> tuple[Processor, ...]:
    """Returns processors as a tuple.

    Raises:
        InvalidConfig: the value is not a sequence of processors, or a processor that draws is not the last.
    """
    listed = isinstance(processors, Sequence) and not isinstance(processors, str)
    if not listed or not all(isinstance(one, Processor) and not isinstance(one, type) for one in processors):
        raise InvalidConfig(
            "processors must be a list of processors, such as [jaxspec.RepetitionPenalty(1.1)], got "
            f"{shown(processors)}"
        )
    given: tuple[Processor, ...] = tuple(processors)
    for one in given[:-1]:
        if draws_tokens([one]):
            raise InvalidConfig(f"{type(one).__name__} draws the token, so it must be the last of the processors")
    return given


def draws_tokens(processors: Sequence[Processor]) -> bool:
    """Returns whether one of the processors draws the token."""
    return any(isinstance(one, DrawingProcessor) and one.draws for one in processors)


def add_processor(processors: Sequence[Processor], added: Processor) -> tuple[Processor, ...]:
    """Returns the processors with one more at the end, but before a processor that draws."""
    if draws_tokens(processors):
        return *processors[:-1], added, processors[-1]
    return *processors, added


def read_text(
    processors: Sequence[Processor],
    beginning: Beginning,
    tokens: Int[Array, "B S"],
    length: Int[Array, "B"],
    start: Int[Array, "B"],
) -> tuple[Any, ...]:
    """Returns the states of processors after a whole text.

    Args:
        processors: the processors, with a setting for each row.
        beginning: see `Beginning`.
        tokens: prompt and text, padded.
        length: the length of prompt and text.
        start: the position of the first new token.
    """
    return tuple(one.absorb(one.init(beginning), tokens, length, start) for one in processors)


def absorb_all(
    processors: Sequence[Processor],
    states: Sequence[Any],
    tokens: Int[Array, "B M"],
    count: Int[Array, "B"],
    start: Int[Array, "B"],
) -> tuple[Any, ...]:
    """Returns the states of processors after more text; see `Processor.absorb`."""
    return tuple(one.absorb(state, tokens, count, start) for one, state in zip(processors, states, strict=True))


def process(
    processors: Sequence[Processor], states: Sequence[Any], path: Int[Array, "B N D"], logits: Float[Array, "B N V"]
) -> Float[Array, "B N V"]:
    """Applies processors one after another; see `Processor.apply`."""
    for one, state in zip(processors, states, strict=True):
        logits = one.apply(state, path, logits)
    return logits


def process_some(
    processors: Sequence[Processor],
    states: Sequence[Any],
    path: Int[Array, "B N D"],
    tokens: Int[Array, "B N R"],
    logits: Float[Array, "B N R"],
    vocab: int,
) -> Float[Array, "B N R"]:
    """Applies processors to the logits of some tokens; see `PointwiseProcessor.apply_to`.

    A processor that is not pointwise is applied to the whole vocabulary, in which all other logits are -inf.
    """
    for one, state in zip(processors, states, strict=True):
        if isinstance(one, PointwiseProcessor):
            logits = one.apply_to(state, path, tokens, logits)
        else:
            whole = place(jnp.full((*tokens.shape[:2], vocab), -jnp.inf, logits.dtype), tokens, logits)
            changed = jnp.take_along_axis(one.apply(state, path, whole), jnp.maximum(tokens, 0), 2)
            logits = jnp.where(tokens < 0, logits, changed)
    return logits


def read_texts(states: Sequence[Any]) -> bool:
    """Returns whether any processor depends on the text; one without a state does not."""
    return bool(jax.tree.leaves(states))


def process_prefixes(
    processors: Sequence[Processor],
    beginning: Beginning,
    text: Int[Array, "S"],
    prefixes: Int[Array, "B"],
    start: Int[Array, ""] | int,
    logits: Float[Array, "B V"],
) -> Float[Array, "B V"]:
    """Applies processors to the logits after prefixes of one text.

    Args:
        processors: the processors, with a setting for each row.
        beginning: see `Beginning`.
        text: the text, padded.
        prefixes: the length of the prefix of each row.
        start: the position of the first new token.
        logits: the logits after each prefix.
    """
    if not processors:
        return logits
    tokens = jnp.broadcast_to(text, (len(prefixes), len(text)))
    states = read_text(processors, beginning, tokens, prefixes, jnp.full_like(prefixes, start))
    nothing = jnp.zeros((len(prefixes), 1, 0), jnp.int32)
    return process(processors, states, nothing, logits[:, None])[:, 0]


def process_text(
    processors: Sequence[Processor],
    states: Sequence[Any],
    tokens: Int[Array, "B N"],
    logits: Float[Array, "B N V"],
) -> Float[Array, "B N V"]:
    """Applies processors to the logits of every token of a text, as if the text were decoded token by token.

    Args:
        processors: the processors, with a setting for each row.
        states: their states after the text before the tokens.
        tokens: new tokens.
        logits: the logits that each of the tokens was drawn from.
    """
    if not processors:
        return logits
    rows = len(tokens)
    nothing, one, zero = jnp.zeros((rows, 1, 0), jnp.int32), jnp.ones((rows,), jnp.int32), jnp.zeros((rows,), jnp.int32)

    def step(states: tuple[Any, ...], inputs: tuple[Array, Array]) -> tuple[tuple[Any, ...], Array]:
        token, before = inputs
        changed = process(processors, states, nothing, before[:, None])[:, 0]
        return absorb_all(processors, states, token[:, None], one, zero), changed

    return jnp.moveaxis(lax.scan(step, tuple(states), (tokens.T, jnp.moveaxis(logits, 1, 0)))[1], 0, 1)


def spread_states(state: Any, nodes: int) -> Any:
    """Returns the states of nodes that are all at the end of the absorbed text; see `ForcingProcessor`."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:, None], (len(leaf), nodes, *leaf.shape[1:])), state)


def walk(step: Callable[[Any, Array], Any], state: Any, tokens: Int[Array, "*B D"]) -> Any:
    """Returns the state after D tokens, one after another.

    Args:
        step: returns the state after one token of each row or node.
        state: the first state.
        tokens: the tokens.
    """
    if tokens.shape[-1] <= _UNROLLED:
        for depth in range(tokens.shape[-1]):
            state = step(state, tokens[..., depth])
        return state
    # A loop, so that the size of the program does not grow with the number of tokens.
    last = tokens.ndim - 1
    return lax.fori_loop(
        0,
        tokens.shape[-1],
        lambda depth, state: step(state, lax.dynamic_index_in_dim(tokens, depth, last, keepdims=False)),
        state,
    )


def gather_rows(table: Shaped[Array, "B V"], tokens: Int[Array, "B N R"]) -> Shaped[Array, "B N R"]:
    """Returns the entries of each row's tokens; the entry of token 0 for tokens below 0."""
    at = jnp.maximum(tokens, 0)
    return jnp.take_along_axis(table, at.reshape(len(at), -1), 1).reshape(at.shape)


def count_tokens(
    counts: Int[Array, "B V"], tokens: Int[Array, "B M"], counted: Bool[Array, "B M"]
) -> Int[Array, "B V"]:
    """Adds tokens to the counts of each row."""
    row = jnp.arange(len(tokens))[:, None]
    return counts.at[row, jnp.where(counted, tokens, counts.shape[1])].add(1, mode="drop")


def append_text(
    text: Int[Array, "B S"], length: Int[Array, "B"], tokens: Int[Array, "B M"], count: Int[Array, "B"]
) -> Int[Array, "B S"]:
    """Writes the first `count` tokens of each row behind the text of each row."""
    index = jnp.arange(tokens.shape[1])
    at = jnp.where(index < count[:, None], length[:, None] + index, text.shape[1])
    return text.at[jnp.arange(len(tokens))[:, None], at].set(tokens, mode="drop")


def place(
    logits: Float[Array, "B N V"], tokens: Int[Array, "B N M"], values: Float[Array, "B N M"] | float
) -> Float[Array, "B N V"]:
    """Writes values into the logits of tokens; tokens below 0 are left out."""
    row, node = jnp.arange(logits.shape[0])[:, None, None], jnp.arange(logits.shape[1])[None, :, None]
    return logits.at[row, node, jnp.where(tokens < 0, logits.shape[2], tokens)].set(values, mode="drop")


def forbid(
    logits: Float[Array, "B N R"], tokens: Int[Array, "B N R"], forbidden: Int[Array, "B N M"]
) -> Float[Array, "B N R"]:
    """Writes -inf into the logits of those of some tokens that are forbidden; tokens below 0 are left out."""
    wrong = ((tokens[..., :, None] == forbidden[..., None, :]) & (tokens >= 0)[..., None]).any(-1)
    return jnp.where(wrong, -jnp.inf, logits)


def last_tokens(last: Int[Array, "B L"], path: Int[Array, "B N D"]) -> Int[Array, "B N L"]:
    """Returns the last L tokens of each text, the last one at the end; -1 before the beginning of a text.

    Args:
        last: the last tokens of the absorbed text.
        path: the tokens after it; -1 after the end of a path.
    """
    whole = jnp.concatenate([jnp.broadcast_to(last[:, None], (*path.shape[:2], last.shape[1])), path], -1)
    depth = (path >= 0).sum(-1)[..., None]
    return jnp.take_along_axis(whole, depth + jnp.arange(last.shape[1]), -1)


def keep_last(last: Int[Array, "B L"], tokens: Int[Array, "B M"], count: Int[Array, "B"]) -> Int[Array, "B L"]:
    """Returns the last L tokens after more text; see `last_tokens`."""
    path = jnp.where(jnp.arange(tokens.shape[1]) < count[:, None], tokens, -1)
    return last_tokens(last, path[:, None])[:, 0]
