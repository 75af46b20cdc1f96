"""Tests that an option is written once: functions, their documentation and type checkers take it from its dataclass."""

# pyright: reportUnnecessaryTypeIgnoreComment=true
# `make lint` fails if pyright no longer reports one of the calls that are marked below.

import dataclasses
import inspect
import pydoc
import typing
from typing import Any

import jedi
import pytest

import jaxspec
from helpers.toy_text import KEY, TOY
from jaxspec import Drafting
from jaxspec.core.descriptions import describe_fields, parse_section, read_fields
from jaxspec.errors import WrongArguments
from jaxspec.generation.drafting import DraftingOptions
from jaxspec.generation.options import CompileOptions, GenerateOptions

pytestmark = pytest.mark.quick

TAKEN = {jaxspec.generate: GenerateOptions, jaxspec.stream: GenerateOptions, jaxspec.precompile: CompileOptions}
NOT_COMPILED = {"on_token", "session", "out", "progress", "rounds"}
"""The options that `precompile` does not take."""


@pytest.mark.parametrize("function", TAKEN)
def test_every_option_is_a_keyword_with_its_type_default_and_description(function):
    signature, described = inspect.signature(function), parse_section(inspect.getdoc(function), "Args")
    assert list(signature.parameters) == list(described)
    target, prompts, *keywords = signature.parameters.values()
    assert (target.name, target.annotation, prompts.name) == ("target", jaxspec.Model, "prompts")
    fields = dataclasses.fields(TAKEN[function])
    assert [one.name for one in keywords] == [field.name for field in fields]
    defaults = TAKEN[function]()
    for one, field in zip(keywords, fields):
        assert one.kind is inspect.Parameter.KEYWORD_ONLY
        assert one.default == getattr(defaults, field.name)
        assert one.annotation == typing.get_type_hints(function)[field.name] == field.type
        assert described[field.name] == describe_fields(TAKEN[function])[field.name]
    assert signature.return_annotation is typing.get_type_hints(function)["return"]


@pytest.mark.parametrize("function", TAKEN)
def test_help_shows_every_option(function):
    page = pydoc.plain(pydoc.render_doc(function))
    for field in dataclasses.fields(TAKEN[function]):
        assert f"{field.name}: " in page.splitlines()[2], field.name
        assert f"\n        {field.name}: " in page, field.name
    assert "Returns:\n" in page
    assert "Raises:\n" in page


def test_precompile_takes_what_decides_which_programs_are_compiled():
    assert {field.name for field in dataclasses.fields(GenerateOptions)} - {
        field.name for field in dataclasses.fields(CompileOptions)
    } == NOT_COMPILED
    for name in NOT_COMPILED:
        given: dict[str, Any] = {name: None}
        with pytest.raises(WrongArguments, match=rf"precompile\(\) has no argument '{name}'"):
            jaxspec.precompile(TOY, "ab", **given)


def test_a_drafting_has_the_options_of_drafting():
    own = [field.name for field in dataclasses.fields(DraftingOptions)]
    assert [field.name for field in dataclasses.fields(Drafting)] == [*own, "measured"]
    assert list(parse_section(Drafting.__doc__)) == [*own, "measured"]


def test_type_checkers_report_what_is_refused():
    with pytest.raises(WrongArguments, match=r"did you mean max_new_tokens=\?"):
        jaxspec.generate(TOY, "ab", max_token=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(WrongArguments, match=r"did you mean samples=\?"):
        jaxspec.stream(TOY, "ab", sample=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(WrongArguments, match="has no argument 'out'"):
        jaxspec.precompile(TOY, "ab", out="x")  # pyright: ignore[reportCallIssue]
    with pytest.raises(WrongArguments, match="missing a required argument: 'prompts'"):
        jaxspec.generate(TOY)  # pyright: ignore[reportCallIssue]
    with pytest.raises(WrongArguments, match="too many positional arguments"):
        jaxspec.generate(TOY, "ab", KEY)  # pyright: ignore[reportCallIssue]
    with pytest.raises(jaxspec.JaxspecError, match="max_new_tokens must be a whole number"):
        jaxspec.generate(TOY, "ab", max_new_tokens="4")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("source", ["", "import jaxspec\n"])
@pytest.mark.parametrize(
    ("call", "completed"), [("generate", "rounds="), ("stream", "on_token="), ("precompile", "batch=")]
)
def test_notebooks_complete_options(source, call, completed):
    """From the objects of the session, and from a cell that imports jaxspec itself."""
    cell = f"{source}jaxspec.{call}(target, 'text', samples=2, {completed[:3]}"
    found = jedi.Interpreter(cell, [] if source else [{"jaxspec": jaxspec}]).complete()
    assert completed in [one.name for one in found]


def test_the_source_has_what_the_classes_have():
    """The command line reads the source, which does not import JAX."""
    for kind in (DraftingOptions, CompileOptions, GenerateOptions):
        found = read_fields(kind.__module__, kind.__name__)
        for name, field in found.items():
            assert field.description == describe_fields(kind)[name]
            assert field.default in (None, getattr(kind(), name))
    assert read_fields(CompileOptions.__module__, "CompileOptions")["max_new_tokens"].default == 128
