"""Dataclasses of settings, whose fields are checked by their types and ranges. This module does not import JAX."""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from jaxspec.core.checks import whole
from jaxspec.core.descriptions import describe_fields, parse_section, with_section
from jaxspec.errors import InvalidConfig, WrongArguments, shown

Class = TypeVar("Class", bound=type)


def setting(
    default: Any = dataclasses.MISSING,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """Declares a field of a dataclass together with its range, for `check_fields`.

    Args:
        default: the default value; a field without a default must be given.
        choices: the allowed values of a string; empty for any string.
        least: the smallest allowed number; None for 1 if the field is an integer, and for any number above 0 if it is a
            float.
        most: the largest allowed number; None for no limit.
    """
    return dataclasses.field(default=default, metadata={"choices": choices, "least": least, "most": most})


def check_fields(config: Any) -> None:
    """Checks the type and the range of the fields of a dataclass that are strings, booleans or numbers.

    A field that is declared without `setting` has the range of `setting()`. None passes if the annotation of the field
    allows it.

    Raises:
        InvalidConfig: a field has another type, or is out of range.
    """
    for field in dataclasses.fields(config):
        _check(field, getattr(config, field.name))


def _check(field: dataclasses.Field, value: Any) -> None:
    """Checks the value of a field."""
    allowed = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
    if value is None and types.NoneType in allowed:
        return
    choices, least, most = field.metadata.get("choices", ()), field.metadata.get("least"), field.metadata.get("most")
    must = f"{field.name} must be"
    if str in allowed:
        if not isinstance(value, str) or (choices and value not in choices):
            expected = f"one of {', '.join(choices)}" if choices else "a string"
            raise InvalidConfig(f"{must} {expected}, got {shown(value)}")
    elif bool in allowed:
        if not isinstance(value, bool):
            raise InvalidConfig(f"{must} true or false, got {shown(value)}")
    elif float in allowed or int in allowed:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidConfig(f"{must} a number, got {shown(value)}")
        if float not in allowed:
            low = 1 if least is None else int(least)
            if not isinstance(value, int):
                raise InvalidConfig(f"{must} a whole number from {low}, got {shown(value)}")
            whole(field.name, value, low)
        elif not 0 <= value < math.inf or (value == 0 and least is None):
            raise InvalidConfig(f"{must} finite and {'above' if least is None else 'at least'} 0, got {shown(value)}")
        if most is not None and value > most:
            raise InvalidConfig(f"{must} at most {most}, got {value}")


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def settings_class(cls: Class) -> Class:
    """Decorates a class of settings: makes it a frozen dataclass with keyword arguments, and documents all its fields.

    The section `Attributes` of its docstring describes the fields of the class. The descriptions of inherited fields
    are added to it. Unknown arguments raise `WrongArguments`, which suggests the nearest name.
    """
    made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    descriptions, own_descriptions = describe_fields(made), parse_section(cls.__doc__)
    raises = {"InvalidConfig": "a setting is invalid, or does not fit another setting."}
    doc = with_section(cls.__doc__ or "", "Raises", raises)
    made.__doc__ = with_section(doc, "Attributes", own_descriptions | descriptions)  # the fields of the class first
    made.__init__ = _refuse_unknown(cls.__name__, made.__init__, [field.name for field in dataclasses.fields(made)])
    return made


def _refuse_unknown(name: str, init: Callable, known: list[str]) -> Callable:
    """Wraps `__init__` of a class: unknown and positional arguments raise `WrongArguments`."""

    @functools.wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        if args:
            raise WrongArguments(f"{name}() takes only keyword arguments, got {shown(args[0])}")
        for key in kwargs:
            if key not in known:
                raise WrongArguments.unknown(name, key, known)
        init(self, **kwargs)

    return call
