"""Tests the drafters "self-int8" and "auto": the same texts, the choice by hand, and what is kept."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import jaxspec
from helpers.checkpoints import random_params, tiny_config, write_bytes
from helpers.narrow import instance, not_none
from helpers.toys import noisy
from jaxspec.cli import main
from jaxspec.core.theory import TokenCost
from jaxspec.decode.session import Timing
from jaxspec.drafters.model import ModelDraft
from jaxspec.errors import InvalidConfig, StorageError, TuningError
from jaxspec.heads import companions
from jaxspec.kernels.library import kernels_available
from jaxspec.models.rounding import round_to_int8
from jaxspec.schedules.best_width import BestWidth
from jaxspec.testing import TableLM
from jaxspec.tuning import auto
from jaxspec.tuning.tune import tune

LM = TableLM(8)
TABLE = jaxspec.Model(LM, LM.init_params(jax.random.key(0)))
CONFIG = tiny_config(vocab_size=264, max_position=1024)
PROMPTS = ["abcabcabc", "a tree is a tree"]
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
KERNELS = [False, pytest.param(True, marks=pytest.mark.skipif(not kernels_available(), reason="needs the kernels"))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_bytes(tmp_path_factory.mktemp("tiny"), CONFIG, random_params(CONFIG, 3))


@pytest.fixture(scope="module")
def target(directory):
    return jaxspec.load(directory)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache directory of the test's own, and a process that has measured nothing."""
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(auto, "_FOUND", {})
    return tmp_path / "cache" / auto.FOLDER


@pytest.fixture
def clock(monkeypatch):
    """Replaces `generate` by one that takes the seconds per token that a test gives each drafter, and each width.

    The seconds of a prompt may be an iterator, with the seconds of one call after the other.
    """
    seconds: dict[str, list[Any]] = {}
    widths: dict[int, float] = {False: 1.0, 4: 1.15, 16: 2.0}
    calls: list[str] = []

    def generate(target, batch, *, drafting=None, width_matched=False, **options):
        if drafting is None:
            return SimpleNamespace(timing=Timing(0.0, 0.0, 40 * widths[width_matched], 40))
        calls.append(drafting.drafter)
        at = auto_batches.index(batch) if batch in auto_batches else 0
        tokens, each = 40 * len(batch), seconds[drafting.drafter][at]
        each = each if isinstance(each, (int, float)) else next(each)
        return SimpleNamespace(timing=Timing(0.0, 0.0, tokens * each, tokens))

    auto_batches = [[prompt] for prompt in "abc"]
    monkeypatch.setattr(auto, "generate", generate)
    return SimpleNamespace(seconds=seconds, widths=widths, calls=calls, prompts=["a", "b", "c"])


def compare_only(monkeypatch, *names: str):
    """Fewer drafters compile in less time."""
    find = auto.find_draftings
    monkeypatch.setattr(auto, "find_draftings", lambda *given: {name: find(*given)[name] for name in names})


# The target in int8 as its own draft model.


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_copy_is_what_load_makes(directory, kernels):
    """Every array and the network are those of `load(..., dtype="int8")`; norms are shared."""
    model = jaxspec.load(directory, kernels=kernels)
    copy, loaded = round_to_int8(model), jaxspec.load(directory, dtype="int8", kernels=kernels)
    assert copy.lm == loaded.lm
    assert jax.tree.structure(copy.params) == jax.tree.structure(loaded.params)
    for made, read in zip(jax.tree.leaves(copy.params), jax.tree.leaves(loaded.params)):
        assert made.dtype == read.dtype
        np.testing.assert_array_equal(made, read)
    assert copy.params["norm"] is model.params["norm"]
    assert copy.bytes < 0.45 * model.bytes


