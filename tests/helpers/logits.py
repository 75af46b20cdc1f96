"""Logits of tiny random models by transformers (`scripts/golden/make_families.py`), and those of a loaded model."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from helpers.families import LENGTH, POSITIONS
from helpers.paths import GOLDEN_DIR
from jaxspec.core.records import Window

GOLDEN = json.loads((GOLDEN_DIR / "families.json").read_text())["cases"]
PIECE = 8
__all__ = ["GOLDEN", "POSITIONS", "logits_in_pieces"]


def logits_in_pieces(model, tokens: list[int]) -> np.ndarray:
    """`[tokens, V]`, reading `PIECE` at a time."""

    @jax.jit
    def read(params, cache, piece):
        at = cache.length[:, None] + jnp.arange(PIECE)
        window = Window(piece, at, jnp.tri(PIECE, dtype=bool)[None])
        features, entries = model.lm.apply(params, window, cache)
        return model.lm.head(params, features), model.lm.commit(cache, entries, None, jnp.full((1,), PIECE))

    cache, found = model.lm.init_cache(1, LENGTH), []
    for start in range(0, LENGTH, PIECE):
        logits, cache = read(model.params, cache, jnp.asarray([tokens[start : start + PIECE]]))
        found.append(np.asarray(logits[0]))
    return np.concatenate(found)
