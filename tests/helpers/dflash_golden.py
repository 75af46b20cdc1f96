"""What `scripts/golden/make_dflash.py` and the tests of its files share: texts, states and supervision."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from helpers.dflash_heads import BLOCK, FILES, E, V
from helpers.families import random_tensor

ROOTS = (8, 12)
"""The positions of the roots of two rounds: the text before the first is read at once, the rest with it kept."""
TEXT = max(ROOTS) + BLOCK
CASES = {name: FILES[name] for name in (
    "z-lab", "z-lab, causal", "z-lab, sliding", "DeepSpec's DFlash", "DSpark", "DSpark, gated", "DSpark, rnn",
    "JetSpec", "JetSpec, shifted",
)}  # fmt: skip
CASES["z-lab, sliding"] = CASES["z-lab, sliding"].changed(told={"sliding_window": 6})
WEIGHTS = {"ce": 0.1, "l1": 0.9, "confidence": 1.0}
"""DSpark's weights of the cross-entropy, of the sum of absolute differences, and of the confidence's cross-entropy."""
TRAINED: dict[str, dict[str, Any]] = {
    "DeepSpec's DFlash": {"anchors": 5, "weights": {"ce": 1.0, "l1": 0.0, "confidence": 0.0}},
    "DSpark": {"anchors": 5, "weights": WEIGHTS},
    "DSpark, gated": {"anchors": 20, "weights": WEIGHTS},
    "DSpark, rnn": {"anchors": 3, "weights": WEIGHTS | {"confidence": 0.0}},
}
"""The most anchors of a text, and the weights of the losses."""


def inputs(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The taps of the target `[1, T, *]`, its text `[1, T]`, its embedding and its projection, both `[V, E]`."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    taps = rng.standard_normal((1, max(ROOTS), 3 * E)).astype(np.float32)
    embed, head = (random_tensor("dflash", table, [V, E]) for table in ("target.embed", "target.head"))
    return taps, rng.integers(0, V, (1, TEXT)), embed, head


def supervision(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The texts `[2, T]`, their tokens that the assistant wrote, and the features with the taps `[2, T, 4 * E]`.

    In the first text the assistant writes twice; in the second there are few tokens to begin from.
    """
    rng = np.random.default_rng(zlib.crc32(f"{name}, supervision".encode()))
    size = 20
    mask = np.zeros((2, size), bool)
    mask[0, 4:11] = mask[0, 14:] = mask[1, 15:18] = True
    return rng.integers(0, V, (2, size)), mask, rng.standard_normal((2, size, 4 * E)).astype(np.float32)


def directions(name: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The arrays with which gradients are multiplied."""
    return {key: random_tensor(f"{name}, direction", key, list(shape)) for key, shape in shapes.items()}
