"""Tests that with the kernels a draft changes no bit of tokens and log-probabilities."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

import jaxspec
from cases import RANDOM
from helpers.blocks import blocks_like
from helpers.tiers import with_slow
from helpers.toys import noisy
from jaxspec import Sampling
from jaxspec.core.topology import Dynamic, Topology, branching, chain, dynamic
from jaxspec.kernels import library
from jaxspec.models.block_kinds import BLOCK_KINDS
from jaxspec.models.config import DeltaSizes, Experts, ModelConfig, is_table
from jaxspec.models.kernels import with_kernels
from jaxspec.models.quantized import quantize
from jaxspec.models.transformer import TransformerLM

pytestmark = pytest.mark.skipif(not library.kernels_available(), reason=library.describe_kernels())

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=56, intermediate_size=100, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=12,
    qk_norm=True,
)  # fmt: skip
WIDE = dataclasses.replace(CONFIG, hidden_size=256, intermediate_size=256, head_dim=32, num_heads=8)
HYBRID = dataclasses.replace(
    CONFIG,
    num_layers=4,
    out_gate=True,
    delta=DeltaSizes(2, 4, 12, 20),
    recurrent=(True, True, False, True),
)
SPARSE = dataclasses.replace(
    CONFIG, num_layers=3, experts=Experts(7, 2, 36, shared_width=20), sparse=(True, False, True)
)
CONFIGS = {"hybrid": HYBRID, "sparse": SPARSE}
DTYPES = (
    *("float32", "bfloat16", "int8", "file"),
    *(f"{kind} {dtype}" for kind in CONFIGS for dtype in ("float32", "bfloat16", "int8")),
)
PROMPTS = [[1, 2, 3, 4, 5, 1, 2, 3], [7, 8, 9, 7, 8], list(range(1, 40))]
TEMPERATURE = np.array([0.8, 0.0, 0.8], np.float32)
DRAFTERS: dict[str, Topology | Dynamic] = {
    "prompt-lookup": chain(7),
    "early-exit": branching(2, 2),
    "model": branching(4, 3, 4),
    "model, dynamic": dynamic(3, 4, 9),
    "medusa": branching(3, 2),
    "eagle": branching(3, 2),
    "eagle, dynamic": dynamic(3, 4, 9),
    "dflash": branching(3, 2),
}


def model(dtype: str, seed: int, draft: float = 0.0) -> jaxspec.Model:
    """Returns a toy on the kernels, or one that drafts for it."""
    kind, dtype = dtype.split()[:-1], dtype.split()[-1]
    config = CONFIGS[kind[0]] if kind else WIDE if dtype == "file" else CONFIG
    lm = TransformerLM(config, dtype if dtype == "bfloat16" else "float32")
    params = noisy(lm.init_params(jax.random.key(seed)), seed, 0.1)
    if dtype == "file":
        lm = lm.with_execution(kernels=True)
        return jaxspec.Model(lm, in_blocks(params, seed if draft == 0 else seed + 1))
    params = noisy(params, seed + 1, draft) if draft else params
    return with_kernels(jaxspec.Model(lm, quantize(params) if dtype == "int8" else params))


def in_blocks(params, seed: int):
    """Returns random parameters whose matrices are in blocks, of all types in turn."""
    rng, kinds = np.random.default_rng(seed), itertools.cycle(BLOCK_KINDS)

    def convert(path, leaf):
        if leaf.ndim < 2:
            return leaf
        return blocks_like(rng, next(kinds), np.asarray(leaf if is_table(path[-1].key) else leaf.T))

    return jax.tree_util.tree_map_with_path(convert, params)


PROCESSORS = {
    "all": [
        jaxspec.LogitBias({3: -1.0, 5: 2.0}), jaxspec.RepetitionPenalty(1.1), jaxspec.PresencePenalty(0.2),
        jaxspec.FrequencyPenalty(0.1), jaxspec.NoRepeatNgram(3), jaxspec.BadWords([[3], [1, 2]]),
        jaxspec.MinNewTokens(5), jaxspec.AllowedTokens(range(1, 60)), jaxspec.SuppressTokens([4]),
        jaxspec.ThinkingBudget(5, [7, 6]),
    ],
    "watermark": [jaxspec.Watermark(7, temperature=0.8, context=1)],
    "none": [],
}  # fmt: skip


def decode(target: jaxspec.Model, rows: list[int], seed: int, processors: str = "none", **drafting) -> list[tuple]:
    """Returns the tokens and log-probabilities of some rows, decoded together."""
    key = jax.random.wrap_key_data(
        jax.vmap(lambda row: jax.random.key_data(jax.random.fold_in(jax.random.key(seed), row)))(np.array(rows))
    )
    out = jaxspec.generate(
        target,
        [PROMPTS[row] for row in rows],
        key=key,
        sampling=Sampling(
            temperature=0.0 if processors == "watermark" else TEMPERATURE[rows],
            top_p=0.95,
            processors=PROCESSORS[processors],
        ),
        max_new_tokens=20,
        logprobs=2,
        verbose=False,
        **drafting,
    )
    return [(row.tokens, row.logprobs, row.sampled_logprobs, row.top_logprobs) for row in out]


@functools.cache
def plain(dtype: str, seed: int) -> list[tuple]:
    target = model(dtype, seed)
    return [decode(target, [row], seed, drafter="none")[0] for row in range(len(PROMPTS))]


def check(dtype: str, name: str, tree: Topology | Dynamic, seed: int) -> None:
    target = model(dtype, seed)
    drafting = {"drafter": name.partition(",")[0], "tree": tree}
    if name.startswith("model"):
        drafting["draft"] = model(dtype, seed, 0.3)
    elif name == "early-exit":
        drafting["drafter_options"] = {"exit_layers": 1}
    elif drafting["drafter"] in RANDOM:
        drafting["heads"] = RANDOM[drafting["drafter"]](target)
    found = decode(target, [0, 1, 2], seed, **drafting)
    for row, expected in enumerate(plain(dtype, seed)):
        assert found[row] == expected, (seed, row)


PAIRS = [(dtype, name) for name in DRAFTERS for dtype in DTYPES]
FAST = {("int8", "prompt-lookup"), ("hybrid bfloat16", "model"), ("sparse int8", "model")}
"""The other pairs are slow."""


@pytest.mark.parametrize(("dtype", "name"), with_slow(PAIRS, set(PAIRS) - FAST))
def test_drafts_and_neighbours_change_no_bit(dtype, name):
    for seed in range(3):
        check(dtype, name, DRAFTERS[name], seed)


@pytest.mark.parametrize("processors", ["all", "watermark"])
def test_with_processors_drafts_change_no_bit(processors):
    target = model("int8", 0)
    alone = [decode(target, [row], 0, processors, drafter="none")[0] for row in range(len(PROMPTS))]
    assert alone != plain("int8", 0), "the processors change the texts"
    assert decode(target, [0, 1, 2], 0, processors, drafter="prompt-lookup", tree=chain(7)) == alone


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thousand_toys(dtype):
    for seed in range(67):
        for name, tree in DRAFTERS.items():
            check(dtype, name, tree, seed)
