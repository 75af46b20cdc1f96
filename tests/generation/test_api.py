"""Tests `generate` and `stream` as a user calls them, with toy models whose every token is known."""

import contextlib
import dataclasses
import inspect
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jaxspec
from helpers.checkpoints import random_params, tiny_config, write_hf
from helpers.costs import DEFAULT
from helpers.narrow import not_none
from helpers.tiers import with_slow
from helpers.toy_text import (
    BARE,
    DRAFT,
    EOS,
    HOT,
    KEY,
    LM,
    NO_TEMPLATE,
    PROMPTS,
    TABLE,
    TINY,
    TINY_LM,
    TOKENIZER,
    TOY,
    V,
    cut_at,
    expected,
    go,
    row_key,
    tokens,
)
from helpers.toys import allowed
from jaxspec import Model, Sampling, branching
from jaxspec.core import noise
from jaxspec.core.records import Window
from jaxspec.core.schedule import Constant
from jaxspec.decode.session import Session
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.errors import (
    CapacityError,
    EmptyPrompt,
    InvalidConfig,
    MissingDraft,
    MissingTokenizer,
    TokenOutOfRange,
    UnknownName,
    VocabMismatch,
)
from jaxspec.generation.drafting import Drafting
from jaxspec.models.transformer import TransformerLM
from jaxspec.rules.coupled import Coupled
from jaxspec.testing import TableLM

pytestmark = pytest.mark.quick


