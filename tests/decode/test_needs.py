"""Tests that a drafter gets what its `needs` state, and nothing because of the names of its fields and methods."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.toys import decoder, generate, request, texts, transformer
from jaxspec.core.drafter import Needs
from jaxspec.core.records import Proposal
from jaxspec.core.topology import chain
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Weights
from jaxspec.drafters.none import NoDraft
from jaxspec.errors import InvalidConfig
from jaxspec.generation.drafting import default_schedule
from jaxspec.rules.coupled import Coupled

LM = transformer(vocab_size=7, hidden_size=24, intermediate_size=32, num_layers=2)
PARAMS = LM.init_params(jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class Named:
    """A drafter whose fields and methods are named like needs, and mean something else."""

    node_count: bool = True
    observed: int = 5
    taps: tuple[int, ...] = (1, 9)
    prompts: int = 2
    answers: bool = True
    room: int = 3
    model: str = "small"
    tree: str = "oak"
    bridge: str = "wooden"

    needs = Needs()
    draws = False
    calls = 0
    shape = chain(3).shape

    def spell(self, word):
        raise AssertionError

    read_prompt = remember = summary = spell

    def init(self, params, batch, capacity):
        return ()

    def absorb(self, params, state, advance):
        assert advance.seen is None
        assert advance.features.shape[-1] == LM.config.hidden_size
        return state

    def propose(self, params, state, context, draw):
        return Proposal(jnp.repeat(context.root[:, None], 4, axis=1), chain(3).tree), state


def test_names_of_fields_make_a_drafter_nothing():
    built = decoder(LM, Named())
    assert built.network is LM
    assert built.call_widths == (1, 4)
    assert type(default_schedule(Named(), PARAMS)).__name__ == "Adaptive", "it does not ask how much to draft"
    asked = request([[1, 2, 3], [4]], 12, vocab=LM.vocab)
    plain = generate(decoder(LM, NoDraft()), Weights(PARAMS), asked, 256)
    assert texts(generate(built, Weights(PARAMS), asked, 256)) == texts(plain)


@dataclasses.dataclass(frozen=True)
class Asking(Named):
    """The same drafter, with needs."""

    needs = Needs(node_count=True, observed=5, taps=(1, 2))

    def absorb(self, params, state, advance):
        assert advance.features.shape[-1] == 3 * LM.config.hidden_size
        assert advance.seen is None or advance.seen.ids.shape[1:] == (4, 5)
        return state


def test_needs_are_met():
    built = decoder(LM, Asking())
    assert built.network == dataclasses.replace(LM, taps=(1, 2))
    assert type(default_schedule(Asking(), PARAMS)).__name__ == "BestWidth"
    asked = request([[1, 2, 3], [4]], 12, vocab=LM.vocab)
    plain = generate(decoder(LM, NoDraft()), Weights(PARAMS), asked, 256)
    np.testing.assert_array_equal(generate(built, Weights(PARAMS), asked, 256).length, plain.length)


@dataclasses.dataclass(frozen=True)
class Bare:
    """A drafter without the methods that some needs take."""

    needs: Any

    draws = False
    calls = 0
    shape = chain(3).shape
    init = absorb = propose = Named.init


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ((), "needs of the drafter Bare must be a jaxspec.core.drafter.Needs, got ()"),
        (Needs(prompts=2), "Bare must have spell, summary, read_prompt"),
        (Needs(answers=True), "Bare must have remember"),
        (lambda: Needs(taps=[1]), "taps must be a tuple of layer numbers, got [1]"),  # pyright: ignore[reportArgumentType]
        (lambda: Needs(observed=-1), "observed must be a whole number from 0"),
        (lambda: Needs(prompts=-1), "prompts must be a whole number from 0"),
        (lambda: Needs(answers=1), "answers must be"),  # pyright: ignore[reportArgumentType]
        (lambda: Needs(node_count=1), "node_count must be"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_needs_that_cannot_be_met_are_refused(needs, message):
    def drafter() -> Any:
        return Bare(needs() if callable(needs) else needs)

    with pytest.raises(InvalidConfig, match=re.escape(message)):
        Decoder(LM, drafter(), Coupled())
