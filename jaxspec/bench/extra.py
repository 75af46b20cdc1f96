"""Imports packages that only the benchmark uses, at their first use."""

import importlib
from typing import Any

from jaxspec.errors import MissingPackage

REQUIREMENTS = {"matplotlib": "matplotlib>=3.9", "reasoning_gym": "reasoning-gym==0.1.25"}


def import_extra(module: str, purpose: str) -> Any:
    """Imports and returns the top module of a package of the `bench` extra.

    Args:
        module: the module's name.
        purpose: what needs it, for the error message.

    Raises:
        MissingPackage: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(
            f"{purpose} needs {REQUIREMENTS[module]}, which cannot be imported here ({error}); "
            "install it with pip, or run `pip install --editable '.[bench]'` in the checkout for all packages of the "
            "benchmark"
        ) from None
