"""Toy language models whose every law is known, for tests of decoders, drafters and rules.

They read their context through cache and mask as a transformer does, so a wrong slot, mask or position gives
wrong text.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxspec.analysis.enumeration import Law
from jaxspec.core import cache as caches
from jaxspec.core.draw import Draw
from jaxspec.core.laws import log_law, scores
from jaxspec.core.networks import LanguageModel
from jaxspec.core.noise import gumbel
from jaxspec.core.records import KV, Advance, Cache, Context, Params, Proposal, Window
from jaxspec.core.sampling import GREEDY, Sampling
from jaxspec.core.tree import Topology, TreeShape
from jaxspec.errors import InvalidConfig

TIE = 1e-3
"""A `tie_gap` below this is a tie in float32: the logits of two widths differ by up to some 1e-4."""


@dataclasses.dataclass(frozen=True)
class TableLM:
    """A Markov model: the logits after a text are looked up by its last `order` tokens.

    It also counts what it sees: where the number of visible tokens is not the position, the logits are others.

    Attributes:
        vocab: V; the table has V^(order + 1) entries.
        context: the longest text.
        order: 0, 1 or 2.
    """

    vocab: int
    context: int = 1 << 20
    order: int = 2

    def __post_init__(self):
        if self.order not in (0, 1, 2):
            raise InvalidConfig(f"a table looks at 0, 1 or 2 tokens, not {self.order!r}")

    def init_params(self, key: Array, scale: float = 2.0) -> Params:
        """Random logits of standard deviation `scale`."""
        shape = (self.vocab + 1, self.vocab, self.vocab)[2 - self.order :]
        return {"table": scale * jax.random.normal(key, shape)}

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Keys and values both hold (token, position)."""
        return caches.empty_cache(1, batch, 1, capacity, 2, jnp.float32)

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
        text = jnp.clip(previous, 0, self.vocab), jnp.clip(window.tokens, 0, self.vocab - 1)
        table = params["table"][text[2 - self.order :]]
        return jnp.where(wrong[..., None], -table, table), new

    def head(self, params: Params, features: Float[Array, "*b V"]) -> Float[Array, "*b V"]:
        return features

    def logits(self, params: Params, text: list[int]) -> Float[Array, "V"]:
        """The logits after a text, looked up directly: the reference."""
        return params["table"][(text[-2] if len(text) > 1 else self.vocab, text[-1])[2 - self.order :]]


def laws(lm: LanguageModel, params: Params, prompt: Sequence[int], sampling: Sampling) -> Law:
    """What a language model really draws from after a prompt: the law that its text, in whatever way, must follow.

    The whole text is read anew for every law, in a call without a cache; the settings are applied in float64.

    Args:
        lm: any language model, with `params`; all texts of a length are read at once, so a small vocabulary.
        prompt: ids; the laws are those of what follows.
        sampling: the settings, one for all rows.
    """

    @functools.cache
    def after(length: int) -> np.ndarray:
        texts = np.array(list(itertools.product(range(lm.vocab), repeat=length)), int)
        tokens = np.concatenate([np.tile(np.asarray(prompt, int), (len(texts), 1)), texts], axis=1)
        logits = _logits(lm, params, jnp.asarray(tokens, jnp.int32))
        with jax.enable_x64(True):
            return np.exp(_log_law(np.asarray(logits, np.float64)[None], sampling.rows(1, lm.vocab))[0])

    def law(text: tuple[int, ...]) -> np.ndarray:
        return after(len(text))[np.ravel_multi_index(text, (lm.vocab,) * len(text)) if text else 0]

    return law


@jax.jit
def _log_law(logits: Array, row: Sampling) -> Array:
    return log_law(scores(logits, row), row)


@functools.partial(jax.jit, static_argnums=0)
def _logits(lm: LanguageModel, params: Params, tokens: Array) -> Array:
    """The logits after each of these texts `[n, length]`, `[n, V]`."""
    count, size = tokens.shape
    causal = jnp.broadcast_to(jnp.tri(size, dtype=bool), (count, size, size))
    window = Window(tokens, jnp.broadcast_to(jnp.arange(size), tokens.shape), causal)
    features, _ = lm.apply(params, window, lm.init_cache(count, size))
    return lm.head(params, features[:, -1:])[:, 0]


@dataclasses.dataclass(frozen=True)
class Script:
    """A drafter that proposes after every token what its parameters `[V, N]` say; anything at all may stand there.

    Its tokens are point masses, and its state counts the tokens it was told of.

    Attributes:
        tree: their topology.
    """

    tree: Topology

    draws = False
    calls = 0

    @property
    def shape(self) -> TreeShape:
        return self.tree.shape

    def init(self, params: Params, batch: int, capacity: int) -> Array:
        return jnp.zeros((batch,), jnp.int32)

    def absorb(self, params: Params, state: Array, advance: Advance) -> Array:
        return state + advance.count

    def propose(self, params: Params, state: Array, context: Context, draw: Draw) -> tuple[Proposal, Array]:
        root = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)[:, 0]
        return Proposal(params[root], self.tree.tree), state


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
    logits = _logits(lm, params, jnp.asarray([text]))
    row = sampling.rows(1, lm.vocab)
    score = np.asarray(scores(logits[:, None], row), np.float64)[0, 0]
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
