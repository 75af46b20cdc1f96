"""Laws of a loaded model along a text, and the expected lengths of chains that follow from them."""

import functools
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.analysis import laws
from jaxspec.analysis.laws import AnyArray
from jaxspec.analysis.length import ChainLengths
from jaxspec.core import sizes
from jaxspec.core.checks import index, whole
from jaxspec.core.laws import log_law, scores, widened
from jaxspec.core.networks import LanguageModel
from jaxspec.core.processor import Beginning, process_prefixes
from jaxspec.core.records import Cache, Params, Window
from jaxspec.core.sampling import Sampling
from jaxspec.errors import CapacityError, EmptyPrompt, InvalidConfig, ShapeMismatch, TokenOutOfRange, shown

POSITIONS = 16
"""Positions whose laws are computed at once."""


def text_laws(
    lm: LanguageModel,
    params: Params,
    text: Sequence[int],
    sampling: Sampling = Sampling(temperature=1.0),
    first: int = 0,
) -> Float[np.ndarray, "n V"]:
    """Returns a model's law of the next token after each token of a text. The model reads the text once.

    Args:
        lm: the model, such as `model.lm`.
        params: its parameters, such as `model.params`.
        text: token ids.
        sampling: temperature, truncation and processors of the laws, as numbers. For processors, the prompt is
            `text[: first + 1]`, and no token is a stop token.
        first: the index of the first token after which a law is returned: one law for each token of `text[first:]`.

    Returns:
        Probabilities `[len(text) - first, V]`, in float32.

    Raises:
        JaxspecError: the text is empty, too long or not of token ids, or another argument is invalid.
    """
    if not isinstance(lm, LanguageModel) or isinstance(lm, type):
        raise InvalidConfig(f"lm must be a LanguageModel, such as model.lm; got {shown(lm)}")
    if not isinstance(sampling, Sampling):
        raise InvalidConfig(f"sampling must be a jaxspec.Sampling, got {shown(sampling)}")
    ids = _ids(text, lm.vocab, lm.context)
    first = whole("first", first, 0, len(ids) - 1)
    rows = sampling.rows(POSITIONS, lm.vocab)
    features = np.stack([*iterate_features(lm, params, ids)])[first:]
    chunks = []
    for start in range(0, len(features), POSITIONS):
        chunk = features[start : start + POSITIONS]
        padded = np.pad(chunk, ((0, POSITIONS - len(chunk)), (0, 0)), mode="edge")
        prefixes = jnp.minimum(first + 1 + start + jnp.arange(POSITIONS), len(ids))
        known = jnp.asarray(ids, jnp.int32), prefixes, first + 1
        chunks.append(np.asarray(_laws(lm, params, padded, rows, *known))[: len(chunk)])
    return np.concatenate(chunks)


def text_chain_lengths(
    target: Float[AnyArray, "n V"], draft: Float[AnyArray, "n V"], tokens: Int[AnyArray, "n"], depth: int
) -> ChainLengths:
    """Returns the expected accepted length of chains below every token of a text that the target has drawn.

    An average over drafts from the draft's law equals an average over texts from the target's law in which each text
    has the weight `draft / target`. So the mean over the positions is the expected length of a chain of `depth` tokens,
    without drafting. Each prefix of the chain has a weight. Under the rule "rejection", the weight is the product of
    `min(1, draft / target)` over the tokens of the prefix. Under "block" (and "traversal"), it is the smallest value
    of `min(1, draft / target)` over all prefixes of the prefix. In the bound, it is `min(1, draft / target)` of the
    whole prefix.

    Args:
        target: the target's laws of the tokens, `[T, V]`; see `text_laws`.
        draft: the draft's laws of the same tokens, `[T, V]`.
        tokens: the tokens, drawn from the target's laws, `[T]`.
        depth: D, the length of the chain.

    Returns:
        One length for each of the T - D + 1 chains. A single position is not an estimate; average over many positions.

    Raises:
        JaxspecError: the laws differ in shape, or there are fewer than D tokens.
    """
    laws.check_laws(target, draft, 1)
    depth = whole("depth", depth)
    ids = np.asarray(_ids(tokens, target.shape[-1], target.size))
    if target.shape[:-1] != ids.shape or len(ids) < depth:
        raise ShapeMismatch(
            f"target and draft must be laws [T, V] of the {len(ids)} tokens, with T at least {depth}; got laws of "
            f"shape {target.shape}"
        )
    target_probs, draft_probs = (
        np.take_along_axis(np.asarray(law, np.float64), ids[:, None], 1)[:, 0] for law in (target, draft)
    )
    with np.errstate(divide="ignore"):  # infinite where the draft cannot draw the token
        ratio = np.log(np.maximum(target_probs, np.finfo(np.float32).tiny)) - np.log(draft_probs)
    windows = np.lib.stride_tricks.sliding_window_view(ratio, depth)
    sums = np.cumsum(windows, -1)
    return ChainLengths(
        *(
            jnp.asarray(np.exp(-np.maximum(logs, 0.0)).sum(-1), jnp.float32)
            for logs in (np.cumsum(np.maximum(windows, 0.0), -1), np.maximum.accumulate(sums, -1), sums)
        )
    )


