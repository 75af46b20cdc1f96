"""Tests of draft models of another vocabulary: their laws, and the texts decoded with them."""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import LOSSLESS, RULES, TREES, WEIGHING, verifies
from helpers.bridges import BEGIN, END, OTHER, OTHER_DRAFT, OTHER_LM, OTHER_PARAMS, OTHER_V, across, bridge
from helpers.narrow import instance, not_none
from helpers.tiers import with_slow
from helpers.toy_text import EOS, LM, PROMPTS, TABLE, TOKENIZER, TOY, V, go, tokens
from helpers.toys import decoder, random_request, request, texts, whole
from jaxspec import Model
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import branching, chain
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import DraftPrompts, Weights
from jaxspec.drafters.model import BridgedDraft, BridgedState, ModelDraft
from jaxspec.drafters.none import NoDraft
from jaxspec.errors import VocabMismatch
from jaxspec.generation import job
from jaxspec.generation.drafting import Drafting
from jaxspec.testing import TableLM, bias, check_drafter, model_law
from jaxspec.text import ChatTemplate, Tokenizer

PARAMS = {"table": TABLE}
PROMPT = [1, 6, 14, 7, 15, 4, 8, 9, 2]  # "a", "ab", "bc", "ca", ".", " ", "é", "b"
"""Tokens that both have, tokens that the draft spells in two, and one that it cannot spell."""


def spelled(text: list[int]) -> list[int]:
    """The other vocabulary's spelling, from the pieces themselves."""
    own = {EOS: [END], 6: [3, 1], 7: [14, 3], 15: []}
    by_bytes = {OTHER.token_bytes(i): i for i in range(OTHER.vocab_size)}
    return [BEGIN, *(i for t in text for i in own.get(t) or ([] if t in own else [by_bytes[TOKENIZER.token_bytes(t)]]))]


def restricted(sampling: Sampling = Sampling(temperature=1.0)):
    """The law of the drafter after `PROMPT` and some tokens, in the target's ids."""
    ids = bridge()

    @functools.cache
    def law(text: tuple[int, ...]) -> np.ndarray:
        own = model_law(OTHER_LM, OTHER_PARAMS, spelled([*PROMPT, *text]), sampling)(())
        found = np.zeros(V)
        found[ids.as_target] = own[ids.common]
        return found / found.sum()

    return law


@pytest.mark.parametrize(
    "tree", with_slow([branching(2, 1), TREES["ragged"]], (branching(2, 1),)), ids=["branching", "ragged"]
)
def test_the_law_is_the_drafts_on_the_common_tokens(tree):
    """At every node, after the draft's own spelling of the whole path."""
    drafter, params = across(tree)
    proposal = check_drafter(drafter, params, LM, PARAMS, [PROMPT, [1], [15]])
    law = restricted()
    for node, path in enumerate(tree.tree.paths):
        nodes = [n for n in path.tolist() if n > 0]
        if (tree.tree.children[node] >= 0).any():
            expected = law(tuple(int(proposal.tokens[0, n]) for n in nodes))
            np.testing.assert_allclose(np.exp(np.asarray(proposal.law)[0, node]), expected, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in LOSSLESS if name in WEIGHING])
def test_lossless_rules_keep_the_targets_law(name):
    """Total variation below 1e-12, by enumeration of all drafts; the laws are those of the two vocabularies."""
    rule, target, draft = WEIGHING[name], model_law(LM, PARAMS, PROMPT, Sampling(temperature=1.0)), restricted()
    trees = [tree for tree in (chain(1), chain(2), branching(2)) if verifies(rule, tree)]
    assert max(bias(rule, tree, target, draft) for tree in trees) < 1e-12


@pytest.mark.parametrize("name", with_slow(TREES, TREES.keys() - {"ragged"}))
def test_texts_are_those_of_plain_decoding(name, seed):
    """Also the draft's text is its spelling of the target's, and what it has read is that text."""
    drafter, params = across(TREES[name])
    asked = random_request(seed, 4, V)
    state = whole(decoder(LM, drafter), Weights(PARAMS, params), asked, 64)
    assert texts(state) == texts(whole(decoder(LM, NoDraft()), Weights(PARAMS), asked, 64))
    assert np.asarray(state.log.accepted).sum() > 0
    own = instance(BridgedState, state.draft)
    cached = np.asarray(own.model.cache.stores.keys)[0, :, 0, :, 0].astype(int)
    for b, text in enumerate(texts(state)):
        length, read = int(own.length[b]), int(own.model.cache.length[b])
        assert np.asarray(own.text)[b, :length].tolist() == spelled(text)
        assert read <= length
        assert cached[b, :read].tolist() == spelled(text)[:read]


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_every_rule_decodes(name):
    """Lossless rules at temperature 0 give plain decoding's text; all make progress."""
    drafter, params = across(chain(2))
    asked = request(PROMPTS, 12, vocab=V)
    config = Decoder(LM, drafter, RULES[name], chunk=4)
    state = whole(config, Weights(PARAMS, params), asked, 64)
    if name in LOSSLESS:
        assert texts(state) == texts(whole(decoder(LM, NoDraft()), Weights(PARAMS), asked, 64))
    assert (np.asarray(state.length) > np.asarray(state.start)).all()


