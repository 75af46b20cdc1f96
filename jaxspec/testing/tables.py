"""Toy language models whose every law is known, for tests of decoders, drafters and rules.

They read their context through cache and mask as a transformer does, so a wrong slot, mask or position gives
wrong text.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxspec.core import cache as caches
from jaxspec.core.noise import gumbel
from jaxspec.core.protocols import LanguageModel
from jaxspec.core.records import KV, Cache, Params, Window
from jaxspec.core.sampling import GREEDY, Sampling, scores

TIE = 1e-3
"""A `tie_gap` below this is a tie in float32: the logits of two widths differ by up to some 1e-4."""


@dataclasses.dataclass(frozen=True)
class TableLM:
    """An order-2 Markov model: the logits after a text are looked up by its last two tokens.

    It also counts what it sees: where the number of visible tokens is not the position, the logits are others.

    Attributes:
        vocab: V, at most a few dozen: the table has V^3 entries.
    """

    vocab: int
    context: int = 1 << 20

    def init_params(self, key: Array, scale: float = 2.0) -> Params:
        """Random logits of standard deviation `scale`."""
        return {"table": scale * jax.random.normal(key, (self.vocab + 1, self.vocab, self.vocab))}

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Keys and values both hold (token, position)."""
        return caches.empty(1, batch, 1, capacity, 2, jnp.float32)

    def apply(
        self, params: Params, window: Window, cache: Cache, past: KV | None = None
    ) -> tuple[Float[Array, "B T V"], KV]:
        own = jnp.stack([window.tokens, window.positions], axis=-1).astype(jnp.float32)
        new = KV(own[None, :, None], own[None, :, None])
        inside = own if past is None else jnp.concatenate([past.keys[0, :, 0], own], axis=1)
        seen = jnp.concatenate([cache.kv.keys[0, :, 0], inside], axis=1)  # [B, S + W, 2]
        batch, size, _ = own.shape
        prefix = jnp.arange(cache.kv.keys.shape[3]) < cache.length[:, None, None]
        visible = jnp.concatenate([jnp.broadcast_to(prefix, (batch, size, prefix.shape[2])), window.mask], axis=2)
        before = visible & (seen[:, None, :, 1] == window.positions[:, :, None] - 1)
        previous = jnp.where(before, seen[:, None, :, 0], 0).sum(-1).astype(jnp.int32)
        previous = jnp.where(before.any(-1), previous, self.vocab)
        wrong = visible.sum(-1) != window.positions + 1
        table = params["table"][jnp.clip(previous, 0, self.vocab), jnp.clip(window.tokens, 0, self.vocab - 1)]
        return jnp.where(wrong[..., None], -table, table), new

    def head(self, params: Params, features: Float[Array, "*b V"]) -> Float[Array, "*b V"]:
        return features

    def logits(self, params: Params, text: list[int]) -> Float[Array, "V"]:
        """The logits after a text, looked up directly: the reference."""
        return params["table"][text[-2] if len(text) > 1 else self.vocab, text[-1]]


def tie_gap(
    lm: LanguageModel,
    params: Params,
    text: list[int],
    tokens: tuple[int, int],
    key: Array,
    sampling: Sampling,
) -> float:
    """How far apart two programs' choices after `text` really are: a certificate of a tie if it is tiny.

    Target calls of different width round differently, so where two tokens' perturbed scores differ by less than
    that rounding, either is right. Returns the difference of the perturbed scores of the two tokens or, if
    smaller, how close (in probability) one of them stands to the border of top-p, or (in score) of min-p.

    Args:
        lm: the target, with `params`.
        text: the tokens both agree on.
        tokens: the two that follow.
        key: the row's key.
        sampling: the row's settings, as numbers.
    """
    size = len(text)
    window = Window(jnp.asarray([text]), jnp.arange(size)[None], jnp.asarray(np.tri(size, dtype=bool))[None])
    features, _ = jax.jit(lm.apply)(params, window, lm.init_cache(1, size))
    row = sampling.rows(1, lm.vocab)
    score = np.asarray(scores(lm.head(params, features[:, -1:]), row), np.float64)[0, 0]
    greedy = float(row.temperature[0]) < GREEDY
    noise = gumbel(key[None], jnp.asarray([[size]]), lm.vocab, not greedy)
    perturbed = score + np.asarray(noise, np.float64)[0, 0]
    gaps = [abs(perturbed[tokens[0]] - perturbed[tokens[1]])]
    law = np.exp(score - score.max())
    law /= law.sum()
    for token in tokens:
        if float(row.top_p[0]) < 1:
            gaps.append(abs(law[score > score[token]].sum() - float(row.top_p[0])))
        if float(row.min_p[0]) > 0:
            gaps.append(abs(score[token] - score.max() - np.log(float(row.min_p[0]))))
    return float(min(gaps))
