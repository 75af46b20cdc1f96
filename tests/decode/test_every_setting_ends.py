"""Tests that a decode ends for every setting: it is refused in one line, or every row has a status after its budget.

All settings are rows of one batch, so the programs compile once. Traced settings are not checked, and neither are the
numbers of a model. A decode that did not end would hang the test: a loop on the device cannot be interrupted.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jaxspec
from helpers.toys import generate, request
from jaxspec.core.records import Status
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import branching
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Weights
from jaxspec.drafters.model import ModelDraft
from jaxspec.errors import JaxspecError
from jaxspec.testing import TableLM

V, BUDGET = 6, 9
LM = TableLM(V)
PARAMS = LM.init_params(jax.random.key(0))
TINY, LARGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
NUMBERS = [
    0.0, -0.0, 5e-324, 1e-300, 1e-46, 1e-45, 1e-40, 1e-38, TINY, 2e-38, 1e-30, 1e-7, 9.9e-7, 1e-6, 1e-3, 0.5,
    1 - 1e-9, 1.0, 1 + 1e-9, 2.0, 1e30, 1e38, LARGE, 3.5e38, 1e300, float("inf"), float("nan"), -1e-40, -1.0,
    float("-inf"),
]  # fmt: skip
BIASES = [
    [0.0] * V,
    [1e-40] * V,
    [3.3e38] * V,
    [-3.3e38] * V,
    [LARGE, -LARGE, 0.0, 0.0, 0.0, 0.0],
    [float("-inf")] * (V - 1) + [0.0],
    [float("-inf")] * V,
    [float("inf")] + [0.0] * (V - 1),
    [float("nan")] + [0.0] * (V - 1),
]
SETTINGS: list[dict[str, Any]] = [
    *({"temperature": value} for value in NUMBERS),
    *({"temperature": 1.0, "top_p": value} for value in NUMBERS),
    *({"temperature": 1.0, "min_p": value} for value in NUMBERS),
    *({"temperature": 0.7, "top_p": value, "min_p": 1.0} for value in NUMBERS),
    *({"temperature": 1.0, "top_k": value} for value in (0, 1, V, V + 1, 2**31 - 1, 2**31, -1, -(2**31))),
    *({"temperature": 1.0, "logit_bias": value} for value in BIASES),
    *({"temperature": 1e-3, "logit_bias": value} for value in BIASES),
]
"""Each a row, with the defaults of what it leaves out."""

FIELDS = [*(field.name for field in dataclasses.fields(Sampling) if field.name != "processors"), "logit_bias"]
FLOATS = [0.0, -0.0, 1e-40, TINY, LARGE, -LARGE, float("inf"), float("-inf"), float("nan")]
RULES = ["coupled", "rejection", "traversal", "deterministic", "lossy-typical"]


def columns(settings: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The settings as arrays `[B]`, and the bias as `[B, V]`, without a check."""
    defaults = {name: getattr(Sampling(), name) for name in FIELDS} | {"logit_bias": [0.0] * V}
    rows = [defaults | some for some in settings]
    with np.errstate(over="ignore"):
        found = {name: np.asarray([row[name] for row in rows], np.float64) for name in rows[0]}
        whole = np.clip(found.pop("top_k"), -(2**31), 2**31 - 1).astype(np.int32)
        return {name: column.astype(np.float32) for name, column in found.items()} | {"top_k": whole}


@functools.cache
def configured(rule: str) -> Decoder:
    return Decoder(LM, ModelDraft(LM, branching(2, 1)), cases.RULES[rule], chunk=4)


