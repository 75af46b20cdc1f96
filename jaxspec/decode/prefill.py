"""Reads prompts, before the first round and after text is appended."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jaxspec.core.drafter import Drafter
from jaxspec.core.networks import LanguageModel, empty_feature
from jaxspec.core.records import Advance, Status, Window
from jaxspec.decode.state import State, Weights
from jaxspec.decode.target_call import read


def prefill(target: LanguageModel, drafter: Drafter, chunk: int, weights: Weights, state: State) -> State:
    """Reads all text that was not read yet, in chunks of a fixed size.

    The target reads up to the token before the root. The drafter absorbs every token, the root included.

    Args:
        target: the target model.
        drafter: the drafter.
        chunk: the number of tokens read at once.
        weights: parameters of target and drafter.
        state: the state; any part of each row may have been read already.
    """
    causal = jnp.asarray(np.tri(chunk, dtype=bool))[None].repeat(state.length.shape[0], 0)
    steps = jnp.arange(chunk)

    def body(carry: tuple[State, Array]) -> tuple[State, Array]:
        state, last = carry
        cursor = state.cache.length
        positions = cursor[:, None] + steps
        # One more token than a chunk has, because after decoding the drafter has already absorbed the root.
        text = jnp.take_along_axis(
            state.tokens,
            jnp.minimum(cursor[:, None] + jnp.arange(chunk + 1), state.tokens.shape[1] - 1),
            1,
        )
        window = Window(text[:, :-1], positions, causal)
        features, entries = read(target, weights.target, window, state.cache)
        count = jnp.clip(state.length - 1 - cursor, 0, chunk)
        cache = target.commit(state.cache, entries, None, count, features)
        # A commit writes zeros in place of values that are not finite, so a row with such values must end here.
        broken = ~jnp.stack([jnp.isfinite(a).all((0, 2, 4)) for a in jax.tree.leaves(entries)]).all(0) & (
            steps < count[:, None]
        )
        status = jnp.where(broken.any(-1), Status.ERROR, state.status).astype(jnp.int32)
        ahead = state.absorbed - cursor  # 1 if the drafter has absorbed the root, else 0
        shift = ahead[:, None] + steps
        before = jnp.concatenate([last[:, None], features], axis=1)
        advance = Advance(
            jnp.take_along_axis(text, shift, 1),
            jnp.take_along_axis(before, shift[:, :, None], 1),
            jnp.clip(state.length - state.absorbed, 0, chunk),
            None,
            state.tokens,
            state.absorbed,
            weights.target,
        )
        draft = drafter.absorb(weights.draft, state.draft, advance)
        absorbed = state.absorbed + advance.count
        state = state._replace(cache=cache, draft=draft, absorbed=absorbed, status=status)
        return state, features[:, -1]

    def unread(carry: tuple[State, Array]) -> Array:
        return jnp.any(carry[0].absorbed < carry[0].length)

    before_first = empty_feature(target, weights.target, state.cache)
    return lax.while_loop(unread, body, (state, before_first))[0]
