"""The drafter "recycling": what followed the same tokens before, in the text or among the target's likely tokens.

Token recycling (Luo et al. 2024, arXiv:2408.08696) keeps the target's likeliest tokens after every node that the target
has verified, rejected nodes included, in a table indexed by the node's token. Here each row keeps these tokens with
their probabilities, and one tree has three sources: the tokens that followed the longest earlier matches with the end
of the text, as in prompt lookup, also in earlier texts of the same prompt; the tokens kept for the last token of a
path; and, for the root's children, the other likely tokens of the law that gave the root, as in LogitSpec
(arXiv:2507.01449). A later source gets the share of the probability that earlier sources leave.
"""

import dataclasses
import functools
from typing import ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core.drafter import DrafterInputs, Needs
from jaxspec.core.draw import Candidates, Draw, Noise
from jaxspec.core.records import Advance, Context, Params, Proposal, Seen
from jaxspec.core.topology import Dynamic, Topology, dynamic
from jaxspec.drafters._grow import grow
from jaxspec.drafters._level import Level, count_slots
from jaxspec.drafters._match import MATCH_ACCURACY, find_positions, with_history
from jaxspec.drafters._tree import TreeDrafter
from jaxspec.errors import InvalidConfig

TOKENS_PER_ENTRY = 8
"""The number of tokens kept for each token."""

GUESS_SHARES = tuple(0.3 / (rank + 1) for rank in range(TOKENS_PER_ENTRY))
"""Shares of the other likely tokens of the law that gave the root (`scripts/measure/replay.py`)."""

RECYCLING_TREE = dynamic(beam=8, depth=7, nodes=32)


class Tables(NamedTuple):
    """What is kept for each row. The entry of a token is in slot `token % M`; a later token replaces an earlier one."""

    token: Int[Array, "B M"]  # the token of each slot's entry; -1: empty
    # K tokens that may follow each slot's token, -1 for none. A separate axis of K would be padded to 128 on a TPU.
    ids: Int[Array, "B MK"]
    probs: Float[Array, "B MK"]
    guesses: Int[Array, "B K"]  # the likely tokens of the law that gave the text's last token; -1 for none


class Paths(NamedTuple):
    """Where the nodes of a draft are in the text, for each of the J positions that it copies from."""

    positions: Int[Array, "B S J"]  # the position of the next token to copy; -1: the path has left the text
    match: Int[Array, "B J"]  # the number of tokens that match before the first copied token
    period: Int[Array, "B J"]  # a copy that reaches the end of the text continues this many tokens before


