"""Runs Pallas kernels for GPUs as plain operations on this machine."""

from typing import Any

import pytest
from jax.experimental import pallas as pl


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every kernel that is traced from now on run in interpret mode."""
    call: Any = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", lambda *args, **options: call(*args, **options | {"interpret": True}))
