"""Rotary position embeddings as data: every published context extension is a set of divisors and one factor.

The angle of frequency `i` at position `t` is `t / (divisors[i] * theta ** (2 i / width))`; cosines and sines are
multiplied by `scale` (Su et al. 2021, arXiv:2104.09864). The functions below compute divisors and scale from the
settings of published checkpoints. Nothing here imports JAX.
"""

import dataclasses
import math

import numpy as np

from jaxspec.errors import InvalidConfig

MAX_WIDTH = 1 << 16
"""Maximum head width that a file may declare: frequencies are computed before any tensor is checked."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embeddings of one kind of layer; hashable.

    Attributes:
        theta: the base of the frequencies.
        width: the number of leading entries of a head that are rotated; None for all.
        divisors: the divisor of each frequency; empty for no divisors.
        scale: the factor of cosines and sines.
    """

    theta: float = 10000.0
    width: int | None = None
    divisors: tuple[float, ...] = ()
    scale: float = 1.0

    def __post_init__(self):
        for name in ("theta", "scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InvalidConfig(f"rope_{name} must be a number, got {value!r}")
            if not (math.isfinite(value) and value > 0):
                raise InvalidConfig(f"rope_{name} must be positive and finite, got {value!r}")
        if self.width is not None and (type(self.width) is not int or self.width < 2 or self.width % 2):
            raise InvalidConfig(f"rotary positions need an even width of at least 2, got {self.width!r}")
        if not all(isinstance(d, (int, float)) and math.isfinite(d) and d > 0 for d in self.divisors):
            raise InvalidConfig("the divisors of the rotary frequencies must be positive and finite")

    def check(self, head_dim: int) -> None:
        """Raises InvalidConfig unless these embeddings fit heads of this width."""
        width = head_dim if self.width is None else self.width
        if width > head_dim:
            raise InvalidConfig(f"rotary positions of width {width} do not fit a head of {head_dim}")
        if self.divisors and len(self.divisors) != width // 2:
            raise InvalidConfig(
                f"{len(self.divisors)} divisors of rotary frequencies, expected {width // 2} for a width of {width}"
            )

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Returns the frequencies in radians per position, `[width / 2]`, float32."""
        width = head_dim if self.width is None else self.width
        plain = self.theta ** (-np.arange(0, width, 2) / width)
        return (plain / np.asarray(self.divisors or 1.0)).astype(np.float32)


def linear(factor: float, width: int) -> tuple[float, ...]:
    """Returns the divisors of linear position interpolation (Chen et al. 2023, arXiv:2306.15595)."""
    return (float(factor),) * (width // 2)


def llama3(
    theta: float, width: int, factor: float, low_freq_factor: float, high_freq_factor: float, original: int
) -> tuple[float, ...]:
    """Returns the divisors of Llama 3.1.

    Wavelengths above `original / low_freq_factor` are stretched by `factor`, wavelengths below
    `original / high_freq_factor` are unchanged, and frequencies in between are interpolated.
    """
    turns = original * theta ** (-np.arange(0, width, 2) / width) / (2 * math.pi)  # in the original context
    mix = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return tuple((1 / ((1 - mix) / factor + mix)).tolist())


def yarn(
    theta: float,
    width: int,
    factor: float,
    original: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> tuple[float, ...]:
    """Returns the divisors of YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.2).

    Frequencies with fewer than `beta_slow` rotations in the original context are stretched by `factor`, and frequencies
    with more than `beta_fast` rotations are unchanged. In between, a linear ramp over the index joins the two.
    """

    def index_of(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(beta_fast), index_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0
    stretched = np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
    return tuple((1 / (stretched / factor + 1 - stretched)).tolist())


def yarn_scale(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """Returns YaRN's factor of cosines and sines (section 3.4), or DeepSeek's ratio if both `mscale`s are set."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def longrope_scale(factor: float, original: int) -> float:
    """Returns LongRoPE's factor of cosines and sines (Ding et al. 2024, arXiv:2402.13753, as used by Phi-3)."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
