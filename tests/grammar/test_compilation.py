"""Tests of grammars of real vocabularies, and through the public functions."""

import json
import re

import numpy as np
import pytest

import jaxspec
from helpers.toy_text import EOS, KEY, TOKENIZER, TOY
from jaxspec.core.automaton import TokenAutomaton
from jaxspec.errors import InvalidConfig
from jaxspec.grammar.compilation import compile_grammar, token_pieces
from jaxspec.grammar.expressions import compile_expression

pytest.importorskip("outlines_core", reason="outlines-core compiles grammars; it is not installed")

EXPRESSIONS = ["[abc]{3,9}é?", "(ab|ca)+", "a.*😀", "b{2}|c(a|bc)*"]


def say(prompts, **options):
    """The texts and finish reasons of the toy model."""
    settings = {"key": KEY, "sampling": jaxspec.Sampling(1.0), "max_new_tokens": 40, "chat": False, "verbose": False}
    output = jaxspec.generate(TOY, prompts, **settings | options)
    return [(row.text, row.finish_reason) for row in output]


@pytest.mark.slow
def test_texts_match_as_a_whole():
    prompts = [[1, 2], [3], [4, 5], [6]]
    plain = say(prompts, grammar=EXPRESSIONS, drafter="none")
    assert say(prompts, grammar=EXPRESSIONS) == say(prompts, grammar=EXPRESSIONS, batch=3) == plain
    for (text, reason), expression in zip(plain, EXPRESSIONS):
        assert reason == "length" or re.fullmatch(expression, text), (text, expression)
    assert sum(reason == "stop" for _, reason in plain) >= 2
    mixed = say(prompts, grammar=[EXPRESSIONS[0], None, None, re.compile(EXPRESSIONS[3])])
    assert [mixed[0], mixed[3]] == [plain[0], plain[3]]
    assert mixed[1:3] == say(prompts)[1:3]


@pytest.mark.quick
def test_a_trigger_starts_the_grammar_and_the_text_cannot_end_before_it():
    prompts = [[1, 2], [3], [4, 5], [6]]
    plain = say(prompts, grammar="c{2}", grammar_after=".", drafter="none")
    assert say(prompts, grammar="c{2}", grammar_after=".") == plain
    assert any(reason == "stop" for _, reason in plain)
    for text, reason in plain:
        assert reason == "length" or re.fullmatch(r"[^.]*\.cc", text, re.DOTALL), text


@pytest.mark.quick
def test_a_second_grammar_of_similar_size_compiles_nothing():
    say([[1]], grammar="[ab]{3}", drafter="none")
    output = jaxspec.generate(TOY, [[1]], grammar="(ab|c){5}", max_new_tokens=40, drafter="none", key=KEY,
                              sampling=jaxspec.Sampling(1.0), chat=False, verbose=False)  # fmt: skip
    assert output.timing.compile_s == 0


@pytest.mark.quick
def test_wrong_grammars_are_refused_before_anything_compiles(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "strin"}')
    for options, words in (
        ({"grammar": 3}, "a grammar must be a JSON schema"),
        ({"grammar": file}, "type at # must be one of"),
        ({"grammar": ["a", "b"]}, "grammar must have one entry for each of the 1 prompts, got 2"),
        ({"grammar": "a", "ignore_eos": True}, "a grammar needs a stop token"),
        ({"grammar_after": "a"}, "grammar_after= needs a grammar"),
        ({"grammar": "a", "grammar_after": [99]}, "a trigger needs at least one token id from 0 to 15"),
        ({"grammar": "x"}, "no sequence of the vocabulary's tokens fits"),
        ({"grammar": {"type": "string", "not": {}}}, "keyword 'not' at #"),
    ):
        with pytest.raises(InvalidConfig, match=re.escape(words)):
            say([[1]], **options)
    with pytest.raises(InvalidConfig, match="needs a model with a tokenizer"):
        compile_grammar(jaxspec.Model(TOY.lm, TOY.params), "a")
    with pytest.raises(InvalidConfig, match="recursion must be"):
        compile_grammar(TOKENIZER, "a", recursion=99)
    with pytest.raises(InvalidConfig, match="whitespace must be one of"):
        compile_grammar(TOKENIZER, {"type": "string"}, whitespace="none")


@pytest.mark.quick
def test_files_pydantic_models_and_automata_are_grammars(tmp_path):
    schema = {"enum": ["a", "b c", None]}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))

    class Model:
        @classmethod
        def model_json_schema(cls):
            return {"const": "a"}

    byte = compile_expression("(ab)+")
    ready = compile_grammar(TOKENIZER, byte)
    assert isinstance(ready, TokenAutomaton)
    assert compile_grammar(TOY, ready) is ready
    np.testing.assert_array_equal(ready.next, compile_grammar(TOKENIZER, "(ab)+").next)
    for given in (file, schema, Model):
        with pytest.raises(InvalidConfig, match="no sequence of the vocabulary"):  # the toy has no quotation mark
            compile_grammar(TOKENIZER, given)


@pytest.mark.quick
def test_special_tokens_are_not_text():
    pieces = token_pieces(TOKENIZER)
    assert pieces[EOS] is None
    automaton = compile_grammar(TOKENIZER, "(?s:.)*")
    assert not automaton.allowed(0)[EOS]
    assert automaton.after([1]).allowed(0)[EOS]


@pytest.mark.smollm2
def test_smollm2_writes_json_of_a_schema(smollm2):
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "people": {"type": "integer", "minimum": 1, "maximum": 9_999_999},
            "kind": {"enum": ["capital", "village"]},
        },
        "required": ["city", "people", "kind"],
    }
    options = {"max_new_tokens": 60, "verbose": False, "grammar": schema}
    drafted, plain = (
        jaxspec.generate(smollm2, "Describe Paris as JSON.", drafter=name, **options)[0]
        for name in ("prompt-lookup", "none")
    )
    assert drafted.tokens == plain.tokens
    value = json.loads(plain.text)
    assert [*value] == ["city", "people", "kind"]
    assert plain.finish_reason == "stop"
    assert 1 <= value["people"] <= 9_999_999
    assert value["kind"] in ("capital", "village")


@pytest.mark.slow
@pytest.mark.smollm2
def test_masks_of_smollm2_are_those_of_a_walk_over_bytes(smollm2):
    """Along random texts, the allowed tokens are those whose bytes the automaton of bytes can read."""
    expression = r'\{"name": "[^"\\]{1,8}é?", "date": "[0-9]{4}(-[0-9]{2}){2}"\}'
    byte, pieces = compile_expression(expression), token_pieces(smollm2.tokenizer)
    automaton = compile_grammar(smollm2, expression)
    rng, text, states = np.random.default_rng(0), [], 0
    while (allowed := np.flatnonzero(automaton.allowed(automaton.walk(text)))).size:
        spelled = b"".join(pieces[token] for token in text)
        state = byte.start
        for one in spelled:
            state = byte.next[state, one]
        expected = []
        for token, piece in enumerate(pieces):
            at = state if piece else -1
            for one in piece or b"":
                at = byte.next[at, one] if at >= 0 else -1
            if at >= 0:
                expected.append(token)
        assert allowed.tolist() == expected
        text.append(int(rng.choice(allowed)))
        states += 1
    assert states > 8
