"""Checks of arguments, shared by all public functions. This module does not import JAX."""

import functools
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from jaxspec.core.sizes import MAX_INT32
from jaxspec.errors import InvalidConfig, WrongArguments, shown

Function = TypeVar("Function", bound=Callable)

MAX_FLOAT32 = float(np.finfo(np.float32).max)
"""The largest value of a setting, because devices compute with settings in float32."""


def whole(name: str, value: Any, least: int = 1, most: int = MAX_INT32) -> int:
    """Returns a whole number within limits as an `int`.

    Accepts integers of Python, NumPy and JAX; refuses booleans and floats.

    Raises:
        InvalidConfig: the value is not a whole number, or is outside the limits; the message names the argument.
    """
    limits = f"from {least}" if most >= MAX_INT32 else f"from {least} to {most}"
    number = index(value)
    if number is None or number < least:
        raise InvalidConfig(f"{name} must be a whole number {limits}, got {shown(value)}")
    if number > most:
        raise InvalidConfig(f"{name} must be a whole number from {least} to {most}, got {shown(value)}")
    return number


def number(name: str, value: Any, least: float = 0.0, most: float = MAX_FLOAT32, above: bool = False) -> float:
    """Returns a number within limits as a `float`; the limits are checked in float32, in which devices compute.

    Accepts numbers of Python and NumPy, and scalar arrays of them; refuses booleans.

    Args:
        name: the name of the argument.
        value: the number.
        least: the least value.
        most: the greatest value.
        above: whether the number must be above `least`. Devices flush numbers below 1.2e-38 to 0, so these count as 0.

    Raises:
        InvalidConfig: the value is not a number, is NaN, or is outside the limits; the message names the argument.
    """
    limits = f"{'above' if above else 'from'} {least:g}" + ("" if most >= MAX_FLOAT32 else f" and at most {most:g}")
    try:
        array = np.asarray(value)
    except Exception:  # ragged lists, deleted arrays
        array = np.asarray(None)
    with np.errstate(all="ignore"):
        single = float(array.astype(np.float32)) if array.dtype.kind in "iuf" and not array.ndim else math.nan
    single = 0.0 if abs(single) < np.finfo(np.float32).tiny else single
    if not (least < single if above else least <= single) or not single <= most:
        raise InvalidConfig(f"{name} must be a finite number {limits}, as float32; got {shown(value)}")
    return float(array)


def index(value: Any) -> int | None:
    """Returns an integer of any type as an `int`; None for other values."""
    if isinstance(value, (bool, np.bool_)) or getattr(value, "dtype", None) == np.bool_:
        return None
    try:
        return operator.index(value)
    except Exception:  # any exception: a deleted array raises one that JAX defines
        return None


def flag(name: str, value: Any) -> bool:
    """Returns a boolean as a `bool`.

    Raises:
        InvalidConfig: the value is not a boolean of Python or NumPy; 0, 1 and arrays are refused.
    """
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise InvalidConfig(f"{name} must be True or False, got {shown(value)}")


def flag_or_whole(name: str, value: Any, least: int, most: int) -> bool | int:
    """Returns a boolean as a `bool`, and a whole number within limits as an `int`.

    Raises:
        InvalidConfig: the value is neither.
    """
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    number = index(value)
    if number is None or not least <= number <= most:
        limits = f"a whole number from {least} to {most}"
        raise InvalidConfig(f"{name} must be True, False or {limits}, got {shown(value)}")
    return number


def check_callable(name: str, value: Any) -> None:
    """Refuses values that are neither None nor callable.

    Raises:
        InvalidConfig: the value is neither None nor callable; the message names the argument.
    """
    if value is not None and not callable(value):
        raise InvalidConfig(f"{name} must be callable, got {shown(value)}")


def dtype_name(value: Any) -> Any:
    """Returns the name of a dtype, which may be a name, a NumPy or JAX type, or a `dtype`; other values unchanged."""
    if isinstance(value, str) or value is None or isinstance(value, (list, tuple, dict)):
        return value
    try:
        return np.dtype(value).name
    except Exception:  # not a dtype; the caller refuses it
        return value


def one_of(name: str, value: Any, known: tuple[str, ...]) -> str:
    """Returns the name of a dtype, which must be one of `known`.

    Raises:
        InvalidConfig: the dtype is not one of `known`.
    """
    dtype = dtype_name(value)
    if not isinstance(dtype, str) or dtype not in known:
        raise InvalidConfig(f"{name} must be one of {', '.join(known)}, got {shown(dtype)}")
    return dtype


def check_arguments(function: Function) -> Function:
    """Decorates a function: unknown arguments raise `WrongArguments`, which suggests the nearest name."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in signature.parameters:
                raise WrongArguments.unknown(function.__name__, name, signature.parameters)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise WrongArguments(f"{function.__name__}(): {error}") from None
        return function(*args, **kwargs)

    return cast(Function, call)


def check_member(kind: str, member: Any, protocol: type) -> None:
    """Checks that a member is a hashable object with all members of its protocol.

    Args:
        kind: "drafter", "rule" or "schedule".
        member: the object.
        protocol: the protocol of this kind of member.

    Raises:
        InvalidConfig: the object is not such a member; the message names what is missing.
    """
    expected = f"{kind} must be a registered name or a {kind} object"
    if isinstance(member, type):
        raise InvalidConfig(f"{expected}, got the class {member.__name__}; pass an object of this class")
    names = _declared(protocol)
    missing = [name for name in names if not hasattr(member, name)]
    if len(missing) == len(names):
        raise InvalidConfig(f"{expected}, got {shown(member)}")
    name = type(member).__name__
    if missing:
        raise InvalidConfig(f"{expected}; {name} has no {', '.join(missing)}, see {protocol.__module__}")
    if kind == "rule" and not callable(member):
        raise InvalidConfig(f"{expected}; {name} cannot be called, see {protocol.__module__}")
    try:
        hash(member)
    except TypeError:
        raise InvalidConfig(
            f"a {kind} must be hashable, because it is a static argument, but {name} is not; make it a frozen dataclass"
        ) from None


def _declared(protocol: type) -> list[str]:
    """Returns the public members that a protocol and its bases declare."""
    bases = [base for base in reversed(protocol.__mro__) if issubclass(base, Protocol) and base is not Protocol]
    return [name for base in bases for name in vars(base) if not name.startswith("_")]
