"""The log-probabilities of a round's tokens, from the target's logits that the round has anyway."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core.laws import highest, log_prob
from jaxspec.core.sampling import Sampling
from jaxspec.decode.state import Logprobs


def empty(batch: int, size: int, top: int) -> Logprobs:
    """Zeros for `size` tokens of each row, with `top` alternatives each."""
    one, many = jnp.zeros((batch, size), jnp.float32), jnp.zeros((batch, size, top), jnp.float32)
    return Logprobs(one, one, many, many.astype(jnp.int32))


def along(
    path: Int[Array, "B M"],
    tokens: Int[Array, "B M"],
    count: Int[Array, ""],
    logits: Float[Array, "B N V"],
    scores: Float[Array, "B N V"],
    sampling: Sampling,
    top: int,
    drawn: bool,
) -> Logprobs:
    """Those of the tokens after each node of a path, `[B, M]`.

    One depth after the other, and only as deep as some row went: the cost is that of the tokens that are emitted.

    Args:
        path: nodes from the root on; negative past the path's end, where the result is undefined.
        tokens: the token after each.
        count: the largest number of tokens in a row; zeros after it.
        logits: the target's, raw.
        scores: the same, as `jaxspec.core.laws.scores` gives them.
        sampling: the rows' settings.
        top: K.
        drawn: see `jaxspec.core.laws.log_prob`.
    """

    def at(depth: Array) -> Logprobs:
        node = jnp.maximum(lax.dynamic_slice_in_dim(path, depth, 1, 1), 0)[:, :, None]
        token = lax.dynamic_slice_in_dim(tokens, depth, 1, 1)
        raw = jnp.take_along_axis(logits, node, 1)
        raw = raw.astype(jnp.promote_types(raw.dtype, jnp.float32))
        total = jax.nn.logsumexp(raw, -1, keepdims=True)
        best, ids = highest(raw, top) if top else (raw[..., :0], token[..., None][..., :0])
        return Logprobs(
            (jnp.take_along_axis(raw, token[..., None], -1) - total)[..., 0],
            log_prob(jnp.take_along_axis(scores, node, 1), token, sampling, drawn),
            best - total,
            ids,
        )

    def put(depth: Array, found: Logprobs) -> Logprobs:
        def write(rows: Array, new: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(rows, new.astype(rows.dtype), depth, 1)

        return jax.tree.map(write, found, at(depth))

    batch, size = path.shape
    return lax.fori_loop(0, count, put, empty(batch, size, top))