def test_a_text_that_does_not_fit_is_decoded_without_drafts():
    drafter, params = across(chain(2), TableLM(OTHER_V, context=24))
    asked = request([PROMPT, [1]], 40, vocab=V, temperature=1.0)
    state = whole(decoder(LM, drafter), Weights(PARAMS, params), asked, 64)
    assert texts(state) == texts(whole(decoder(LM, NoDraft()), Weights(PARAMS), asked, 64))
    drafted = np.asarray(state.log.drafted)
    for b in range(2):
        length = np.cumsum([0, *np.asarray(state.log.emitted)[b]])[:-1] + len([PROMPT, [1]][b])
        fits = [len(spelled(texts(state)[b][:n])) <= 24 - 2 for n in length]
        rounds = int(state.round[b])
        assert (drafted[b, :rounds] > 0).tolist() == fits[:rounds]
        assert 0 < sum(fits[:rounds]) < rounds


def test_tables_take_what_the_page_says():
    """From shapes: once for all rows, whatever the vocabularies; and the draft's text for each row."""
    (drafter, params), ids = across(chain(2)), bridge()
    tables = [leaf for name, leaf in params.items() if name != "model"]
    assert sum(leaf.nbytes for leaf in tables) == 4 * (V + 1 + 2 * len(ids.common) + len(ids.spelling))
    state = jax.eval_shape(lambda: drafter.init(params, 16, 2048))
    own = jax.tree.leaves(state._replace(model=None))
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in own) == 16 * 4 * (2 * 2048 + 2)


@pytest.mark.slow
def test_prompts_that_fill_the_room():
    """Of 512 places: a prompt of 600 tokens is never read, one of 440 leaves room for some drafts, one of 3 for all."""
    drafter, params = across(chain(2))
    counts = np.array([600, 440, 3])
    prompts = DraftPrompts(jnp.asarray(np.random.default_rng(0).integers(1, 7, (3, 600))), jnp.asarray(counts))
    asked = request([[1], [2], [1, 2]], 40, vocab=V, temperature=1.0)
    state = whole(decoder(LM, drafter), Weights(PARAMS, params), asked._replace(draft_prompts=prompts), 64)
    assert texts(state) == texts(whole(decoder(LM, NoDraft()), Weights(PARAMS), asked, 64))
    drafts = (np.asarray(state.log.drafted) > 0).sum(-1)
    rounds, own = np.asarray(state.round), instance(BridgedState, state.draft)
    assert drafts[0] == 0 < drafts[1] < rounds[1]
    assert drafts[2] == rounds[2]
    cached, read = (
        np.asarray(own.model.cache.stores.keys)[0, :, 0, :, 0].astype(int),
        np.asarray(own.model.cache.length),
    )
    assert (read > 0).tolist() == [False, True, True]
    for b in range(3):
        assert cached[b, : read[b]].tolist() == np.asarray(own.text)[b, : read[b]].tolist()
        new = spelled(texts(state)[b][len(np.asarray(asked.tokens)[b][: int(asked.count[b])]) :])[1:]
        assert int(own.length[b]) == counts[b] + len(new)


