"""Builds the C++ kernels as an optional extension: where they cannot be built, the package works without them.

`JAXSPEC_KERNELS=0` leaves them out, which makes a wheel for every platform.
"""

import importlib.util
import os
import pathlib
import platform
import shutil
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = pathlib.Path("jaxspec/kernels/src")
RECORD = "_not_built.txt"
"""Where a failure is recorded, see `jaxspec/kernels/installation.py`."""


class BuildKernels(build_ext):
    """Builds the kernels and, if that fails, records why beside the place of the library."""

    def build_extension(self, ext: Extension) -> None:
        """Builds an extension; an error is recorded and raised again, and setuptools makes a warning of it."""
        record = self._record(ext)
        record.unlink(missing_ok=True)
        try:
            super().build_extension(ext)
        except Exception as error:
            record.parent.mkdir(parents=True, exist_ok=True)
            command = next(iter(getattr(self.compiler, "compiler_so_cxx", None) or []), "-")
            command = "c++" if command.startswith("-") else command  # CXX is set, and empty
            missing = f"there is no C++ compiler ({command})"
            failed = f"building with {command} failed ({type(error).__name__}), see `pip install --verbose`"
            record.write_text(f"{missing if not shutil.which(command) else failed}\n")
            raise

    def copy_extensions_to_source(self) -> None:
        """Copies what an editable installation built into the checkout: the libraries, or the records."""
        super().copy_extensions_to_source()
        for ext in self.extensions:
            place = pathlib.Path(*ext.name.split(".")[:-1], RECORD)
            place.unlink(missing_ok=True)
            if self._record(ext).exists():
                shutil.copyfile(self._record(ext), place)

    def _record(self, ext: Extension) -> pathlib.Path:
        return pathlib.Path(self.build_lib, *ext.name.split(".")[:-1], RECORD)


def headers() -> list[str]:
    """Returns the folder of the headers of XLA's foreign function interface."""
    spec = importlib.util.find_spec("jaxlib")
    places = spec.submodule_search_locations if spec else None
    return [str(pathlib.Path(place) / "include") for place in places or ()]


def extensions() -> list[Extension]:
    """Returns the kernels, on the processors that they are for, with the compilers that they are for."""
    wanted = os.environ.get("JAXSPEC_KERNELS", "") != "0"
    if not wanted or platform.machine() != "x86_64" or sys.platform == "win32":
        return []
    return [
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


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernels})
