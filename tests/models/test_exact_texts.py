"""Tests that with `exact=True` on a simulated GPU or TPU, no draft and no other row changes a bit of a text.

The kernels of Pallas run as plain operations. Every way to decode is compared with plain decoding of each prompt alone,
in tokens and log-probabilities.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jaxspec
from helpers import pallas, toys
from helpers.covering import pairwise
from helpers.quantizing import quantize_by_powers
from helpers.tiers import with_slow
from helpers.toys import RAGGED, lively, noisy
from jaxspec import registry
from jaxspec.core.topology import branching, chain, dynamic
from jaxspec.heads.dflash_config import DFlashConfig
from jaxspec.heads.eagle_config import EagleConfig
from jaxspec.heads.network import init_params
from jaxspec.models import attention_pieces
from jaxspec.models.config import ModelConfig
from jaxspec.models.exact import find_gap
from jaxspec.models.execution import Execution
from jaxspec.models.transformer import TransformerLM

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    tie_embeddings=False,
)  # fmt: skip
"""So wide that another order of sums changes bits."""
FOR_TPU = dataclasses.replace(CONFIG, num_heads=2, num_kv_heads=1, head_dim=128)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [7, 8, 9, 7, 8], [*range(1, 40), *range(1, 40)]]
ROWS = range(len(PROMPTS))
SAMPLING = jaxspec.Sampling(temperature=np.array([0.8, 0.0, 0.8], np.float32), top_p=np.float32(0.95))
NEW, CAPACITY = 14, 256
TREES = {"chain": chain(3), "ragged": RAGGED, "wide": branching(2, 2), "dynamic": dynamic(2, 3, 6)}

Text = tuple[list[int], list[float] | None, list[float] | None]
"""Tokens, and their log-probabilities without and with the sampling settings."""


@pytest.fixture(autouse=True)
def as_plain_operations(monkeypatch):
    pallas.interpret(monkeypatch)


@functools.cache
def model(kind: str) -> jaxspec.Model:
    """Returns a toy with weights of this type, on a GPU or a TPU ("tpu int8")."""
    platform = "tpu" if kind.startswith("tpu") else "gpu"
    execution = Execution(platform=platform, exact=True, products="pallas")
    lm = TransformerLM(FOR_TPU if platform == "tpu" else CONFIG, "bfloat16", execution=execution)
    params = lively(noisy(lm.init_params(jax.random.key(0)), 0, 0.1), 3.0)
    return jaxspec.Model(lm, quantize_by_powers(params) if kind.endswith("int8") else params)


def keys(rows: Sequence[int]) -> jax.Array:
    """Returns the key of each row."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), np.asarray(rows))


def sampling(rows: Sequence[int]) -> jaxspec.Sampling:
    return dataclasses.replace(SAMPLING, temperature=np.asarray(SAMPLING.temperature)[np.asarray(rows)])


def drafting(name: str, tree: str | None = None, kind: str = "bfloat16") -> dict[str, Any]:
    """Returns the arguments of `generate` for a drafter; a draft model runs by XLA, and drafts well."""
    target = model("tpu bfloat16" if kind.startswith("tpu") else "bfloat16")
    given = cases.arguments(name, target)
    if "draft" in given:
        lm: Any = target.lm
        by_xla = lm.with_execution(exact=False, products="xla")
        given["draft"] = jaxspec.Model(by_xla, noisy(target.params, 1, 0.05))
    return given if tree is None else given | {"tree": TREES[tree]}


def generate(
    kind: str, rows: Sequence[int] = ROWS, capacity: int = CAPACITY, samples: int = 1, **more: Any
) -> list[Text]:
    """Decodes prompts together; the samples of a prompt have the same key, so their texts are the same."""
    repeated = [row for row in rows for _ in range(samples)]
    out = jaxspec.generate(
        model(kind), [PROMPTS[row] for row in rows], key=keys(repeated), sampling=sampling(repeated), samples=samples,
        max_new_tokens=NEW, logprobs=2, capacity=capacity, verbose=False, **more,
    )  # fmt: skip
    return [text_of(row) for row in out]