def ends(rule: str, settings: dict[str, np.ndarray], params: Any, draft: Any) -> np.ndarray:
    """Decodes a row for each setting, and returns how many tokens each has."""
    size = len(settings["top_k"])
    asked = request([[1, 2]] * size, BUDGET, vocab=V, temperature=1.0)
    limits = jax.tree.unflatten(
        jax.tree.structure(Sampling(logit_bias=0)),
        [jnp.asarray(settings[name]) for name in FIELDS],
    )
    config = configured(rule)
    result = generate(config, Weights(params, draft), asked._replace(sampling=limits), config.slots(2 + BUDGET))
    assert (np.asarray(result.status) != Status.RUNNING).all()
    tokens, length = np.asarray(result.tokens), np.asarray(result.length)
    written = np.arange(tokens.shape[1]) < length[:, None]
    assert ((tokens >= 0) & (tokens < V))[written].all()
    assert (length - 2 <= BUDGET).all()
    assert ((length - 2 == BUDGET) | (np.asarray(result.status) == Status.ERROR)).all()
    return length - 2


@pytest.mark.parametrize("rule", RULES)
def test_every_setting_is_refused_in_one_line_or_decodes(rule):
    """137 settings, as a user passes them; those that are taken write their whole budget."""
    taken, refused = [], []
    for some in SETTINGS:
        try:
            Sampling(**some).rows(1, V)
            taken.append(some)
        except JaxspecError as error:
            refused.append((str(error), some))
    assert all("\n" not in line and any(name in line for name in some) for line, some in refused)
    assert 60 < len(taken) < len(SETTINGS) - 40
    # Sums of the largest numbers are infinite; such a row ends with a status.
    large = [max(abs(bias) for bias in some.get("logit_bias", [0.0]) if bias > -np.inf) > 1e37 for some in taken]
    rows = [*taken, *taken, *taken][: len(SETTINGS)]  # as many as below, so that both share a program
    counts = ends(rule, columns(rows), PARAMS, PARAMS)
    assert all(count == BUDGET for count, overflows in zip(counts, large) if not overflows)


@pytest.mark.parametrize("rule", RULES)
def test_every_traced_setting_decodes_to_an_end(rule):
    """The same settings without a check: what no user can ask for ends, too."""
    counts = ends(rule, columns(SETTINGS), PARAMS, PARAMS)
    assert len(counts) == len(SETTINGS) > 130
    assert (counts == BUDGET).sum() > 90


@pytest.mark.parametrize("rule", RULES)
def test_every_number_of_a_model_decodes_to_an_end(rule, seed):
    """9 kinds of numbers in all places of the target's or the draft's table, and in some: 36 models of 137 settings."""
    rng = np.random.default_rng(seed)
    table = np.asarray(PARAMS["table"])
    for number in FLOATS:
        full, some = np.full_like(table, number), np.where(rng.random(table.shape) < 0.1, np.float32(number), table)
        for wrong in (full, some):
            ends(rule, columns(SETTINGS), {"table": jnp.asarray(wrong)}, PARAMS)
            counts = ends(rule, columns(SETTINGS), PARAMS, {"table": jnp.asarray(wrong)})
            assert (counts == BUDGET).sum() > 90


@pytest.mark.parametrize("value", [1e-40, 1e-45, 5e-324, 1e-38])
def test_a_share_that_is_zero_in_float32_is_refused(value):
    with pytest.raises(JaxspecError, match=r"top_p must be above 0 and at most 1 \(from 1.2e-38, as float32\), got "):
        jaxspec.Sampling(temperature=1.0, top_p=value)
    with pytest.raises(JaxspecError, match="top_p must be above 0"):
        jaxspec.Sampling(temperature=1.0, top_p=np.asarray([0.5, value]))


def test_the_least_share_keeps_the_likeliest_token():
    settings: dict[str, Any] = {"temperature": 1.0, "top_p": TINY}
    config = configured("coupled")
    greedy, least = (
        generate(config, Weights(PARAMS, PARAMS), request([[1, 2]], BUDGET, vocab=V, **some), config.slots(11))
        for some in ({}, settings)
    )
    np.testing.assert_array_equal(greedy.tokens[:, :11], least.tokens[:, :11])