def test_texts_with_the_copy_are_plain_texts(target, directory):
    """The same draft as with the int8 model as `draft`; the copy is made once for each target."""
    plain = jaxspec.generate(target, PROMPTS, drafter="none", **OPTIONS)
    own = jaxspec.generate(target, PROMPTS, drafter="self-int8", tree=3, **OPTIONS)
    loaded = jaxspec.load(directory, dtype="int8")
    given = jaxspec.generate(target, PROMPTS, drafter="model", draft=loaded, tree=3, **OPTIONS)
    assert [row.tokens for row in own] == [row.tokens for row in given] == [row.tokens for row in plain]
    assert (own.stats.drafted, own.stats.accepted) == (given.stats.drafted, given.stats.accepted)
    assert own.stats.accepted > 0.5 * own.stats.drafted
    first, second = (jaxspec.Drafting("self-int8").build_drafter(target) for _ in range(2))
    assert instance(ModelDraft, first[0]) == second[0]
    assert first[1] is second[1]


def test_what_cannot_be_a_copy_is_refused(target, directory):
    with pytest.raises(InvalidConfig, match="is quantized already"):
        jaxspec.generate(jaxspec.load(directory, dtype="int8"), "a", drafter="self-int8", **OPTIONS)
    with pytest.raises(InvalidConfig, match="only the weights of a TransformerLM"):
        jaxspec.generate(TABLE, [1, 2], drafter="self-int8", **OPTIONS)
    with pytest.raises(InvalidConfig, match="leave draft out, or choose the drafter 'model'"):
        jaxspec.generate(target, "a", drafter="self-int8", draft=target, **OPTIONS)


# The choice, by hand.


def test_the_fastest_is_chosen(clock):
    """By the geometric mean over prompts; the mean of the fastest repeats is the measure."""
    clock.seconds |= {"none": [1, 1, 1], "prompt-lookup": [0.8, 0.4, 0.6], "recycling": [0.5, 0.5, 0.5]}
    clock.seconds |= {"model": [0.6, 0.6, 0.6]}
    chosen = auto.compare_drafters(TABLE, clock.prompts, jaxspec.Drafting("auto", draft=TABLE), key=None)
    assert chosen.drafter == "recycling"
    assert chosen.draft is None
    expected = {"none": 1.0, "prompt-lookup": (0.8 * 0.4 * 0.6) ** (-1 / 3), "recycling": 2.0, "model": 1 / 0.6}
    assert chosen.measured["drafters"] == {name: pytest.approx(mean, abs=1e-4) for name, mean in expected.items()}
    assert chosen.measured["slowest"]["prompt-lookup"] == pytest.approx(1 / 0.8, abs=1e-4)
    assert chosen.measured["batches"] == 3


def test_a_drafter_that_slows_a_prompt_down_is_not_chosen(clock):
    clock.seconds |= {"none": [1, 1, 1], "prompt-lookup": [0.4, 0.4, 1.2], "recycling": [0.6, 0.6, 1.05]}
    chosen = auto.compare_drafters(TABLE, clock.prompts, jaxspec.Drafting("auto"))
    assert chosen.drafter == "recycling"
    clock.seconds |= {"recycling": [1.2, 1.2, 1.0]}
    assert auto.compare_drafters(TABLE, clock.prompts, jaxspec.Drafting("auto")).drafter == "none"


def test_a_prompt_that_seems_slow_is_timed_again(clock):
    """So that a disturbance does not decide."""
    disturbed = iter([1.3] * auto.REPEATS + [1.3, 0.9, 1.3])
    clock.seconds |= {"none": [1, 1, 1], "prompt-lookup": [0.5, 0.5, disturbed], "recycling": [0.8, 0.8, 0.8]}
    chosen = auto.compare_drafters(TABLE, clock.prompts, jaxspec.Drafting("auto"))
    assert chosen.drafter == "prompt-lookup"
    assert chosen.measured["slowest"]["prompt-lookup"] == pytest.approx(1 / 0.9, abs=1e-4)
    assert clock.calls.count("prompt-lookup") == clock.calls.count("none") == 3 * auto.REPEATS + auto.CONFIRMED
    assert clock.calls.count("recycling") == 3 * auto.REPEATS


@pytest.mark.parametrize(("seconds", "turns"), [(1.0, 2), (0.5, 2), (0.21, 5), (0.1, 8)])
def test_what_takes_little_time_is_timed_more_often(seconds, turns):
    """Because its times are noisier: two to eight times, until each drafter has decoded for a second on average."""
    calls: list[str] = []

    def decode(name: str) -> Timing:
        calls.append(name)
        return Timing(0.0, 0.0, seconds, 40)

    assert auto._take_turns(decode, ["a", "b"], 8) == {"a": seconds / 40, "b": seconds / 40}
    assert calls == ["a", "b"] * turns


