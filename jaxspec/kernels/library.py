"""Finds the compiled kernels and registers them with XLA.

The kernels are an optional extension: if they are not built, or on a processor without AVX2, XLA's own operations are
used. `jaxspec.kernels.installation` finds out why they are not built. `JAXSPEC_KERNELS=0` turns the kernels off;
`JAXSPEC_KERNELS=AVX2` selects the kernels for older processors.
"""

import ctypes
import functools
import os
import warnings

import jax

from jaxspec.core.checks import flag
from jaxspec.core.records import Params
from jaxspec.core.theory import XLA_TOKEN_COST, TokenCost
from jaxspec.errors import InvalidConfig
from jaxspec.kernels import installation

VARIABLE = "JAXSPEC_KERNELS"
COST_TYPES = ("float32", "bfloat16", "int8", "file")
TOKEN_COSTS = {
    "AMX": {
        "float32": TokenCost(0.03, 15.0),
        "bfloat16": TokenCost(0.025, 27.0),
        "int8": TokenCost(0.055, 7.6),
        "file": TokenCost(0.09, 6.2),
    },
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
"""The measured cost of tokens on two cores, by kind of processor and by `dtype` of `jaxspec.load`
(`scripts/measure/speed.py widths`)."""
TARGETS = (
    "jaxspec_multiply",
    "jaxspec_attend",
    "jaxspec_rms_norm",
    "jaxspec_heads",
    "jaxspec_delta",
    "jaxspec_delta_commit",
    "jaxspec_experts",
)


@functools.cache
def _library() -> ctypes.CDLL | str:
    """Loads the library and registers its functions; returns the reason if this is not possible."""
    file = installation.library_file()
    if not file.exists():
        return installation.explain_missing()
    try:
        library = ctypes.CDLL(str(file))
        library.jaxspec_processor.restype = ctypes.c_char_p
        if library.jaxspec_processor() is None:
            if (wanted := os.environ.get(VARIABLE, "")) not in ("", "1"):
                return f"{VARIABLE}={wanted} names kernels that this processor cannot run; unset the variable"
            return "they need an x86-64 processor with AVX2 and FMA, which this processor does not have"
        for name in TARGETS:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    except (OSError, AttributeError, RuntimeError, jax.errors.JaxRuntimeError) as error:
        return f"{file.name} cannot be used: {str(error).splitlines()[0]}"
    return library


def kernels_available() -> bool:
    """Returns whether programs for this CPU can call the kernels, and no environment variable turns them off."""
    return not _switched_off() and not isinstance(_library(), str)


def describe_kernels() -> str:
    """Returns the kind of processors that the loaded kernels are for, or the reason why kernels are not used."""
    if _switched_off():
        return f"none ({VARIABLE}=0)"
    library = _library()
    return f"none ({library})" if isinstance(library, str) else library.jaxspec_processor().decode()


def token_cost(params: Params) -> TokenCost:
    """Returns the assumed cost of tokens on this CPU, in calls of a target with these parameters."""
    if not kernels_available():
        return XLA_TOKEN_COST
    sizes = dict.fromkeys(COST_TYPES, 0)
    for leaf in jax.tree.leaves(params):
        name = str(getattr(leaf, "dtype", None))
        if name == "uint8":  # packed int8 is [..., I / 4, 16, 4], a file's blocks are [..., I / unit, bytes]
            name = "int8" if leaf.shape[-2:] == (16, 4) else "file"
        if name in sizes:
            sizes[name] += leaf.size
    return TOKEN_COSTS[describe_kernels()][max(sizes, key=lambda name: sizes[name])]


def use_kernels(wanted: bool | None, whole_layers: bool = True) -> bool:
    """Returns whether to use the kernels: `wanted`, or by default whether they are available. Warns once if they are
    not.

    Args:
        wanted: the user's choice.
        whole_layers: whether the model is on CPU devices, and layers are not split over devices.

    Raises:
        InvalidConfig: `wanted` is true, but the kernels cannot be used; the message says why.
    """
    if wanted is not None and flag("kernels", wanted):
        if not whole_layers:
            raise InvalidConfig("kernels=True needs a model on CPU devices that do not split layers; leave it out")
        if not kernels_available():
            raise InvalidConfig(
                f"kernels=True, but the CPU kernels are not available: {describe_kernels()}; leave it out"
            )
    if wanted is None and whole_layers and not kernels_available() and not _switched_off():
        _warn()
    return whole_layers and kernels_available() and wanted is not False


def _switched_off() -> bool:
    return os.environ.get(VARIABLE, "") == "0"


@functools.cache
def _warn() -> None:
    warnings.warn(
        f"jaxspec's CPU kernels: {describe_kernels()}; without them, drafting gains less on a CPU", stacklevel=5
    )
