"""The decoder's random numbers, as pure functions of a row's key and a position in its text.

Sampling is greedy decoding of perturbed scores: the token sampled from a law is `argmax(log law + noise)` (Gumbel-max).
A row's key has three streams, each with its own tag:

- `draw_gumbel`, by absolute position: the target draws every token with it, under every rule. Under a coupled rule the
  drafter reads the same noise, and therefore the same key gives the same text.
- `draw_fresh`, by round and node: under a rule that reads the draft's law, the drafter draws a node's children with it.
- `draw_uniform`, by round: under a rule that reads the draft's law, it decides where the walk ends.

A round is identified by the position of its root, which is different in all rounds of a row. So the random numbers do
not depend on the number of rounds, on other rows, or on interruptions of a session.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import threefry
from jaxspec.core.checks import whole
from jaxspec.core.sizes import MAX_SEED
from jaxspec.errors import InvalidConfig, shown

NOISE_VERSION = 1
"""The version of the noise, recorded with every result; it changes when the same key begins to give other noise."""

_POSITION = 0x706F73
_FRESH = 0x647266
_ACCEPT = 0x616363


def seed_key(seed: int) -> Array:
    """Returns the random key of a seed; all 64 bits of the seed count.

    For a seed below 2^32, it is `jax.random.key(seed)`. Without JAX's 64-bit types, that function ignores all higher
    bits. The key of a larger seed is therefore made with these types enabled.

    Raises:
        InvalidConfig: the seed is not a whole number from 0 to 2^64 - 1.
    """
    seed = whole("seed", seed, 0, MAX_SEED)
    if seed < 1 << 32:
        return jax.random.key(seed)
    with jax.enable_x64(True):
        return jax.random.key(np.uint64(seed))


def as_key(key: Any, rows: int | None = None) -> Array:
    """Returns one typed key, or one for each row. An array of uint32 is read as keys of JAX's default kind.

    Args:
        key: the key, or keys.
        rows: the number of rows; None if a single key is required.

    Raises:
        InvalidConfig: the value is not a random key, or has another shape.
    """
    if not isinstance(key, (jax.Array, np.ndarray)):
        raise InvalidConfig(f"key must be a JAX random key such as jax.random.key(0), got {shown(key)}")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.dtype != np.uint32 or key.shape[-1:] != (2,):
            raise InvalidConfig(f"key must be a JAX random key such as jax.random.key(0), got {key.dtype}{key.shape}")
        key = jax.random.wrap_key_data(jnp.asarray(key))
    if rows is None and key.shape:
        raise InvalidConfig(f"key must be one key, got shape {key.shape}")
    if key.shape not in ((), (rows,)):
        raise InvalidConfig(f"key must be one key, or one for each of the {rows} rows; got shape {key.shape}")
    return jnp.asarray(key)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("keys", "roots", "any_sampled", "shared"),
    meta_fields=("vocab",),
)
@dataclasses.dataclass(frozen=True)
class RoundNoise:
    """The random numbers of one round, which drafter and rule read.

    Attributes:
        keys: one key per row, [B].
        roots: the length of each row's text, which is the position of its next token.
        any_sampled: a scalar; false if all rows are greedy: Gumbel noise is then zero and costs nothing.
        vocab: V, the size of the target's vocabulary; static.
        shared: the target's noise by depth, if `share` has drawn it; None if it is drawn whenever it is read.
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
            needed: the number of depths that are read, from 0 on; the noise of deeper tokens is zero.
        """
        needed = jnp.where(self.any_sampled, needed, 0)
        return dataclasses.replace(self, shared=draw_ahead(self.keys, self.roots, depths, needed, self.vocab))

    def target(self, depth: Array | int) -> Float[Array, "B 1 V"]:
        """Returns the target's noise for the token after a node of this depth."""
        if self.shared is None:
            return draw_gumbel(self.keys, (self.roots + depth)[:, None], self.vocab, self.any_sampled)
        return jax.lax.dynamic_index_in_dim(self.shared, depth, axis=1)

    def target_at(self, depths: Int[Array, "B n"]) -> Float[Array, "B n V"]:
        """Returns the target's noise for the tokens after nodes of these depths."""
        if self.shared is None:
            return draw_gumbel(self.keys, self.roots[:, None] + depths, self.vocab, self.any_sampled)
        return jnp.take_along_axis(self.shared, depths[..., None], 1)

    def fresh(self, nodes: Int[Array, "n"], vocab: int) -> Float[Array, "B n V"]:
        """Returns independent noise for the children of each node.

        Args:
            nodes: the ids of the nodes.
            vocab: the size of the drafter's vocabulary.
        """
        return draw_fresh(self.keys, self.roots, nodes, vocab, self.any_sampled)

    def uniform(self) -> Float[Array, "B"]:
        """Returns one number in [0, 1) per row, which decides where its walk ends."""
        return draw_uniform(self.keys, self.roots)


