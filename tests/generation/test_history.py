"""Tests drafts from earlier texts of the same prompts: what is kept, what is copied, and that no text changes."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers import toys
from helpers.rollouts import compilations
from helpers.tiers import with_slow
from jaxspec.core.records import Status
from jaxspec.decode.state import Weights
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.errors import InvalidConfig
from jaxspec.generation.history import LEAD, MAX_HISTORY, History, Texts
from jaxspec.generation.rollout import Rollout

V, NEW, SAMPLES = 13, 16, 3
LM = toys.transformer(vocab_size=V, num_layers=2)
MODEL = jaxspec.Model(LM, toys.lively(LM.init_params(jax.random.key(0)), 2.0))
PROMPTS = [[1, 2, 3], [4, 5]]
TOKENS, COUNT = jnp.array([[1, 2, 3], [4, 5, 0]]), jnp.array([3, 2])
COPYING = ("prompt-lookup", "recycling")


def roll(key: int, drafter: str, history: History | None = None, **more: Any) -> Rollout:
    drafting = jaxspec.Drafting(drafter, **({} if drafter == "none" else {"schedule": "constant"}), **more)
    return jaxspec.rollout(
        MODEL, TOKENS, COUNT, key=jax.random.key(key), max_new_tokens=NEW, samples=SAMPLES, drafting=drafting,
        history=history,
    )  # fmt: skip


def texts(rollout: Rollout) -> list[list[int]]:
    return [row[:size].tolist() for row, size in zip(rollout.new_tokens, rollout.drawn.sum(1))]


# What is kept.


def by_hand(kept: list[int], size: int, rows: list[tuple[list[int], list[int]]]) -> list[int]:
    """The ring of a prompt after new texts, each with its prompt."""
    for prompt, text in rows:
        kept = kept + prompt[-LEAD:] + text + [-1]
    return ([-1] * size + kept)[-size:]


class Given:
    """Texts as a user's own class may give them."""

    def __init__(self, rows: list[tuple[list[int], list[int]]], valid: list[bool]):
        width = max(len(prompt) + len(text) for prompt, text in rows) + 2
        self.tokens = np.full((len(rows), width), 7)
        for row, (prompt, text) in zip(self.tokens, rows):
            row[: len(prompt) + len(text)] = prompt + text
        self.start = np.array([len(prompt) for prompt, _ in rows])
        self.length = self.start + np.array([len(text) for _, text in rows])
        self.valid = np.array(valid)

    def as_texts(self) -> Texts:
        return Texts(self.tokens, self.start, self.length, self.valid)