def iterate_features(
    lm: LanguageModel, params: Params, text: Sequence[int], slots: int | None = None
) -> Iterator[np.ndarray]:
    """Yields a model's features after every token, `[E]` each. Texts of all lengths share one compiled program, which
    reads chunks.

    Args:
        lm: the model.
        params: its parameters.
        text: token ids.
        slots: the number of cache slots; None for as many as the text needs.
    """
    cache = lm.init_cache(1, sizes.required_slots(len(text), sizes.PROMPT_CHUNK) if slots is None else slots)
    for start in range(0, len(text), sizes.PROMPT_CHUNK):
        chunk = list(text[start : start + sizes.PROMPT_CHUNK])
        tokens = jnp.asarray([chunk + [0] * (sizes.PROMPT_CHUNK - len(chunk))])
        features, cache = _read(lm, params, tokens, cache)
        yield from np.asarray(features, np.float32)[0, : len(chunk)]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _read(lm: LanguageModel, params: Params, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
    size = tokens.shape[1]
    window = Window(tokens, cache.length[:, None] + jnp.arange(size), jnp.tri(size, dtype=bool)[None])
    features, entries = lm.apply(params, window, cache)
    return features, lm.commit(cache, entries, None, jnp.full((1,), size), features)


@functools.partial(jax.jit, static_argnums=0)
def _laws(
    lm: LanguageModel,
    params: Params,
    features: Float[Array, "n E"],
    rows: Sampling,
    text: Int[Array, "S"],
    prefixes: Int[Array, "n"],
    start: Array | int,
) -> Float[Array, "n V"]:
    """Returns the laws after prefixes of a text; see `process_prefixes`."""
    logits = widened(lm.head(params, features[:, None]))
    if rows.processors:
        beginning = Beginning(lm.vocab, len(text), jnp.full((len(prefixes), 1), -1))
        logits = process_prefixes(rows.processors, beginning, text, prefixes, start, logits[:, 0])[:, None]
    return jnp.exp(log_law(scores(logits, rows), rows))[:, 0]


def _ids(text: Sequence[int] | AnyArray, vocab: int, limit: int) -> list[int]:
    """Returns token ids as a list.

    Raises:
        InvalidConfig: they are not a sequence of whole numbers.
        CapacityError: there are more than `limit`.
        EmptyPrompt: the text is empty.
        TokenOutOfRange: an id is not in the vocabulary.
    """
    try:
        size = -1 if isinstance(text, (str, bytes, Mapping)) else len(text)
        ids = [index(token) for token in text] if 0 <= size <= limit else [None]
    except Exception:  # not a sequence, a deleted array
        size, ids = -1, [None]
    if size > limit:
        raise CapacityError(f"the text has {size} tokens; at most {limit} are supported. Pass a shorter text")
    if None in ids:
        raise InvalidConfig(f"a text must be a list of token ids, got {shown(text)}")
    if not ids:
        raise EmptyPrompt("the text is empty; pass at least one token id")
    for i, token in enumerate(ids):
        if token is None or not 0 <= token < vocab:
            raise TokenOutOfRange(f"the text has token {shown(token)} at index {i}; ids go from 0 to {vocab - 1}")
    return [token for token in ids if token is not None]
