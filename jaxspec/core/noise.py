"""Every random number of the decoder, as a pure function of a row's key and a place in its text.

Sampling is greedy decoding of perturbed scores: the token drawn from a law is `argmax(log law + noise)`
(Gumbel-max). A row's key has three streams, each with a tag of its own:

`gumbel`: by the absolute position of the token that is drawn. The target draws with it, whatever the rule. A coupled
drafter draws with it too, which is why the same key gives the same text.
`fresh`: by round and node. What a drafter draws a node's children with where the rule weighs its law.
`uniform`: by round. Where the walk of such a rule ends.

A round is named by the position of its root, which no two rounds of a row share; so nothing depends on how rounds
are counted, on neighbours, or on where a session was interrupted.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

VERSION = 1
"""Bumped whenever the same key would give other noise; recorded with every result."""

_POSITION = 0x706F73
_FRESH = 0x647266
_ACCEPT = 0x616363


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("keys", "roots", "any_sampled", "shared"),
    meta_fields=("vocab",),
)
@dataclasses.dataclass(frozen=True)
class RoundNoise:
    """The random numbers of one round. They depend on the rows' keys and roots alone, not on who asks for them.

    Attributes:
        keys: one per row, [B].
        roots: the position after the root's, where the row's next token will be: the length of its text.
        any_sampled: a scalar; false where every row is greedy, and then Gumbel noise is zero and costs nothing.
        vocab: V of the target; static.
        shared: the target's noise by depth, if `share` has drawn it; None if it is drawn when needed.
    """

    keys: Array
    roots: Int[Array, "B"]
    any_sampled: Bool[Array, ""]
    vocab: int
    shared: Float[Array, "B D1 V"] | None = None

    def share(self, depths: int, needed: Array) -> "RoundNoise":
        """Draws the target's noise once, for a drafter and a rule that both read it.

        Args:
            depths: D + 1; static.
            needed: the number of depths, from 0 on, that are read; the noise of the others is zero.
        """
        needed = jnp.where(self.any_sampled, needed, 0)
        return dataclasses.replace(self, shared=ahead(self.keys, self.roots, depths, needed, self.vocab))

    def target(self, depth: Array | int) -> Float[Array, "B 1 V"]:
        """Returns the noise that the target draws the token after a node of this depth with."""
        if self.shared is None:
            return gumbel(self.keys, (self.roots + depth)[:, None], self.vocab, self.any_sampled)
        return jax.lax.dynamic_index_in_dim(self.shared, depth, axis=1)

    def target_path(self, depths: int) -> Float[Array, "B D1 V"]:
        """Returns the same for depth 0 to `depths` - 1."""
        if self.shared is None:
            return gumbel(self.keys, self.roots[:, None] + jnp.arange(depths), self.vocab, self.any_sampled)
        return self.shared[:, :depths]

    def target_at(self, depths: Int[Array, "B"]) -> Float[Array, "B V"]:
        """Returns the same for one depth per row; drawn here, also if other depths are shared."""
        return gumbel(self.keys, (self.roots + depths)[:, None], self.vocab, self.any_sampled)[:, 0]

    def fresh(self, nodes: Int[Array, "n"], vocab: int) -> Float[Array, "B n V"]:
        """Returns the noise that the children of each node are drawn with if a rule weighs their law.

        Args:
            nodes: node ids.
            vocab: the number of tokens that the drafter knows.
        """
        return fresh(self.keys, self.roots, nodes, vocab, self.any_sampled)

    def uniform(self) -> Float[Array, "B"]:
        """Returns the numbers of [0, 1) that decide where each row's walk ends."""
        return uniform(self.keys, self.roots)


def gumbel(keys: Array, positions: Int[Array, "B n"], vocab: int, wanted: Array | bool = True) -> Float[Array, "B n V"]:
    """The noise of the tokens at `positions` of each row.

    `wanted` is a scalar: where it is false (every row greedy) the noise is zero and costs nothing.
    `mode="high"` because the default draws no token of probability 1e-8: its noise ends at 15.9.
    """

    def one(key: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(key, _POSITION), position)
        return jax.random.gumbel(key, (vocab,), jnp.float32, mode="high")

    return _drawn(one, keys, positions, vocab, wanted)


def ahead(
    keys: Array, roots: Int[Array, "B"], depths: int, wanted_depths: Array | int, vocab: int
) -> Float[Array, "B D V"]:
    """The noise of the tokens at `roots` and after it, [:, d] that of position `roots + d`; one depth after the other.

    Args:
        keys: one per row.
        roots: a position per row.
        depths: D, static.
        wanted_depths: how many of them are drawn; the rest are zeros, and cost nothing.
        vocab: V.
    """

    def draw(depth: Array, noise: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(noise, gumbel(keys, (roots + depth)[:, None], vocab), depth, 1)

    return jax.lax.fori_loop(0, wanted_depths, draw, jnp.zeros((roots.shape[0], depths, vocab), jnp.float32))


def fresh(
    keys: Array, roots: Int[Array, "B"], nodes: Int[Array, "n"], vocab: int, wanted: Array | bool = True
) -> Float[Array, "B n V"]:
    """The noise of the children of `nodes`, in the round whose root stands at `roots`; else as `gumbel`."""

    def one(key: Array, place: Array) -> Array:
        root, node = place
        key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, _FRESH), root), node)
        return jax.random.gumbel(key, (vocab,), jnp.float32, mode="high")

    shape = (roots.shape[0], nodes.shape[0])
    places = jnp.stack([jnp.broadcast_to(roots[:, None], shape), jnp.broadcast_to(nodes, shape)], axis=-1)
    return _drawn(one, keys, places, vocab, wanted)


def uniform(keys: Array, roots: Int[Array, "B"]) -> Float[Array, "B"]:
    """One number of [0, 1) per row, for the round whose root stands at `roots`.

    Of 32 bits: `jax.random.uniform` has 23, and its exact zeros would let an event of probability 1e-9 happen a
    hundred times too often.
    """

    def one(key: Array, root: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(key, _ACCEPT), root)
        return jnp.minimum(jax.random.bits(key, (), jnp.uint32).astype(jnp.float32) * 2.0**-32, 1 - 2.0**-24)

    return _over_rows(one, keys, roots)


def _drawn(one: Callable, keys: Array, places: Array, vocab: int, wanted: Array | bool) -> Float[Array, "B n V"]:
    def row(key: Array, places: Array) -> Array:
        return _over_rows(lambda place: one(key, place), places, like=keys)

    def draw() -> Array:
        return _over_rows(row, keys, places)

    return jax.lax.cond(wanted, draw, lambda: jnp.zeros((*places.shape[:2], vocab), jnp.float32))


def _over_rows(function: Callable, *arrays: Array, like: Array | None = None) -> Array:
    """The function of each row. Keys of the "rbg" kind must not be vmapped: all but the first would be ignored."""
    if str(jax.random.key_impl(arrays[0] if like is None else like)) == "threefry2x32":
        return jax.vmap(function)(*arrays)
    return jax.lax.map(lambda row: function(*row), arrays)