def text_of(row: jaxspec.Generation) -> Text:
    return row.tokens, row.logprobs, row.sampled_logprobs


@functools.cache
def plain(kind: str) -> list[Text]:
    """Returns the texts of plain decoding, each prompt alone."""
    return [generate(kind, [row], drafter="none")[0] for row in ROWS]


def test_the_sizes_have_kernels():
    assert find_gap(CONFIG) is find_gap(FOR_TPU, "tpu") is None
    assert repr(model("int8")).endswith("exact, products in Pallas)")


USUAL = [("tpu int8", "prompt-lookup", "chain"), ("bfloat16", "model", "dynamic")]
EVERY = [("bfloat16", "medusa", "wide"), ("int8", "prompt-lookup", "chain"), ("tpu bfloat16", "model", "dynamic")]
for number, drafter in enumerate(registry.DRAFTERS):
    EVERY += [(platform + ("int8" if number % 2 else "bfloat16"), drafter, None) for platform in ("", "tpu ")]


@pytest.mark.parametrize(("kind", "name", "tree"), with_slow([*USUAL, *EVERY], set(EVERY)))
def test_drafts_and_other_rows_change_no_bit(kind, name, tree):
    assert generate(kind, **drafting(name, tree, kind)) == plain(kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "tree"), [("int8", "prompt-lookup", "chain"), ("bfloat16", "model", "dynamic")]
)
def test_texts_of_several_pieces_have_the_bits_of_plain_decoding(kind, name, tree, monkeypatch):
    """The capacity is one of this test alone, so that nothing traced with other pieces is used again."""
    monkeypatch.setattr(attention_pieces, "PIECE_SLOTS", 64)
    prompts = [[*range(1, 47)] * 5, [7, 8, 9] * 70, [5, 6, 7, 5, 6]]

    def decode(rows: Sequence[int], **more: Any) -> list[Text]:
        out = jaxspec.generate(
            model(kind), [prompts[row] for row in rows], key=keys(rows), sampling=sampling(rows),
            max_new_tokens=NEW, logprobs=2, capacity=768, verbose=False, **more,
        )  # fmt: skip
        return [text_of(row) for row in out]

    alone = [decode([row], drafter="none")[0] for row in range(3)]
    assert decode(range(3), **drafting(name, tree, kind)) == alone


def other_heads(name: str) -> tuple[str, jaxspec.DraftHeads]:
    """Returns heads of other versions than `cases.RANDOM` makes, and their drafter."""
    decoder, key = dataclasses.replace(CONFIG, num_layers=1), jax.random.key(0)
    config: Any = EagleConfig(decoder, version=1 if name == "eagle-1" else 3)
    if name == "dflash":
        config = DFlashConfig(dataclasses.replace(decoder, qk_norm=True), 5, 0, taps=(1, 1))
    return config.drafter, jaxspec.DraftHeads(config, init_params(config, key=key))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle-1", "eagle-3", "dflash"])
def test_other_versions_of_heads_change_no_bit(name):
    drafter, heads = other_heads(name)
    assert generate("bfloat16", drafter=drafter, heads=heads) == plain("bfloat16")


def fits(case: dict[str, Any]) -> bool:
    """Tells whether the drafter drafts such a tree."""
    trees = {"none": ("chain",), "prompt-lookup": ("chain", "dynamic"), "medusa": ("wide",)}
    return case["tree"] in trees.get(case["name"], TREES)


