"""Draft heads as the draft of `jaxspec.tuning.acceptance`: their logits along a text, by drafted token."""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.core.networks import LanguageModel
from jaxspec.core.records import Params
from jaxspec.heads.network import DraftHeads
from jaxspec.models.model import Model
from jaxspec.train import losses
from jaxspec.train.evaluate import trainee_of
from jaxspec.train.step import compute_features
from jaxspec.train.trainee import Trainee

MAX_DRAFTED_TOKENS = 5
"""The largest number of drafted tokens whose laws are compared."""


class HeadParams(NamedTuple):
    """The parameters of the target and the heads, and the target's tables that the heads read."""

    target: Params
    heads: Params
    frozen: losses.FrozenTarget


@dataclasses.dataclass(frozen=True)
class HeadLaws:
    """Draft heads whose laws along a text are computed; static and hashable.

    Attributes:
        trainee: the heads.
        network: the target's network with the taps of the heads.
    """

    trainee: Trainee
    network: LanguageModel

    @property
    def context(self) -> int:
        """The largest number of tokens that the heads read."""
        return self.network.context

    def along(self, params: HeadParams, text: list[int], first: int, size: int, slots: int) -> list[np.ndarray]:
        """Returns logits of the drafted tokens, `[size, R]` each.

        Row i of drafted token d, counted from 0, holds the logits of the token after `text[first + d + i]`, in a round
        whose root is `text[first + i]`. The tokens that were drafted before it are the text's own tokens.

        Args:
            params: the parameters.
            text: the tokens.
            first: the root of row 0, at least 1.
            size: the number of rows, some of which may be past the text.
            slots: the padded length of the text, at least `first - 1 + size`.
        """
        tokens = np.zeros((1, slots), np.int32)
        tokens[0, : len(text)] = text
        segments = (np.arange(slots) < len(text)).astype(np.int32)[None]
        return list(map(np.asarray, _unroll(self, size, params, tokens, segments, first - 1)))

    def head(self, params: HeadParams, rows: Float[Array, "n 1 R"]) -> Float[Array, "n 1 V"]:
        """Returns logits of the whole vocabulary, which are minus infinity for tokens that cannot be drafted."""
        ids, size = params.frozen.ids, self.network.vocab
        return rows[..., :size] if ids is None else jnp.full((len(rows), 1, size), -jnp.inf).at[..., ids].set(rows)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _unroll(
    laws: HeadLaws,
    size: int,
    params: HeadParams,
    tokens: Int[Array, "1 T"],
    segments: Int[Array, "1 T"],
    start: Int[Array, ""],
) -> list[Float[Array, "size R"]]:
    features = compute_features(laws.network, params.target, tokens, segments)
    batch = losses.Batch(tokens, segments, segments > 0, features)
    logits = itertools.islice(laws.trainee.unroll_logits(params.heads, params.frozen, batch), MAX_DRAFTED_TOKENS)
    return [lax.dynamic_slice_in_dim(each[0], start, size) for each in logits]


def build_head_laws(target: Model, heads: DraftHeads, config: Any = None) -> tuple[HeadLaws, HeadParams]:
    """Returns heads and their parameters.

    Args:
        target: the target.
        heads: the heads.
        config: sizes that replace the sizes of the heads, as the drafter's options state; None for their own sizes.
    """
    trainee = trainee_of(heads if config is None else dataclasses.replace(heads, config=config))
    frozen = losses.freeze(trainee, target.lm, target.params, heads.params.get("tokens"))
    kept = {name: value for name, value in heads.params.items() if name != "tokens"}
    return HeadLaws(trainee, trainee.network(target.lm)), HeadParams(target.params, kept, frozen)
