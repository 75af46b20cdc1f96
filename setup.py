"""Builds the C++ kernels as an optional extension: without a compiler, the package works without them."""

import importlib.util
import pathlib

from setuptools import Extension, setup

SOURCES = pathlib.Path("jaxspec/kernels/src")


def headers() -> list[str]:
    """Returns the folder of the headers of XLA's foreign function interface."""
    spec = importlib.util.find_spec("jaxlib")
    places = spec.submodule_search_locations if spec else None
    return [str(pathlib.Path(place) / "include") for place in places or ()]


setup(
    ext_modules=[
        Extension(
            "jaxspec.kernels._kernels",
            sources=sorted(map(str, SOURCES.glob("*.cpp"))),
            depends=sorted(map(str, SOURCES.glob("*.h"))),
            include_dirs=headers(),
            # Only what is written as a fused multiply-add may be one: its rounding is part of the bits.
            extra_compile_args=["-std=c++17", "-O3", "-g0", "-ffp-contract=off"],
            language="c++",
            optional=True,
        )
    ]
)
