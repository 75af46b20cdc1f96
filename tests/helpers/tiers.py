"""Divides the parameters of a test between `make test` and `make slow`."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def with_slow(values: Iterable[Any], slow: Container[Any]) -> list:
    """Returns the values as parameters; those in `slow` are left to the slow tests.

    A tuple stands for several arguments: it is slow where its first one is in `slow`, or the whole.
    """

    def param(value: Any):
        parts = value if isinstance(value, tuple) else (value,)
        marks = [pytest.mark.slow] if value in slow or parts[0] in slow else []
        return pytest.param(*parts, marks=marks)

    return [param(value) for value in values]