@pytest.mark.parametrize("size", [1, 5, 24, 300])
def test_the_latest_tokens_are_kept(size):
    """Over several calls, with prompts shorter and longer than what is kept of them, and rows that failed."""
    rng = np.random.default_rng(size)
    history, kept = History.empty(2, size), [[], []]
    assert (history.tokens == -1).all()
    for samples in (1, 3, 2):
        rows = [
            (rng.integers(0, V, rng.integers(1, 14)).tolist(), rng.integers(0, V, rng.integers(0, 9)).tolist())
            for _ in range(2 * samples)
        ]
        valid = rng.random(2 * samples) < 0.8
        for row, (pair, ok) in enumerate(zip(rows, valid)):
            kept[row // samples] += [pair] * bool(ok)
        history = history.add(Given(rows, valid.tolist()))
        assert history.tokens.tolist() == [by_hand([], size, pairs) for pairs in kept]
    assert repr(history) == f"History(2 prompts, {size} tokens each)"


def test_some_prompts_are_selected_and_replaced():
    history = History.empty(4, 20)
    part = history.of(jnp.array([2, 0])).add(Given([([1], [5]), ([2], [6])], [True, True]))
    whole = jax.jit(History.replace)(history, jnp.array([2, 0]), part)
    assert [row[-3:] for row in whole.tokens.tolist()] == [[2, 6, -1], [-1] * 3, [1, 5, -1], [-1] * 3]


def test_what_generate_and_rollout_return_is_kept_alike():
    rollout = roll(1, "none")
    output = jaxspec.generate(
        MODEL, PROMPTS, key=jax.random.key(1), sampling=jaxspec.Sampling(temperature=1.0), max_new_tokens=NEW,
        samples=SAMPLES, drafter="none", verbose=False,
    )  # fmt: skip
    assert texts(rollout) == [row.tokens for row in output]
    empty = History.empty(2, 100)
    assert (empty.add(rollout).tokens == empty.add(output).tokens).all()
    failed = rollout._replace(status=jnp.full(6, Status.ERROR))
    assert (empty.add(failed).tokens == empty.tokens).all()


# What is copied.


@pytest.mark.parametrize("drafter", COPYING)
def test_the_texts_of_the_same_key_are_copied_whole(drafter):
    """Drafts of earlier texts reach their last token, and not what stands after it."""
    plain = roll(1, "none")
    history = History.empty(2, 200).add(plain)
    found = roll(1, drafter, history)
    assert texts(found) == texts(plain)
    # The samples of a prompt begin alike, so that the first rounds may copy another sample.
    assert int(found.rounds.sum()) < int(roll(1, drafter).rounds.sum()) / 2
    other = History(history.tokens[::-1])  # of the other prompt
    swapped = roll(1, drafter, other)
    assert texts(swapped) == texts(plain)
    assert int(swapped.rounds.sum()) > 1.5 * int(found.rounds.sum())


@pytest.mark.parametrize("drafter", COPYING)
def test_steps_of_training_give_the_texts_of_plain_decoding(drafter):
    """Two epochs in one program, each with new noise; the history of the first helps the second."""
    keys = [10, 11, 12, 13]

    @jax.jit
    def epoch(history, key):
        drafting = jaxspec.Drafting(drafter, schedule="constant")
        rollout = jaxspec.rollout(
            MODEL, TOKENS, COUNT, key=key, max_new_tokens=NEW, samples=SAMPLES, drafting=drafting, history=history,
            sampling=jaxspec.Sampling(temperature=0.5),
        )  # fmt: skip
        return history.add(rollout), rollout

    history, rounds = History.empty(2, 256), []
    for number, key in enumerate(keys):
        with compilations() as compiled:
            history, found = epoch(history, jax.random.key(key))
        assert bool(compiled) == (number == 0)
        plain = jaxspec.rollout(
            MODEL, TOKENS, COUNT, key=jax.random.key(key), max_new_tokens=NEW, samples=SAMPLES,
            drafting=jaxspec.Drafting("none"), sampling=jaxspec.Sampling(temperature=0.5),
        )  # fmt: skip
        assert texts(found) == texts(plain)
        rounds.append(int(found.rounds.sum()))
    assert max(rounds[1:]) < rounds[0]


@pytest.mark.parametrize(
    ("drafter", "more"),
    with_slow(
        [
            ("prompt-lookup", {"batch": 2}),
            ("recycling", {}),
            ("prompt-lookup", {"drafter_options": {"earlier": 64}}),
            ("prompt-lookup", {"width_matched": True}),
        ],
        [("prompt-lookup", {"width_matched": True})],
    ),
)
def test_generate_copies_as_well(drafter, more):
    """With samples, in batches and with continuous batching: every row has the history of its own prompt."""
    common: dict[str, Any] = {
        "key": jax.random.key(3), "sampling": jaxspec.Sampling(temperature=0.8), "max_new_tokens": NEW,
        "samples": SAMPLES, "verbose": False,
    }  # fmt: skip
    plain = jaxspec.generate(MODEL, PROMPTS, drafter="none", **common)
    history = History.empty(2, 256).add(plain)
    drafting: dict[str, Any] = {"drafter": drafter, "schedule": "constant"} | more
    without = jaxspec.generate(MODEL, PROMPTS, **drafting, **common)
    found = jaxspec.generate(MODEL, PROMPTS, history=history, **drafting, **common)
    assert [row.tokens for row in found] == [row.tokens for row in without] == [row.tokens for row in plain]
    assert found.stats.rounds < 0.6 * without.stats.rounds


def test_a_session_keeps_its_history():
    """Further turns copy from it; another one of the same size replaces it."""
    shared: dict[str, Any] = {"max_new_tokens": 8, "verbose": False, "capacity": 256}
    common: dict[str, Any] = shared | {"schedule": "constant"}
    plain = jaxspec.generate(MODEL, [[1, 2, 3]], drafter="none", **shared)
    after = jaxspec.generate(MODEL, [[6]], drafter="none", session=plain.session, **shared)
    history = History.empty(1, 64).add(after)
    first = jaxspec.generate(MODEL, [[1, 2, 3]], history=History.empty(1, 64), **common)
    second = jaxspec.generate(MODEL, [[6]], history=history, session=first.session, **common)
    assert [first[0].tokens, second[0].tokens] == [plain[0].tokens, after[0].tokens]
    assert second.stats.rounds <= 4
    with pytest.raises(InvalidConfig, match=r"has a history \(\d+, 65\), but the first request had \(\d+, 64\)"):
        jaxspec.generate(MODEL, [[6]], history=History.empty(1, 65), session=second.session, **common)


def test_batches_under_vmap_have_histories_of_their_own():
    decoder = toys.decoder(LM, PromptLookup())
    asked = toys.request([[1, 2, 3], [4, 5]], NEW, vocab=V, temperature=[0.7, 0.9])
    plain = toys.generate(decoder, Weights(MODEL.params), asked, 256)
    answers = [np.asarray(plain.tokens[row])[len(PROMPTS[row]) : plain.length[row]].tolist() for row in (0, 1)]
    kept = History.empty(2, 64).add(Given(list(zip(PROMPTS, answers)), [True, True])).tokens
    batch = toys.generate(decoder, Weights(MODEL.params), asked._replace(history=kept), 256)

    @jax.jit
    def mapped(request):
        return jax.vmap(lambda row: decoder.generate(Weights(MODEL.params), row, 256))(request)

    found = mapped(asked._replace(history=kept))
    assert toys.texts(found) == toys.texts(batch) == toys.texts(plain)
    assert np.asarray(found.log.emitted).tolist() == np.asarray(batch.log.emitted).tolist()
    assert (np.asarray(batch.log.emitted) > 0).sum() < (np.asarray(plain.log.emitted) > 0).sum()


@pytest.mark.parametrize("rule", ["rejection", "deterministic"])
def test_greedy_texts_have_no_other_text_under_any_rule(rule):
    greedy: dict[str, Any] = {"max_new_tokens": NEW, "verbose": False}
    plain = jaxspec.generate(MODEL, PROMPTS, drafter="none", **greedy)
    history = History.empty(2, 64).add(plain)
    found = jaxspec.generate(MODEL, PROMPTS, rule=rule, tree=4, schedule="constant", history=history, **greedy)
    assert [row.tokens for row in found] == [row.tokens for row in plain]


def test_a_results_file_is_for_one_history_where_it_changes_texts(tmp_path):
    """Under the rule coupled, a history changes no text, and the same file goes on."""
    common: dict[str, Any] = {
        "key": jax.random.key(3), "sampling": jaxspec.Sampling(temperature=0.8), "max_new_tokens": 4, "tree": 3,
        "verbose": False,
    }  # fmt: skip
    one, two = History.empty(2, 32), History.empty(2, 32).add(roll(1, "none"))
    for rule, file in (("coupled", tmp_path / "a.jsonl"), ("deterministic", tmp_path / "b.jsonl")):
        go = functools.partial(jaxspec.generate, MODEL, PROMPTS, rule=rule, out=file, **common)
        first = go(history=one)
        assert [row.tokens for row in go(history=one)] == [row.tokens for row in first]
        if rule == "coupled":
            assert [row.tokens for row in go(history=two)] == [row.tokens for row in first]
        else:
            with pytest.raises(InvalidConfig, match="drafter"):
                go(history=two)


# Refusals.


def test_what_is_no_history_of_these_prompts_is_refused():
    good = History.empty(2, 8)
    for call, why in (
        (lambda: History.empty(0, 8), "prompts must be a whole number from 1"),
        (lambda: History.empty(2, MAX_HISTORY + 1), "size of a history must be a whole number from 1 to"),
        (lambda: good.add([1, 2]), "texts must be a jaxspec.Rollout or a jaxspec.Output"),  # pyright: ignore
        (lambda: good.add(Given([([1], [2])] * 3, [True] * 3)), "3 rows, which are not samples of the history's 2"),
        (lambda: roll(1, "prompt-lookup", History.empty(3, 8)), "is of 3 prompts, but the call has 2"),
        (lambda: roll(1, "prompt-lookup", good.tokens), "history must be a jaxspec.History"),  # pyright: ignore
        (lambda: roll(1, "prompt-lookup", History(good.tokens[0])), "history must be a jaxspec.History"),
        (lambda: roll(1, "prompt-lookup", History(good.tokens * 1.0)), "tokens of a history must be integers"),
        (lambda: roll(1, "none", good), "NoDraft does not copy from a history; use prompt-lookup or recycling"),
        (lambda: jaxspec.generate(MODEL, PROMPTS, history=History.empty(3, 8)), "is of 3 prompts, but the call has 2"),
    ):
        with pytest.raises(InvalidConfig, match=why):
            call()


def test_samples_do_not_share_a_row():
    """The rows of a prompt are adjacent in the texts as in the request."""
    rows = [([prompt], [10 + sample]) for prompt, sample in itertools.product((1, 2), range(3))]
    tokens = History.empty(2, 9).add(Given(rows, [True] * 6)).tokens.tolist()
    assert tokens == [[1, 10, -1, 1, 11, -1, 1, 12, -1], [2, 10, -1, 2, 11, -1, 2, 12, -1]]
