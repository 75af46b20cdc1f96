"""Checks an installed jaxspec: it decodes, its data files are there, and the kernels are in use, or it says why not.

Run it with `python -I scripts/prove/installed.py with` or `without`: `-I` keeps the checkout out of the path, so that
the package that was installed is imported.
"""

import sys
import warnings

import jax
import jax.numpy as jnp

import jaxspec
from jaxspec.cli import main
from jaxspec.heads.find import list_shipped_heads
from jaxspec.kernels.library import describe_kernels, kernels_available
from jaxspec.text.chat import ChatTemplate

VOCAB = 16


def follow(params: jax.Array, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns the logits after each text: a table, by its last token."""
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, 1)[:, 0]
    return params[last]


def check(kernels: bool) -> None:
    """Raises an AssertionError if the installation is incomplete.

    Args:
        kernels: whether it is to have the CPU kernels.
    """
    print(f"jaxspec {jaxspec.__version__} in {jaxspec.__path__[0]}, kernels: {describe_kernels()}")
    assert kernels_available() == kernels, describe_kernels()
    assert list_shipped_heads(), "no heads come with this installation"
    lm = jaxspec.FunctionLM(follow, VOCAB)
    table = jax.nn.one_hot((jnp.arange(VOCAB) * 5 + 1) % VOCAB, VOCAB) * 9.0
    model = jaxspec.Model(lm, table)
    texts = [jaxspec.generate(model, [[1, 2, 3]], max_new_tokens=24, drafter=name, verbose=False)[0].tokens
             for name in ("none", "prompt-lookup")]  # fmt: skip
    assert texts[0] == texts[1], texts
    assert len(texts[0]) == 24
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "hello"}]) == "hello"
    assert main(["--version"]) == 0


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "jaxspec's CPU kernels", UserWarning)
    check(kernels={"with": True, "without": False}[sys.argv[1]])
