"""A model of sixteen tokens whose every text is known beforehand, with a tokenizer and a chat template."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from helpers.checkpoints import tiny_config
from jaxspec import Model, Sampling
from jaxspec.core import noise
from jaxspec.core.drafter import Drafter
from jaxspec.models.transformer import TransformerLM
from jaxspec.testing import TableLM
from jaxspec.text import ChatTemplate, Tokenizer
from jaxspec.text.tokenizer import _BYTE_OF

# Sixteen tokens: letters and pairs of them, the two bytes of é and the four of 😀, each a token of its own.
SPELLING = {byte: char for char, byte in _BYTE_OF.items()}
PIECES = [b"a", b"b", b"c", b" ", b"\n", b"ab", b"ca", *(bytes([b]) for b in "é😀".encode()), b"bc", b"."]
WORDS = ["<eos>", *("".join(SPELLING[b] for b in piece) for piece in PIECES)]
EOS, E_ACUTE, GRIN = 0, [8, 9], [10, 11, 12, 13]
TOKENIZER = Tokenizer.from_gguf(
    {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": WORDS,
        "tokenizer.ggml.token_type": [3] + [1] * 15,
        "tokenizer.ggml.merges": ["a b", "c a", "b c"],
        "tokenizer.ggml.eos_token_id": EOS,
    }
)
TEMPLATE = ChatTemplate("{% for m in messages %}{{ '.' if m.role == 'user' else ' ' }}{{ m.content }}\n{% endfor %}")
V = len(WORDS)


def whole_characters(logits: jax.Array) -> jax.Array:
    """The law of a table with every character begun also finished, and few ends of text."""
    table = np.array(logits)
    table[..., EOS] -= 3
    table[..., [8, 10]] += 1  # more of é and 😀
    for first, second in [E_ACUTE, *itertools.pairwise(GRIN)]:
        table[..., second] = -40
        table[:, first, second] = 40
    return jnp.asarray(table)


LM = TableLM(V)
TABLE = whole_characters(LM.init_params(jax.random.key(0))["table"])
TOY = Model(LM, {"table": TABLE}, TOKENIZER, TEMPLATE, stop_ids=(EOS,), name="toy")
NEAR = {"table": TABLE + jax.random.normal(jax.random.key(1), TABLE.shape)}
DRAFT = Model(LM, NEAR, name="draft", settings={"pard_token": 3})
NO_TEMPLATE = Model(LM, TOY.params, TOKENIZER, name="plain")
BARE = Model(LM, {"table": TABLE}, name="bare")
TINY_LM = TransformerLM(tiny_config(vocab_size=V))
TINY = Model(TINY_LM, jax.tree.map(lambda a: 3 * a, TINY_LM.init_params(jax.random.key(2))), TOKENIZER, name="tiny")

KEY = jax.random.key(11)
HOT = Sampling(temperature=1.0)
PROMPTS = [[1, 2, 3], [4, 1, 6, 7, 2]]


def go(
    prompts=PROMPTS,
    drafter: str | Drafter = "none",
    key: jax.Array | None = KEY,
    target=TOY,
    call: Callable[..., Any] = jaxspec.generate,
    **options,
) -> Any:
    options = {"sampling": HOT, "max_new_tokens": 24, "chat": False} | options
    if drafter in ("model", "pard"):
        options = {"draft": DRAFT, "tree": 4} | options
    return call(target, prompts, key=key, drafter=drafter, **options)


def row_key(index: int, sample: int = 0, key: jax.Array = KEY) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(key, index), sample)


@jax.jit
def _noise(key, start):
    return noise.draw_gumbel(key[None], start + jnp.arange(64)[None], V)[0]


def expected(prompt: list[int], key: jax.Array, budget: int = 24, stops=(EOS,)) -> list[int]:
    """Gumbel-max sampling from the table, token by token, without any of the decoder."""
    text, drawn = list(prompt), np.asarray(_noise(key, len(prompt)))
    table = np.asarray(TABLE)
    for step in range(budget):
        previous = text[-2] if len(text) > 1 else V
        text.append(int((table[previous, text[-1]] + drawn[step]).argmax()))
        if text[-1] in stops:
            break
    return text[len(prompt) :]


def tokens(output) -> list[list[int]]:
    return [row.tokens for row in output]


def cut_at(ids: list[int], stops: list[str]) -> tuple[list[int], str, str]:
    """Tokens, text and reason with stop strings, by trying every length."""
    for count in range(1, len(ids) + 1):
        text = TOKENIZER.decode(ids[:count])
        if ends := [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]:
            return ids[:count], text[: min(ends)[1]], "stop"
    return ids, TOKENIZER.decode(ids), "stop" if ids[-1] == EOS else "length"
