"""Narrows a value's type where a test knows more than the signature says."""

from typing import TypeVar

T = TypeVar("T")


def not_none(value: T | None) -> T:
    """Returns `value`, which must not be None."""
    assert value is not None
    return value


def instance(kind: type[T], value: object) -> T:
    """Returns `value`, which must be an instance of `kind`."""
    assert isinstance(value, kind), type(value)
    return value