def test_the_slow_are_not_run_to_the_end(clock):
    """What is below 0.6 of the fastest ends; plain decoding is always run."""
    clock.seconds |= {"none": [1, 1, 1], "prompt-lookup": [0.5, 0.5, 0.5], "recycling": [0.9, 0.1, 0.1]}
    chosen = auto.compare_drafters(TABLE, clock.prompts, jaxspec.Drafting("auto"))
    assert chosen.measured["stopped_early"] == ["recycling"]
    assert set(chosen.measured["drafters"]) == {"none", "prompt-lookup"}
    assert clock.calls.count("recycling") == auto.REPEATS
    assert clock.calls.count("prompt-lookup") == 3 * auto.REPEATS


def test_texts_that_end_at_once_are_not_timed(monkeypatch):
    ended = SimpleNamespace(timing=Timing(0.0, 0.0, 1.0, auto.FEWEST_TOKENS - 1))
    monkeypatch.setattr(auto, "generate", lambda *_, **__: ended)
    with pytest.raises(TuningError, match="fewer than 8 tokens"):
        auto.compare_drafters(TABLE, [[1], [2]], jaxspec.Drafting("auto"))


def test_the_price_of_tokens(clock, target, cache, monkeypatch):
    """By hand; the drafters that choose by the price know it, and so does the kept answer."""
    assert auto.measure_token_cost(TABLE, clock.prompts) == pytest.approx((0.05, 8.0))
    clock.seconds |= {name: [1.0] * 3 for name in ("none", "recycling", "early-exit", "self-int8")}
    clock.seconds["prompt-lookup"] = [0.5] * 3
    chosen = auto.fastest_drafting(target, jaxspec.Drafting("auto"))
    assert instance(BestWidth, chosen.schedule).cpu == pytest.approx((0.05, 8.0))
    assert chosen.measured["token_cost"] == [0.05, 8.0]
    (file,) = cache.iterdir()
    assert jaxspec.Drafting.load(file).schedule == chosen.schedule
    found = auto.find_draftings(target, chosen, TokenCost(0.5, 2)).items()
    prices = {name: drafting.schedule for name, drafting in found}
    assert {name for name, schedule in prices.items() if schedule is not None} == {"prompt-lookup", "recycling"}
    for widths, price in (({4: 0.9, 16: 1.0}, (0.0, 16.0)), ({4: 40.0, 16: 160.0}, (1.0, 1.0))):
        clock.widths |= widths
        assert auto.measure_token_cost(TABLE, clock.prompts) == pytest.approx(price)
    monkeypatch.setattr(auto, "platform_of", lambda mesh: "gpu")
    assert auto.measure_token_cost(TABLE, clock.prompts) is None


def test_batches_hold_every_prompt():
    assert auto._fill_batches([*"abc"], 1) == [["a"], ["b"], ["c"]]
    assert auto._fill_batches([*"abc"], 2) == [["a", "b"], ["c", "a"]]
    assert auto._fill_batches([*"abc"], 8) == [[*"abcabcab"], [*"cabcabca"]]


def test_all_drafters_of_a_target_are_compared(target):
    """Names with their own models come once; a target without layers has fewer; a draft model brings one more."""
    asked = jaxspec.Drafting("auto", rule="rejection")
    found = auto.find_draftings(target, asked)
    assert [*found] == ["none", "prompt-lookup", "recycling", "early-exit", "self-int8"]
    assert {drafting.rule for drafting in found.values()} == {"rejection"}
    assert [*auto.find_draftings(TABLE, jaxspec.Drafting("auto"))] == ["none", "prompt-lookup", "recycling"]
    draft = jaxspec.Model(LM, noisy(TABLE.params, 1, 0.2))
    with_draft = auto.find_draftings(TABLE, jaxspec.Drafting("auto", draft=draft))
    assert [*with_draft] == ["none", "prompt-lookup", "recycling", "model"]
    assert with_draft["model"].draft is draft


# What is kept.