def draw_gumbel(
    keys: Array, positions: Int[Array, "B n"], vocab: int, any_sampled: Array | bool = True
) -> Float[Array, "B n V"]:
    """Returns the noise of the tokens at `positions` of each row.

    `any_sampled` is a scalar; if it is false, the noise is zero and costs nothing. The mode is "high", because the
    noise of the default mode does not exceed 15.9, and a token of probability 1e-8 would never be drawn.
    """

    return _draw(keys, _POSITION, (positions,), vocab, any_sampled)


def draw_ahead(
    keys: Array, roots: Int[Array, "B"], depths: int, needed: Array | int, vocab: int
) -> Float[Array, "B D V"]:
    """Returns the noise of positions `roots + d` at `[:, d]`, drawn one depth after another.

    Args:
        keys: one key per row.
        roots: the position of depth 0 in each row.
        depths: D, static.
        needed: the number of depths that are drawn; the noise of deeper positions is zero and costs nothing.
        vocab: V, the size of the vocabulary.
    """

    def draw(depth: Array, noise: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(noise, draw_gumbel(keys, (roots + depth)[:, None], vocab), depth, 1)

    return jax.lax.fori_loop(0, needed, draw, jnp.zeros((roots.shape[0], depths, vocab), jnp.float32))


def draw_fresh(
    keys: Array, roots: Int[Array, "B"], nodes: Int[Array, "n"], vocab: int, any_sampled: Array | bool = True
) -> Float[Array, "B n V"]:
    """Returns the noise of the children of `nodes` in the round with these roots.

    For the other arguments, see `draw_gumbel`.
    """
    shape = (roots.shape[0], nodes.shape[0])
    numbers = jnp.broadcast_to(roots[:, None], shape), jnp.broadcast_to(nodes, shape)
    return _draw(keys, _FRESH, numbers, vocab, any_sampled)


def draw_uniform(keys: Array, roots: Int[Array, "B"]) -> Float[Array, "B"]:
    """Returns one number in [0, 1) per row, for the round with these roots.

    It has 32 random bits. `jax.random.uniform` has 23, and returns 0 so often that an event of probability 1e-9 would
    happen a hundred times as often.
    """

    if _is_threefry(keys):
        random = threefry.bits(_fold_all(keys, _ACCEPT, (roots,)), 1)[:, 0]
    else:
        random = jax.lax.map(lambda row: jax.random.bits(_fold(row[0], _ACCEPT, row[1:])), (keys, roots))
    return jnp.minimum(random.astype(jnp.float32) * 2.0**-32, 1 - 2.0**-24)


def _draw(
    keys: Array, tag: int, numbers: tuple[Int[Array, "B n"], ...], vocab: int, any_sampled: Array | bool
) -> Float[Array, "B n V"]:
    """Returns the Gumbel noise of keys into which a tag and `numbers` are folded."""

    def draw() -> Array:
        if _is_threefry(keys):
            return threefry.gumbel(_fold_all(keys[:, None], tag, numbers), vocab)

        def draw_vocab(key: Array, numbers: tuple[Array, ...]) -> Array:
            return jax.random.gumbel(_fold(key, tag, numbers), (vocab,), jnp.float32, mode="high")

        # Keys of the kind "rbg" must not be vmapped: all but the first would be ignored.
        return jax.lax.map(lambda row: jax.lax.map(functools.partial(draw_vocab, row[0]), row[1]), (keys, numbers))

    return jax.lax.cond(any_sampled, draw, lambda: jnp.zeros((*numbers[0].shape, vocab), jnp.float32))


def _is_threefry(keys: Array) -> bool:
    return str(jax.random.key_impl(keys)) == "threefry2x32"


def _fold(key: Array, tag: int, numbers: tuple[Array, ...]) -> Array:
    """Folds a tag and numbers into a key of any kind."""
    return functools.reduce(jax.random.fold_in, numbers, jax.random.fold_in(key, tag))


def _fold_all(keys: Array, tag: int, numbers: tuple[Array, ...]) -> Array:
    """Returns the data of Threefry keys into which a tag and numbers are folded."""
    return threefry.fold_in(jax.random.key_data(keys), tag, *numbers)
