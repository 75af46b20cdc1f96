"""Tests settings of a call together: dtype, kernels, mesh, batch, samples, session, file, log-probabilities, stops.

The cases are covering arrays, in which any two values of any two settings meet. Every text is that of plain decoding at
the same width.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest

import jaxspec
from helpers.checkpoints import tiny_config
from helpers.covering import pairwise
from helpers.toy_text import KEY, TOKENIZER, V
from jaxspec import Sampling
from jaxspec.kernels.library import kernels_available
from jaxspec.models.kernels import with_kernels
from jaxspec.models.quantized import quantize
from jaxspec.models.transformer import TransformerLM

FACTORS: dict[str, tuple] = {
    "dtype": ("float32", "bfloat16", "int8"),
    "kernels": (False, True) if kernels_available() else (False,),
    "mesh": (False, True),
    "drafter": ("prompt-lookup", "model"),
    "temperature": (0.0, 1.0),
    "session": (False, True),
    "batch": (None, 2),
    "samples": (1, 2),
    "out": (False, True),
    "logprobs": (False, True, 2),
    "stop": ((), (" ", "ca")),
    "rounds": (None, 1),
}
PROMPTS = [[1, 2, 3, 1, 2], [4, 1, 6, 7, 2, 4, 1], [5]]
BUDGET = 10


def allowed(case: dict[str, Any]) -> bool:
    return not (case["session"] and (case["batch"] or case["out"]))


ARRAYS = [pairwise(FACTORS, allowed, seed) for seed in range(4)]
CASES = [case for array in ARRAYS for case in array]


def label(case: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in sorted(case.items()) if value)


@functools.cache
def model(dtype: str, kernels: bool) -> jaxspec.Model:
    lm = TransformerLM(tiny_config(vocab_size=V), "bfloat16" if dtype == "bfloat16" else "float32")
    params = jax.tree.map(lambda leaf: (3 * leaf).astype(leaf.dtype), lm.init_params(jax.random.key(2)))
    made = jaxspec.Model(lm, quantize(params) if dtype == "int8" else params, TOKENIZER, stop_ids=(0,), name="tiny")
    return with_kernels(made) if kernels else made


@functools.cache
def draft() -> jaxspec.Model:
    lm = TransformerLM(tiny_config(vocab_size=V, num_layers=1))
    return jaxspec.Model(lm, jax.tree.map(lambda leaf: 3 * leaf, lm.init_params(jax.random.key(2))), TOKENIZER)


def decode(case: dict[str, Any], drafter: str, out: str | None) -> list[tuple]:
    """Decodes one turn, or two in a session, and returns what the rows have."""
    options: dict[str, Any] = {
        "key": KEY, "sampling": Sampling(case["temperature"]), "max_new_tokens": BUDGET, "samples": case["samples"],
        "logprobs": case["logprobs"], "stop": case["stop"], "chat": False, "drafter": drafter, "tree": 3,
        "width_matched": True, "mesh": jaxspec.make_mesh() if case["mesh"] else None, "rounds": case["rounds"],
        "verbose": False,
    }  # fmt: skip
    options |= {"draft": draft()} if drafter == "model" else {}
    options |= {"capacity": 256} if case["session"] else {"batch": case["batch"], "out": out}
    target = model(case["dtype"], case["kernels"])

    def rows_of(output: jaxspec.Output) -> list[tuple]:
        return [(row.prompt, row.sample, row.tokens, row.text, row.finish_reason, row.logprobs) for row in output]

    output = jaxspec.generate(target, PROMPTS, **options)
    rows = rows_of(output)
    if case["session"]:
        again: dict[str, Any] = options | {"capacity": None, "session": output.session}
        rows += rows_of(jaxspec.generate(target, PROMPTS, **again))
    return rows


def test_the_arrays_cover_every_pair():
    assert len(CASES) >= 48
    names = list(FACTORS)
    for a in names:
        for b in names[names.index(a) + 1 :]:
            there = {(case[a], case[b]) for case in ARRAYS[0]}
            every = {(x, y) for x in FACTORS[a] for y in FACTORS[b]}
            barred = {("session", "batch"): {(True, 2)}, ("session", "out"): {(True, True)}}.get((a, b), set())
            assert there == every - barred


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (i >= 2), id=label(case)) for i, case in enumerate(CASES)]
)
def test_texts_are_those_of_plain_decoding(case, tmp_path):
    out = [str(tmp_path / f"{name}.jsonl") if case["out"] else None for name in ("drafted", "plain")]
    drafted, plain = decode(case, case["drafter"], out[0]), decode(case, "none", out[1])
    assert len(drafted) == len(PROMPTS) * case["samples"] * (1 + case["session"])
    assert [row[:-1] for row in drafted] == [row[:-1] for row in plain]
    assert (drafted[0][-1] is None) == (case["logprobs"] is False)
    for row, other in zip(drafted, plain):
        np.testing.assert_allclose(row[-1] or [], other[-1] or [], atol=1e-3)
    if case["out"]:
        assert len((tmp_path / "drafted.jsonl").read_text().splitlines()) == len(drafted)
