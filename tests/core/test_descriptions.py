"""Tests that the descriptions of fields are read from the docstrings of their classes."""

import dataclasses
import importlib.util

import pytest

from jaxspec.core import descriptions
from jaxspec.core.descriptions import Field, describe_fields, parse_section, read_fields

pytestmark = pytest.mark.quick


@dataclasses.dataclass(frozen=True)
class Base:
    """A base.

    Attributes:
        size: a size, of
            two lines: the second is indented.
        name: the name.

    Raises:
        ValueError: never.
    """

    size: int = 3
    name: str = "x"


@dataclasses.dataclass(frozen=True)
class Derived(Base):
    """A derived class.

    Attributes:
        name: another name.
        made: a value that is not a literal.
    """

    name: str = "y"
    made: tuple = ()


ABOUT = {"size": "a size, of two lines: the second is indented.", "name": "the name."}


def test_the_section_is_parsed():
    assert parse_section(Base.__doc__) == ABOUT
    assert parse_section("No section.") == parse_section(None) == {}


def test_a_class_has_the_descriptions_of_its_bases():
    assert list(describe_fields(Derived)) == ["size", "name", "made"]
    assert describe_fields(Derived) == ABOUT | {"name": "another name.", "made": "a value that is not a literal."}


def test_the_source_is_read_without_importing_the_module(monkeypatch, tmp_path):
    (tmp_path / "described.py").write_text(f"import dataclasses\nraise SystemExit\n{DERIVED}")
    monkeypatch.syspath_prepend(tmp_path)
    found = {"name": Field("another name.", "y"), "made": Field("a value that is not a literal.", None)}
    assert read_fields("described", "Derived") == found


def test_without_a_source_the_module_is_imported(monkeypatch, tmp_path):
    (tmp_path / "compiled.py").write_text(f"import dataclasses\nclass Base: pass\n{DERIVED}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert read_fields("compiled", "Derived")["name"] == Field("another name.", "y")
    descriptions.read_fields.cache_clear()


DERIVED = '''
@dataclasses.dataclass(frozen=True)
class Derived(Base):
    """A derived class.

    Attributes:
        name: another name.
        made: a value that is not a literal.
    """

    name: str = "y"
    made: tuple = ()
'''