@contextlib.contextmanager
def nothing_compiles():
    """Every program of a decode is compiled by `Session._compiled`; here it fails the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "_compiled", lambda *_, **__: pytest.fail("compiled before the error"))
        yield


class TestPrompts:
    FORMS: ClassVar = {
        "text": ("abc .", [6, 3, 4, 15]),
        "ids": ([6, 3, 4], [6, 3, 4]),
        "numpy": (np.asarray([2, 15, 1]), [2, 15, 1]),
        "messages": (
            [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}],
            [15, 6, 5, 4, 3, 5],
        ),
    }

    @pytest.mark.parametrize("form", FORMS)
    def test_one_prompt_in_every_form(self, form):
        prompt, ids = self.FORMS[form]
        (row,) = go(prompt)
        assert row.prompt_tokens == ids
        assert row.tokens == expected(ids, row_key(0))
        assert row.text == TOKENIZER.decode(row.tokens)

    def test_mixed_in_one_batch(self):
        output = go([prompt for prompt, _ in self.FORMS.values()])
        assert len(output) == 4
        for i, (row, (_, ids)) in enumerate(zip(output, self.FORMS.values())):
            assert (row.prompt, row.sample, row.prompt_tokens) == (i, 0, ids)
            assert row.tokens == expected(ids, row_key(i))
        assert output.text == [row.text for row in output]

    def test_text_is_a_user_s_message_where_there_is_a_template(self):
        """As on the command line; `chat=False` is for raw text, and ids and messages stay as they are."""
        wrapped, raw = TOKENIZER.encode(".ab\n"), TOKENIZER.encode("ab")
        for call in (jaxspec.generate, lambda *given, **options: jaxspec.stream(*given, **options).output):
            assert call(TOY, "ab", max_new_tokens=1)[0].prompt_tokens == wrapped
            assert call(NO_TEMPLATE, "ab", max_new_tokens=1)[0].prompt_tokens == raw
        assert go("ab", chat=None)[0].prompt_tokens == go("ab", chat=True)[0].prompt_tokens == wrapped
        assert go("ab", chat=False)[0].prompt_tokens == raw
        assert go([6, 3], chat=None)[0].prompt_tokens == [6, 3]
        messages, ids = self.FORMS["messages"]
        assert go(messages, chat=None)[0].prompt_tokens == go(messages, chat=False)[0].prompt_tokens == ids

    def test_without_a_tokenizer_there_is_no_text(self):
        output = go(target=BARE, stop_ids=[EOS])
        assert output.text == [None, None]
        assert tokens(output) == [expected(p, row_key(i)) for i, p in enumerate(PROMPTS)]


class TestKeys:
    def test_samples(self):
        several = go([PROMPTS[0]], samples=3)
        assert [(row.prompt, row.sample) for row in several] == [(0, 0), (0, 1), (0, 2)]
        assert tokens(several) == [expected(PROMPTS[0], row_key(0, s)) for s in range(3)]
        assert several[0].tokens == go([PROMPTS[0]])[0].tokens
        assert len({tuple(row.tokens) for row in several}) == 3

    def test_one_key_per_row(self):
        keys = jax.random.split(jax.random.key(3), 2)
        assert tokens(go(key=keys)) == [expected(p, k) for p, k in zip(PROMPTS, keys)]
        twice = go([PROMPTS[0]] * 2, key=keys[jnp.asarray([1, 1])])
        assert twice[0].tokens == twice[1].tokens == expected(PROMPTS[0], keys[1])

    @pytest.mark.parametrize("wrap", [jnp.asarray, np.asarray])
    def test_raw_keys(self, wrap):
        raw = wrap(jax.random.key_data(KEY))
        assert raw.dtype == np.uint32
        assert tokens(go(key=raw)) == tokens(go())
        rows = jax.random.split(jax.random.key(3), 2)
        assert tokens(go(key=wrap(jax.random.key_data(rows)))) == tokens(go(key=rows))

    @pytest.mark.slow
    def test_rbg_keys(self):
        key = jax.random.key(11, impl="rbg")
        same = [PROMPTS[0]] * 2
        output = go(same, "prompt-lookup", key)
        assert tokens(output) == [expected(same[0], row_key(i, key=key)) for i in range(2)]
        assert output[0].tokens != output[1].tokens

    def test_greedy_needs_no_key(self):
        assert tokens(go(key=None, sampling=Sampling())) == tokens(go(sampling=Sampling()))


class TestEnds:
    @pytest.mark.parametrize("drafter", with_slow(cases.ANY_NETWORK, ("recycling", "pard")))
    @pytest.mark.parametrize("budget", [1, 2, 7, 24])
    def test_exactly_max_new_tokens(self, drafter, budget):
        output = go(drafter=drafter, max_new_tokens=budget, ignore_eos=True)
        assert tokens(output) == [expected(p, row_key(i), budget, ()) for i, p in enumerate(PROMPTS)]
        assert [row.finish_reason for row in output] == ["length"] * 2
        assert output.stats.committed == 2 * budget

    @pytest.mark.parametrize("drafter", with_slow(cases.ANY_NETWORK, ("recycling", "pard")))
    def test_the_stop_token_is_kept(self, drafter):
        free = [expected(p, row_key(i), 24, ()) for i, p in enumerate(PROMPTS)]
        for stop in sorted({*free[0][3:9]}):
            output = go(drafter=drafter, stop_ids=[stop], ignore_eos=True)
            for row, ids in zip(output, free):
                end = ids.index(stop) + 1 if stop in ids else None
                assert row.tokens == ids[:end]
                assert row.finish_reason == ("length" if end is None else "stop")

    def test_the_model_s_own_stop_token(self):
        often = Model(LM, {"table": TABLE.at[..., EOS].add(6)}, TOKENIZER, stop_ids=(EOS,))
        ended, free = go(target=often), go(target=often, ignore_eos=True)
        for row, longer in zip(ended, free):
            assert longer.tokens[: len(row.tokens)] == row.tokens
            assert row.tokens.count(EOS) == 1
            assert row.tokens[-1] == EOS
            assert "<eos>" not in row.text
            assert (row.finish_reason, longer.finish_reason) == ("stop", "length")

    @pytest.mark.parametrize("drafter", with_slow(cases.ANY_NETWORK, ("recycling", "pard")))
    def test_stop_strings(self, drafter):
        free = [expected(p, row_key(i)) for i, p in enumerate(PROMPTS)]
        text = TOKENIZER.decode(free[0])
        cases = [[text[a:b]] for a, b in [(1, 3), (4, 6), (6, 10), (11, 14)]] + [
            ["😀"],
            ["é", text[5:7]],
            ["zz"],
        ]
        ends = set()
        for stops in cases:
            for row, ids in zip(go(drafter=drafter, stop=stops), free):
                assert (row.tokens, row.text, row.finish_reason) == cut_at(ids, stops)
                assert row.stats.committed == len(row.tokens)
                ends.add((row.finish_reason, TOKENIZER.decode(row.tokens).startswith(row.text + stops[0])))
        assert ("stop", True) in ends
        inside = [cut_at(free[0], stops) for stops in cases[:4]]
        assert any(text != TOKENIZER.decode(ids[:n]) for ids, text, _ in inside for n in [len(ids) - 1])

    def test_one_stop_string_needs_no_list(self):
        assert go(stop="é").text == go(stop=["é"]).text

    def test_logits_that_are_not_finite_end_the_row(self):
        free = expected(PROMPTS[0], row_key(0))
        broken = Model(LM, {"table": TABLE.at[free[5], free[6]].set(NAN)}, TOKENIZER, stop_ids=(EOS,))
        first = next(i for i in range(1, 24) if free[i - 1 : i + 1] == free[5:7]) + 1
        row = go(target=broken)[0]
        assert row.finish_reason == "error"
        assert row.tokens == free[:first]


@jax.jit
def fresh_law(text):
    """The log-law after every token of one text, by a single causal call of TINY."""
    places = jnp.arange(len(text))
    window = Window(text[None], places[None], (places[:, None] >= places)[None])
    features, _ = TINY_LM.apply(TINY.params, window, TINY_LM.init_cache(1, 1))
    return jax.nn.log_softmax(TINY_LM.head(TINY.params, features)[0])


@pytest.mark.parametrize("drafter", with_slow(cases.DRAFTERS, cases.DRAFTERS.keys() - {"none", "eagle"}))
def test_logprobs_are_those_of_a_fresh_forward(drafter):
    """Raw, sampled and the likeliest, whoever drafted; and the tokens are those of plain decoding."""
    options = {"logprobs": 3, "sampling": Sampling(temperature=0.7, top_p=0.9), "target": TINY}
    plain, drafted = go(**options), go(**options, **cases.arguments(drafter, TINY))
    assert tokens(drafted) == tokens(plain)
    for row in drafted:
        text = row.prompt_tokens + row.tokens
        law = np.asarray(fresh_law(jnp.asarray(text + [0] * (32 - len(text)))))
        law = law[np.arange(len(row.prompt_tokens), len(text)) - 1]
        wanted = np.take_along_axis(law, np.asarray(row.tokens)[:, None], 1)[:, 0]
        np.testing.assert_allclose(row.logprobs, wanted, atol=2e-4)
        assert np.std(wanted) > 0.1  # a law worth comparing
        kept = np.stack([allowed(some, 0.7, top_p=0.9) for some in law])
        sampled = law / 0.7 - np.log(np.where(kept, np.exp(law / 0.7), 0).sum(-1, keepdims=True))
        sampled = np.take_along_axis(sampled, np.asarray(row.tokens)[:, None], 1)[:, 0]
        np.testing.assert_allclose(row.sampled_logprobs, sampled, atol=3e-4)
        for some, top in zip(law, row.top_logprobs):
            np.testing.assert_allclose([value for _, value in top], np.sort(some)[::-1][:3], atol=2e-4)
            np.testing.assert_allclose(some[[token for token, _ in top]], [value for _, value in top], atol=2e-4)


class TestCallback:
    @pytest.mark.parametrize("drafter", with_slow(cases.ANY_NETWORK, ("recycling", "pard")))
    @pytest.mark.parametrize("end", [3, 7, 10, 14])
    def test_every_token_in_order_and_an_early_end(self, drafter, end):
        seen = [[], []]

        def on_token(row, token, text):
            seen[row].append((token, text))
            return not (row == 0 and len(seen[0]) == end)

        output = go(drafter=drafter, on_token=on_token)
        free = [expected(p, row_key(i)) for i, p in enumerate(PROMPTS)]
        assert tokens(output) == [free[0][:end], free[1]]
        assert [[token for token, _ in row] for row in seen] == tokens(output)
        assert output[0].finish_reason == "callback"
        assert output[1].finish_reason == cut_at(free[1], ["zz"])[2]
        assert [row.stats.committed for row in output] == [end, len(free[1])]
        for row, pieces in zip(output, seen):
            shown = "".join(text for _, text in pieces)
            assert row.text == TOKENIZER.decode(row.tokens)
            assert row.text.removesuffix("\ufffd") == shown  # a character cut by the end is shown last

    def test_only_false_ends(self):
        assert tokens(go(on_token=lambda *_: None)) == tokens(go())


class TestStream:
    @pytest.mark.parametrize("drafter", cases.ANY_NETWORK)
    @pytest.mark.parametrize("rounds", [1, 2, 7])
    def test_is_generate_in_pieces(self, drafter, rounds):
        running = go(drafter=drafter, call=jaxspec.stream, rounds=rounds)
        chunks = list(running)
        whole = go(drafter=drafter)
        assert len(chunks) > 2 * (24 // (5 * rounds))
        for b, row in enumerate(whole):
            own = [chunk for chunk in chunks if chunk.row == b]
            assert [token for chunk in own for token in chunk.tokens] == row.tokens
            assert "".join(chunk.text for chunk in own) == row.text
            assert [chunk.finish_reason for chunk in own][-1] == row.finish_reason
            assert not any(chunk.finish_reason for chunk in own[:-1])
            broken = ["\ufffd" in chunk.text for chunk in own]
            assert not any(broken[:-1])
        assert any("😀" in row.text for row in whole)
        assert running.output.text == whole.text
        assert running.output.stats == whole.stats

    @pytest.mark.parametrize("drafter", cases.ANY_NETWORK)
    @pytest.mark.parametrize("stop", [(), "a"])
    def test_says_which_tokens_were_drafted(self, drafter, stop):
        running = go(drafter=drafter, call=jaxspec.stream, rounds=1, stop=stop)
        flags: list[list[bool]] = [[], []]
        for chunk in running:  # one round of one row: what was accepted, then the target's own, unless cut off
            assert len(chunk.drafted) == len(chunk.tokens)
            assert chunk.drafted.count(False) <= 1
            assert all(chunk.drafted[:-1])
            flags[chunk.row] += chunk.drafted
        assert [sum(row) for row in flags] == [row.stats.accepted for row in running.output]
        at_once: list[list[bool]] = [[], []]
        for chunk in go(drafter=drafter, call=jaxspec.stream, rounds=7, stop=stop):
            at_once[chunk.row] += chunk.drafted
        assert at_once == flags
        assert (drafter == "model") <= any(map(any, flags)) <= (drafter != "none")

    def test_arrives_before_the_end(self):
        running = go(call=jaxspec.stream, rounds=2)
        first = next(running)
        assert (first.row, len(first.tokens), first.finish_reason) == (0, 2, None)
        assert running.output[0].tokens == first.tokens


class TestSession:
    EXTRA: ClassVar = [[3, 15], [1, 1, 4]]

    def continued(self, first, drafter, budget=12):
        """A second turn, and what one call on the whole text would say."""
        second = go(self.EXTRA, drafter, session=first.session, max_new_tokens=budget)
        texts = [p + row.tokens + e for p, row, e in zip(PROMPTS, first, self.EXTRA)]
        assert [row.prompt_tokens for row in second] == self.EXTRA
        assert tokens(second) == [expected(text, row_key(i), budget) for i, text in enumerate(texts)]
        return second, go(texts, drafter, max_new_tokens=budget)

    @pytest.mark.parametrize("drafter", cases.ANY_NETWORK)
    def test_equals_one_long_call(self, drafter):
        first = go(drafter=drafter, max_new_tokens=10)
        second, whole = self.continued(first, drafter)
        assert tokens(second) == tokens(whole)
        assert second.text == whole.text
        assert second.stats.committed == whole.stats.committed

    @pytest.mark.parametrize("drafter", cases.ANY_NETWORK)
    def test_after_a_stop_string(self, drafter):
        free = expected(PROMPTS[0], row_key(0))
        first = go(drafter=drafter, stop=[TOKENIZER.decode(free)[4:6]])
        assert len(first[0].tokens) < len(free)
        self.continued(first, drafter)

    @pytest.mark.parametrize("drafter", cases.ANY_NETWORK)
    def test_after_a_callback(self, drafter):
        first = go(drafter=drafter, on_token=lambda row, token, text: False)
        assert [len(row.tokens) for row in first] == [1, 1]
        self.continued(first, drafter)

    def test_near_the_end_of_the_capacity(self):
        """A chunk of prompt is wider than what is left behind the text."""
        random = np.random.default_rng(0)
        prompt, more = random.integers(1, 8, 455).tolist(), random.integers(1, 8, 32).tolist()
        first = go([prompt], "model", max_new_tokens=10, ignore_eos=True)
        second = go([more], "model", session=first.session, max_new_tokens=8)
        text = prompt + first[0].tokens + more
        assert second[0].tokens == expected(text, row_key(0), 8)
        assert second.stats == go([text], "model", max_new_tokens=8).stats

    def test_too_small(self):
        first = go()
        with (
            nothing_compiles(),
            pytest.raises(
                CapacityError, match=r"has 512 slots, but this turn needs \d+; start the session with a larger"
            ),
        ):
            go(session=first.session, max_new_tokens=600)
        changes: list[dict[str, Any]] = [{"prompts": PROMPTS * 2}, {"drafter": "model"}, {"logprobs": 9}]
        for change in changes:
            with (
                nothing_compiles(),
                pytest.raises(InvalidConfig, match="session must be continued with the settings"),
            ):
                go(**{**change, "session": first.session})


class TestDrafting:
    def test_the_default_is_prompt_lookup_under_the_coupled_rule(self):
        for function in (jaxspec.generate, jaxspec.stream):
            defaults = {n: p.default for n, p in inspect.signature(function).parameters.items()}
            assert (defaults["drafter"], defaults["rule"]) == ("prompt-lookup", "coupled")
        output = jaxspec.generate(TOY, PROMPTS, key=KEY, sampling=HOT, max_new_tokens=24)
        assert not_none(output.session).decoder.drafter == PromptLookup()
        assert tokens(output) == tokens(go())

    @pytest.mark.parametrize(
        ("drafter", "tree", "schedule"),
        [
            ("prompt-lookup", None, DEFAULT),
            ("prompt-lookup", 4, DEFAULT),
            ("recycling", None, DEFAULT),
            ("recycling", branching(2, 1), Constant()),
            ("model", 2, Constant()),
            ("none", None, Constant()),
        ],
    )
    def test_the_default_schedule_drafts_the_whole_tree_or_what_pays(self, drafter, tree, schedule):
        """What it may lose is bounded in test_balance.py. A schedule that is given is kept."""
        made = Drafting(drafter, tree=tree, draft=DRAFT if drafter == "model" else None)
        assert made.build(TOY)[0].schedule == schedule
        assert dataclasses.replace(made, schedule="constant").build(TOY)[0].schedule == Constant()
        assert dataclasses.replace(made, schedule="best-width").build(TOY)[0].schedule == DEFAULT

    @pytest.mark.slow
    def test_objects_are_the_members_of_those_names(self):
        named = go(drafter="prompt-lookup", rule="coupled", schedule="constant")
        objects = {"drafter": PromptLookup(), "rule": Coupled(), "schedule": Constant()}
        given = go(**objects)
        assert given.session.decoder == named.session.decoder
        assert go(**objects, call=jaxspec.precompile) == 0
        assert given.timing.compile_s == 0
        assert tokens(given) == tokens(named)

    def test_drafts_are_accepted_and_counted(self):
        output = go(drafter="model", ignore_eos=True)
        total = output.stats
        assert total.accepted > 10
        assert total.rounds == total.target_calls < total.committed == 48
        assert total.committed == sum(row.stats.committed for row in output)
        assert go().stats.accepted == 0

    def test_width_matched_is_bit_for_bit_the_reference(self):
        """In bfloat16, where a call of another width rounds otherwise."""
        lm = TransformerLM(tiny_config(vocab_size=V, num_layers=1), "bfloat16")
        model = Model(lm, jax.tree.map(lambda a: 3 * a, lm.init_params(jax.random.key(2))))
        options = {"tree": branching(2, 1), "width_matched": True, "logprobs": True, "target": model}
        drafted, plain = go(drafter="model", **options), go(**options)
        assert plain.session.decoder.width_matched
        assert plain.session.decoder.drafter.shape == drafted.session.decoder.drafter.shape
        assert drafted.stats.accepted > plain.stats.accepted == 0
        assert tokens(drafted) == tokens(plain)
        assert [row.logprobs for row in drafted] == [row.logprobs for row in plain]

    def test_padded_vocabulary_is_never_emitted(self):
        lm = TableLM(V + 4)
        table = lm.init_params(jax.random.key(5))["table"].at[..., V:].add(8)
        padded = Model(lm, {"table": table}, TOKENIZER)
        output = go(target=padded, max_new_tokens=40)
        assert all(token < V for row in tokens(output) for token in row)
        assert all(token < V for row in tokens(go(target=padded, sampling=Sampling())) for token in row)
        biased = go(target=padded, sampling=Sampling(logit_bias={3: 60.0}))
        assert tokens(biased) == [[3] * 24] * 2
        bare = Model(lm, padded.params)
        assert any(token >= V for row in tokens(go(target=bare)) for token in row)

    def test_timing(self):
        prompts = [[1, 2], [3, 4]]
        jaxspec.decode.session.clear_executables()
        first, second = go(prompts), go(prompts)
        assert first.timing.compile_s > 0
        assert second.timing.compile_s == 0
        for timing in (first.timing, second.timing):
            assert timing.prefill_s > 0
            assert timing.decode_s > 0
            assert timing.tokens == first.stats.committed
            assert timing.tokens_per_s == pytest.approx(timing.tokens / timing.decode_s)
        assert first.noise_version == noise.NOISE_VERSION


def sampling(**fields):
    """Made only when the case runs: a setting out of range is refused when it is made."""
    return {"sampling": lambda: Sampling(**fields)}


SMALL = Model(TableLM(V, context=32), TOY.params)
WIDE_DRAFT = Model(TableLM(V + 1), {"table": jnp.zeros((V + 2, V + 1, V + 1))})

NAN = float("nan")

ERRORS = {
    # vocabulary and prompts
    "vocabulary": (VocabMismatch, {"drafter": "model", "draft": WIDE_DRAFT}, ["17", "16"]),
    "no prompts": (EmptyPrompt, {"prompts": []}, ["at least one prompt", "[]"]),
    "empty text": (EmptyPrompt, {"prompts": ["ab", ""]}, ["prompt 1", "at least one"]),
    "empty ids": (EmptyPrompt, {"prompts": [[1], []]}, ["prompt 1", "at least one"]),
    "empty array": (EmptyPrompt, {"prompts": np.zeros(0, np.int32)}, ["prompt 0", "at least one"]),
    "token too large": (
        TokenOutOfRange,
        {"prompts": [[1], [2, 16]]},
        ["prompt 1", "16", "index 1", "0 to 15"],
    ),
    "token negative": (TokenOutOfRange, {"prompts": [-1]}, ["-1", "0 to 15"]),
    "stop id": (TokenOutOfRange, {"stop_ids": [16]}, ["16", "0 to 15"]),
    "bias id": (TokenOutOfRange, sampling(logit_bias={16: 1.0}), ["16", "0 to 15"]),
    "floats": (InvalidConfig, {"prompts": [[1.5, 2.0]]}, ["prompt 0", "[1.5, 2.0]", "token ids"]),
    "truths": (InvalidConfig, {"prompts": [True, False]}, ["token ids", "True"]),
    "ragged": (InvalidConfig, {"prompts": [[1, [2]]]}, ["prompt 0", "token ids", "[1, [2]]"]),
    "two dimensions": (InvalidConfig, {"prompts": np.ones((2, 2), int)}, ["prompt 0", "token ids"]),
    # text
    "no tokenizer": (
        MissingTokenizer,
        {"target": BARE, "prompts": "ab"},
        ["bare has no tokenizer", "token ids"],
    ),
    "stop without": (MissingTokenizer, {"target": BARE, "stop": "a"}, ["bare has no tokenizer"]),
    "no template": (
        MissingTokenizer,
        {"target": NO_TEMPLATE, "prompts": "ab", "chat": True},
        ["no chat template"],
    ),
    "empty stop": (InvalidConfig, {"stop": ["a", ""]}, ["stop string", "1 to", "''"]),
    "stop is a number": (InvalidConfig, {"stop": 5}, ["stop", "5"]),
    "stop id is text": (TokenOutOfRange, {"stop_ids": [1, "a"]}, ["'a'", "0 to 15"]),
    # sampling
    "temperature negative": (
        InvalidConfig,
        sampling(temperature=-1.0),
        ["temperature", "at least 0", "-1.0"],
    ),
    "temperature NaN": (InvalidConfig, sampling(temperature=NAN), ["temperature", "finite", "nan"]),
    "temperature infinite": (InvalidConfig, sampling(temperature=np.inf), ["temperature", "finite", "inf"]),
    "temperature text": (InvalidConfig, sampling(temperature="hot"), ["temperature", "finite", "'hot'"]),
    "temperature rows": (InvalidConfig, sampling(temperature=np.ones(3)), ["temperature", "2 rows", "(3,)"]),
    "top_k negative": (InvalidConfig, sampling(top_k=-1), ["top_k", "whole number", "-1"]),
    "top_k broken": (InvalidConfig, sampling(top_k=1.5), ["top_k", "whole number", "1.5"]),
    "top_k NaN": (InvalidConfig, sampling(top_k=NAN), ["top_k", "whole number", "nan"]),
    "top_p zero": (InvalidConfig, sampling(top_p=0.0), ["top_p", "above 0", "0.0"]),
    "top_p large": (InvalidConfig, sampling(top_p=1.1), ["top_p", "at most 1", "1.1"]),
    "top_p NaN": (InvalidConfig, sampling(top_p=NAN), ["top_p", "above 0", "nan"]),
    "min_p negative": (InvalidConfig, sampling(min_p=-0.1), ["min_p", "between 0 and 1", "-0.1"]),
    "min_p NaN": (InvalidConfig, sampling(min_p=NAN), ["min_p", "between 0 and 1", "nan"]),
    "bias NaN": (InvalidConfig, sampling(logit_bias={1: NAN}), ["logit_bias", "NaN"]),
    "bias shape": (InvalidConfig, sampling(logit_bias=np.zeros(3)), ["logit_bias", "[16]", "[3]"]),
    "bias bans all": (InvalidConfig, sampling(logit_bias=np.full(V, -np.inf)), ["logit_bias", "every token"]),
    # the other fields
    **{
        f"{name} {value!r}": (InvalidConfig, {name: value}, [name, "whole number from 1", repr(value)])
        for name in ("max_new_tokens", "samples", "rounds")
        for value in (0, -3, 1.5, NAN, True, "x")
    },
    **{
        f"tree {value!r}": (InvalidConfig, {"tree": value}, ["whole number from 0", repr(value)])
        for value in (-1, 1.5, NAN, True, "x")
    },
    **{
        f"capacity {value!r}": (InvalidConfig, {"capacity": value}, ["capacity", "whole number", repr(value)])
        for value in (600.5, NAN, True, "x")
    },
    "capacity": (CapacityError, {"capacity": 64}, ["capacity 64", "256 slots", "2 rows", "B for"]),
    "context": (CapacityError, {"target": SMALL, "max_new_tokens": 28}, ["33 tokens", "context is 32"]),
    # keys
    "no key": (InvalidConfig, {"key": None}, ["needs a key", "jax.random.key(seed)"]),
    "a number": (InvalidConfig, {"key": 42}, ["jax.random.key(0)", "42"]),
    "floats as key": (InvalidConfig, {"key": np.zeros(2, np.float32)}, ["jax.random.key(0)", "float32"]),
    "too many keys": (InvalidConfig, {"key": jax.random.split(KEY, 3)}, ["2 rows", "(3,)"]),
    "raw key of another kind": (
        InvalidConfig,
        {"key": np.zeros(4, np.uint32)},
        ["jax.random.key(0)", "(4,)"],
    ),
    # drafters and rules
    "drafter": (UnknownName, {"drafter": "promt-lookup"}, ["drafter 'promt-lookup'", "'prompt-lookup'?"]),
    "rule": (UnknownName, {"rule": "coupld"}, ["rule 'coupld'", "mean 'coupled'?"]),
    "no draft": (MissingDraft, {"drafter": "model", "draft": None}, ["needs a draft model", "draft=..."]),
    "draft length 0": (InvalidConfig, {"drafter": "model", "tree": 0}, ["at least one drafted token"]),
    "lookup of a tree": (
        InvalidConfig,
        {"drafter": "prompt-lookup", "tree": branching(2, 1)},
        ["a chain", "instead of a static tree"],
    ),
    "tree for an object": (
        InvalidConfig,
        {"drafter": NoDraft(), "tree": 2},
        ["a drafter object cannot be combined with tree"],
    ),
    "no layers": (InvalidConfig, {"drafter": "early-exit"}, ["TableLM", "stop after a layer"]),
    **{
        f"exit after {value!r}": (
            InvalidConfig,
            {"drafter": "early-exit", "target": TINY, "drafter_options": {"exit_layers": value}},
            [f"got {value!r}", "has 2 layers"],
        )
        for value in (0, -1, 2, 1.5, NAN)
    },
    "no drafter at all": (InvalidConfig, {"drafter": None}, ["drafter", "None"]),
    "no rule at all": (InvalidConfig, {"rule": None}, ["rule", "None"]),
}


class TestErrors:
    @pytest.mark.parametrize("name", ERRORS)
    def test_is_raised_before_anything_compiles(self, name):
        kind, arguments, parts = ERRORS[name]
        with nothing_compiles(), pytest.raises(kind) as caught:
            go(**{name: value() if name == "sampling" else value for name, value in arguments.items()})
        message = str(caught.value)
        assert type(caught.value) is kind
        assert "\n" not in message
        for part in parts:
            assert part in message

    def test_the_guard_guards(self):
        with nothing_compiles(), pytest.raises(pytest.fail.Exception, match="compiled before"):
            go()

    def test_unknown_model(self):
        with pytest.raises(UnknownName, match=r"'smollm2-135m-instrct'\. Did you mean 'smollm2-135m-instruct'\?"):
            jaxspec.load("smollm2-135m-instrct")

    def test_unknown_dtype(self, tmp_path):
        source = write_hf(tmp_path / "tiny", tiny_config(), random_params(tiny_config()))
        with pytest.raises(InvalidConfig, match=r"float32, bfloat16, int8, file, got 'float16'"):
            jaxspec.load(source, dtype="float16")
