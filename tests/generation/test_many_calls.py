"""Tests thousands of calls in one process: only the first call of a size compiles, and memory does not grow."""

import gc
import pathlib
import resource
from typing import Any

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec.testing import TableLM

LM = TableLM(24)
TARGET = jaxspec.Model(LM, LM.init_params(jax.random.key(0)))
COMPILED = "/jax/core/compile/backend_compile_duration"


def resident() -> int:
    """Bytes this process has in memory now; where the system does not say, the most it ever had."""
    gc.collect()
    status = pathlib.Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def call(i: int) -> int:
    """Tokens of a text: prompts of any length in a cache of one of two sizes; drafts, settings and key by turns."""
    rng = np.random.default_rng(i)
    prompt = rng.integers(0, 24, rng.integers(1, 900)).tolist()
    sampling = jaxspec.Sampling(temperature=float(rng.integers(0, 3)) / 2, top_p=0.9)
    options: dict[str, Any] = {"drafter": "none"} if i % 3 == 0 else {"drafter": "prompt-lookup", "tree": 2}
    got = jaxspec.generate(TARGET, prompt, key=jax.random.key(i), sampling=sampling, max_new_tokens=8, **options)
    return len(got[0].tokens)


@pytest.mark.slow
def test_ten_thousand_calls():
    """Two sizes of caches, two drafters: nothing is compiled after the first hundred calls; memory stays."""
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **more: compiled.append(event) if event == COMPILED else None
    )
    for i in range(100):
        call(i)
    assert compiled, "the event has another name"
    compiled.clear()
    for i in range(100, 1000):
        call(i)
    before = resident()
    assert sum(call(i) for i in range(1000, 10_000)) == 8 * 9000
    grown = resident() - before
    print(f"memory grew by {grown / 2**20:.1f} MiB over 9,000 calls; compiled after the first hundred: {len(compiled)}")
    assert not compiled
    assert grown < 16 * 2**20
