"""Tests of grammars with every drafter: what is finished is valid JSON of its schema, and equal to plain decoding."""

import functools
import json

import jax
import numpy as np
import pytest

import jaxspec
from cases import DRAFTERS, arguments
from helpers.checkpoints import tiny_config
from helpers.schemas import random_document_schema
from jaxspec.core.automaton import TokenAutomaton, read_vocabulary
from jaxspec.grammar.expressions import compile_expression
from jaxspec.grammar.schema import write_schema
from jaxspec.models.transformer import TransformerLM

pytest.importorskip("outlines_core", reason="outlines-core compiles grammars; it is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema validates texts; it is not installed")

WORDS = (b'{"', b'":', b'": ', b'",', b'", ', b'"}', b'"]', b"name", b"size", b"true", b"false", b"null", b"12", b"-0")
PIECES: list[bytes | None] = [None, *(bytes([byte]) for byte in range(256)), *WORDS]
"""The end of a text, all bytes, and some words."""

V, GROUP, LONGEST = len(PIECES), 50, 100
CLOSING = {token: 3.0 for token, piece in enumerate(PIECES) if piece is None or piece[:1] in b'"}],'}
LM = TransformerLM(tiny_config(vocab_size=V))
MODEL = jaxspec.Model(LM, jax.tree.map(lambda a: 3 * a, LM.init_params(jax.random.key(0))), stop_ids=(0,))


@functools.cache
def grammars(first: int) -> tuple[list[dict], list[TokenAutomaton]]:
    """Some random schemas, and their automata."""
    schemas = [random_document_schema(np.random.default_rng(seed)) for seed in range(first, first + GROUP)]
    settings = ("blank", "compact", "lines")
    automata = [
        read_vocabulary(compile_expression(write_schema(schema, whitespace=settings[i % 3])), PIECES)
        for i, schema in enumerate(schemas)
    ]
    return schemas, automata


def say(first: int, **options) -> list[tuple[list[int], str]]:
    """The tokens and finish reason of a text of each schema at temperature 0, and of one at temperature 1."""
    automata = grammars(first)[1]
    temperatures = np.repeat([0.0, 1.0], GROUP)
    processors = [jaxspec.LogitBias(CLOSING), jaxspec.Grammar([*automata, *automata])]
    output = jaxspec.generate(
        MODEL, [[1 + i % 7] for i in range(2 * GROUP)], key=jax.random.key(first), max_new_tokens=LONGEST,
        sampling=jaxspec.Sampling(temperatures, processors=processors), verbose=False, **options,
    )  # fmt: skip
    return [(list(row.tokens), row.finish_reason) for row in output]


plain = functools.cache(functools.partial(say, drafter="none"))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, GROUP))
def test_finished_texts_are_valid(first):
    finished = 0
    for i, (tokens, reason) in enumerate(plain(first)):
        assert reason in ("stop", "length")
        if reason == "stop":
            schema = grammars(first)[0][i % GROUP]
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            value = json.loads(b"".join(PIECES[token] or b"" for token in tokens))
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)
            finished += 1
    assert finished > GROUP  # of twice as many


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "none"])
def test_every_drafter_writes_these_texts(name):
    for first in range(0, 200, GROUP):
        assert say(first, **arguments(name, MODEL)) == plain(first), first
