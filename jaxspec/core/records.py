"""What the parts of the decoder hand to one another, and the invariants they all keep.

Letters: B rows, S cache slots, N nodes, D tree height, C most children of a node, V vocabulary, E feature
width, L layers, H key/value heads, K head width, T tokens in a window, P earlier tokens of a window.

Invariants; each has a test of its name in `tests/decode/test_invariants.py`:

- root_is_pending: the root is committed text and not yet in the target's cache: `cache.length == length - 1`.
- scratch_is_never_read: slots at or past `cache.length` are scratch, finite, and never read.
- capacity_covers_the_window: S is at least prompt + new tokens + N; `dynamic_update_slice` clamps silently.
- cache_equals_fresh_prefill: after every round, cache and text are those of a fresh prefill of the text; a draft
  model's cache, which may end sooner, is one as far as it goes.
- every_round_makes_progress: a healthy running row commits 1 to D + 1 tokens a round, before the cuts.
- finished_rows_stand_still: a finished row computes on, and moves no cursor, text, log or drafter state.
- non_finite_never_reaches_the_cache: what is not finite in a window is not committed.
"""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.tree import Tree

Params = Any  # a pytree of arrays, whatever the member made of it


class Status(enum.IntEnum):
    """Why a row stands still; 0 while it runs."""

    RUNNING = 0
    STOP = 1  # a stop token was emitted (and kept)
    LENGTH = 2  # the budget of new tokens is used up
    ERROR = 3  # the target's logits were not finite; nothing was emitted from them


class KV(NamedTuple):
    """Keys and values of some tokens, for all layers. A model may store anything that has this layout."""

    keys: Array  # [L, B, H, T, K]
    values: Array  # [L, B, H, T, K]


class Cache(NamedTuple):
    """The prefix a model has read: slots below `length` hold text, the others are scratch."""

    kv: KV  # [L, B, H, S, K]
    length: Int[Array, "B"]


class Window(NamedTuple):
    """Tokens to be read on top of a cache. The model knows nothing of trees: only what each may see."""

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]  # absolute
    mask: Bool[Array, "B T PT"]  # which tokens of the window each token sees, the P earlier ones first
    # Each token's path through the window, -1 past its end: asks for sums whose bits do not depend on how much of
    # that path is in the cache already. A model may leave it unread, and the bits to chance.
    paths: Int[Array, "B T D1"] | None = None


class Proposal(NamedTuple):
    """A drafted tree.

    `law[n]` is the log-law that node n's children were drawn from, without replacement and in the order of their
    ranks; it is not read where a node has none. None says that the tokens are no sample: a point mass each.
    """

    tokens: Int[Array, "*b N"]  # -1: nothing is proposed at this node; entry 0, the root, is not read
    tree: Tree  # with or without the batch axis
    law: Float[Array, "*b N V"] | None = None


class Verdict(NamedTuple):
    """Where a walk ended: the deepest kept node, and the token after it."""

    node: Int[Array, "*b"]
    token: Int[Array, "*b"]


class StopLaw(NamedTuple):
    """The law of where a row's walk ends, before any random number is drawn."""

    node_probs: Float[Array, "N"]  # the probability that each node is the deepest accepted one; they sum to 1
    next_logits: Callable[[Array], Array]  # of the token after a node, [V], by the node's id; of any scale


class RoundResult(NamedTuple):
    """What a schedule learns from a round, per row; finished rows are not updated."""

    drafted: Int[Array, "B"]  # the depth of the deepest drafted node
    accepted: Int[Array, "B"]  # accepted tokens, before any cut


class Advance(NamedTuple):
    """What was committed since the drafter was last told. The prompt is the first Advance, in chunks.

    Entries at or past `count` are padding. `features[i]` is the target's feature at the token before
    `tokens[i]` (zeros before the prompt's first). `nodes` is None for text that no draft proposed.
    """

    tokens: Int[Array, "B M"]
    features: Float[Array, "B M E"]
    count: Int[Array, "B"]  # pyright: ignore[reportIncompatibleMethodOverride]
    nodes: Int[Array, "B M"] | None  # the node of the last proposal that held this token, -1 for none
    text: Int[Array, "B S"]  # all of the text, these tokens included, for who has not read what came before
    start: Int[Array, "B"]  # where in it they begin


class Context(NamedTuple):
    """What a drafter may look at, read-only: the committed text, the target's cache and parameters."""

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]  # the root is tokens[length - 1]
    cache: Cache  # the target's; it lacks the root
    params: Params  # the target's
