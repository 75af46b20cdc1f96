"""Toy requests, toy drafters, and a decoder written out in numpy."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from helpers.compiling import AS_USERS_DO, QUICK
from jaxspec.core.bias import LogitBias
from jaxspec.core.drafter import Needs
from jaxspec.core.noise import draw_gumbel
from jaxspec.core.records import Proposal, Status
from jaxspec.core.sampling import MIN_TEMPERATURE, Sampling
from jaxspec.core.topology import from_paths
from jaxspec.core.tree import TreeShape, build
from jaxspec.decode import lifecycle
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Request
from jaxspec.models.config import ModelConfig
from jaxspec.models.transformer import TransformerLM
from jaxspec.rules.coupled import Coupled

RAGGED = from_paths([(0, 0, 0, 0), (0, 1), (1, 0), (2,)])
SIZES = ModelConfig(
    61, 64, 96, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, tie_embeddings=False, qk_norm=True
)
"""The sizes of networks with recurrent layers or mixtures of experts, without these."""


# Running the core.


@functools.lru_cache
def _jitted(function: Callable, static: tuple[int, ...], quick: bool = True):
    return jax.jit(function, static_argnums=static, compiler_options=QUICK if quick else AS_USERS_DO)


def generate(decoder, weights, request, capacity, quick=True):
    return _jitted(Decoder.generate, (0, 3), quick)(decoder, weights, request, capacity)


def start(decoder, weights, request, capacity):
    """The prompt read. The parts are compiled one by one, so that tests share them."""
    return prefill(decoder, weights, _jitted(Decoder.init, (0, 3))(decoder, weights, request, capacity))


def prefill(decoder, weights, state):
    return _jitted(Decoder.prefill, (0,))(decoder, weights, state)


def step(decoder, weights, state):
    return _jitted(Decoder.step, (0,))(decoder, weights, state)


def run(decoder, weights, state):
    """To the end, a round at a time: what `Decoder.run` must be equal to."""
    while (np.asarray(state.status) == Status.RUNNING).any():
        state = step(decoder, weights, state)
    return state


def whole(decoder, weights, request, capacity):
    """`generate` out of the shared parts; the result is a state."""
    return run(decoder, weights, start(decoder, weights, request, capacity))


def extend(decoder, weights, state, request):
    return prefill(
        decoder, weights, _jitted(lifecycle.extend, (0, 1))(decoder.target.vocab, decoder.drafter, state, request)
    )


def truncate(decoder, weights, state, length):
    return _jitted(lifecycle.truncate, (0,))(decoder.drafter, weights, state, length)


def decoder(target, drafter, **options) -> Decoder:
    defaults: dict[str, Any] = {"chunk": 4}
    return Decoder(target, drafter, Coupled(), **defaults | options)


def texts(result) -> list[list[int]]:
    """Every row's tokens, prompt included."""
    tokens, length = np.asarray(result.tokens), np.asarray(result.length)
    return [row[:n].tolist() for row, n in zip(tokens, length)]


# Requests.


