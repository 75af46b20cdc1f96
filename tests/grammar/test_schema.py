"""Tests of JSON schemas as regular expressions: what they allow is valid, and what they cannot enforce is refused."""

import itertools
import json
import re

import numpy as np
import pytest

from helpers.schemas import random_document_schema
from jaxspec.core.automaton import ByteAutomaton
from jaxspec.errors import InvalidConfig
from jaxspec.grammar.expressions import compile_expression
from jaxspec.grammar.numbers import write_integers
from jaxspec.grammar.schema import write_schema
from jaxspec.grammar.strings import write_pattern

pytestmark = pytest.mark.quick

pytest.importorskip("outlines_core", reason="outlines-core compiles grammars; it is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema validates texts; it is not installed")

STRING = {"type": "string"}


def compiled(schema, **settings) -> ByteAutomaton:
    return compile_expression(write_schema(schema, **settings))


def random_text(automaton: ByteAutomaton, rng: np.random.Generator, longest: int) -> bytes:
    """A text that the automaton accepts: random bytes, and from `longest` on the way to the nearest end."""
    left = np.where(automaton.final, 0, 10**6)  # steps to the nearest final state
    while True:
        after = np.where(automaton.next >= 0, left[automaton.next], 10**6).min(1) + 1
        if (after >= left).all():
            break
        left = np.minimum(left, after)
    state, text = automaton.start, bytearray()
    while True:
        allowed = np.flatnonzero(automaton.next[state] >= 0)
        if automaton.final[state] and (len(text) >= longest or not len(allowed) or rng.random() < 0.3):
            return bytes(text)
        if len(text) >= longest:
            allowed = allowed[left[automaton.next[state, allowed]] < left[state]]
        text.append(int(rng.choice(allowed)))
        state = int(automaton.next[state, text[-1]])


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 200, 8))])
def test_random_texts_of_random_schemas_are_valid(first):
    for seed in range(first, first + 8):
        rng = np.random.default_rng(seed)
        schema = random_document_schema(rng)
        automaton = compiled(schema, whitespace=["blank", "compact", "lines"][seed % 3])
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        for longest in (0, 20, 60, 200):
            validator.validate(json.loads(random_text(automaton, rng, longest)))


def test_texts_of_a_schema_are_accepted_as_json_writes_them():
    schema = {
        "type": "object",
        "properties": {
            "name": STRING,
            "size": {"type": "integer", "minimum": 3, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b\n", 1.5]}, "maxItems": 2},
            "more": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}]},
        },
        "required": ["name", "tags"],
        "$defs": {"pair": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "number"}], "maxItems": 2}},
    }
    good = [
        {"name": 'é "quoted" \\ 😀 \n', "size": 99, "tags": ["a", "b\n"], "more": [True, -2.5e3]},
        {"name": "", "tags": []},
        {"name": "x", "size": 3, "tags": [1.5], "more": None},
    ]
    bad = [
        {"tags": []}, {"name": "x", "tags": ["c"]}, {"name": "x", "size": 121, "tags": []},
        {"name": "x", "tags": ["a", "a", "a"]}, {"name": 3, "tags": []}, {"name": "x", "tags": [], "other": 1},
    ]  # fmt: skip
    separators = {"blank": (", ", ": "), "compact": (",", ":"), "lines": (",\n  ", ": ")}
    for whitespace, pair in separators.items():
        automaton = compiled(schema, whitespace=whitespace)
        for value in good + bad:
            text = json.dumps(value, ensure_ascii=False, separators=pair).encode()
            assert automaton.accepts(text) == (value in good), text
    assert compiled(schema, whitespace="lines").accepts(json.dumps(good[0], indent=2, ensure_ascii=False).encode())
    assert not compiled(schema, whitespace="compact").accepts(json.dumps(good[1]).encode())


@pytest.mark.parametrize(
    ("least", "most"), [(None, None), (0, 0), (7, None), (None, -13), (-105, 1203), (98, 1002), (-7, -7), (None, 40)]
)
def test_integers_of_a_range(least, most):
    automaton = compile_expression(write_integers(least, most) or "")
    for number in (*range(-1300, 1300), 10**9, -(10**9)):
        inside = (least is None or number >= least) and (most is None or number <= most)
        assert automaton.accepts(str(number).encode()) == inside, number
    assert not automaton.accepts(b"007")


