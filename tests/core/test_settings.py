"""Tests that fields of settings are checked by their types and ranges, and documented with those of their bases."""

import dataclasses
from typing import Any

import pytest

from jaxspec.core.descriptions import parse_section
from jaxspec.core.settings import check_fields, setting, settings_class
from jaxspec.errors import InvalidConfig, WrongArguments

pytestmark = pytest.mark.quick


@settings_class
class Base:
    """Settings of all.

    Attributes:
        count: a count.
        name: a name.
    """

    count: int = 3
    name: str = setting("a", ("a", "b"))

    def __post_init__(self):
        check_fields(self)


@settings_class
class Derived(Base):
    """Settings of some.

    Attributes:
        share: a share.
        token: a token.
        wide: whether it is wide.
        window: a window.
        sizes: sizes, which are not checked.
        text: a text.
    """

    share: float = setting(0.5, least=0, most=1)
    token: int = setting(-1, least=-1)
    wide: bool = False
    window: int | None = None
    sizes: tuple[bool, ...] = ()
    text: str = ""
    name: str = setting("b", ("a", "b"))


def test_values_of_each_type_are_accepted():
    made = Derived(count=1, share=1, token=-1, wide=True, window=4, sizes=(True,), text="any", name="a")
    assert (made.window, made.share) == (4, 1)
    assert dataclasses.replace(made, window=None).window is None
    assert (Base().name, Derived().name) == ("a", "b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 0}, "count must be a whole number from 1, got 0"),
        ({"count": 1.0}, "count must be a whole number from 1, got 1.0"),
        ({"count": True}, "count must be a number, got True"),
        ({"count": 2**31}, "count must be a whole number from 1 to 2147483647, got 2147483648"),
        ({"token": -2}, "token must be a whole number from -1, got -2"),
        ({"window": 0}, "window must be a whole number from 1, got 0"),
        ({"window": "4"}, "window must be a number, got '4'"),
        ({"share": -0.5}, "share must be finite and at least 0, got -0.5"),
        ({"share": 1.5}, "share must be at most 1, got 1.5"),
        ({"share": float("nan")}, "share must be finite and at least 0, got nan"),
        ({"share": None}, "share must be a number, got None"),
        ({"wide": 1}, "wide must be true or false, got 1"),
        ({"name": "c"}, "name must be one of a, b, got 'c'"),
        ({"text": 5}, "text must be a string, got 5"),
    ],
)
def test_other_values_are_refused(change, message):
    with pytest.raises(InvalidConfig) as error:
        Derived(**change)
    assert str(error.value) == message


def test_arguments_have_known_names():
    kind: Any = Derived
    with pytest.raises(WrongArguments, match=r"Derived\(\) has no argument 'counts'; did you mean count="):
        kind(counts=5)
    with pytest.raises(WrongArguments, match=r"Derived\(\) takes only keyword arguments, got 5"):
        kind(5)


def test_the_docstring_describes_inherited_fields_after_those_of_the_class():
    found = parse_section(Derived.__doc__)
    assert list(found) == ["share", "token", "wide", "window", "sizes", "text", "count", "name"]
    assert found["count"] == "a count."
