"""What a PARD-2 draft model reads of the target (2026, arXiv:2605.08632): an entry of config.json, and a projection.

The projection is not among the model's weights: AMD's folders contain it as `warp_model.bin`, which torch.save wrote.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxspec.checkpoints import folder, torch_file
from jaxspec.checkpoints.base import check_finite
from jaxspec.errors import CheckpointError
from jaxspec.storage.reading import check_path

WEIGHT, BIAS = "target_proj.weight", "target_proj.bias"
SCALES = ("pard2_scale", "pard_scale", "feat_scale")
"""The entries of config.json that state the scale, of which the first counts."""


@dataclasses.dataclass(frozen=True)
class Pard2:
    """What a PARD-2 draft model reads of the target, see `jaxspec.drafters.pard`.

    Attributes:
        layers: the target's hidden states, in the order in which they are concatenated, as Hugging Face counts them:
            i is the state after i layers, the last state is normed, and -1 stands for it.
        scale: factor applied to their projection.
    """

    layers: tuple[int, ...]
    scale: float = 0.02


class Projection(NamedTuple):
    """What makes a vector of the draft model's width from states of the target."""

    weight: np.ndarray  # [F, E]
    bias: np.ndarray  # [E]; zeros without one


def is_pard2(settings: Mapping[str, Any]) -> bool:
    """Returns whether these are the entries of a PARD-2 model that names its layers."""
    named = settings.get("pard2") is True or settings.get("spd_type") == "pard2"
    return named and settings.get("pard2_target_layers") is not None


def parse_pard2(where: str, settings: Mapping[str, Any]) -> Pard2:
    """Reads the entries of a PARD-2 model.

    Raises:
        CheckpointError: an entry is malformed.
    """
    layers = settings["pard2_target_layers"]
    if not isinstance(layers, list) or not layers or not all(type(i) is int and abs(i) < 1 << 16 for i in layers):
        raise CheckpointError(f"{where}: pard2_target_layers is {layers!r:.80}, expected a list of layer numbers")
    scale = next((settings[name] for name in SCALES if name in settings), Pard2.scale)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise CheckpointError(f"{where}: pard2_scale is {scale!r:.80}, expected a number")
    return Pard2(tuple(layers), float(scale))


def read_projection(source: str | os.PathLike) -> Projection:
    """Reads the projection from a file of torch.save or a safetensors file. Code in the file is not run.

    Raises:
        CheckpointError: the file is malformed, or holds no such projection.
    """
    path = check_path(source, "the file of a PARD-2 projection")
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file; expected warp_model.bin of a PARD-2 model")
    opened = folder.open_shard(path.parent, path.name) if path.suffix == ".safetensors" else torch_file.open_torch(path)
    tensors = {name: opened[name] for name in (WEIGHT, BIAS) if name in opened}
    folder.check_types(tensors)
    if WEIGHT not in tensors or len(tensors[WEIGHT].stored.shape) != 2:
        raise CheckpointError(f"{path}: has no matrix {WEIGHT}")
    read = {name: check_finite(str(path), name, tensor.read().astype(np.float32)) for name, tensor in tensors.items()}
    weight = np.ascontiguousarray(read[WEIGHT].T)
    bias = read.get(BIAS, np.zeros(weight.shape[1], np.float32))
    if bias.shape != weight.shape[1:]:
        raise CheckpointError(f"{path}: {BIAS} has the shape {bias.shape}, expected {weight.shape[1:]}")
    return Projection(weight, bias)
