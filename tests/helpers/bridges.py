"""Two toy vocabularies, `toy_text`'s and another, and draft models of the other one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helpers.toy_text import EOS, SPELLING, TABLE, TOKENIZER, V
from helpers.toy_text import PIECES as TARGET_PIECES
from jaxspec import Model
from jaxspec.core.drafter import Drafter
from jaxspec.core.records import Params
from jaxspec.core.topology import Dynamic, Topology
from jaxspec.drafters.model import ModelDraft, make_bridged_draft
from jaxspec.testing import TableLM
from jaxspec.text import ChatTemplate, Tokenizer
from jaxspec.text.bridge import Bridge, Side, build_bridge

# In another order than the target's; without ".", "ab" and "ca", and with "abc", which the target does not have.
PIECES = [b"b", b"abc", b"a", b"bc", *TARGET_PIECES[7:13], b"\n", b" ", b"c"]
END, BEGIN = 7, 0
_TOKENS = ["".join(SPELLING[b] for b in piece) for piece in PIECES]
_TOKENS = ["<s>", *_TOKENS[: END - 1], "<end>", *_TOKENS[END - 1 :]]
OTHER = Tokenizer.from_gguf(
    {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": _TOKENS,
        "tokenizer.ggml.token_type": [3 if token[0] == "<" else 1 for token in _TOKENS],
        "tokenizer.ggml.merges": ["b c", "a bc"],
        "tokenizer.ggml.bos_token_id": BEGIN,
        "tokenizer.ggml.eos_token_id": END,
    }
)
OTHER_V = len(_TOKENS) + 1  # one id of padding
OTHER_LM = TableLM(OTHER_V)
OTHER_TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ 'b' if m.role == 'user' else 'c' }} {{ m.content }}{% endfor %}ca "
)


def bridge() -> Bridge:
    """The bridge from `toy_text` to the other vocabulary."""
    return build_bridge(Side(TOKENIZER, None, (EOS,), V, "toy"), Side(OTHER, None, (END,), OTHER_V, "other"))


def _near() -> Params:
    """A table that is nearly the target's where both have the tokens, and random elsewhere."""
    ids, table = bridge(), np.array(OTHER_LM.init_params(jax.random.key(8))["table"])
    ours, theirs = np.append(ids.as_target, V), np.append(ids.common, OTHER_V)
    near = np.asarray(TABLE)[np.ix_(ours, ids.as_target, ids.as_target)]
    table[np.ix_(theirs, ids.common, ids.common)] = near + 0.5 * np.random.default_rng(0).normal(size=near.shape)
    return {"table": jnp.asarray(table)}


OTHER_PARAMS = _near()
OTHER_DRAFT = Model(OTHER_LM, OTHER_PARAMS, OTHER, OTHER_TEMPLATE, (END,), "other")


def across(tree: Topology | Dynamic, lm: Any = OTHER_LM, params: Params = OTHER_PARAMS) -> tuple[Drafter, Params]:
    """A drafter of the other vocabulary, and its parameters."""
    return make_bridged_draft(ModelDraft(lm, tree), params, bridge())
