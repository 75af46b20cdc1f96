"""Tests target calls of one width: the bits of a text depend neither on the drafter and its tree nor on other rows.

The network runs on XLA's own operations, in bfloat16, and is so wide that another number of rows changes bits.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers import toys
from helpers.tiers import with_slow
from jaxspec.core.records import Window
from jaxspec.core.topology import branching, chain
from jaxspec.decode.state import Weights
from jaxspec.decode.target_call import MAX_PATH, widen
from jaxspec.drafters.medusa import Medusa
from jaxspec.drafters.model import ModelDraft
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.errors import InvalidConfig
from jaxspec.heads.medusa_config import HeadsConfig
from jaxspec.heads.network import flatten, init_params, unflatten

WIDTH = 16
TARGET = toys.transformer(
    "bfloat16", vocab_size=96, hidden_size=512, intermediate_size=768, num_layers=2, num_heads=8, head_dim=64
)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [7, 8, 7, 8, 7], [30, 31, 32], [5] * 9]
OTHERS = [[60, 61], [50, 51, 52, 53], PROMPTS[2], [9, 8, 7, 6, 5, 4]]


@functools.cache
def params():
    return toys.lively(TARGET.init_params(jax.random.key(1)))


def drafter(name: str):
    """Returns a drafter and its parameters."""
    if name == "none":
        return NoDraft(), None
    if name.startswith("prompt-lookup"):
        return PromptLookup(chain(8), min_match=1), None
    if name.startswith("model"):
        draft = toys.noisy(params(), 3, 0.02)
        return ModelDraft(TARGET, branching(2, 2) if "tree" in name else chain(4)), draft
    config = HeadsConfig(TARGET.config.hidden_size, TARGET.vocab, 3)
    heads = init_params(config, TARGET.unembedding(params()))
    rng = np.random.default_rng(0)
    moved = {
        name: leaf + jnp.asarray(rng.normal(0, 0.02, leaf.shape), leaf.dtype) for name, leaf in flatten(heads).items()
    }
    return Medusa(config, TARGET, branching(2, 2, 1)), {"heads": unflatten(moved)}


def decode(name: str, prompts=PROMPTS, width: bool | int = WIDTH):
    """Every second row is sampled; log-probabilities and two alternatives are recorded."""
    proposer, own = drafter(name)
    decoder = toys.decoder(TARGET, proposer, width_matched=width, top_logprobs=2)
    asked = toys.request(
        prompts, 20, vocab=TARGET.vocab, size=9, logprobs=True, temperature=[0.0, 0.8, 0.0, 1.0],
        top_p=[1.0, 0.95, 1.0, 0.9],
    )  # fmt: skip
    return toys.generate(decoder, Weights(params(), own), asked, 256, quick=False)


@functools.cache
def plain():
    return decode("none")


def bits(result, row: int) -> list[np.ndarray]:
    """Returns a row's tokens, and the log-probabilities of its new tokens."""
    first, end = int(result.start[row]), int(result.length[row])
    of_tokens = [np.asarray(leaf)[row, first:end] for leaf in jax.tree.leaves(result.logprobs)]
    return [np.asarray(result.tokens)[row, :end], *of_tokens]


def differing(one, other, rows: Sequence[int] = range(4)) -> list[int]:
    """Returns the rows whose bits differ."""
    pairs = [(bits(one, row), bits(other, row)) for row in rows]
    return [row for row, (a, b) in zip(rows, pairs) if not all(map(np.array_equal, a, b))]


NAMES = ("prompt-lookup, chain 8", "model, tree 2x2", "model, chain 4", "medusa, tree 2x2x1")


@pytest.mark.parametrize("name", with_slow(NAMES, NAMES[2:]))
def test_every_drafter_has_the_bits_of_plain_decoding(name):
    found = decode(name)
    assert differing(found, plain()) == []
    if not name.startswith("medusa"):  # these heads are random
        assert np.asarray(found.log.accepted).sum() > 0


def test_neighbours_in_a_batch_of_the_same_size_change_no_bit():
    assert differing(decode("none", OTHERS), plain(), [2]) == []


@pytest.mark.slow
def test_without_it_the_bits_depend_on_the_drafter():
    """Otherwise these tests would show nothing."""
    assert differing(decode(NAMES[0], width=False), decode("none", width=False))


def test_a_window_is_widened_to_the_same_shapes():
    """The padding sees the text and itself; what the tokens see is unchanged."""
    tree = branching(2, 1).tree
    tokens = jnp.arange(5)[None]
    window = Window(tokens, 10 + tree.depths[None], tree.ancestors[None], tree.paths[None])
    wide = widen(window, 8)
    assert wide.paths is not None
    assert [leaf.shape for leaf in jax.tree.leaves(wide)] == [(1, 8), (1, 8), (1, 8, 8), (1, 8, 8)]
    assert wide.tokens[0].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert wide.positions[0].tolist() == [10, 11, 11, 12, 12, 10, 10, 10]
    np.testing.assert_array_equal(wide.mask[0, :5, :5], tree.ancestors)
    np.testing.assert_array_equal(wide.mask[0, 5:], np.eye(8, dtype=bool)[5:])
    assert not wide.mask[0, :5, 5:].any()
    np.testing.assert_array_equal(wide.paths[0, :5, :3], tree.paths)
    assert wide.paths[0, 5:, 0].tolist() == [5, 6, 7]
    assert (wide.paths[0, :5, 3:] == -1).all()
    assert (wide.paths[0, 5:, 1:] == -1).all()
    assert [leaf.shape[2:] for leaf in jax.tree.leaves(widen(window, 64))] == [(), (), (64,), (MAX_PATH,)]


@pytest.mark.parametrize("width", [1, 0, -4, 2.0, "16", 1026])
def test_other_values_are_refused(width):
    with pytest.raises(InvalidConfig, match="width_matched must be True, False or a whole number from 2 to 1025"):
        toys.decoder(TARGET, NoDraft(), width_matched=width)


def test_trees_that_do_not_fit_are_refused():
    with pytest.raises(InvalidConfig, match="the draft tree has 9 nodes, and width_matched=8 allows 8 tokens"):
        toys.decoder(TARGET, PromptLookup(chain(8)), width_matched=8)
    with pytest.raises(InvalidConfig, match="the draft tree is 40 deep, and width_matched=64 allows a depth of 31"):
        toys.decoder(TARGET, PromptLookup(chain(40)), width_matched=64)


def test_the_number_is_an_option_of_generate():
    model = jaxspec.Model(toys.transformer(), toys.lively(toys.transformer().init_params(jax.random.key(0))))
    options = {"width_matched": 8, "logprobs": True, "max_new_tokens": 12, "tree": 3, "verbose": False}
    prompt = [[1, 2, 1, 2, 1]]
    drafted = jaxspec.generate(model, prompt, drafter="prompt-lookup", **options)
    reference = jaxspec.generate(model, prompt, **options | {"drafter": "none", "tree": None})
    assert (drafted[0].tokens, drafted[0].logprobs) == (reference[0].tokens, reference[0].logprobs)
    assert drafted.session is not None
    assert drafted.session.decoder.canonical_width == 8
