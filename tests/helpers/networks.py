"""Networks of every kind, which a test describes in two processes."""

import jax
import jax.numpy as jnp
from flax import nnx

import jaxspec
from helpers.toys import transformer
from jaxspec.generation import fingerprint
from jaxspec.testing import TableLM

V = 24


def made(bias: float):
    """A network that is a function made anew, as in another process."""

    def network(params, texts, lengths):
        return jnp.zeros((len(texts), V)) + (bias if "a" in {"b", "c", "d"} else params)

    return jaxspec.FunctionLM(jax.jit(network), V)


def module(width: int):
    class Small(nnx.Module):
        def __init__(self, rngs):
            self.embed, self.out = nnx.Embed(V, width, rngs=rngs), nnx.Linear(width, V, rngs=rngs)

        def __call__(self, tokens):
            return self.out(jnp.cumsum(self.embed(tokens), axis=1))

    return jaxspec.from_flax(Small(nnx.Rngs(0)), V)[0]


def digests() -> str:
    """Digests of networks of every kind."""
    return " ".join(
        fingerprint.digest(fingerprint.describe_static(lm)) for lm in (TableLM(V), transformer(), made(1.0), module(8))
    )
