"""Checks of arguments, the same wherever one is taken. Nothing here imports JAX."""

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from jaxspec.errors import InvalidConfig, WrongArguments, shown

Function = TypeVar("Function", bound=Callable)

INT32 = 2**31 - 1
"""The largest count: positions and sizes are int32 on the device."""


def whole(name: str, value: Any, least: int = 1, most: int = INT32) -> int:
    """Gives a whole number within limits as an `int`.

    Integers of NumPy and JAX are taken as Python's are; truth values and floats are refused.

    Raises:
        InvalidConfig: naming the argument.
    """
    limits = f"from {least}" if most >= INT32 else f"from {least} to {most}"
    number = index(value)
    if number is None or number < least:
        raise InvalidConfig(f"{name} must be a whole number {limits}, got {shown(value)}")
    if number > most:
        raise InvalidConfig(f"{name} must be a whole number from {least} to {most}, got {shown(value)}")
    return number


def index(value: Any) -> int | None:
    """Gives a value that is an integer of any kind as an `int`, others as None."""
    if isinstance(value, (bool, np.bool_)) or getattr(value, "dtype", None) == np.bool_:
        return None
    try:
        return operator.index(value)
    except Exception:  # a value may raise whatever it likes, a deleted array among them
        return None


def flag(name: str, value: Any) -> bool:
    """Gives a truth value as a `bool`.

    Raises:
        InvalidConfig: it is none; 0, 1 and arrays are not taken for one.
    """
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise InvalidConfig(f"{name} must be True or False, got {shown(value)}")


def called(name: str, value: Any) -> None:
    """Refuses what is neither None nor callable.

    Raises:
        InvalidConfig: naming the argument.
    """
    if value is not None and not callable(value):
        raise InvalidConfig(f"{name} must be callable, got {shown(value)}")


def dtype_name(value: Any) -> Any:
    """Gives the name of a dtype that may be a name, a NumPy or JAX type, or a `dtype`; other values as they are."""
    if isinstance(value, str) or value is None or isinstance(value, (list, tuple, dict)):
        return value
    try:
        return np.dtype(value).name
    except Exception:  # no dtype; who takes it refuses it by name
        return value


def one_of(name: str, value: Any, known: tuple[str, ...]) -> str:
    """Gives a dtype's name where it is among those known.

    Raises:
        InvalidConfig: it is not.
    """
    found = dtype_name(value)
    if not isinstance(found, str) or found not in known:
        raise InvalidConfig(f"{name} must be one of {', '.join(known)}, got {shown(found)}")
    return found


def named(like: Callable | None = None) -> Callable[[Function], Function]:
    """Makes a function refuse arguments that it does not have by a typed error, which suggests the nearest name.

    Args:
        like: the function whose arguments are known; None: the decorated one.
    """

    def decorate(function: Function) -> Function:
        own, known = inspect.signature(function), inspect.signature(like or function).parameters

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name not in known:
                    raise WrongArguments.unknown(function.__name__, name, known)
            try:
                own.bind(*args, **kwargs)
            except TypeError as error:
                raise WrongArguments(f"{function.__name__}(): {error}") from None
            return function(*args, **kwargs)

        return cast(Function, call)

    return decorate
