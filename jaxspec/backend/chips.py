"""Published figures of accelerators, and devices that are not here, for which programs can be compiled."""

import os
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


def chip_of(device: Any) -> Chip | None:
    """Returns the figures of a device; None if they are not known."""
    kind = device.device_kind.lower()
    names = {name: name for name in CHIPS} | DEVICE_KINDS
    return next((CHIPS[chip] for name, chip in names.items() if name in kind), None)


def describe_topology(text: str) -> list[Any]:
    """Returns the devices of a topology such as "v5e:2x4", for the compiler of TPUs.

    Raises:
        InvalidConfig: there is no such topology, or libtpu is not installed.
    """
    from jax.experimental import topologies

    name = text.partition(":")[0]
    if name not in TPUS:
        raise InvalidConfig(f"a topology is such as v5e:2x4, v6e:2x4 or v5p:2x2x2, got {shown(text)}")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu would ask the host for a TPU of its own
    try:
        return list(topologies.get_topology_desc(text, "tpu").devices)
    except Exception as error:  # libtpu has exceptions of several types
        cause = " ".join(str(error).split())[:200]
        raise InvalidConfig(f"{text}: cannot be compiled for; `pip install libtpu` may be missing ({cause})") from None
