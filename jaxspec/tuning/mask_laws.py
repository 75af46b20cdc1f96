"""A PARD model as the draft of `jaxspec.tuning.acceptance`: its features along a text, by drafted token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core import sizes
from jaxspec.core.records import Params
from jaxspec.drafters.pard import Pard
from jaxspec.tuning.head_laws import MAX_DRAFTED_TOKENS


@dataclasses.dataclass(frozen=True)
class MaskLaws:
    """The model of the drafter "pard", whose laws along a text are computed; static and hashable."""

    drafter: Pard

    @property
    def context(self) -> int:
        """The largest number of tokens that the model reads."""
        return self.drafter.network.context

    def along(self, params: Params, text: list[int], first: int, size: int, slots: int) -> list[np.ndarray]:
        """Returns, for each drafted token, features of the rows that guess it, `[size, E]`; see `HeadLaws.along`."""
        tokens = np.zeros((1, slots), np.int32)
        tokens[0, : len(text)] = text
        rows = np.asarray(_unroll(self.drafter, size, params, tokens, np.array([len(text)]), first))
        return list(rows.swapaxes(0, 1))

    def head(self, params: Params, rows: Float[Array, "n 1 E"]) -> Float[Array, "n 1 V"]:
        """Returns logits of the target's vocabulary."""
        return self.drafter.head(params, rows)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _unroll(
    drafter: Pard, size: int, params: Params, text: Int[Array, "1 S"], length: Int[Array, "1"], first: Int[Array, ""]
) -> Float[Array, "size D E"]:
    state = lax.while_loop(
        lambda state: (state.cache.length < length).all(),
        lambda state: drafter.read(params, state, text, length, sizes.PROMPT_CHUNK)[0],
        drafter.init(params, 1, text.shape[1]),
    )

    def guess(root: Int[Array, ""]) -> Float[Array, "D E"]:
        """Reads the root and masks, as a round does, after the text before the root."""
        before = state._replace(cache=state.cache._replace(length=root[None]))
        return drafter.read(params, before, text, root[None] + 1, 1, MAX_DRAFTED_TOKENS - 1)[1][0]

    return lax.map(guess, first + jnp.arange(size))
