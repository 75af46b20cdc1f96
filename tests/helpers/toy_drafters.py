"""Drafters of each kind for a toy, with the decoder's options and their parameters; and the comparison of results."""

from typing import Any

import jax
import numpy as np

from helpers.toys import RAGGED, Chaos, noisy, texts
from jaxspec.core.theory import TokenCost
from jaxspec.core.topology import branching, chain, dynamic
from jaxspec.drafters.model import ModelDraft
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.drafters.recycling import Recycling
from jaxspec.schedules.best_width import BestWidth
from jaxspec.testing import TableLM


def toy_drafters(lm: TableLM, params: Any) -> dict[str, tuple[Any, dict[str, Any], Any]]:
    """Drafters by name: on static, dynamic and scheduled trees, with laws, copies and nonsense."""
    cheap = BestWidth((1, 4), TokenCost(0.0005, 1e5))
    return {
        "none": (NoDraft(RAGGED), {}, None),
        "model-ragged": (ModelDraft(lm, RAGGED), {}, noisy(params, 1, 0.3)),
        "model-chain": (ModelDraft(lm, chain(5)), {}, params),
        "model-dynamic": (ModelDraft(lm, dynamic(3, 4, 9)), {"schedule": cheap}, noisy(params, 1, 0.3)),
        "model-branching": (ModelDraft(lm, branching(3, 2)), {"width_matched": True}, noisy(params, 2, 0.5)),
        "lookup": (PromptLookup(chain(4), min_match=1), {}, None),
        "recycling": (Recycling(dynamic(3, 3, 8), size=8), {}, None),
        "chaos": (Chaos(lm.vocab), {}, jax.random.key(5)),
    }


def require_equal(got: Any, plain: Any, drafts: bool) -> None:
    """Asserts that texts, ends and log-probabilities are equal, and whether tokens of drafts were accepted."""
    assert texts(got) == texts(plain)
    np.testing.assert_array_equal(got.status, plain.status)
    for row in range(len(plain.status)):
        new = slice(int(plain.start[row]), int(plain.length[row]))
        for one, other in zip(got.logprobs, plain.logprobs):
            np.testing.assert_array_equal(one[row, new], other[row, new])
    assert not drafts or int(np.asarray(got.log.accepted).sum()) > 0
