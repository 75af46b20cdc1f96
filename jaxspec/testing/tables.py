"""Toy models with known laws, for tests of decoders, drafters and rules.

A `TableLM` reads its context through cache and mask as a transformer does, so a wrong slot, mask or position gives
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
from jaxspec.core.drafter import Needs
from jaxspec.core.draw import Draw
from jaxspec.core.laws import log_law, scores, widened
from jaxspec.core.networks import LanguageModel
from jaxspec.core.noise import draw_gumbel
from jaxspec.core.processor import Beginning, process, process_prefixes, read_text
from jaxspec.core.records import KV, Advance, Cache, Context, Params, Proposal, Window
from jaxspec.core.sampling import MIN_TEMPERATURE, Sampling
from jaxspec.core.topology import Topology
from jaxspec.core.tree import TreeShape
from jaxspec.errors import InvalidConfig

TIE_GAP = 1e-3
"""A `tie_gap` below this is a tie in float32, where logits of two widths differ by up to about 1e-4."""


@dataclasses.dataclass(frozen=True)
class TableLM:
    """A Markov model: a table holds the logits after the last `order` tokens.

    The model also counts the visible tokens. Where their number does not match the position, the logits are negated.

    Attributes:
        vocab: V. The table has V^(order + 1) entries, and V^2 more for texts of one token if the order is 2.
        context: the length of the longest text.
        order: 0, 1 or 2.
    """

    vocab: int
    context: int = 1 << 20
    order: int = 2

    def __post_init__(self):
        if self.order not in (0, 1, 2):
            raise InvalidConfig(f"order must be 0, 1 or 2, got {self.order!r}")

    def init_params(self, key: Array, scale: float = 2.0) -> Params:
        """Returns random logits of standard deviation `scale`."""
        shape = (self.vocab + 1, self.vocab, self.vocab)[2 - self.order :]
        return {"table": scale * jax.random.normal(key, shape)}

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Returns an empty cache, whose keys and values both hold (token, position)."""
        return caches.empty_cache(1, batch, 1, capacity, 2, jnp.float32)

    def apply(
        self, params: Params, window: Window, cache: Cache, past: KV | None = None
    ) -> tuple[Float[Array, "B T V"], KV]:
        new_pairs = jnp.stack([window.tokens, window.positions], axis=-1).astype(jnp.float32)
        new = KV(new_pairs[None, :, None], new_pairs[None, :, None])
        inside = new_pairs if past is None else jnp.concatenate([past.keys[0, :, 0], new_pairs], axis=1)
        seen = jnp.concatenate([cache.stores.keys[0, :, 0], inside], axis=1)  # [B, S + W, 2]
        batch, size, _ = new_pairs.shape
        prefix = jnp.arange(cache.stores.keys.shape[3]) < cache.length[:, None, None]
        visible = jnp.concatenate([jnp.broadcast_to(prefix, (batch, size, prefix.shape[2])), window.mask], axis=2)
        before = visible & (seen[:, None, :, 1] == window.positions[:, :, None] - 1)
        previous = jnp.where(before, seen[:, None, :, 0], 0).sum(-1).astype(jnp.int32)
        previous = jnp.where(before.any(-1), previous, self.vocab)
        wrong = visible.sum(-1) != window.positions + 1
        text = jnp.clip(previous, 0, self.vocab), jnp.clip(window.tokens, 0, self.vocab - 1)
        table = params["table"][text[2 - self.order :]]
        return jnp.where(wrong[..., None], -table, table), new

    commit = staticmethod(caches.append_to_cache)

    def head(self, params: Params, features: Float[Array, "*b V"]) -> Float[Array, "*b V"]:
        return features

    def logits(self, params: Params, text: list[int]) -> Float[Array | np.ndarray, "V"]:
        """Returns the logits after a text by direct lookup, the reference for tests."""
        return params["table"][(text[-2] if len(text) > 1 else self.vocab, text[-1])[2 - self.order :]]


