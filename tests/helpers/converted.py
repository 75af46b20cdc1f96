"""What the converter of llama.cpp writes for tiny random models (`scripts/golden/make_converted.py`)."""

import pathlib
from typing import Any

import gguf
import numpy as np


def digest(array: np.ndarray) -> list[Any]:
    """The shape of a tensor, and a sum of its numbers that depends on their order."""
    weights = np.cos(np.arange(array.size, dtype=np.float64))
    return [list(array.shape), round(float(array.astype(np.float64).ravel() @ weights), 3)]


def read_metadata(path: pathlib.Path) -> dict[str, Any]:
    """The entries of a file that describe its architecture, without the name of the architecture."""
    fields = gguf.GGUFReader(path).fields
    name = fields["general.architecture"].contents()
    entries = {key.partition(".")[2]: field.contents() for key, field in fields.items() if key.startswith(f"{name}.")}
    return {"general.architecture": name} | {
        key: round(value, 9) if isinstance(value, float) else value for key, value in entries.items()
    }
