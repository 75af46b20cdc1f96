"""Tests the measured acceptance of two models: against tables, against figures computed by hand, and as a command."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers import toys
from helpers.checkpoints import random_params, tiny_config, write_bytes
from helpers.recorded import recorded
from helpers.toys import noisy
from jaxspec import analysis
from jaxspec.cli import main
from jaxspec.cli.acceptance import format_counts
from jaxspec.core.topology import branching
from jaxspec.drafters.pard import Pard
from jaxspec.errors import CapacityError, InvalidConfig
from jaxspec.generation.drafting import Drafting
from jaxspec.heads.network import init_params
from jaxspec.testing import TableLM
from jaxspec.tuning import acceptance
from jaxspec.tuning.acceptance import ANY_RULE, Positions
from jaxspec.tuning.head_laws import build_head_laws

V = 8
LM = TableLM(V, context=512)
TARGET = jaxspec.Model(LM, LM.init_params(jax.random.key(0)))
DRAFT = noisy(TARGET.params, 1, 0.4)
PROMPTS = [("one", [1, 2]), ("two", [3] * 40), ("three", [4])]


def laws(params, text, temperature) -> np.ndarray:
    logits = np.asarray(LM.logits(params, text), np.float64) / temperature
    return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()


def measured(**options):
    defaults: dict[str, Any] = {"max_new_tokens": 21, "children": 2, "seed": 3}
    return acceptance.measure_acceptance(TARGET, LM, DRAFT, PROMPTS, **{**defaults, **options})


@pytest.mark.slow
def test_it_is_that_of_the_laws_along_the_targets_text():
    """Every position of each text once: the sums of the formulas, found from the tables directly."""
    sampling = jaxspec.Sampling(temperature=0.7)
    found = measured(sampling=sampling)
    for i, (row, (name, prompt)) in enumerate(zip(found, PROMPTS)):
        key = jax.random.split(jax.random.fold_in(jax.random.key(3), i))[0]
        text = jaxspec.generate(TARGET, prompt, key=key[None], drafter="none", sampling=sampling, max_new_tokens=21)
        whole = prompt + text[0].tokens
        places = range(len(prompt), len(whole))
        target, draft = (np.stack([laws(p, whole[:n], 0.7) for n in places]) for p in (TARGET.params, DRAFT))
        assert (row.name, row.count) == (name, 21)
        exact = {
            "deterministic": analysis.deterministic_acceptance(target, draft, 2).sum(0),
            "rejection": analysis.rejection_acceptance(target, draft, 2).sum(0),
        }
        np.testing.assert_allclose(row.kept["deterministic"], exact["deterministic"], rtol=1e-4)
        np.testing.assert_allclose(row.kept["rejection"][0], exact["rejection"][0], rtol=1e-4)
        np.testing.assert_allclose(row.kept["rejection"][1], exact["rejection"][1], rtol=0.05)
        np.testing.assert_allclose(row.kept["coupled"][0], analysis.match_probability(target, draft).sum(), rtol=1e-4)
        optimum = analysis.optimal_acceptance(target, draft, 2).sum(0)
        for rule in ("rejection", "coupled"):
            np.testing.assert_allclose(row.optimum[rule], optimum, rtol=1e-4)


@pytest.mark.slow
def test_limits_and_greedy():
    """Where laws are limited the coupled draft is not, and has its own optimum; greedy rules are one."""
    limited = measured(sampling=jaxspec.Sampling(temperature=1.0, top_k=3))
    assert any(abs(row.optimum["coupled"][1] - row.optimum["rejection"][1]) > 1e-3 for row in limited)
    greedy = measured(sampling=jaxspec.Sampling())
    decoded = jaxspec.generate(TARGET, [ids for _, ids in PROMPTS], drafter="model", draft=jaxspec.Model(LM, DRAFT),
                               tree=branching(2), max_new_tokens=21)  # fmt: skip
    assert decoded.stats.accepted > 0
    for row, (_, prompt) in zip(greedy, PROMPTS):
        text = prompt + jaxspec.generate(TARGET, prompt, drafter="none", max_new_tokens=21)[0].tokens
        best = [np.argsort(-laws(DRAFT, text[:n], 1.0))[:2] for n in range(len(prompt), len(text))]
        hits = [[t in b[:k] for t, b in zip(text[len(prompt) :], best)] for k in (1, 2)]
        np.testing.assert_allclose(row.kept[ANY_RULE], np.sum(hits, 1))


def test_figures_by_hand():
    """Means over positions, not prompts; the interval holds the mean, and there is none of one prompt."""
    found = [
        Positions("a", 10, {"r": np.array([5.0, 6.0])}, {"r": np.array([7.0, 9.0])}),
        Positions("b", 30, {"r": np.array([27.0, 30.0])}, {"r": np.array([30.0, 30.0])}),
    ]
    one, two = acceptance.average_acceptance(found, (1, 2))
    assert (one.acceptance, one.optimum, one.gap) == pytest.approx((32 / 40, 37 / 40, 5 / 40))
    assert (one.low, one.high) == pytest.approx((0.5, 0.9)), "both prompts or one of them twice"
    assert (two.children, two.acceptance) == (2, 36 / 40)
    assert acceptance.rank_acceptance(found) == {"r": pytest.approx([0.8, 0.1])}
    assert acceptance.average_acceptance(found[:1], (1,))[0].low is None


# --- draft heads, and masks ----------------------------------------------------------------------------------

SMALL = toys.transformer(vocab_size=16, num_layers=2)
WRITER = jaxspec.Model(SMALL, toys.lively(SMALL.init_params(jax.random.key(0))))
MEDUSA = jaxspec.HeadsConfig(SMALL.config.hidden_size, 16, 2, inputs="recurrent")
EAGLE = jaxspec.EagleConfig(dataclasses.replace(SMALL.config, num_layers=1), fc_norm=True, norm_output=True)
DSPARK = jaxspec.DFlashConfig(EAGLE.decoder, 5, 0, markov="vanilla", markov_rank=4)
DRAFTS: dict[str, Any] = {
    "pard": {"draft": jaxspec.Model(SMALL, noisy(WRITER.params, 3, 0.3), settings={"pard_token": 9})},
    "dflash": {"heads": jaxspec.DraftHeads(DSPARK, init_params(DSPARK, key=jax.random.key(1)))},
    "medusa": {"heads": jaxspec.DraftHeads(MEDUSA, noisy(init_params(MEDUSA), 2, 0.3))},
    "eagle": {"heads": jaxspec.DraftHeads(EAGLE, init_params(EAGLE, key=jax.random.key(1)))},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTS)
def test_by_drafted_token_it_is_that_of_a_round_from_every_position(kind):
    """Greedily, each drafted token with 4 candidates; the first level of the other tree has every token."""
    given, prompts = DRAFTS[kind], [("one", [5, 9, 7]), ("two", [8])]
    draft, params = acceptance.drafting_model(WRITER, Drafting(kind, tree=2, **given))
    found = acceptance.measure_acceptance(WRITER, draft, params, prompts, sampling=jaxspec.Sampling(), children=4,
                               max_new_tokens=8)  # fmt: skip
    accepted = np.zeros(2)
    for name, prompt in prompts:
        whole = prompt + jaxspec.generate(WRITER, prompt, drafter="none", max_new_tokens=8)[0].tokens
        texts = [whole[:root] for root in range(max(len(prompt), 2), len(whole))]
        for token, tree in ((1, branching(4)), (2, branching(16, 4))):
            (row,) = (row for row in found if (row.name, row.token) == (name, token))
            begun = texts[: len(texts) + 1 - token]
            rounds = jaxspec.generate(WRITER, begun, drafter=kind, tree=tree, max_new_tokens=token, **given)
            assert row.count == len(begun)
            assert row.kept[ANY_RULE][3] == sum(out.stats.accepted == token for out in rounds)
            accepted[token - 1] += row.kept[ANY_RULE][3]
    assert (accepted > 0).all(), "else nothing was compared"
    assert (accepted < 15).all()
    made = acceptance.average_acceptance(found, (1, 4))
    assert [(figure.token, figure.children) for figure in made][:4] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    assert jaxspec.best_tree(acceptance.rank_acceptance(found)[ANY_RULE], 6).shape.depth <= len(made) // 2


@pytest.mark.slow
def test_tokens_that_heads_cannot_draft_have_no_probability():
    config = dataclasses.replace(EAGLE, draft_vocab_size=5)
    ids = np.array([1, 4, 5, 9, 15], np.int32)
    heads = jaxspec.DraftHeads(config, init_params(config, key=jax.random.key(1), tokens=ids))
    draft, params = build_head_laws(WRITER, heads)
    rows = jnp.arange(10.0).reshape(2, 1, 5)
    whole = np.asarray(draft.head(params, rows))
    assert whole.shape == (2, 1, 16)
    np.testing.assert_array_equal(whole[..., ids], rows)
    assert np.isneginf(np.delete(whole, ids, axis=-1)).all()
    found = acceptance.measure_acceptance(
        WRITER, draft, params, [("one", [5, 9, 7])], children=2, max_new_tokens=4, draws=2
    )
    assert [row.count for row in found] == [4, 3, 2, 1]


def test_wrong_input():
    with pytest.raises(InvalidConfig, match="children is 9"):
        measured(children=9)
    with pytest.raises(CapacityError, match="at most 512"):
        measured(max_new_tokens=500)
    with pytest.raises(InvalidConfig, match="cannot be computed"):
        acceptance.drafting_model(TARGET, Drafting())
    second = dataclasses.replace(DSPARK, markov=None, markov_rank=0, selector_rank=4, selector_top=4)
    heads = jaxspec.DraftHeads(second, init_params(second, key=jax.random.key(1)), name="second")
    with pytest.raises(InvalidConfig, match="'dflash' cannot be computed: its distributions"):
        acceptance.drafting_model(WRITER, Drafting("dflash", heads=heads))
    with pytest.raises(InvalidConfig, match="second: a DFlash 2 head of 1 layer, blocks of 5 cannot be trained"):
        build_head_laws(WRITER, heads)
    assert not acceptance.has_laws(Pard(LM, 1, V, states=(None,)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    config = tiny_config(vocab_size=264, max_position=4096)
    return str(write_bytes(tmp_path_factory.mktemp("tiny"), config, random_params(config, 3)))


def test_the_command(directory, tmp_path, capsys, monkeypatch):
    """The target as its own draft: every rule keeps all it can; the JSON gives trees."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out.json"
    words = ["--prompt", "abc", "--prompt", "de", "--children", "3,1", "--max-new-tokens", "9", "--draws", "4"]
    words += ["--target", directory, "--draft-model", directory, "--ignore-eos", "--json", str(out)]
    assert main(["acceptance", *words, "--record", "toy"]) == 0
    shown = capsys.readouterr().out
    record = json.loads(out.read_text())
    (measured,) = record["runs"]
    assert measured["positions"] == 18
    assert [(f["rule"], f["children"]) for f in measured["figures"]] == [
        (rule, children) for children in (1, 3) for rule in ("coupled", "deterministic", "rejection")
    ]
    for figure in measured["figures"]:
        assert f"{figure['acceptance']:.4f}" in shown
        if figure["rule"] != "deterministic":
            assert figure["acceptance"] == pytest.approx(1, abs=1e-4)
        assert figure["gap"] == pytest.approx(figure["optimum"] - figure["acceptance"])
    assert [p["name"] for p in measured["prompts"]] == ["prompt 1", "prompt 2"]
    small, shown = recorded("toy")
    assert small.values["runs"][0]["figures"] == measured["figures"]
    assert all(f"{figure['acceptance']:.3f}" in shown for figure in measured["figures"])
    for ranks in measured["by_rank"].values():
        assert jaxspec.best_tree(ranks, 5).shape.nodes >= 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--children", "0"], "whole numbers from 1"),
        (["--children", "1,x"], "whole numbers from 1"),
        (["--target", "m.gguf"], "needs --draft-model"),
        (["--drafter", "prompt-lookup"], "prompt-lookup"),
        (["--drafter", "early-exit", "--draft-model", "m.gguf"], "is for the drafter model"),
        (["--target", "m.gguf", "--drafter", "eagle"], "the drafter eagle needs --heads SOURCE"),
        (
            ["--target", "m.gguf", "--draft-model", "m.gguf", "--heads", "h"],
            "--heads is for the drafter medusa",
        ),
        (["--draft-model", "m.gguf", "--drafter-option", "exit_layers=2"], "has no such option"),
        (["--draft-model", "m.gguf", "--json", "/no/where/x.json"], "there is no folder"),
    ],
)
def test_usage_errors(words, said, capsys):
    assert main(["acceptance", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("texts", [1, 2, 7])
@pytest.mark.parametrize("length", [1, 5, 24])
def test_texts_are_counted_once(tokens, texts, length):
    """Heads have sums for every drafted token of a text, over ever fewer positions."""
    found = [
        Positions(f"prompt {i}", max(length - token, 0), {}, {}, token + 1)
        for i in range(texts)
        for token in range(tokens)
    ]
    count = texts * length
    assert format_counts(found) == f"{count} position{'s' * (count != 1)} of {texts} text{'s' * (texts != 1)}"
