"""The data that the parts of a decoder exchange, and the invariants that they all keep.

Letters: B rows, S cache slots, N nodes, D tree depth, C largest number of children of a node, V vocabulary, E feature
width, L layers, H key/value heads, K head width, T tokens in a window, P earlier tokens of a window.

Invariants; each has a test of the same name in `tests/decode/test_invariants.py`:

- root_is_pending: the root is committed text, but not yet in the target's cache: `cache.length == length - 1`.
- scratch_is_never_read: slots at or past `cache.length` are scratch, finite, and never read.
- capacity_covers_the_window: S is at least prompt + new tokens + N, because `dynamic_update_slice` clamps silently.
- cache_equals_fresh_prefill: after every round, the cache equals the cache after a prefill of the text; a draft model's
  cache may be shorter, and is equal up to its own length.
- every_round_makes_progress: a healthy running row commits 1 to D + 1 tokens per round, before its tokens are cut.
- finished_rows_stand_still: a finished row is still computed, but its text, lengths, log and states do not change.
- non_finite_never_reaches_the_cache: values of a window that are not finite are not committed.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.tree import Tree

Params = Any  # a pytree of arrays; only the member that owns it knows its structure
Entries = Any  # what a model remembers of the T tokens of a window: a pytree of arrays [L, B, H, T, K], such as `KV`


class Status(enum.IntEnum):
    """Whether a row is running, or why it has finished."""

    RUNNING = 0
    STOP = 1  # a stop token was emitted, and is part of the text
    LENGTH = 2  # the budget of new tokens is used up
    ERROR = 3  # the target's logits were not finite; no token was drawn from them


class KV(NamedTuple):
    """Keys and values of some tokens in all layers. A model may store anything with these axes."""

    keys: Array  # [L, B, H, T, K]
    values: Array  # [L, B, H, T, K]


class Cache(NamedTuple):
    """The text that a model has read.

    Only the model knows what `stores` holds: keys and values, the states of recurrent layers, or both. In a store of
    keys and values, slots below `length` hold the keys and values of the text, and the other slots are scratch. A
    recurrent state is that of exactly `length` tokens. A row of length 0 is empty, whatever the stores hold: to forget
    a text, the decoder sets its length to 0. Every leaf of `stores` has an axis of rows.
    """

    stores: Any  # a pytree; for `attend`, a `KV` of [L, B, H, S, K]
    length: Int[Array, "B"]


class Window(NamedTuple):
    """Tokens to read on top of a cache. The model does not know trees, only which tokens each token attends to."""

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]  # absolute
    mask: Bool[Array, "B T PT"]  # which tokens of the window each token attends to, the P earlier tokens first
    # Each token's path through the window, -1 past its end. With it, the decoder requests sums whose bits do not depend
    # on how much of the path is already in the cache. A model may ignore it; the bits of its sums may then depend on
    # that.
    paths: Int[Array, "B T D1"] | None = None


class Proposal(NamedTuple):
    """A drafted tree.

    `law[n]` is the log-law from which the children of node n were drawn, without replacement and in the order of their
    ranks; it is not read for nodes without children. None means that the tokens are not a sample: each of them is a
    point mass.
    """

    tokens: Int[Array, "*b N"]  # -1: nothing is proposed at this node; entry 0, the root, is not read
    tree: Tree  # with or without the batch axis
    law: Float[Array, "*b N V"] | None = None


class Verdict(NamedTuple):
    """The end of a row's walk: the deepest accepted node, and the token after it."""

    node: Int[Array, "*b"]
    token: Int[Array, "*b"]


class StopLaw(NamedTuple):
    """The law of where a row's walk ends, before any random number is drawn."""

    node_probs: Float[Array, "N"]  # the probability that each node is the deepest accepted node; they sum to 1
    next_logits: Callable[[Array], Array]  # node id -> logits of the token after it, [V], not normalised


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("drafted", "accepted", "nodes", "emitted"),
    meta_fields=("together",),
)
@dataclasses.dataclass(frozen=True)
class RoundResult:
    """What a schedule learns from a round, per row. The state of finished rows is not updated.

    Attributes:
        drafted: the depth of the deepest drafted node.
        accepted: the number of accepted tokens, before any cut.
        nodes: the number of nodes, root included, up to the last drafted node.
        emitted: the number of committed tokens.
        together: whether drafts cannot change a text, so that rows may choose together; static.
    """

    drafted: Int[Array, "B"]
    accepted: Int[Array, "B"]
    nodes: Int[Array, "B"]
    emitted: Int[Array, "B"]
    together: bool = False


class Seen(NamedTuple):
    """The target's likeliest tokens after every node of a round, rejected nodes included."""

    tokens: Int[Array, "B N"]  # the nodes' tokens; -1: nothing was drafted, `ids` and `logits` are undefined
    ids: Int[Array, "B N K"]  # in descending order of their logits; -1 where the vocabulary has no more tokens
    logits: Float[Array, "B N K"]  # raw


class Advance(NamedTuple):
    """The tokens committed since the drafter last absorbed. The prompt is absorbed first, in chunks.

    Entries from `count` on are padding. `features[i]` is the target's feature at the token before `tokens[i]`, zeros
    before the first token of the prompt. `nodes` is None for text that was not drafted.
    """

    tokens: Int[Array, "B M"]
    features: Float[Array, "B M E"]
    count: Int[Array, "B"]  # pyright: ignore[reportIncompatibleMethodOverride]
    nodes: Int[Array, "B M"] | None  # the node of the last proposal that each token was drafted at, -1 for none
    text: Int[Array, "B S"]  # the whole text, these tokens included, for drafters that have not read all of it
    start: Int[Array, "B"]  # the position of the first of these tokens
    params: Params = None  # the target's parameters
    seen: Seen | None = None  # for a drafter that needs it; None for text that was not drafted


class Context(NamedTuple):
    """The read-only inputs of `Drafter.propose`: the committed text, the target's cache and parameters."""

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]  # the root is tokens[length - 1]
    cache: Cache  # the target's cache, without the root
    params: Params  # the target's parameters
    history: Int[Array, "B H"] | None = None  # earlier texts of the same prompt, -1 between them; None: not given

    @property
    def root(self) -> Int[Array, "B"]:
        """The last token of each row's text, which is the root of the next tree."""
        return jnp.take_along_axis(self.tokens, self.length[:, None] - 1, axis=1)[:, 0]
