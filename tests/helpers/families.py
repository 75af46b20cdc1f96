"""Tiny random checkpoints of every family, which follow from a name; shared with `scripts/golden/make_families.py`."""

import json
import pathlib
import zlib

import numpy as np
from safetensors.numpy import load_file, save_file

LENGTH = 72
"""Tokens of each text: past the windows and the original contexts of the cases."""
POSITIONS = (0, 3, 10, 17, 40, 63, 71)
"""Where logits are compared."""


PREFIX = 21
"""Tokens of a text before a tree."""
TREE = (-1, 0, 0, 0, 1, 1, 2, 4, 4, 7, 9)
"""The parents of the nodes of a tree that reaches further back than a convolution."""


def paths() -> list[list[int]]:
    """The nodes from the root to each node of `TREE`."""
    found: list[list[int]] = []
    for node, parent in enumerate(TREE):
        found.append([*(found[parent] if node else []), node])
    return found


def random_tensor(case: str, name: str, shape: list[int]) -> np.ndarray:
    """The weights of one tensor, float32."""
    rng = np.random.default_rng(zlib.crc32(f"{case}/{name}".encode()))
    scale = 0.3 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
    plain = case.startswith(("gemma", "qwen3.5", "qwen3-next")) and not name.endswith("linear_attn.norm.weight")
    around = 0.0 if plain or not name.endswith("norm.weight") else 1.0
    return (around + scale * rng.standard_normal(shape)).astype(np.float32)


def tokens_of(case: str) -> list[int]:
    """The text of one case."""
    return np.random.default_rng(zlib.crc32(case.encode())).integers(3, 48, LENGTH).tolist()


def write_checkpoint(folder: pathlib.Path, case: str, settings: dict, shapes: dict[str, list[int]]) -> None:
    """A Hugging Face directory without tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = {name: random_tensor(case, name, shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def split_experts(path: pathlib.Path, start: str = "") -> None:
    """Rewrites tensors of all experts as tensors of single experts, as published files of Qwen3-MoE have them.

    Args:
        path: the directory.
        start: the beginning of the names of the tensors that are rewritten.
    """
    tensors = {}
    for name, array in load_file(path / "model.safetensors").items():
        prefix, found, kind = name.partition("mlp.experts.") if name.startswith(start) else (name, "", "")
        names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for i, matrix in enumerate(array) if found else ():
            for part, half in zip(names, np.split(matrix, len(names))):
                tensors[f"{prefix}mlp.experts.{i}.{part}.weight"] = np.ascontiguousarray(half)
        if not found:
            tensors[name] = array
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
