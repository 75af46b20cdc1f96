"""Packages that only the benchmark uses, imported when they are needed."""

import importlib
from typing import Any

from jaxspec.errors import MissingPackage

REQUIREMENTS = {"matplotlib": "matplotlib>=3.9", "reasoning_gym": "reasoning-gym==0.1.25"}


def need(module: str, purpose: str) -> Any:
    """The top module of a package of the `bench` extra.

    Raises:
        MissingPackage: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(
            f"{purpose} needs {REQUIREMENTS[module]}, which cannot be imported here ({error}); "
            f"install it with pip, or all that the benchmark uses with `pip install '.[bench]'` in the checkout"
        ) from None