def model_law(lm: LanguageModel, params: Params, prompt: Sequence[int], sampling: Sampling) -> Law:
    """Returns the law that the text of a language model must follow after a prompt, however it is decoded.

    Each text is read as a whole, without a cache. The sampling settings are applied in float64.

    Args:
        lm: any language model with a small vocabulary: all texts of one length are read in one call.
        params: the parameters of the model.
        prompt: the token ids of the prompt; the law describes the tokens after it.
        sampling: the sampling settings.
    """

    @functools.cache
    def after(length: int) -> np.ndarray:
        texts = np.array(list(itertools.product(range(lm.vocab), repeat=length)), int)
        tokens = np.concatenate([np.tile(np.asarray(prompt, int), (len(texts), 1)), texts], axis=1)
        logits = _logits(lm, params, jnp.asarray(tokens, jnp.int32))
        with jax.enable_x64(True):
            rows = sampling.rows(len(texts), lm.vocab)
            return np.exp(_log_law(np.asarray(logits, np.float64), rows, jnp.asarray(tokens, jnp.int32), len(prompt)))

    def law(text: tuple[int, ...]) -> np.ndarray:
        return after(len(text))[np.ravel_multi_index(text, (lm.vocab,) * len(text)) if text else 0]

    return law


@functools.partial(jax.jit, static_argnums=3)
def _log_law(logits: Array, rows: Sampling, texts: Array, start: int) -> Array:
    """Returns the log-laws `[n, V]` after texts `[n, length]`, of which the first `start` tokens are the prompt."""
    count, size = texts.shape
    beginning = Beginning(logits.shape[1], size, jnp.full((count, 1), -1))
    states = read_text(rows.processors, beginning, texts, jnp.full(count, size), jnp.full(count, start))
    changed = process(rows.processors, states, jnp.zeros((count, 1, 0), jnp.int32), widened(logits)[:, None])
    return log_law(scores(changed, rows), rows)[:, 0]


@functools.partial(jax.jit, static_argnums=0)
def _logits(lm: LanguageModel, params: Params, tokens: Array) -> Array:
    """Returns the logits after texts `[n, length]`, as `[n, V]`."""
    count, size = tokens.shape
    causal = jnp.broadcast_to(jnp.tri(size, dtype=bool), (count, size, size))
    window = Window(tokens, jnp.broadcast_to(jnp.arange(size), tokens.shape), causal)
    features, _ = lm.apply(params, window, lm.init_cache(count, size))
    return lm.head(params, features[:, -1:])[:, 0]


@dataclasses.dataclass(frozen=True)
class ScriptedDrafter:
    """A drafter whose parameters `[V, N]` are the tokens to propose after each token; they may have any value.

    The tokens are point masses. The state is the number of absorbed tokens.

    Attributes:
        tree: the topology of the proposals.
    """

    tree: Topology

    draws = False
    calls = 0

    @property
    def shape(self) -> TreeShape:
        return self.tree.shape

    @property
    def needs(self) -> Needs:
        return Needs(tree=self.tree)

    def init(self, params: Params, batch: int, capacity: int) -> Array:
        return jnp.zeros((batch,), jnp.int32)

    def absorb(self, params: Params, state: Array, advance: Advance) -> Array:
        return state + advance.count

    def propose(self, params: Params, state: Array, context: Context, draw: Draw) -> tuple[Proposal, Array]:
        root = context.root
        return Proposal(params[root], self.tree.tree), state


def tie_gap(
    lm: LanguageModel,
    params: Params,
    text: list[int],
    tokens: tuple[int, int],
    key: Array,
    sampling: Sampling,
    start: int = 0,
) -> float:
    """Returns how close a choice between two tokens is; a tiny gap certifies a tie.

    Target calls of different width round differently. Where the perturbed scores of two tokens differ by less than
    the rounding error, both tokens are correct. The gap is the difference of these scores or, if smaller, the distance
    of one of the tokens from the top-p limit (in probability) or the min-p limit (in log-probability).

    Args:
        lm: the target.
        params: the parameters of the model.
        text: the tokens before the choice.
        tokens: the two tokens to compare.
        key: the row's key.
        sampling: the row's settings, as numbers.
        start: the position of the first new token, for processors. Stop tokens are not known to them here.
    """
    size = len(text)
    row = sampling.rows(1, lm.vocab)
    read = jnp.asarray(text, jnp.int32)
    beginning = Beginning(lm.vocab, size, jnp.full((1, 1), -1))
    logits = widened(_logits(lm, params, read[None]))
    logits = process_prefixes(row.processors, beginning, read, jnp.full(1, size), start, logits)
    score = np.asarray(scores(logits[:, None], row), np.float64)[0, 0]
    greedy = float(row.temperature[0]) < MIN_TEMPERATURE
    noise = draw_gumbel(key[None], jnp.asarray([[size]]), lm.vocab, not greedy)
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
