"""Tests, by enumeration, that every lossless rule keeps distributions that processors change by the path."""

import jax
import numpy as np
import pytest

from cases import WEIGHING, verifies
from helpers.tiers import with_slow
from helpers.toys import noisy
from jaxspec.core.draw import Noise
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import branching, chain
from jaxspec.processors.budget import ThinkingBudget
from jaxspec.processors.penalties import FrequencyPenalty, RepetitionPenalty
from jaxspec.processors.words import BadWords, NoRepeatNgram
from jaxspec.testing import TableLM, bias, model_law

pytestmark = pytest.mark.quick

V, PROMPT = 4, [1, 2]
LM = TableLM(V)
PARAMS = LM.init_params(jax.random.key(0))
PENALTIES = [RepetitionPenalty(1.7), FrequencyPenalty(0.8)]
AUTOMATON = [BadWords([[3], [0, 1, 2]]), ThinkingBudget(1, [2, 0])]
LOSSLESS = [name for name, rule in WEIGHING.items() if rule.lossless]


def by_hand(text: tuple[int, ...]) -> np.ndarray:
    """The law after a text with penalties, at temperature 0.8."""
    whole = [*PROMPT, *text]
    logits = np.asarray(LM.logits(PARAMS, whole), np.float64)
    for token in set(whole):
        logits[token] = logits[token] * 1.7 if logits[token] <= 0 else logits[token] / 1.7
    weights = np.exp((logits - 0.8 * np.bincount(text, minlength=V)) / 0.8)
    return weights / weights.sum()


def test_laws_of_a_model_include_processors():
    law = model_law(LM, PARAMS, PROMPT, Sampling(temperature=0.8, processors=PENALTIES))
    for text in ((), (1,), (3, 3), (0, 1), (2, 2)):
        np.testing.assert_allclose(law(text), by_hand(text), atol=1e-6)
    law = model_law(LM, PARAMS, PROMPT, Sampling(temperature=0.8, processors=AUTOMATON))
    assert law((0,)).tolist() == [0, 0, 1, 0]  # after one token of thinking, the sequence is forced
    assert law((0, 2)).tolist() == [1, 0, 0, 0]
    assert law(())[3] == 0


@pytest.mark.parametrize("name", with_slow(LOSSLESS, set(LOSSLESS) - {"rejection", "traversal"}))
def test_a_round_keeps_the_processed_law(name):
    """Total variation below 1e-12, for drafts from the processed law, from the law without processors, and points."""
    rule, worst, count = WEIGHING[name], 0.0, 0
    for processors in (PENALTIES, AUTOMATON, [*PENALTIES, NoRepeatNgram(3)]):
        sampling = Sampling(temperature=0.8, processors=processors)
        target, draft = (model_law(LM, params, PROMPT, sampling) for params in (PARAMS, noisy(PARAMS, 1, 0.5)))
        free = model_law(LM, noisy(PARAMS, 1, 0.5), PROMPT, Sampling(temperature=0.8))
        for topology in (chain(2), branching(2, 1)):
            if not verifies(rule, topology):
                continue
            for drafted in (draft, free):
                for noise in {rule.noise, Noise.NONE}:
                    worst, count = np.maximum(worst, bias(rule, topology, target, drafted, noise=noise)), count + 1
    assert worst < 1e-12
    assert count >= 6
