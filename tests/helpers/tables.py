"""A target of which only the tables are read, for the EAGLE heads of `helpers.eagle_heads`."""

import dataclasses

import jax.numpy as jnp

from helpers.eagle_heads import CASES, SIZES, parameters, reference_shapes
from jaxspec import KV, Model, append_to_cache, empty_cache
from jaxspec.models.layers import matmul


@dataclasses.dataclass(frozen=True)
class Tables:
    """A target of which only the tables are read; `target` has its parameters."""

    vocab: int = SIZES["vocab_size"]
    context: int = 64
    depth: int = 12
    taps: tuple[int, ...] = ()

    def init_cache(self, batch, capacity):
        return empty_cache(1, batch, 1, capacity, 2, jnp.float32)

    def apply(self, params, window, cache, past=None):
        batch, size = window.tokens.shape
        width = params["embed"].shape[1] * (1 + len(self.taps))
        return jnp.zeros((batch, size, width)), KV(*(jnp.zeros((1, batch, 1, size, 2)) for _ in range(2)))

    commit = staticmethod(append_to_cache)

    def head(self, params, features):
        return matmul(features, params["head"], transposed=True)

    def embedding(self, params):
        return params["embed"]

    def unembedding(self, params):
        return params["head"]


def target(name: str) -> Model:
    """The target of a case."""
    tensors = parameters(name, reference_shapes(CASES[name]))
    named = {"embed": "embed_tokens.weight", "head": "target.lm_head.weight"}
    return Model(Tables(), {ours: jnp.asarray(tensors[theirs]) for ours, theirs in named.items()}, name="tables")