@dataclasses.dataclass(frozen=True)
class Recycling(TreeDrafter):
    """Reuses what followed the same tokens before, both in the text and in the target's own top predictions.

    Its tables take 68 bytes for each slot and row.

    Attributes:
        tree: the topology, or the sizes of a dynamic tree, which suits this drafter better.
        size: M, the number of slots of a table.
        places: the number of positions to copy from.
        share: the share that the kept tokens get of the probability that the copies leave.

    Raises:
        InvalidConfig: the tree has only its root, or nodes with more children than tokens are kept.
    """

    tree: Topology | Dynamic = RECYCLING_TREE
    size: int = 1 << 13
    places: int = 4
    share: float = 0.5

    takes: ClassVar[frozenset[str]] = frozenset({"tree"})
    draws = True

    def __post_init__(self):
        shape = self.tree.shape
        if shape.depth < 1:
            raise InvalidConfig("recycling needs a tree of at least one drafted token; got the root alone")
        width = self.tree.beam if isinstance(self.tree, Dynamic) else shape.width
        if width > TOKENS_PER_ENTRY:
            raise InvalidConfig(
                f"recycling knows {TOKENS_PER_ENTRY} tokens after each token, got a tree of width {width}"
            )

    @classmethod
    def build(cls, inputs: DrafterInputs) -> tuple[Self, Params]:
        size = min(cls.size, inputs.target.lm.vocab)
        return (cls(size=size) if inputs.tree is None else cls(inputs.tree, size)), None

    @property
    def needs(self) -> Needs:
        counts = isinstance(self.tree, Dynamic)
        return Needs(observed=TOKENS_PER_ENTRY, node_count=counts, history=True, tree=self.tree)

    @property
    def calls(self) -> int:
        """Zero calls of a draft model; the cost of tables is measured as a part of the round."""
        return 0

    def init(self, params: Params, batch: int, capacity: int) -> Tables:
        none = jnp.full((batch, self.size * TOKENS_PER_ENTRY), -1, jnp.int32)
        probs = jnp.zeros(none.shape, jnp.float32)
        return Tables(none[:, : self.size], none, probs, none[:, :TOKENS_PER_ENTRY])

    def absorb(self, params: Params, state: Tables, advance: Advance) -> Tables:
        if advance.seen is None:
            return self._absorb_text(state, advance)
        return self._absorb_round(state, advance, advance.seen)

    def _absorb_text(self, state: Tables, advance: Advance) -> Tables:
        """Puts each token of the prompt in front of the entry of the token before it, with half of the weight."""
        before = jnp.take_along_axis(advance.text, jnp.maximum(advance.start - 1, 0)[:, None], 1)
        before = jnp.concatenate([before, advance.tokens[:, :-1]], 1)
        steps = jnp.arange(advance.tokens.shape[1])
        on = (steps < advance.count[:, None]) & (steps + advance.start[:, None] > 0)

        def put(state: Tables, pair: tuple[Array, Array, Array]) -> tuple[Tables, None]:
            token, follower, on = pair
            ids, probs = self._entries(state, token[:, None])
            ids, probs = ids[:, 0], probs[:, 0] / 2
            again = ids == follower[:, None]
            first = 0.5 + jnp.where(again, probs, 0.0).sum(-1)
            # The tokens before the follower's old position, or all of them, move back by one.
            place = jnp.where(again.any(-1), jnp.argmax(again, -1), TOKENS_PER_ENTRY)
            back = jnp.arange(TOKENS_PER_ENTRY - 1) < place[:, None]
            ids = jnp.concatenate([follower[:, None], jnp.where(back, ids[:, :-1], ids[:, 1:])], 1)
            probs = jnp.concatenate([first[:, None], jnp.where(back, probs[:, :-1], probs[:, 1:])], 1)
            slot = jnp.where(on, token % self.size, self.size)
            return _put(state, slot[:, None], token[:, None], ids[:, None], probs[:, None]), None

        state = lax.scan(put, state, (before.T, advance.tokens.T, on.T))[0]
        return state._replace(guesses=jnp.where((advance.count > 0)[:, None], -1, state.guesses))

    def _absorb_round(self, state: Tables, advance: Advance, seen: Seen) -> Tables:
        """Replaces the entries of a round's nodes.

        If nodes share a slot, the entry of the last node is kept, because it has the longest path.
        """
        running, nodes = (advance.count > 0)[:, None], seen.tokens.shape[1]
        probs = jax.nn.softmax(seen.logits, -1)
        on = (seen.tokens >= 0) & running & jnp.isfinite(probs).all(-1)
        slot = jnp.where(on, seen.tokens % self.size, -1)
        later = jnp.triu(slot[:, :, None] == slot[:, None, :], 1).any(-1)
        # Entries that are not kept get slots of their own beyond the table, where they are dropped.
        slot = jnp.where(on & ~later, slot, self.size + jnp.arange(nodes))
        # The last token was drawn after the node of the token before it, or after the root if there is no such node.
        path = advance.nodes if advance.nodes is not None else jnp.full(advance.tokens.shape, -1)
        end = jnp.take_along_axis(path, jnp.maximum(advance.count - 2, 0)[:, None], 1)
        end = jnp.where((advance.count > 1)[:, None], jnp.maximum(end, 0), 0)
        guesses = jnp.take_along_axis(seen.ids, end[..., None], 1)[:, 0]
        state = _put(state, slot, seen.tokens, seen.ids, probs, unique=True)
        return state._replace(guesses=jnp.where(running, guesses, state.guesses))

    def _entries(self, state: Tables, tokens: Int[Array, "B n"]) -> tuple[Int[Array, "B n K"], Float[Array, "B n K"]]:
        """Returns what followed each token; -1 and 0 where nothing is known."""
        slot = tokens % self.size
        hit = (jnp.take_along_axis(state.token, slot, 1) == tokens)[..., None]
        at = _entry_indices(slot)
        ids, probs = (
            jnp.take_along_axis(a, at.reshape(len(at), -1), 1).reshape(at.shape) for a in (state.ids, state.probs)
        )
        return jnp.where(hit, ids, -1), jnp.where(hit, probs, 0.0)

    def propose(self, params: Params, state: Tables, context: Context, draw: Draw) -> tuple[Proposal, Tables]:
        root = context.root
        if draw.kind is Noise.FRESH:
            draw = dataclasses.replace(draw, kind=Noise.NONE)  # point masses, not a sample, for every rule
        context = with_history(context)
        paths = self._find(context, count_slots(self.tree))

        def read(level: Level, paths: Paths) -> tuple[Candidates, Paths]:
            return self._read(state, context, level, paths)

        return grow(self.tree, root, draw, read, paths, unroll=True).proposal, state

    def _find(self, context: Context, slots: int) -> Paths:
        """Returns the positions after the longest earlier matches with the end of each text, with different tokens."""

        find = functools.partial(find_positions, count=self.places, least=1, most=len(MATCH_ACCURACY) - 1)
        positions, match = jax.vmap(find)(context.tokens, context.length)
        period = context.length[:, None] - positions
        positions = jnp.where(match > 0, positions, -1)
        return Paths(jnp.broadcast_to(positions[:, None], (len(positions), slots, self.places)), match, period)

    def _read(self, state: Tables, context: Context, level: Level, paths: Paths) -> tuple[Candidates, Paths]:
        """Returns what may follow the nodes of a level."""
        positions, at_root = level.of_parents(paths.positions), isinstance(level.depth, int) and level.depth == 0
        if not at_root:
            follows = self._next(context, positions) == level.tokens[..., None]
            further = positions + 1
            further = jnp.where(further < context.length[:, None, None], further, further - paths.period[:, None])
            positions = jnp.where((positions >= 0) & follows, further, -1)
        copied = self._next(context, positions)
        match = jnp.minimum(paths.match + level.depth, len(MATCH_ACCURACY) - 1)
        trust = jnp.where(copied >= 0, jnp.asarray(MATCH_ACCURACY)[match][:, None], 0.0)
        rest = jnp.cumprod(1 - trust, -1)
        before = jnp.concatenate([jnp.ones_like(rest[..., :1]), rest[..., :-1]], -1)
        kept, probs = self._entries(state, level.tokens)
        ids, shares = [copied, kept], [before * trust, rest[..., -1:] * self.share * probs]
        if at_root:
            others = jnp.where(state.guesses == level.tokens, -1, state.guesses)[:, None]
            ids.append(others)
            shares.append(rest[..., -1:] * jnp.asarray(GUESS_SHARES, jnp.float32))
        candidates = _merge(jnp.concatenate(ids, -1), jnp.concatenate(shares, -1))
        return candidates, paths if at_root else paths._replace(positions=level.put(paths.positions, positions))

    def _next(self, context: Context, positions: Int[Array, "B n J"]) -> Int[Array, "B n J"]:
        """Returns the token at each position; -1 for none."""
        flat = jnp.maximum(positions, 0).reshape(len(positions), -1)
        return jnp.where(positions >= 0, jnp.take_along_axis(context.tokens, flat, 1).reshape(positions.shape), -1)


