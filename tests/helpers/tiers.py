"""Divides tests, and the parameters of a test, between `make test` and `make slow`."""

import pathlib
from collections.abc import Container, Iterable
from typing import Any

import pytest

LONG = pathlib.Path(__file__).parents[1] / "long.txt"
"""The tests that were measured to take long, and whose claim tests of `make test` make in other cases."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of the list to the slow tests.

    Raises:
        UsageError: no test has a name of the list, in a file of which all tests were collected.
    """
    lines = LONG.read_text().splitlines()
    listed = {line for line in lines if line and not line.startswith("#")}
    names = {item.nodeid for item in items}
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)
    files = set() if any("::" in arg for arg in config.args) else {name.partition("::")[0] for name in names}
    if unknown := sorted(name for name in listed - names if name.partition("::")[0] in files):
        raise pytest.UsageError(f"{LONG.name} names tests that do not exist: {', '.join(unknown)}")


def with_slow(values: Iterable[Any], slow: Container[Any]) -> list:
    """Returns the values as parameters; those in `slow` are left to the slow tests.

    A tuple stands for several arguments: it is slow where its first one is in `slow`, or the whole.
    """

    def param(value: Any):
        parts = value if isinstance(value, tuple) else (value,)
        marks = [pytest.mark.slow] if value in slow or parts[0] in slow else []
        return pytest.param(*parts, marks=marks)

    return [param(value) for value in values]