@pytest.mark.parametrize(
    "pattern", ["^ab*c$", "a|^b$", '^["x]{1,2}$', r"^\\?.$", "[^a]$", "^(ab|c)?$", r"^\s\S$", "^[a-c]|(b)$"]
)
def test_a_pattern_is_searched_in_the_text_of_a_string(pattern):
    automaton = compile_expression(write_pattern(pattern))
    for size in range(4):
        for letters in itertools.product('abc"\\ \n', repeat=size):
            text = "".join(letters)
            # Python's `$` also matches before a line break at the end, and its `.` does not match one.
            found = re.search(re.sub(r"(?<!\\)\$", r"\\Z", pattern), text) is not None
            assert automaton.accepts(json.dumps(text).encode()) == found, text


def test_recursion_is_unrolled_to_a_depth_or_refused_with_its_path():
    schema = {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["value", "next"],
    }
    with pytest.raises(InvalidConfig, match=re.escape("refers to itself at #/properties/next/anyOf/0 ('#')")):
        write_schema(schema)
    value: dict = {"value": 0, "next": None}
    for depth in range(5):
        assert compiled(schema, recursion=3).accepts(json.dumps(value).encode()) == (depth <= 4)
        value = {"value": depth, "next": value}
    assert not compiled(schema, recursion=3).accepts(json.dumps(value).encode())
    endless = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    with pytest.raises(InvalidConfig, match="allows no text, at least not with this depth"):
        write_schema(endless, recursion=2)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ([], "must be an object at #"),
        ({"type": "text"}, "type at # must be one of object, array"),
        ({"type": "array", "uniqueItems": True}, "keyword 'uniqueItems' at #, which is not supported"),
        ({"properties": {"a": {"not": {}}}}, "keyword 'not' at #/properties/a"),
        ({"properties": {"a/b": {"type": "integer", "multipleOf": 2}}}, "'multipleOf' at #/properties/a~1b"),
        ({"type": "number", "minimum": 1}, "'minimum' at #, which is not supported of a number other than 0"),
        ({"type": "string", "format": "regex"}, "format 'regex' at # is not supported; supported: date"),
        ({"type": "string", "pattern": "(?=a)b"}, "has assert, which is not supported"),
        ({"type": "string", "pattern": "a^"}, "has an anchor inside of it"),
        ({"type": "string", "pattern": "("}, "is not a regular expression"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "'maxLength' at #, which is not supported beside 'patt"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf at #: its parts are not known to"),
        ({"allOf": [{}, {}]}, "'allOf' at #, which is not supported with several parts"),
        ({"anyOf": [STRING], "minItems": 2}, "'minItems' at #, which is not supported beside 'anyOf'"),
        ({"$ref": "other.json"}, "$ref at # must be a place in the same schema"),
        ({"$ref": "#/$defs/a"}, "which the JSON schema does not have"),
        ({"enum": []}, "enum at # must be a list of values"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "allows no text"),
        ({"type": "number", "maximum": 3}, "'maximum' at #, which is not supported for type number"),
        ({"type": "string", "maxlength": 3}, "'maxlength' at #, which is not a keyword; did you mean 'maxLength'?"),
        ({"properties": {"a": {"oneof": []}}}, "'oneof' at #/properties/a, which is not a keyword"),
        ({"type": "array", "minItems": -1}, "minItems at # must be a whole number from 0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(schema, words):
    with pytest.raises(InvalidConfig, match=re.escape(words)):
        write_schema(schema)


def test_keywords_of_other_types_have_no_effect():
    schema = {"id": "a", "type": "array", "items": {"type": "null", "maxLength": 3}, "properties": {"a": {"not": {}}}}
    assert write_schema(schema) == write_schema({"type": "array", "items": {"type": "null"}})
    unknown = {"type": "string", "x-order": 3, "self": {}, "_format": "uri", "readonly": True}
    assert write_schema(unknown) == write_schema({"type": "string"})
    assert write_schema({"enum": ["a"], "type": "string", "maximum": 3}) == write_schema({"enum": ["a"]})


def test_expressions_that_cannot_be_compiled_are_refused():
    for expression, words in (
        ("", "must be a text that is not empty"),
        ("(a", "cannot be compiled"),
        ("^a$", "anchors, lookarounds and references are not supported"),
        (r"\w{200}", "of bytes; at most 60,000 are supported"),
    ):
        with pytest.raises(InvalidConfig, match=re.escape(words)):
            compile_expression(expression)


def test_alternatives_are_a_union():
    automaton = compile_expression("a|ab|abc?d|(?:x|xy)*z?")
    for text in ("a", "ab", "abcd", "abd", "", "xxyx", "xyz", "z"):
        assert automaton.accepts(text.encode()), text
    for text in ("abc", "b", "xzx", "a\U0010ffff", "\U0010ffff"):
        assert not automaton.accepts(text.encode()), text
