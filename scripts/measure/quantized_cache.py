"""Estimates what a draft gains that is the target itself on a 4-bit copy of its own cache, as in QuantSpec.

    python -m scripts.measure.quantized_cache [--lengths 2000 8000] [--tokens 96] [--record quantized-cache]

SmolLM2-135M continues pages of the documentation. Along its own texts, each draft's distribution is compared with the
target's: the target on a cache of 4 bits (QuantSpec, arXiv:2502.10424, section 4: keys in groups of tokens by channel,
values in groups of channels by token, the latest tokens not quantized), the target with int8 matrices, and both. A call
then costs the bytes that it reads, with everything that is not quantized in 16 bits. From both follow the best length
of a draft, and the most that a round can gain. Nothing of this is a drafter; it says whether one would be worth it.
"""

import argparse
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec.bench.measurements import add_record, round_significant, write_record
from jaxspec.core import cache as caches
from jaxspec.core.records import Cache, Window
from jaxspec.core.theory import best_length

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m-instruct"
GROUP, RECENT, CHUNK, LONGEST = 64, 128, 512, 16
"""Values of a group that share a scale, latest tokens in full precision, tokens read at once, longest draft."""
DRAFTS = {"4-bit cache": (False, True), "int8 matrices": (True, False), "int8 matrices, 4-bit cache": (True, True)}
"""Whether the matrices of each draft are quantized, and whether its cache is."""
SHAPES = {
    "SmolLM2 135M": (134.5e6, 30 * 2 * 3 * 64),
    "Llama 3.1 8B": (7.5e9, 32 * 2 * 8 * 128),
    "Llama 2 7B": (6.6e9, 32 * 2 * 32 * 128),
}
"""Parameters that a call reads (the embedding is looked up), and values of the cache for each token."""
BATCHES = (1, 16)


def round_groups(values: jax.Array, axis: int, bits: int = 4) -> jax.Array:
    """Returns values rounded to `2**bits` levels between the extremes of each group along an axis."""
    moved = jnp.moveaxis(values, axis, -1)
    shape, size = moved.shape, moved.shape[-1] // GROUP * GROUP
    groups = moved[..., :size].reshape(*shape[:-1], -1, GROUP)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale = jnp.maximum(high - low, 1e-8) / (2**bits - 1)
    rounded = (low + jnp.round((groups - low) / scale) * scale).reshape(*shape[:-1], size)
    return jnp.moveaxis(jnp.concatenate([rounded, moved[..., size:]], -1), -1, axis)


def quantize_cache(cache: Cache, length: int) -> Cache:
    """Returns a cache whose older keys and values are rounded to 4 bits."""
    old = max(length - RECENT, 0) // GROUP * GROUP
    keys, values = cache.stores

    def mix(stored: jax.Array, axis: int) -> jax.Array:
        values = caches.as_values(stored)
        rounded = round_groups(values[:, :, :, :old].astype(jnp.float32), axis).astype(values.dtype)
        mixed = values.at[:, :, :, :old].set(rounded)
        return caches.as_bits(mixed) if stored.dtype != values.dtype else mixed

    return cache._replace(stores=type(cache.stores)(mix(keys, 3), mix(values, 4)))


def read(model: jaxspec.Model, text: list[int], last: int, narrow: bool) -> np.ndarray:
    """Returns the logits `[last, V]` after the last tokens of a text, whose cache before them may be quantized."""
    lm, length = model.lm, len(text) - last

    @jax.jit
    def call(params: Any, cache: Cache, tokens: jax.Array, count: jax.Array) -> tuple[jax.Array, Cache]:
        size = tokens.shape[1]
        places = cache.length[:, None] + jnp.arange(size)
        window = Window(tokens, places, jnp.tri(size, dtype=bool)[None])
        features, entries = lm.apply(params, window, cache)
        return features, lm.commit(cache, entries, None, count, features)

    cache = lm.init_cache(1, (-(-len(text) // CHUNK) + 1) * CHUNK)
    for start in range(0, length, CHUNK):
        part = text[start : min(start + CHUNK, length)]
        tokens = jnp.asarray([part + [0] * (CHUNK - len(part))])
        _, cache = call(model.params, cache, tokens, jnp.array([len(part)]))
    cache = jax.jit(quantize_cache, static_argnums=1)(cache, length) if narrow else cache
    features, _ = call(model.params, cache, jnp.asarray([text[length:]]), jnp.array([0]))
    return np.asarray(lm.head(model.params, features)[0], np.float64)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def accept(target: np.ndarray, draft: np.ndarray, temperature: float) -> float:
    """Returns how often a token of the draft is accepted: the mass that both laws share, or equal best tokens."""
    if temperature:
        return float(np.minimum(softmax(target), softmax(draft)).sum(-1).mean())
    return float((target.argmax(-1) == draft.argmax(-1)).mean())


def bytes_read(shape: tuple[float, int], length: int, batch: int, narrow: tuple[bool, bool]) -> float:
    """Returns the bytes of a call of one token in each row; 4-bit values have two 16-bit numbers for each group."""
    parameters, each = shape
    weights = parameters * (1 if narrow[0] else 2)
    return weights + batch * length * each * (0.5 + 4 / GROUP if narrow[1] else 2)


def gain(acceptance: float, cost: float) -> tuple[float, int]:
    """Returns the speed of the best chain relative to plain decoding, if time is bytes, and its length."""
    length = best_length(acceptance, cost, LONGEST)
    tokens = sum(acceptance**i for i in range(length + 1))
    return tokens / (1 + length * cost), length


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2000, 8000], help="tokens of context")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each continuation")
    add_record(parser.add_argument)
    given = parser.parse_args()
    target = jaxspec.load(MODEL, kernels=False)
    models = {False: target, True: jaxspec.load(MODEL, dtype="int8", kernels=False)}
    pages = sorted((ROOT / "docs").glob("*.md"))
    ids = target.encode("\n\n".join(page.read_text() for page in pages))
    rows = []
    for length in given.lengths:
        for temperature in (0.0, 1.0):
            prompt = ids[:length]
            (output,) = jaxspec.generate(
                target, prompt, key=jax.random.key(0), sampling=jaxspec.Sampling(temperature), drafter="none",
                max_new_tokens=given.tokens, ignore_eos=True, verbose=False,
            )  # fmt: skip
            text = prompt + output.tokens[:-1]
            laws = read(target, text, given.tokens, False)
            for name, (matrices, cache) in DRAFTS.items():
                share = accept(laws, read(models[matrices], text, given.tokens, cache), temperature)
                row = {"length": length, "temperature": temperature, "draft": name, "acceptance": round(share, 3)}
                for shape, sizes in SHAPES.items():
                    for batch in BATCHES:
                        whole = bytes_read(sizes, length, batch, (False, False))
                        cost = bytes_read(sizes, length, batch, (matrices, cache)) / whole
                        best, drafted = gain(share, cost)
                        row[f"{shape}, {batch}"] = [round_significant(cost), round_significant(best), drafted]
                rows.append(row)
                print(row, flush=True)
    if given.record:
        values = {"tokens": given.tokens, "rows": rows}
        print(f"written: {write_record(given.record, 'quantized-cache', sys.argv, values)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