def test_texts_are_plain_texts_and_the_answer_is_kept(target, cache, monkeypatch, capsys):
    """Measured at the first call only, in a file that the next process reads."""
    monkeypatch.setattr(auto, "TRIAL_PROMPTS", PROMPTS)
    compare_only(monkeypatch, "none", "recycling")
    lm = TableLM(CONFIG.vocab_size)
    target = jaxspec.Model(lm, lm.init_params(jax.random.key(2)), tokenizer=target.tokenizer)
    plain = jaxspec.generate(target, PROMPTS[0], drafter="none", **OPTIONS)
    first = jaxspec.generate(target, PROMPTS[0], drafter="auto", **OPTIONS)
    said = capsys.readouterr().err
    assert said.count("once for this machine") == said.count("the fastest drafter is") == 1
    (file,) = cache.iterdir()
    record = json.loads(file.read_text())
    assert {"none", record["drafter"]} <= record["measured"]["drafters"].keys()

    def measured(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr(auto, "race", measured)
    second = jaxspec.generate(target, PROMPTS[0], drafter="auto", **OPTIONS)
    monkeypatch.setattr(auto, "_FOUND", {})
    third = jaxspec.generate(target, PROMPTS[0], drafter="auto", **OPTIONS)
    assert plain[0].tokens == first[0].tokens == second[0].tokens == third[0].tokens
    decoders = {not_none(output.session).decoder for output in (first, second, third)}
    assert len(decoders) == 1
    assert "once for this machine" not in capsys.readouterr().err


def test_another_use_has_another_answer(target, directory, clock, cache):
    """Sampling, rows, dtype, rule and a draft model each make a measurement of their own; the same use makes none."""
    names = ["none", "prompt-lookup", "recycling", "early-exit", "self-int8", "model"]
    clock.seconds |= {name: [1.0] * 3 for name in names} | {"recycling": [0.5] * 3}
    uses: list[tuple[jaxspec.Model, dict[str, Any], dict[str, Any]]] = [
        (target, {}, {}),
        (target, {}, {"sampled": True}),
        (target, {}, {"rows": 4}),
        (target, {"rule": "rejection"}, {}),
        (target, {"draft": target}, {}),
        (jaxspec.load(directory, dtype="bfloat16"), {}, {}),
    ]
    for count, (model, asked, options) in enumerate(uses, start=1):
        for _ in range(2):
            chosen = auto.fastest_drafting(model, jaxspec.Drafting("auto", **asked), **options)
            assert chosen.drafter == "recycling"
            assert chosen.rule == asked.get("rule", "coupled")
        assert len([*cache.iterdir()]) == count
    many = [auto.fastest_drafting(target, jaxspec.Drafting("auto"), rows=rows) for rows in (64, 1000)]
    assert many[0] == many[1]
    assert len([*cache.iterdir()]) == len(uses) + 1


def test_an_answer_that_cannot_be_kept_is_kept_in_the_process(target, clock, monkeypatch):
    clock.seconds |= {name: [1.0] * 3 for name in ("none", "prompt-lookup", "recycling", "early-exit", "self-int8")}

    def save(self, path):
        raise StorageError("no space left")

    said: list[str] = []
    monkeypatch.setattr(jaxspec.Drafting, "save", save)
    chosen = auto.fastest_drafting(target, jaxspec.Drafting("auto"), report=said.append)
    assert said[-1] == "the result is kept for this process only: no space left"
    calls = len(clock.calls)
    assert auto.fastest_drafting(target, jaxspec.Drafting("auto"), report=said.append) == chosen
    assert len(clock.calls) == calls


def test_a_damaged_answer_is_named(target, clock, cache):
    clock.seconds |= {name: [1.0] * 3 for name in ("none", "prompt-lookup", "recycling", "early-exit", "self-int8")}
    auto.fastest_drafting(target, jaxspec.Drafting("auto"))
    (file,) = cache.iterdir()
    file.write_text("{")
    auto._FOUND.clear()
    with pytest.raises(TuningError, match=str(file)):
        auto.fastest_drafting(target, jaxspec.Drafting("auto"))


# Errors, `tune` and the commands.


@pytest.mark.parametrize(
    "given", [{"tree": 3}, {"schedule": "constant"}, {"drafter_options": {"exit_layers": 1}}, {"draft_params": 1}]
)
def test_what_is_chosen_cannot_be_given(target, given):
    with pytest.raises(InvalidConfig, match=f"cannot be combined with {next(iter(given))}"):
        jaxspec.generate(target, "a", drafter="auto", **given, **OPTIONS)


def test_what_cannot_be_measured_is_refused(target, monkeypatch):
    with pytest.raises(InvalidConfig, match="has no tokenizer; measure it on your own prompts"):
        jaxspec.generate(TABLE, [1, 2], drafter="auto", **OPTIONS)
    tokens, count = np.ones((1, 2), np.int32), np.full(1, 2, np.int32)
    with pytest.raises(InvalidConfig, match="a rollout is traced"):
        jaxspec.rollout(
            TABLE, tokens, count, key=jax.random.key(0), max_new_tokens=2, drafting=jaxspec.Drafting("auto")
        )
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InvalidConfig, match="measured by one process, and there are 2"):
        jaxspec.generate(target, "a", drafter="auto", **OPTIONS)