COVERING = pairwise(
    {
        "name": list(registry.DRAFTERS), "tree": list(TREES), "schedule": list(registry.SCHEDULES),
        "kind": ["bfloat16", "int8"], "rows": [(0, 1, 2), (2, 0), (1,)], "capacity": [CAPACITY, 512],
        "samples": [1, 2],
    },
    fits,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", COVERING, ids=lambda case: "-".join(map(str, case.values())))
def test_no_pair_of_settings_changes_a_bit(case):
    given = drafting(case["name"], None if case["name"] == "none" else case["tree"])
    given["schedule"] = cases.SCHEDULES[case["schedule"]][0]
    rows, samples, expected = case["rows"], case["samples"], plain(case["kind"])
    found = generate(case["kind"], rows, case["capacity"], samples, **given)
    assert found == [expected[row] for row in rows for _ in range(samples)]


@pytest.mark.parametrize("name", with_slow(registry.DRAFTERS, set(registry.DRAFTERS) - {"recycling"}))
def test_streams_and_sessions_have_the_bits_of_one_call(name):
    """A second turn is compared with plain decoding of the whole conversation in one call."""
    given, more = drafting(name), [5, 6, 7]
    options: dict[str, Any] = {"sampling": sampling([0, 1]), "logprobs": True, "capacity": CAPACITY, "verbose": False}
    running = jaxspec.stream(
        model("bfloat16"), [PROMPTS[0], PROMPTS[1]], key=keys([0, 1]), max_new_tokens=NEW, **options, **given
    )
    streamed: list[list[int]] = [[], []]
    for chunk in running:
        streamed[chunk.row] += chunk.tokens
    first = running.output
    assert streamed == [row.tokens for row in first]
    assert list(map(text_of, first)) == plain("bfloat16")[:2]
    second = jaxspec.generate(
        model("bfloat16"), [more, more], key=keys([0, 1]), max_new_tokens=8, session=first.session, **options, **given
    )
    for row, text in enumerate(second):
        alone = options | {"sampling": sampling([row]), "key": keys([row])}
        text_before = [*PROMPTS[row], *first[row].tokens, *more]
        whole = jaxspec.generate(model("bfloat16"), [text_before], max_new_tokens=8, drafter="none", **alone)[0]
        assert text_of(text) == text_of(whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.DRAFTERS)
def test_rollouts_have_the_bits_of_generate(name):
    target: Any = model("bfloat16")
    longest = max(map(len, PROMPTS))
    tokens = jnp.asarray([prompt + [0] * (longest - len(prompt)) for prompt in PROMPTS])
    count = jnp.asarray([len(prompt) for prompt in PROMPTS])

    def roll(params):
        return jaxspec.rollout(
            dataclasses.replace(target, params=params), tokens, count, key=keys(ROWS), sampling=SAMPLING,
            max_new_tokens=NEW, drafting=jaxspec.Drafting(**drafting(name)),
        )  # fmt: skip

    rolled = jax.jit(roll, compiler_options=dict(target.lm.compiler_options))(target.params)
    for row, (new, raw, sampled) in enumerate(plain("bfloat16")):
        size = len(new)
        assert rolled.new_tokens[row, :size].tolist() == new
        assert rolled.logprobs.raw[row, :size].tolist() == raw
        assert rolled.logprobs.sampled[row, :size].tolist() == sampled


@pytest.mark.parametrize("name", with_slow(registry.DRAFTERS, set(registry.DRAFTERS) - {"eagle"}))
def test_the_functional_core_has_the_bits_of_generate(name):
    """Prompts are read four tokens at a time, and rounds are steps of their own."""
    target: Any = model("bfloat16")
    decoder, weights = jaxspec.Drafting(**drafting(name)).build(target, chunk=4, top_logprobs=2)
    asked = toys.request(
        PROMPTS, NEW, vocab=target.lm.vocab, logprobs=True, temperature=SAMPLING.temperature, top_p=[0.95] * 3
    )
    state = toys.whole(decoder, weights, asked._replace(key=keys(ROWS)), CAPACITY)
    for row, (new, raw, sampled) in enumerate(plain("bfloat16")):
        text = slice(len(PROMPTS[row]), len(PROMPTS[row]) + len(new))
        assert np.asarray(state.tokens)[row, text].tolist() == new
        assert np.asarray(state.logprobs.raw)[row, text].tolist() == raw
        assert np.asarray(state.logprobs.sampled)[row, text].tolist() == sampled
