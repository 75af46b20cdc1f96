"""Finds the compiled kernels and registers them with XLA.

They are an optional extension: where they are not built, or on a processor without AVX2, XLA's own operations serve.
`jaxspec.kernels.installation` says why they are not built. `JAXSPEC_KERNELS=0` turns them off; `JAXSPEC_KERNELS=AVX2`
runs those of older processors.
"""

import ctypes
import functools
import os
import warnings

import jax

from jaxspec.core.checks import flag
from jaxspec.core.records import Params
from jaxspec.core.theory import TokenCost
from jaxspec.errors import InvalidConfig
from jaxspec.kernels import installation

VARIABLE = "JAXSPEC_KERNELS"
TYPES = ("float32", "bfloat16", "int8", "file")
TOKEN_COSTS = {
    "AVX-512 with BF16 and VNNI": {
        "float32": TokenCost(0.015, 11.0),
        "bfloat16": TokenCost(0.015, 10.5),
        "int8": TokenCost(0.025, 9.0),
        "file": TokenCost(0.08, 5.4),
    },
    "AVX-512": {
        "float32": TokenCost(0.015, 11.0),
        "bfloat16": TokenCost(0.02, 5.8),
        "int8": TokenCost(0.04, 4.2),
        "file": TokenCost(0.1, 3.9),
    },
    "AVX2": {
        "float32": TokenCost(0.03, 10.5),
        "bfloat16": TokenCost(0.04, 6.0),
        "int8": TokenCost(0.06, 4.3),
        "file": TokenCost(0.12, 4.2),
    },
}
"""What tokens take, by the processors that the kernels are for and `dtype` of `jaxspec.load`, on two cores
(`scripts/measure/speed.py widths`)."""
COST_WITHOUT = TokenCost(0.025, 1.7)
"""The same of XLA's own products, in float32."""
TARGETS = ("jaxspec_multiply", "jaxspec_attend", "jaxspec_rms_norm", "jaxspec_heads")


@functools.cache
def _library() -> ctypes.CDLL | str:
    """Loads the library and registers its functions; returns the reason if that is not possible."""
    file = installation.library_file()
    if not file.exists():
        return installation.why_missing()
    try:
        library = ctypes.CDLL(str(file))
        library.jaxspec_processor.restype = ctypes.c_char_p
        if library.jaxspec_processor() is None:
            if (wanted := os.environ.get(VARIABLE, "")) not in ("", "1"):
                return f"{VARIABLE}={wanted}: this processor runs no kernels of that name; leave the variable unset"
            return "they need an x86-64 processor with AVX2 and FMA; this processor is not one"
        for name in TARGETS:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    except (OSError, AttributeError, RuntimeError, jax.errors.JaxRuntimeError) as error:
        return f"{file.name} cannot be used: {str(error).splitlines()[0]}"
    return library


def available() -> bool:
    """Returns True if programs for this CPU can call the kernels and no variable turns them off."""
    return not _switched_off() and not isinstance(_library(), str)


def describe() -> str:
    """Returns the processors that the kernels in use are for, or the reason why there are none."""
    if _switched_off():
        return f"none ({VARIABLE}=0)"
    library = _library()
    return f"none ({library})" if isinstance(library, str) else library.jaxspec_processor().decode()


def token_cost(params: Params) -> TokenCost:
    """Returns what tokens are assumed to take on this CPU in calls of a target with these parameters."""
    if not available():
        return COST_WITHOUT
    sizes = dict.fromkeys(TYPES, 0)
    for leaf in jax.tree.leaves(params):
        name = str(getattr(leaf, "dtype", None))
        if name == "uint8":  # packed int8 is [O / 16, I / 4, 16, 4], a file's blocks are [O / 16, I / unit, bytes]
            name = "int8" if leaf.ndim == 4 else "file"
        if name in sizes:
            sizes[name] += leaf.size
    return TOKEN_COSTS[describe()][max(sizes, key=lambda name: sizes[name])]


def use_kernels(wanted: bool | None, suited: bool = True) -> bool:
    """Returns `wanted`, by default whether the kernels are available; warns once if they are not.

    Args:
        wanted: the user's choice.
        suited: whether the model is placed on CPU devices that run whole layers.

    Raises:
        InvalidConfig: they are wanted and cannot be used; the message says why.
    """
    if wanted is not None and flag("kernels", wanted):
        if not suited:
            raise InvalidConfig("the CPU kernels need whole layers on each CPU device; leave out kernels=True")
        if not available():
            raise InvalidConfig(f"the CPU kernels are not available: {describe()}; leave out kernels=True")
    if wanted is None and suited and not available() and not _switched_off():
        _warn()
    return suited and available() and wanted is not False


def _switched_off() -> bool:
    return os.environ.get(VARIABLE, "") == "0"


@functools.cache
def _warn() -> None:
    warnings.warn(f"jaxspec's CPU kernels: {describe()}; without them, drafting pays less on a CPU", stacklevel=5)
