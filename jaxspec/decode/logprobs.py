"""Log-probabilities of a round's tokens, from the logits that verification has computed."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core.laws import highest, log_prob, log_total, scores
from jaxspec.decode.state import Logprobs
from jaxspec.decode.verify import Processing


def empty_logprobs(batch: int, size: int, top: int) -> Logprobs:
    """Returns zeros for `size` tokens per row, with `top` alternatives each."""
    chosen, alternatives = jnp.zeros((batch, size), jnp.float32), jnp.zeros((batch, size, top), jnp.float32)
    return Logprobs(chosen, chosen, alternatives, alternatives.astype(jnp.int32))


def compute_logprobs(
    path: Int[Array, "B M"],
    tokens: Int[Array, "B M"],
    count: Int[Array, ""],
    logits: Float[Array, "B N V"],
    processing: Processing,
    top: int,
    drawn: bool,
) -> Logprobs:
    """Returns the log-probabilities of the tokens after each node of a path, `[B, M]`.

    Depths are computed one after another up to `count`, so the cost grows only with the number of emitted tokens.

    Args:
        path: nodes, the root first; negative after the end of the path, where the result is undefined.
        tokens: the token after each node.
        count: the largest number of tokens of any row; the result is zero after it.
        logits: the target's raw logits.
        processing: the rows' settings and processors.
        top: K, the number of alternatives.
        drawn: see `jaxspec.core.laws.log_prob`.
    """

    rest = processing.rest

    def at(depth: Array) -> Logprobs:
        node = jnp.maximum(lax.dynamic_slice_in_dim(path, depth, 1, 1), 0)[:, :, None]
        token = lax.dynamic_slice_in_dim(tokens, depth, 1, 1)
        raw = jnp.take_along_axis(logits, node, 1)
        raw = raw.astype(jnp.promote_types(raw.dtype, jnp.float32))
        total = log_total(raw)
        best, ids = highest(raw, top) if top else (raw[..., :0], token[..., None][..., :0])
        return Logprobs(
            (jnp.take_along_axis(raw, token[..., None], -1) - total)[..., 0],
            log_prob(scores(processing.change(raw, node[..., 0]), rest), token, rest, drawn),
            best - total,
            ids,
        )

    def put(depth: Array, logprobs: Logprobs) -> Logprobs:
        def write(rows: Array, new: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(rows, new.astype(rows.dtype), depth, 1)

        return jax.tree.map(write, logprobs, at(depth))

    batch, size = path.shape
    return lax.fori_loop(0, count, put, empty_logprobs(batch, size, top))
