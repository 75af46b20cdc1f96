"""Reads the rotary settings of a config.json as a `Rope`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.errors import CheckpointError
from jaxspec.models import rope as ropes
from jaxspec.models.rope import Rope

LAYER_TYPES = ("full_attention", "sliding_attention")


class RopeReader:
    """Reads the rotary settings of each layer type, from top-level entries or from `rope_parameters` (newer files).

    Attributes:
        longest: context length; `read` can lower it.
    """

    def __init__(self, where: str, entries: Mapping, head_dim: int, longest: int, context: int | None):
        self._where, self._entries, self._head_dim, self._context = where, entries, head_dim, context
        self.longest = longest

    def read(self, layer_type: str) -> Rope:
        """Returns the rotary embeddings of one layer type; may lower `longest`."""
        entries, settings = self._entries, {}
        for key in ("rope_scaling", "rope_parameters"):
            value = entries.get(key) or {}
            if not isinstance(value, dict):
                raise CheckpointError(f"{self._where}: {key} is {value!r:.80}, expected an object")
            if any(isinstance(value.get(kind), dict) for kind in LAYER_TYPES):
                value = value.get(layer_type) or {}
            elif "rope_local_base_freq" in entries and layer_type == "sliding_attention":
                value = {}  # this entry belongs to the other layers
            settings |= value
        local = layer_type == "sliding_attention"
        theta = settings.get("rope_theta") or entries.get("rope_local_base_freq" if local else "rope_theta", 10000.0)
        self._settings = settings | {"rope_theta": theta}
        theta, share = self._number("rope_theta"), settings.get("partial_rotary_factor")
        share = entries.get("partial_rotary_factor", 1.0) if share is None else share
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise CheckpointError(f"{self._where}: partial_rotary_factor is {share!r:.80}, expected 0 to 1")
        width = int(self._head_dim * share)
        try:
            with np.errstate(all="ignore"):  # `Rope` rejects non-finite values with a message
                divisors, scale = self._scaling(theta, width)
            return Rope(theta, None if width == self._head_dim else width, divisors, scale)
        except CheckpointError:
            raise
        except (ValueError, ArithmeticError) as error:  # a base of at most 1 has no logarithm
            raise CheckpointError(f"{self._where}: rotary embeddings: {error}") from None

    def _scaling(self, theta: float, width: int) -> tuple[tuple[float, ...], float]:
        kind = self._settings.get("rope_type", self._settings.get("type", "default"))
        number = self._number
        if kind in ("su", "yarn") and self._entries.get("model_type") == "phi3":
            kind = "longrope"  # former names
        if kind == "default":
            return (), 1.0
        if kind == "linear":
            return ropes.linear(number("factor"), width), 1.0
        if kind == "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            if high <= low:
                raise CheckpointError(f"{self._where}: high_freq_factor is {high}, expected more than {low}")
            return ropes.llama3(theta, width, number("factor"), low, high, self._original()), 1.0
        if kind == "yarn":
            original = self._original()
            factor = number("factor", max(self.longest / original, 1.0))
            turns = self._given("beta_fast") or 32.0, self._given("beta_slow") or 1.0
            truncate = self._settings.get("truncate") is not False
            scale = number(
                "attention_factor", ropes.yarn_scale(factor, *map(self._given, ("mscale", "mscale_all_dim")))
            )
            return ropes.yarn(theta, width, factor, original, *turns, truncate), scale
        if kind == "longrope":
            return self._longrope(width)
        raise CheckpointError(
            f"{self._where}: rotary embeddings of type {kind!r:.80} are not supported; "
            "supported: default, linear, llama3, yarn, longrope"
        )

    def _longrope(self, width: int) -> tuple[tuple[float, ...], float]:
        """Returns one of the two sets of divisors, and the scale.

        The requested context selects the set, not the current length of a text, because cached keys cannot be rotated
        again.
        """
        original = self._original()
        factor = self._number("factor", self.longest / original)
        scale = self._number("attention_factor", ropes.longrope_scale(factor, original))
        long = self._context is not None and self._context > original
        if not long:
            self.longest = min(self.longest, original)
        name = "long_factor" if long else "short_factor"
        divisors: Any = self._settings.get(name)
        numbers = isinstance(divisors, list) and all(type(d) in (int, float) for d in divisors)
        if not numbers or len(divisors) != width // 2:
            raise CheckpointError(f"{self._where}: {name} is {divisors!r:.80}, expected a list of {width // 2} numbers")
        return tuple(map(float, divisors)), scale

    def _original(self) -> int:
        value = self._entries.get("original_max_position_embeddings")
        value = self._settings.get("original_max_position_embeddings", self.longest) if value is None else value
        if type(value) is float and value.is_integer():
            value = int(value)  # some published files contain a float
        if type(value) is not int or value < 2:
            raise CheckpointError(
                f"{self._where}: original_max_position_embeddings is {value!r:.80}, expected a whole number from 2"
            )
        return value

    def _given(self, key: str) -> float | None:
        """Returns a number, or None if it is absent, null or 0, which transformers ignores."""
        value: Any = self._settings.get(key)
        return None if type(value) in (int, float) and value == 0 else self._number(key) if value is not None else None

    def _number(self, key: str, default: float | None = None) -> float:
        value: Any = self._settings.get(key)
        if value is None:
            if default is not None:
                return default
            raise CheckpointError(f"{self._where}: {key} is missing, expected a positive number")
        if type(value) not in (int, float) or not 0 < value < float("inf"):  # also refuses NaN
            raise CheckpointError(f"{self._where}: {key} is {value!r:.80}, expected a positive number")
        return float(value)
