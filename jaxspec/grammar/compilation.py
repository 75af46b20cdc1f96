"""Compiles a grammar for the vocabulary of a model."""

import os
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.core.automaton import ByteAutomaton, TokenAutomaton, read_vocabulary
from jaxspec.core.checks import check_arguments, whole
from jaxspec.errors import InvalidConfig, shown
from jaxspec.grammar.expressions import compile_expression
from jaxspec.grammar.schema import write_schema
from jaxspec.storage.reading import check_path, read_json_file
from jaxspec.text.tokenizer import Tokenizer

MAX_RECURSION = 8
"""The largest number of times that a reference of a JSON schema may lead to itself."""

_PIECES: weakref.WeakKeyDictionary[Tokenizer, list[bytes | None]] = weakref.WeakKeyDictionary()
_COMPILED: weakref.WeakKeyDictionary[Tokenizer, dict[str, TokenAutomaton]] = weakref.WeakKeyDictionary()
_MAX_COMPILED = 64  # automata of each tokenizer that are kept


def token_pieces(tokenizer: Tokenizer) -> list[bytes | None]:
    """Returns the bytes of each token of a vocabulary; None for special tokens, which are not text."""
    if tokenizer not in _PIECES:
        _PIECES[tokenizer] = [
            None if token in tokenizer.special_ids else tokenizer.token_bytes(token)
            for token in range(tokenizer.vocab_size)
        ]
    return _PIECES[tokenizer]


@check_arguments
def compile_grammar(
    model: Any,
    grammar: Any,
    *,
    after: str | Sequence[int] | None = None,
    required: bool = True,
    recursion: int = 0,
    whitespace: str = "blank",
) -> TokenAutomaton:
    """Compiles a grammar for the vocabulary of a model; see docs/grammar.md.

    Args:
        model: the target model, or its tokenizer.
        grammar: a JSON schema (a dict, a `pathlib.Path` of a file, or a class derived from `pydantic.BaseModel`); a
            regular expression that matches the whole text (a text, or the result of `re.compile`); or an automaton (a
            `TokenAutomaton` or a `ByteAutomaton`).
        after: a trigger: the grammar begins after these tokens, or after the tokens of this text. Everything before is
            free. None to begin at once.
        required: with a trigger, whether the text may end only after the trigger.
        recursion: how often a reference of a JSON schema may lead to itself; 0 refuses such schemas.
        whitespace: what may follow commas and colons of a JSON schema: "blank" allows a blank, "compact" nothing, and
            "lines" also a line break with up to 16 blanks.

    Raises:
        InvalidConfig: the grammar is invalid or too large, has a part that is not supported, or has no tokens; or the
            package outlines-core is not installed.
    """
    tokenizer = model if isinstance(model, Tokenizer) else getattr(model, "tokenizer", None)
    automaton = _of_tokens(tokenizer, grammar, whole("recursion", recursion, 0, MAX_RECURSION), whitespace)
    if after is None:
        return automaton
    is_text = isinstance(after, str)
    return automaton.after(_require(tokenizer).encode(after, False, False) if is_text else list(after), required)


def _of_tokens(tokenizer: Any, grammar: Any, recursion: int, whitespace: str) -> TokenAutomaton:
    if isinstance(grammar, TokenAutomaton):
        return grammar
    if isinstance(grammar, ByteAutomaton):
        return read_vocabulary(grammar, token_pieces(_require(tokenizer)))
    if isinstance(grammar, re.Pattern):
        grammar = grammar.pattern
    if isinstance(grammar, os.PathLike):
        grammar = read_json_file(check_path(grammar, "the path of the JSON schema"), InvalidConfig)
    if isinstance(grammar, type) and hasattr(grammar, "model_json_schema"):
        grammar = grammar.model_json_schema()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(grammar, Mapping):
        grammar = write_schema(grammar, recursion, whitespace)
    if not isinstance(grammar, str):
        raise InvalidConfig(
            "a grammar must be a JSON schema (a dict, a pathlib.Path or a pydantic model), a regular expression, or an "
            f"automaton; got {shown(grammar)}"
        )
    kept = _COMPILED.setdefault(_require(tokenizer), {})
    if grammar not in kept:
        kept[grammar] = read_vocabulary(compile_expression(grammar), token_pieces(tokenizer))
        if len(kept) > _MAX_COMPILED:
            del kept[next(iter(kept))]
    return kept[grammar]


def _require(tokenizer: Any) -> Tokenizer:
    if not isinstance(tokenizer, Tokenizer):
        raise InvalidConfig("compiling a grammar needs a model with a tokenizer, or a tokenizer")
    return tokenizer