def request(
    prompts,
    new_tokens: Any = 20,
    *,
    vocab: int,
    seed: int = 0,
    stops=(),
    size: int = 0,
    logprobs=None,
    **sampling,
) -> Request:
    """A batch of prompts (lists of ids); `sampling` as in `Sampling`, `stops` one list of ids per row."""
    batch = len(prompts)
    tokens = np.zeros((batch, max(size, *map(len, prompts))), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    stop_ids = np.full((batch, 2), -1, np.int32)
    for row, ids in zip(stop_ids, stops):
        row[: len(ids)] = ids
    return Request(
        jnp.asarray(tokens),
        jnp.asarray([len(p) for p in prompts], jnp.int32),
        jnp.asarray(np.broadcast_to(np.int32(new_tokens), (batch,))),
        jax.random.split(jax.random.key(seed), batch),
        jnp.asarray(stop_ids),
        Sampling(**sampling).rows(batch, vocab),
        None if logprobs is None else jnp.broadcast_to(jnp.asarray(logprobs), (batch,)),
    )


def random_request(seed: int, batch: int, vocab: int, longest: int = 20, budget: int = 24) -> Request:
    """Prompts, budgets, stop ids and every sampling setting drawn at random, each row its own."""
    rng = np.random.default_rng(seed)

    def some(share, values, off):
        return np.where(rng.random(batch) < share, values, off)

    bias = np.where(rng.random((batch, 1)) < 0.5, rng.normal(0, 1, (batch, vocab)), 0.0)
    bias[np.arange(batch), rng.integers(0, vocab, batch)] = some(0.3, -np.inf, 0.0)
    return request(
        [rng.integers(0, vocab, n) for n in rng.integers(1, longest + 1, batch)],
        rng.integers(0, budget + 1, batch),
        vocab=vocab,
        seed=seed,
        stops=[rng.integers(0, vocab, n) for n in rng.choice([0, 0, 1, 2], batch)],
        size=longest,
        temperature=some(0.75, rng.uniform(0.2, 2.0, batch), rng.choice([0.0, 9e-7], batch)),
        top_k=some(0.4, rng.integers(1, vocab + 2, batch), 0),
        top_p=some(0.5, rng.uniform(0.05, 1.0, batch), 1.0),
        min_p=some(0.4, rng.uniform(0.0, 0.5, batch), 0.0),
        processors=[LogitBias(bias.astype(np.float32))],
    )


# The reference: one token at a time, on the host, from the definitions.


def allowed(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Which tokens may be drawn: top-k, then top-p over what remains, then min-p; by a sort, in float64."""
    tempered = logits.astype(np.float64) / (1.0 if temperature < MIN_TEMPERATURE else temperature)
    kept = tempered > -np.inf
    if top_k:
        kept &= tempered >= np.sort(tempered)[::-1][min(top_k, tempered.size) - 1]
    if not kept.any():
        return kept
    weights = np.where(kept, np.exp(tempered - tempered.max()), 0.0)
    law = weights / weights.sum()
    if top_p < 1:
        order = np.argsort(-tempered, kind="stable")
        before = np.concatenate([[0.0], np.cumsum(law[order])])
        # Equal scores stand or fall together: the mass above is that before the first of them.
        first = np.searchsorted(-tempered[order], -tempered, side="left")
        kept &= before[first] < top_p
    return kept & (law >= min_p * law.max() * (1 - 1e-9))


def draw(logits, noise, temperature, top_k, top_p, min_p) -> int:
    """The token: the highest perturbed score of those allowed."""
    logits = logits.astype(np.float32)
    if temperature < MIN_TEMPERATURE:
        return int(logits.argmax())
    perturbed = logits / np.float32(temperature) + noise
    return int(np.where(allowed(logits, temperature, top_k, top_p, min_p), perturbed, -np.inf).argmax())


@functools.partial(jax.jit, static_argnums=(1, 2))
def all_noise(keys, length, vocab):
    """The noise of every position below `length`, `[B, length, V]`."""
    return draw_gumbel(keys, jnp.broadcast_to(jnp.arange(length), (*keys.shape, length)), vocab)


def by_hand(
    table: np.ndarray, request: Request, noise: np.ndarray, row: int, change=lambda logits, text: logits
) -> list[int]:
    """The text of one row of a `TableLM`: its two last tokens give the logits, key and position the noise.

    `change` is what processors do: it takes the logits and the text so far.
    """
    bos, longest = table.shape[1], int(request.count[row] + request.new_tokens[row])
    sampling, text = request.sampling, np.asarray(request.tokens)[row, : int(request.count[row])].tolist()
    settings = [np.asarray(getattr(sampling, n))[row] for n in ("temperature", "top_k", "top_p", "min_p")]
    bias = sum(np.asarray(one.bias)[row] for one in sampling.processors if isinstance(one, LogitBias))
    stops = set(np.asarray(request.stop_ids)[row].tolist())
    while len(text) < longest:
        logits = table[text[-2] if len(text) > 1 else bos, text[-1]] + bias
        text.append(draw(change(logits, text), noise[row, len(text)], *settings))
        if text[-1] in stops:
            break
    return text


# Drafters that a decoder must survive.


class ChaosState(NamedTuple):
    key: Any


@dataclasses.dataclass(frozen=True)
class Chaos:
    """Random traced trees, another for every row and round, of tokens that repeat, miss, or do not exist."""

    vocab: int
    shape = TreeShape(9, 3, 8)
    draws = True
    calls = 0
    needs = Needs()

    def init(self, params, batch, capacity):
        return ChaosState(jax.random.split(params, batch))

    def absorb(self, params, state, advance):
        return state

    def propose(self, params, state, context, draw):
        def row(key):
            after, *keys = jax.random.split(key, 6)
            levels = jnp.array([0, 3, 6])  # ids 1..3 below the root, 4..6 below 1..3, 7..8 below 4..6
            level = jnp.concatenate([jnp.zeros(3, int), jnp.ones(3, int), jnp.full(2, 2)])
            low, high = jnp.maximum(levels[level] - 2, 0), levels[level]
            parents = jnp.sort(jax.random.randint(keys[0], (8,), low, high + 1))
            tree = build(jnp.concatenate([jnp.full(1, -1), parents]), self.shape)
            return after, Proposal(jax.random.randint(keys[1], (9,), -2, self.vocab + 2), tree)

        keys, proposal = jax.vmap(row)(state.key)
        return proposal, ChaosState(keys)


# Small real models.


def transformer(dtype="float32", **changes) -> TransformerLM:
    sizes = {
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "tie_embeddings": False,
    }
    return TransformerLM(ModelConfig(**sizes | changes), dtype)


def lively(params, scale: float = 6.0):
    """Random parameters with a head so large that the text is neither constant nor uniform."""
    return params | {"head": (params["head"].astype(jnp.float32) * scale).astype(params["head"].dtype)}


def noisy(params, seed: int, scale: float):
    """The parameters with noise on every leaf, relative to its spread: a draft that is nearly right."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return structure.unflatten(
        [(a + scale * a.std() * jax.random.normal(k, a.shape)).astype(a.dtype) for a, k in zip(leaves, keys)]
    )


# What dynamic trees are checked against.


def eagle2(log_share, beam: int, depth: int, nodes: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Parents and texts of the tree: Li et al. 2024, section 4, with plain lists and stable sorts.

    `log_share(text)`: log-probabilities [V] after the tokens since the root.
    """
    pool: list[tuple[float, int, tuple[int, ...]]] = [(0.0, -1, ())]  # worth, parent, text
    level = [0]
    for _ in range(depth):
        below = []
        for node in level:
            worth, _, text = pool[node]
            share = log_share(text)
            for token in np.argsort(-share, kind="stable")[:beam]:
                below.append(len(pool))
                pool.append((worth + share[token], node, (*text, int(token))))
        level = sorted(below, key=lambda node: -pool[node][0])[:beam]
    kept = [0, *sorted(sorted(range(1, len(pool)), key=lambda node: -pool[node][0])[: nodes - 1])]
    return [-1, *(kept.index(pool[node][1]) for node in kept[1:])], [pool[node][2] for node in kept]


def log_softmax(logits) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