def _put(
    state: Tables,
    slot: Int[Array, "B n"],
    token: Int[Array, "B n"],
    ids: Int[Array, "B n K"],
    probs: Float[Array, "B n K"],
    unique: bool = False,
) -> Tables:
    """Writes entries; entries of slots beyond the table are dropped."""

    def put(old: Array, new: Array, at: Array) -> Array:
        rows = jnp.arange(len(at)).reshape(-1, *[1] * (at.ndim - 1))
        return old.at[rows, at].set(new, mode="drop", unique_indices=unique)

    at = _entry_indices(slot)
    return state._replace(
        token=put(state.token, token, slot), ids=put(state.ids, ids, at), probs=put(state.probs, probs, at)
    )


def _entry_indices(slot: Int[Array, "B n"]) -> Int[Array, "B n K"]:
    """Returns the indices of the K tokens of each slot."""
    return slot[..., None] * TOKENS_PER_ENTRY + jnp.arange(TOKENS_PER_ENTRY)


def _merge(ids: Int[Array, "B n R"], shares: Float[Array, "B n R"]) -> Candidates:
    """Returns each token once, with the sum of its shares; the tokens not listed share the rest of 1."""
    same = (ids[..., :, None] == ids[..., None, :]) & (ids >= 0)[..., None]
    first = (ids >= 0) & ~jnp.tril(same, -1).any(-1)
    shares = jnp.where(first, (same * shares[..., None, :]).sum(-1), 0.0)
    left = jnp.maximum(1 - shares.sum(-1, keepdims=True), 1e-3)
    ids = jnp.concatenate([jnp.where(first, ids, -1), jnp.full_like(ids[..., :1], -1)], -1)
    return Candidates(ids, jnp.log(jnp.concatenate([shares, left], -1)))