def test_copies_that_lose_are_freed(target, clock):
    for fastest in ("recycling", "self-int8"):
        clock.seconds |= {name: [1.0] * 3 for name in ("none", "prompt-lookup", "recycling", "early-exit", "self-int8")}
        clock.seconds[fastest] = [0.5] * 3
        auto.compare_drafters(target, clock.prompts, jaxspec.Drafting("auto"))
        assert ("self-int8" in companions._LOADED[target]) == (fastest == "self-int8")


def test_tune_finds_the_fastest_of_all(tmp_path, monkeypatch):
    """On token ids; the file holds the drafter, and texts are plain texts."""
    compare_only(monkeypatch, "none", "model")
    sampled: dict[str, Any] = {"sampling": jaxspec.Sampling(temperature=1.0), "key": jax.random.key(5)}
    prompts = [[1, 2, 3], [4]]
    draft = jaxspec.Model(LM, noisy(TABLE.params, 1, 0.2))
    tuned = tune(TABLE, prompts, drafter="auto", draft=draft, max_new_tokens=24, **sampled)
    assert {"none", "model"} == tuned.measured["drafters"].keys() | {*tuned.measured["stopped_early"]}
    tuned.save(tmp_path / "t.json")
    read = jaxspec.Drafting.load(tmp_path / "t.json")
    assert dataclasses.replace(read, draft=tuned.draft) == tuned
    plain = jaxspec.generate(TABLE, prompts, drafter="none", max_new_tokens=24, **sampled)
    found = jaxspec.generate(TABLE, prompts, drafting=tuned, max_new_tokens=24, **sampled)
    assert [row.tokens for row in found] == [row.tokens for row in plain]
    with pytest.raises(InvalidConfig, match="cannot be combined with tree"):
        tune(TABLE, prompts, drafter="auto", tree=2)


def test_the_commands(directory, clock, capsys, tmp_path):
    """`generate` and `tune` take the name; a tree beside it is refused."""
    clock.seconds |= {name: [1.0] * 3 for name in ("none", "prompt-lookup", "recycling", "early-exit")}
    clock.seconds |= {"self-int8": [0.5] * 3}
    common = ["--target", str(directory), "--max-new-tokens", "12", "--no-chat", "abcabc"]
    texts = []
    for drafter in ("none", "auto", "self-int8"):
        assert main(["generate", *common, "--json", "--drafter", drafter]) == 0
        texts.append(json.loads(capsys.readouterr().out)[0]["tokens"])
    assert texts[0] == texts[1] == texts[2]
    assert main(["generate", *common, "--drafter", "auto", "--tree", "2x2"]) == 2
    assert "chooses the tree" in capsys.readouterr().err
    out = tmp_path / "t.json"
    clock.seconds["prompt-lookup"] = clock.seconds["self-int8"] = [2.0] * 3
    assert main(["tune", *common, "--drafter", "auto", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["drafter", "times", "plain", "slowest", "prompt"]
    assert lines[1].split() == ["none", "1.00", "1.00"]
    assert jaxspec.Drafting.load(out).drafter == "none"
