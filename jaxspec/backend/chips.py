"""Published figures of accelerators, and devices that are not here, for which programs can be compiled."""

import contextlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxspec.errors import InvalidConfig, shown


class Chip(NamedTuple):
    """Published figures of one chip.

    Attributes:
        bandwidth: bytes of memory per second.
        flops: operations of bfloat16 products per second, without sparsity.
        memory: bytes of memory.
    """

    bandwidth: float
    flops: float
    memory: float


CHIPS = {
    # cloud.google.com/tpu/docs, system architecture
    "v5e": Chip(819e9, 197e12, 16e9),
    "v6e": Chip(1640e9, 918e12, 32e9),
    "v5p": Chip(2765e9, 459e12, 95e9),
    # NVIDIA's data sheets
    "h100": Chip(3352e9, 989e12, 80e9),
    "h200": Chip(4800e9, 989e12, 141e9),
    "a100": Chip(2039e9, 312e12, 80e9),
}
"""The figures by name."""
DEVICE_KINDS = {"v5 lite": "v5e", "v5litepod": "v5e", "v6 lite": "v6e", "v5p": "v5p", "v5": "v5p"}
"""Names of chips in `jax.Device.device_kind` that differ from the names in `CHIPS`."""
TPUS = ("v5e", "v6e", "v5p")


class Gpu(NamedTuple):
    """What XLA reads from a GPU and its driver, as far as it differs between GPUs.

    Attributes:
        capability: the first number of the compute capability.
        feature: the name of its instruction set in XLA's description.
        cores: number of cores, units of each core, bytes of shared memory of a core and of a block, bytes of the L2
            cache, and GHz; from openxla/xla, xla/backends/gpu/target_config/specs.
    """

    capability: int
    feature: str
    cores: tuple[float, ...]


_HOPPER = Gpu(9, "ACCELERATED_FEATURES", (132, 128, 233472, 232448, 52428800, 1.98))
GPUS = {
    "h100": _HOPPER,
    "h200": _HOPPER,
    "a100": Gpu(8, "NONE", (108, 64, 167936, 166912, 41943040, 1.41)),
}
"""GPUs that programs can be compiled for, by name."""
# Without the version of the driver, XLA captures no loop in a command buffer.
GPU_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 shared_memory_per_block: 49152
  core_count: {0} fpus_per_core: {1} shared_memory_per_core: {2} shared_memory_per_block_optin: {3} l2_cache_size: {4}
  clock_rate_ghz: {5} memory_bandwidth: {bandwidth} device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} feature_extension: {feature} }}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "12.9.0" dnn_version: "9.10.0" name: "{name}"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}"
"""
"""XLA's description of a GPU."""


def chip_of(device: Any) -> Chip | None:
    """Returns the figures of a device; None if they are not known."""
    kind = device.device_kind.lower()
    names = {name: name for name in CHIPS} | DEVICE_KINDS
    return next((CHIPS[chip] for name, chip in names.items() if name in kind), None)


def describe_topology(text: str) -> list[Any]:
    """Returns the devices of a topology, for the compiler of TPUs or GPUs; none of the devices needs to be there.

    Args:
        text: a chip and the shape of a slice, such as "v5e:2x4" or "v5p:2x2x2"; or a GPU and their number, such as
            "h100:8", on several hosts such as "h100:2x8".

    Raises:
        InvalidConfig: there is no such topology, or the compiler is not installed.
    """
    name, _, shape = text.partition(":")
    if name in TPUS:
        return _devices_of(text, "libtpu", _describe_tpus, text)
    if name in GPUS and re.fullmatch(r"([1-9]\d*x)?[1-9]\d*", shape):
        hosts, _, each = shape.rpartition("x")
        return _devices_of(text, "jaxspec-decoding[gpu]", _describe_gpus, name, int(hosts or 1), int(each))
    raise InvalidConfig(f"a topology is such as v5e:2x4, v5p:2x2x2, h100:8 or h100:2x8, got {shown(text)}")


def _devices_of(text: str, package: str, describe: Callable[..., Any], *arguments: Any) -> list[Any]:
    try:
        return list(describe(*arguments).devices)
    except Exception as error:  # the compilers have exceptions of several types
        cause = " ".join(str(error).split())[:200]
        raise InvalidConfig(
            f"{text}: cannot be compiled for; `pip install {package}` may be missing ({cause})"
        ) from None


def _describe_tpus(text: str) -> Any:
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu would ask the host for a TPU of its own
    # Otherwise only one process of a machine may compile, even if no TPU is used.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return topologies.get_topology_desc(text, "tpu")


@contextlib.contextmanager
def without_xla_flags() -> Iterator[None]:
    """Hides the environment variable XLA_FLAGS from libtpu, which ends the process at a flag that it does not know.

    It does not know some flags of CPUs, and reads the variable when it first compiles. Its own are in LIBTPU_INIT_ARGS.
    """
    given = os.environ.pop("XLA_FLAGS", None)
    try:
        yield
    finally:
        if given is not None:
            os.environ["XLA_FLAGS"] = given


def _describe_gpus(name: str, hosts: int, each: int) -> Any:
    from jax.experimental import topologies

    chip, gpu = CHIPS[name], GPUS[name]
    if not importlib.util.find_spec("nvidia.cuda_nvcc"):  # XLA would end the process at a null pointer
        raise ModuleNotFoundError("there is no ptxas")
    config = GPU_CONFIG.format(
        *gpu.cores, bandwidth=int(chip.bandwidth), memory=int(chip.memory), major=gpu.capability, name=name,
        feature=gpu.feature,
    )  # fmt: skip
    return topologies.get_topology_desc(platform="cuda", target_config=config, topology=f"1x{hosts}x{each}")
