"""The properties of every correct processor, as a function that raises `AssertionError`."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core.processor import (
    Beginning,
    ForcingProcessor,
    PointwiseProcessor,
    Processor,
    draws_tokens,
    process_some,
    read_text,
    spread_states,
    walk,
)
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import Topology, branching
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Request, Result, Weights
from jaxspec.rules.coupled import Coupled
from jaxspec.testing.properties import require
from jaxspec.testing.tables import ScriptedDrafter, TableLM

_PATH = 3

# Compiled as wholes, as in the decoder: a single compilation for each shape, in place of one for each operation. The
# programs take sampling settings, because a pytree of a processor alone may not say its class (`Sampling`).


@jax.jit
def _apply_all(sampling: Sampling, state: Any, path: jax.Array, logits: jax.Array) -> jax.Array:
    return sampling.processors[0].apply(state, path, logits)


@jax.jit
def _absorb_all(sampling: Sampling, state: Any, tokens: jax.Array, count: jax.Array, start: jax.Array) -> Any:
    return sampling.processors[0].absorb(state, tokens, count, start)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _read_all(
    sampling: Sampling, vocab: int, slots: int, stops: jax.Array, text: jax.Array, length: jax.Array, start: jax.Array
) -> Any:
    return read_text(sampling.processors, Beginning(vocab, slots, stops), text, length, start)[0]


def _apply(settings: Processor, state: Any, path: jax.Array, logits: jax.Array) -> jax.Array:
    return _apply_all(Sampling(processors=[settings]), state, path, logits)


def _absorb(settings: Processor, state: Any, tokens: jax.Array, count: jax.Array, start: jax.Array) -> Any:
    return _absorb_all(Sampling(processors=[settings]), state, tokens, count, start)


def _read(settings: Processor, *arguments: Any) -> Any:
    """Returns the state after a text."""
    return _read_all(Sampling(processors=[settings]), *arguments)


def check_processor(
    processor: Processor,
    vocab: int = 12,
    texts: Sequence[Sequence[int]] | None = None,
    stop_ids: Sequence[int] = (),
    seed: int = 0,
) -> None:
    """Checks that a processor changes logits by the text alone.

    The logits after a text must be the same, bit by bit, however the text is divided into absorbed text and path, alone
    and beside other rows and nodes, with any padding. `apply_to` and `forced` must agree with `apply`. Texts that are
    decoded with a tree of wrong and right drafts must be those of plain decoding.

    Args:
        processor: the processor, with the same settings for all rows.
        vocab: V, the size of the vocabulary.
        texts: token ids of at least two texts of at least four tokens each, on which the processor is tried; None for
            random texts. A grammar needs texts that it accepts.
        stop_ids: the stop tokens.
        seed: the seed of texts and logits.

    Raises:
        AssertionError: a property does not hold; the message names it.
    """
    rng = np.random.default_rng(seed)
    if texts is None:
        texts = [rng.integers(0, vocab, size).tolist() for size in (18, 11, 7)]
    rows = [list(map(int, text)) for text in texts]
    require(len(rows) > 1 and min(map(len, rows)) > _PATH, processor, "needs two texts or more, of four tokens or more")
    settings = processor.rows(len(rows), vocab)
    _check_divisions(settings, rows, vocab, stop_ids, rng)
    _check_decoding(processor, rows, vocab, stop_ids, seed)


def _check_divisions(
    settings: Processor, rows: list[list[int]], vocab: int, stop_ids: Sequence[int], rng: np.random.Generator
) -> None:
    """Compares divisions of each text; the prompt is the first half of a text."""
    batch, longest = len(rows), max(map(len, rows))
    stops = jnp.asarray(np.tile([*stop_ids, -1], (batch, 1)), jnp.int32)
    text = np.asarray([row + [0] * (longest - len(row)) for row in rows], np.int32)
    lengths, starts = np.asarray([len(row) for row in rows]), np.asarray([len(row) // 2 for row in rows])
    logits = jnp.asarray(rng.normal(size=(batch, _PATH + 1, vocab)), jnp.float32)

    def absorbed(length: np.ndarray, padding: int = 0) -> Any:
        """Returns the state after the first tokens of each text, with other tokens behind them."""
        tokens = np.where(np.arange(longest) < length[:, None], text, padding)
        return _read(settings, vocab, longest + 8, stops, jnp.asarray(tokens), jnp.asarray(length), jnp.asarray(starts))

    # The last tokens of a text as a path: the node at index i has i of them.
    first = lengths - _PATH
    ends = np.stack([text[np.arange(batch), first + i] for i in range(_PATH)], 1)
    path = np.where(np.arange(_PATH) < np.arange(_PATH + 1)[:, None], ends[:, None], -1).astype(np.int32)
    state = absorbed(first)
    tree = _apply(settings, state, jnp.asarray(path), logits)
    require(tree.shape == logits.shape and tree.dtype == logits.dtype, settings, "changes the shape or dtype of logits")
    require(not np.isnan(tree).any() and not np.isposinf(tree).any(), settings, "writes NaN or +inf into logits")
    nothing = jnp.zeros((batch, 1, 0), jnp.int32)
    for i in range(_PATH + 1):
        after = _apply(settings, absorbed(first + i), nothing, logits[:, i : i + 1])[:, 0]
        require(np.array_equal(after, tree[:, i]), settings, "gives a path other logits than the absorbed text")
        alone = _apply(settings, state, jnp.asarray(path[:, i : i + 1]), logits[:, i : i + 1])[:, 0]
        require(np.array_equal(alone, tree[:, i]), settings, "gives a node other logits beside other nodes")
    padded = jnp.asarray(np.pad(path, ((0, 0), (0, 0), (0, 2)), constant_values=-1))
    same = np.array_equal(_apply(settings, state, padded, logits), tree)
    require(same, settings, "depends on the padding of paths")
    same = np.array_equal(_apply(settings, absorbed(first, vocab - 1), jnp.asarray(path), logits), tree)
    require(same, settings, "depends on the tokens behind a text")
    _check_rounds(settings, state, ends, starts - first, jnp.asarray(path), logits, absorbed(lengths))
    _check_some(settings, state, jnp.asarray(path), logits, tree, rng)


def _check_rounds(
    settings: Processor, state: Any, ends: np.ndarray, start: np.ndarray, path: jax.Array, logits: jax.Array, whole: Any
) -> None:
    """Absorbs the last tokens one by one, with a wrong token behind each, as rounds of decoding do."""
    one, nothing = jnp.ones(len(ends), jnp.int32), path[:, :, :0]
    for i in range(ends.shape[1]):
        pair = jnp.asarray(np.stack([ends[:, i], (ends[:, i] + 1) % logits.shape[2]], 1), jnp.int32)
        idle = _absorb(settings, state, pair, jnp.zeros_like(one), jnp.asarray(start - i))
        same = np.array_equal(_apply(settings, idle, nothing, logits), _apply(settings, state, nothing, logits))
        require(same, settings, "changes its state although no token is absorbed")
        state = _absorb(settings, state, pair, one, jnp.asarray(start - i))
    same = np.array_equal(_apply(settings, state, nothing, logits), _apply(settings, whole, nothing, logits))
    require(same, settings, "depends on how a text is divided into rounds")


def _check_some(
    settings: Processor, state: Any, path: jax.Array, logits: jax.Array, tree: jax.Array, rng: np.random.Generator
) -> None:
    """Compares `apply_to` and `forced` with `apply`."""
    vocab = logits.shape[2]
    some = jnp.asarray(rng.integers(-1, vocab, (*logits.shape[:2], 5)), jnp.int32)
    if isinstance(settings, PointwiseProcessor):
        given = jnp.take_along_axis(logits, jnp.maximum(some, 0), 2)
        expected = jnp.where(some < 0, given, jnp.take_along_axis(tree, jnp.maximum(some, 0), 2))
        got = process_some([settings], [state], path, some, given, vocab)
        require(np.array_equal(got, expected), settings, "has an apply_to that differs from apply")
    if isinstance(settings, ForcingProcessor):
        only = np.asarray(settings.forced(walk(settings.step, spread_states(state, path.shape[1]), path)))[..., None]
        forced = np.where((only >= 0) & (np.arange(vocab) == only), tree, 0.0)
        require(not np.isneginf(forced).any(), settings, "forbids the token that it forces")


def _check_decoding(
    processor: Processor, rows: list[list[int]], vocab: int, stop_ids: Sequence[int], seed: int
) -> None:
    """Compares texts with drafts and without, and of a row alone."""
    network, batch, longest = TableLM(vocab, order=1), len(rows), max(map(len, rows))
    params, tree = network.init_params(jax.random.key(seed)), branching(2, 2, 1)
    likely = np.asarray(jax.tree.leaves(params)[0]).reshape(-1, vocab)[:vocab]
    script = _follow(tree, np.argsort(-likely, -1))

    decoder = Decoder(network, ScriptedDrafter(tree), Coupled(), chunk=4)
    stops = jnp.asarray(np.tile([*stop_ids, -1], (batch, 1)), jnp.int32)
    temperature = 0.0 if draws_tokens([processor]) else 0.7
    sampling = Sampling(temperature=temperature, processors=[processor]).rows(batch, vocab)
    slots = decoder.slots(longest + 12)
    run = jax.jit(lambda weights, request: decoder.generate(weights, request, slots))

    def decode(rows: list[list[int]], keys: jax.Array, script: np.ndarray) -> list[list[int]]:
        tokens = jnp.asarray([row + [0] * (longest - len(row)) for row in rows], jnp.int32)
        counts, budget = jnp.asarray([len(row) for row in rows]), jnp.full((batch,), 12)
        request = Request(tokens, counts, budget, keys, stops, sampling)
        return _texts(run(Weights(params, jnp.asarray(script)), request))

    keys = jax.random.split(jax.random.key(seed), batch)
    nothing = np.full_like(script, -1)
    plain = decode(rows, keys, nothing)
    among_copies = decode([rows[0]] * batch, keys, nothing)
    require(among_copies[0] == plain[0], processor, "gives a row another text beside other rows")
    require(decode(rows, keys, script) == plain, processor, "gives another text with drafts than without")


def _texts(result: Result) -> list[list[int]]:
    """Returns the tokens of every row, without the scratch tokens behind them."""
    pairs = zip(np.asarray(result.tokens), np.asarray(result.length), strict=True)
    return [tokens[:length].tolist() for tokens, length in pairs]


def _follow(tree: Topology, likely: np.ndarray) -> np.ndarray:
    """Returns the drafts after each token, `[V, N]`: the likeliest tokens after each node."""
    script = np.tile(np.arange(len(likely))[:, None], (1, tree.shape.nodes)).astype(np.int32)
    for node in range(1, tree.shape.nodes):
        parent, rank = int(tree.tree.parents[node]), int(tree.tree.ranks[node])
        script[:, node] = likely[script[:, parent], rank]
    return script