class TestOwnPrompts:
    """Prompts in the draft's own tokens."""

    def asked(self, prompts: list[str], **options: Any) -> tuple[Any, Any]:
        settings = {"max_new_tokens": 16, "chat": False} | options
        plain = go(prompts, **settings)
        return go(prompts, "model", draft=OTHER_DRAFT, **settings), plain

    def test_text_is_tokenized_by_the_draft(self):
        output, plain = self.asked(["abc b", "a bca"])
        assert tokens(output) == tokens(plain)
        own = instance(BridgedState, output.session.state.draft)
        for b, prompt in enumerate(["abc b", "a bca"]):
            expected = OTHER.encode(prompt) + spelled(output[b].tokens)[1:]
            assert np.asarray(own.text)[b, : int(own.length[b])].tolist() == expected

    @pytest.mark.slow
    def test_messages_are_rendered_by_the_drafts_template(self):
        output, plain = self.asked(["abc b"], chat=True)
        assert tokens(output) == tokens(plain)
        own = np.asarray(instance(BridgedState, output.session.state.draft).text)[0]
        expected = OTHER.encode("b abc bca ")
        assert own[: len(expected)].tolist() == expected

    @pytest.mark.parametrize("stop", [(), ("b",)], ids=["whole", "cut"])
    def test_a_session_goes_on(self, stop):
        """After a text was cut, the draft reads the target's tokens again."""
        settings: dict[str, Any] = {"stop": stop, "capacity": 512}
        output, plain = self.asked(["abc b", "bc"], **settings)
        more, expected = (
            go(["ca", "a"], name, session=one.session, max_new_tokens=16, **given, **settings)
            for name, one, given in (("model", output, {"draft": OTHER_DRAFT}), ("none", plain, {}))
        )
        assert tokens(more) == tokens(expected)
        own = instance(BridgedState, more.session.state.draft)
        assert int(own.covered[0]) == int(more.session.state.length[0])

    def test_the_drafts_template_is_given_tools(self):
        """Those of the prompt, and those of the call for prompts without any."""
        source = not_none(not_none(OTHER_DRAFT.chat_template).source)
        template = ChatTemplate("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + source)
        draft = dataclasses.replace(OTHER_DRAFT, chat_template=template)
        asked = [{"role": "user", "content": "abc"}]
        a, b = ([{"type": "function", "function": {"name": name, "parameters": {}}}] for name in ("a", "b"))
        prompts = [{"messages": asked, "tools": a}, asked, "abc"]
        output = go(prompts, "model", draft=draft, chat=True, tools=b, max_new_tokens=4)
        own = instance(BridgedState, output.session.state.draft).text
        for row, tools in zip(np.asarray(own), (a, b, b)):
            expected = OTHER.encode(template.render(asked, tools=tools))
            assert row[: len(expected)].tolist() == expected

    def test_a_conversation_that_is_read_again(self):
        """From the first token on: the draft reads the whole conversation, with the answer of each sample."""
        settings: dict[str, Any] = {"chat": True, "capacity": 512, "max_new_tokens": 8, "samples": 2}
        output = go(["abc", "b"], "model", draft=OTHER_DRAFT, **settings)
        other = dataclasses.replace(TOY, chat_template=ChatTemplate("b" + not_none(not_none(TOY.chat_template).source)))
        more = go(["ca", "a"], "model", target=other, draft=OTHER_DRAFT, session=output.session, **settings)
        state = more.session.state
        own = instance(BridgedState, state.draft)
        assert more[0].prompt_tokens != more[1].prompt_tokens
        for b, row in enumerate(more):
            expected = spelled(row.prompt_tokens + row.tokens)
            assert row.prompt_tokens == np.asarray(state.tokens)[b, : len(row.prompt_tokens)].tolist()
            assert np.asarray(own.text)[b, : int(own.length[b])].tolist() == expected[: int(own.length[b])]
            assert int(own.length[b]) >= len(spelled(row.prompt_tokens))

    def test_rows_are_replaced(self):
        output, plain = self.asked(["abc b", "bc", "a", "cab", "c c"], batch=2)
        assert tokens(output) == tokens(plain)
        assert sum(row.stats.accepted for row in output) > 0


def test_what_both_have_is_said_once(capsys, monkeypatch):
    monkeypatch.setattr(job, "_REPORTED", set())
    for _ in range(2):
        go(["abc"], "model", draft=OTHER_DRAFT, max_new_tokens=1)
    assert capsys.readouterr().err.count("other and toy have 13 tokens in common: 81% of the target's") == 1


def test_a_draft_without_a_tokenizer_needs_as_many_tokens():
    with pytest.raises(VocabMismatch, match="of 17 tokens and the target has one of 16"):
        go(["abc"], "model", draft=Model(TableLM(V + 1), {}))


def test_a_same_vocabulary_is_read_as_it_is():
    twin = Model(LM, PARAMS, Tokenizer(json.loads(TOKENIZER.text), eos_id=EOS))
    assert isinstance(Drafting("model", draft=twin).build_drafter(TOY)[0], ModelDraft)
    padded = Model(TableLM(V + 1), {}, TOKENIZER)
    assert isinstance(Drafting("model", draft=padded).build_drafter(TOY)[0], BridgedDraft)
