"""Programs lowered for devices that this machine need not have."""

from typing import Any


def lowered_text(traced: Any, platform: str) -> str:
    """The StableHLO of a traced function for "cpu", "tpu", "cuda" or "rocm"."""
    return traced.lower(lowering_platforms=(platform,)).as_text()
