"""Tests `jaxspec tune`: its conclusions, its file, and the commands that read the file."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest

import jaxspec
from helpers import toys
from helpers.checkpoints import random_params, tiny_config, write_bytes
from helpers.narrow import instance, not_none
from helpers.recorded import recorded
from helpers.toys import noisy
from jaxspec.bench.records import Method
from jaxspec.bench.setup import BenchSetup
from jaxspec.cli import bench, main
from jaxspec.cli.options import UsageError
from jaxspec.cli.tune import format_table, warn_about_few_rounds
from jaxspec.core.schedule import Constant
from jaxspec.core.topology import Topology, as_topology, branching, chain
from jaxspec.decode.session import Session
from jaxspec.decode.stats import Stats
from jaxspec.drafters.model import ModelDraft
from jaxspec.drafters.none import NoDraft
from jaxspec.errors import InvalidConfig, TuningError
from jaxspec.heads.network import init_params
from jaxspec.schedules.adaptive import Adaptive
from jaxspec.schedules.confidence import Confidence
from jaxspec.schedules.plus_minus import PlusMinus
from jaxspec.testing import TableLM
from jaxspec.tuning import tune as tuning
from jaxspec.tuning.head_laws import MAX_DRAFTED_TOKENS
from jaxspec.tuning.tune import choose_widths, derive_drafting, estimate_call_costs, order_depths, tune

LM = TableLM(8)
TARGET = jaxspec.Model(LM, LM.init_params(jax.random.key(0)))
DRAFT = jaxspec.Model(LM, noisy(TARGET.params, 1, 0.2))
PROMPTS = [[1, 2, 3], [4]]
SAMPLED: dict[str, Any] = {"sampling": jaxspec.Sampling(temperature=1.0), "key": jax.random.key(5)}


# What it concludes.


def test_widths_hold_depths_in_powers_of_two():
    assert choose_widths(chain(8)) == (2, 3, 5)
    assert choose_widths(chain(3)) == (2, 3)
    assert choose_widths(chain(1)) == ()
    assert choose_widths(branching(2, 2, 1)) == (3, 7)


def test_conclusions_by_hand():
    """Costs are medians in plain rounds, gaps filled, never falling; the best depth is that of the most tokens."""
    seconds = {4: [0.8, 0.9, 7.0], 0: [0.4, 0.4, 0.5], 1: [0.5], 2: [0.45, 0.65, 0.6]}
    stats = Stats(tested_at=(10, 8, 0, 4), accepted_at=(8, 4, 0, 1))
    tuned = derive_drafting("model", chain(4), {}, seconds, [(10, 0.7), (10, 0.9)], stats)
    assert tuned.tree == chain(4)
    assert tuned.schedule == Adaptive((1.0, 1.25, 1.5, 1.875, 2.25), resume=0.075, prior_acceptance=0.8, widths=(2, 3))
    assert tuned.measured["acceptance_by_depth"] == [0.8, 0.5, 0.5, 0.25]
    by_depth = [1.0, 1.8 / 1.25, 2.2 / 1.5, 2.4 / 1.875, 2.45 / 2.25]
    assert tuned.measured["speedup_by_depth"] == pytest.approx(by_depth, abs=1e-4)
    assert tuned.measured["best_depth"] == 2
    lines = format_table(tuned.measured)
    assert lines[0] == "a chain, by its length:"
    assert lines[4].split() == ["2", "600.0", "50%", "1.47", "best"]
    assert lines[5].split() == ["3", "~750.0", "50%", "~1.28"]
    assert lines[6].split() == ["4", "900.0", "25%", "1.09"]
    assert lines[7] == "~ was not timed, but interpolated between timed depths"
    assert format_table(tuned.measured, 9)[0] == "a tree of 9 nodes, cut at each depth:"
    assert warn_about_few_rounds(tuned.measured, 2).startswith("only 1 round of some depths were timed on 2 prompts; ")
    assert not warn_about_few_rounds({"rounds_timed": {"0": 40, "1": 10}}, 1)


def test_where_nothing_pays_the_draft_is_one_token():
    """Zero is the best depth; the schedule may still try one token now and then."""
    tuned = derive_drafting(
        "model", chain(4), {}, {0: [1.0], 4: [3.0]}, [], Stats(tested_at=(9,) * 4, accepted_at=(0,) * 4)
    )
    assert (tuned.measured["best_depth"], tuned.tree) == (0, chain(1))
    schedule = instance(Adaptive, tuned.schedule)
    assert (schedule.prior_acceptance, schedule.resume) == (0.05, 0.0)
    wide = derive_drafting(
        "model", branching(2, 2), {}, {0: [1.0], 2: [3.0]}, [], Stats(tested_at=(9, 1), accepted_at=(1, 0))
    )
    assert wide.tree == branching(2, 2)


def test_nothing_drafted_is_an_error():
    with pytest.raises(TuningError, match="drafted too little"):
        derive_drafting(
            "prompt-lookup", chain(4), {}, {0: [1.0, 1.0]}, [], Stats(tested_at=(0,) * 4, accepted_at=(0,) * 4)
        )


# The file.


TUNED = jaxspec.Drafting(
    "model", tree=chain(4), schedule=Adaptive((1.0, 1.5), resume=0.01, widths=(2, 3)), measured={"device": "x"}
)


def test_what_is_written_is_read_again(tmp_path):
    for tuned in (
        TUNED,
        jaxspec.Drafting(
            "early-exit",
            tree=branching(2, 1),
            schedule=Confidence(threshold=0.3, entropy=True),
            drafter_options={"exit_layers": 2},
        ),
        jaxspec.Drafting("none", tree=chain(0), schedule=Constant(0)),
        jaxspec.Drafting("prompt-lookup", tree=chain(6), schedule=PlusMinus(first=3)),
        jaxspec.Drafting("self-int8"),
        jaxspec.Drafting("recycling", tree=branching(2, 1)),
    ):
        tuned.save(tmp_path / "t.json")
        again = jaxspec.Drafting.load(tmp_path / "t.json")
        assert again == tuned
        assert again.measured == tuned.measured
        assert hash(again.schedule) == hash(tuned.schedule)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 5}, "version 1 to 4"),
        ({"version": None}, "version 1 to 4"),
        ({"version": 3, "tree": None}, "parents"),
        ({"version": 3, "schedule": None}, "schedule must be an object"),
        ({"drafter": "modle"}, "'model'"),
        ({"drafter": 3}, "drafter must be a name"),
        ({"tree": [-1, 5]}, "node 1"),
        ({"tree": "chain"}, "list of parents"),
        ({"tree": [-1, 0.0]}, "list of parents"),
        ({"options": {"exit_layers": 2}}, "no option 'exit_layers'"),
        ({"options": [2]}, "options must be"),
        ({"schedule": {"name": "adaptiv"}}, "'adaptive'"),
        ({"schedule": {"name": "adaptive", "price": 1}}, "no field 'price'"),
        ({"schedule": {"name": "adaptive", "costs": [1.0, "dear"]}}, "a cost must be a finite number above 0"),
        ({"schedule": {"name": "adaptive", "costs": [1.0, -2.0]}}, "a cost must be a finite number above 0"),
        ({"schedule": {"name": "plus-minus", "first": "two"}}, "first must be a whole number from 1"),
        ({"schedule": {"name": "adaptive", "prior_rounds": 10**30}}, "prior_rounds must be a finite number above 0"),
        ({"schedule": {"name": "adaptive", "loss_budget": 10**30}}, "loss_budget must be a finite number"),
        ({"schedule": {"name": "confidence", "entropy": []}}, "entropy must be True or False"),
        ({"tree": [-1] + [0] * 20_000}, "at most 1024 are supported"),
        ({"schedule": ["adaptive"]}, "with a name"),
        ({"measured": 1}, "measured"),
        ({"more": 1}, "more"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, change, said):
    path = tmp_path / "t.json"
    TUNED.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(TuningError, match=said) as error:
        jaxspec.Drafting.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("version", [1, 2])
def test_files_of_earlier_versions_are_read(tmp_path, version):
    earlier = {"name": "adaptive", "costs": [1.0, 1.5], "hope": 0.8, "credit": 3.0, "share": 0.02, "memory": 16.0}
    options = {"options": {"exit_layers": 2}} if version == 2 else {"exit_layers": 2}
    record = {"version": version, "drafter": "early-exit", "tree": [-1, 0], "measured": {}} | options
    (tmp_path / "t.json").write_text(json.dumps(record | {"schedule": earlier | {"weight": 2.0, "widths": [3]}}))
    expected = Adaptive((1.0, 1.5), 0.0, 0.8, 3.0, 0.02, 16.0, 2.0, widths=(3,))
    assert jaxspec.Drafting.load(tmp_path / "t.json") == jaxspec.Drafting(
        "early-exit", tree=chain(1), schedule=expected, drafter_options={"exit_layers": 2}
    )


def test_earlier_names_are_unknown_in_a_file_of_this_version(tmp_path):
    TUNED.save(tmp_path / "t.json")
    record = json.loads((tmp_path / "t.json").read_text())
    (tmp_path / "t.json").write_text(json.dumps(record | {"schedule": {"name": "adaptive", "hope": 0.8}}))
    with pytest.raises(TuningError, match="no field 'hope'"):
        jaxspec.Drafting.load(tmp_path / "t.json")


@pytest.mark.parametrize("content", ["", "[1]", "{}", "[" * 100_000, "\x00", '{"version": 1}', None])
def test_what_is_no_such_file_is_refused(tmp_path, content):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TuningError, match=str(path)):
        jaxspec.Drafting.load(path)


def test_tuned_is_given_alone():
    conflicts: list[dict[str, Any]] = [
        {"tree": 3},
        {"schedule": "adaptive"},
        {"drafter": "none"},
        {"drafter_options": {"exit_layers": 1}},
        {"draft_params": np.zeros(3)},
    ]
    for more in conflicts:
        with pytest.raises(InvalidConfig, match="drafting="):
            jaxspec.generate(TARGET, PROMPTS, draft=DRAFT, drafting=TUNED, **more)
    no_members: Any = (3, Adaptive)
    with pytest.raises(InvalidConfig, match="drafting must be"):
        jaxspec.generate(TARGET, PROMPTS, drafting=no_members[0])
    with pytest.raises(InvalidConfig, match="schedule must be"):
        jaxspec.generate(TARGET, PROMPTS, schedule=no_members[1])
    with pytest.raises(jaxspec.JaxspecError, match="Did you mean 'adaptive'"):
        jaxspec.generate(TARGET, PROMPTS, schedule="adaptve")


# From one end to the other.


@pytest.mark.slow
def test_from_measuring_to_decoding(tmp_path):
    """Measured on two prompts, written, read, decoded by: the plain text, and the schedule is the file's."""
    tuned = tune(TARGET, PROMPTS, drafter="model", draft=DRAFT, tree=2, max_new_tokens=60, **SAMPLED)
    assert tuned.drafter == "model"
    assert len(tuned.measured["round_s"]) == 3
    assert all(count >= 4 for count in tuned.measured["rounds_timed"].values())
    assert 0.3 < tuned.measured["acceptance_by_depth"][0] <= 1
    tuned.save(tmp_path / "t.json")
    asking = {**SAMPLED, "max_new_tokens": 20}
    plain = jaxspec.generate(TARGET, PROMPTS, drafter="none", **asking)
    output = jaxspec.generate(TARGET, PROMPTS, draft=DRAFT, drafting=str(tmp_path / "t.json"), **asking)
    assert [row.tokens for row in output] == [row.tokens for row in plain]
    decoder = not_none(output.session).decoder
    assert decoder.schedule == tuned.schedule
    assert instance(ModelDraft, decoder.drafter).tree == tuned.tree


def test_wrong_input_to_tune_is_refused():
    refused: list[dict[str, Any]] = [
        {"drafter": NoDraft()},
        {"drafter": "modle"},
        {"drafter": "model", "draft": DRAFT, "max_new_tokens": 0},
        {"drafter": "model", "draft": DRAFT, "tree": -1},
        {"drafter": "none", "draft": DRAFT},
    ]
    for wrong in refused:
        with pytest.raises(jaxspec.JaxspecError):
            tune(TARGET, PROMPTS, **{**SAMPLED, **wrong})


def test_rounds_are_timed_by_their_depth(monkeypatch):
    """Where a round of depth g takes 2 + g seconds, just those costs come out."""
    run = Session.run

    def timed(self, max_rounds, max_depth):
        before = self.timing.decode_s
        run(self, max_rounds, max_depth=max_depth)
        self.timing.decode_s = before + 2 + max_depth

    monkeypatch.setattr(Session, "run", timed)
    tuned = tune(TARGET, PROMPTS, drafter="model", draft=DRAFT, tree=2, max_new_tokens=60, **SAMPLED)
    assert tuned.measured["round_s"] == {"0": 2.0, "1": 3.0, "2": 4.0}
    assert instance(Adaptive, tuned.schedule).costs == (1.0, 1.5, 2.0)[: instance(Topology, tuned.tree).shape.depth + 1]


def test_what_others_are_drawn_between_is_timed_first():
    """A text may end before all depths had their turn."""
    assert order_depths(9) == [9, 0, 1, 2, 4, 8, 3, 5, 6, 7]
    assert order_depths(2) == [2, 0, 1]
    assert order_depths(1) == [1, 0]


def test_costs_of_calls_by_hand():
    """A draft's call is what rounds of one width differ by; the target's is what is left, never below a plain round."""
    costs, draft = not_none(estimate_call_costs(chain(8), np.array([1.0, 1.3, 1.6, 2.0, 2.25, 3.0, 3.25, 3.5, 3.75])))
    assert costs == pytest.approx({1: 1.0, 2: 1.05, 3: 1.1, 5: 1.25, 9: 1.75})
    assert draft == pytest.approx(0.25)
    assert estimate_call_costs(chain(4), np.array([1.0, 1.0, 1.0, 1.5, 2.0])) == ({1: 1.0, 2: 1.0, 3: 1.0, 5: 1.0}, 0.5)
    assert estimate_call_costs(chain(3), np.ones(4)) is None


def test_the_faster_of_chain_and_tree_is_taken(monkeypatch):
    """A draft's call costs half a plain round, a wide window nothing: the best tree has branches, and is played too.

    It is taken if those rounds were faster. Where the first child is always right, or rules take no tree, none is.
    """
    played = []

    def play(decoder, *_):
        tree, share = decoder.drafter.tree, 60 if decoder.drafter.tree.is_chain else accepted
        played.append(tree)
        depth = tree.shape.depth
        stats = Stats(tested_at=(100,) * depth, accepted_at=(share,) * depth)
        return {drafted: [2.0 + drafted] * 2 for drafted in range(depth + 1)}, [], stats

    monkeypatch.setattr(tuning, "_measure_rounds", play)
    asking = {"drafter": "model", "tree": 4, "max_new_tokens": 20, **SAMPLED}
    accepted = 90
    tuned = tune(TARGET, PROMPTS, draft=DRAFT, **asking)
    ranks = tuned.measured["acceptance_by_rank"]
    best = jaxspec.fastest_tree(ranks, dict.fromkeys((1, 2, 3, 5), 2.0), 1.0)
    assert best.shape.nodes == 5
    assert best.shape.width > 1
    assert played == [chain(4), best]
    assert tuned.tree == best
    assert tuned.measured["acceptance_by_depth"] == [0.9] * best.shape.depth
    assert tuned.measured["speedups"]["tree"] == max(tuned.measured["speedup_by_depth"])
    assert instance(Adaptive, tuned.schedule).costs == (1.0, 1.5, 2.0, 2.5)[: best.shape.depth + 1]
    accepted = 40
    slow = tune(TARGET, PROMPTS, draft=DRAFT, **asking)
    assert instance(Topology, slow.tree).is_chain
    assert slow.measured["speedups"]["chain"] > slow.measured["speedups"]["tree"]
    assert tune(TARGET, PROMPTS, draft=TARGET, **asking).measured["acceptance_by_rank"][0] == 1
    assert "acceptance_by_rank" not in tune(TARGET, PROMPTS, draft=DRAFT, rule="block", **asking).measured
    assert played[2:] == [chain(4), best, chain(4), chain(4)]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle", "dflash", "pard"])
def test_the_tree_is_that_of_each_drafted_token(drafter, monkeypatch):
    """The chain is as deep as with a draft model, whatever the heads' own tree; the tree ends where no law was read."""
    played = []

    def play(decoder, *_):
        played.append(decoder.drafter.tree)
        depth = played[-1].shape.depth
        stats = Stats(tested_at=(100,) * depth, accepted_at=(90,) * depth)
        return {drafted: [2.0 + drafted / 8] * 2 for drafted in range(depth + 1)}, [], stats

    monkeypatch.setattr(tuning, "_measure_rounds", play)
    lm = toys.transformer(vocab_size=16, num_layers=2)
    target = jaxspec.Model(lm, toys.lively(lm.init_params(jax.random.key(0))))
    layer = dataclasses.replace(lm.config, num_layers=1)
    if drafter == "pard":
        given: dict[str, Any] = {"draft": jaxspec.Model(lm, noisy(target.params, 1, 1.0), settings={"pard_token": 3})}
    elif drafter == "eagle":
        config = jaxspec.EagleConfig(layer)
        given = {"heads": jaxspec.DraftHeads(config, init_params(config, key=jax.random.key(1)), chain(2))}
    else:
        blocks = jaxspec.DFlashConfig(layer, tuning.DEFAULT_DEPTH + 1, 3)
        given = {"heads": jaxspec.DraftHeads(blocks, init_params(blocks, key=jax.random.key(1)), chain(2))}
    tuned = tune(target, PROMPTS, drafter=drafter, max_new_tokens=8, **given, **SAMPLED)
    ranks = tuned.measured["acceptance_by_rank"]
    assert (len(ranks), {len(row) for row in ranks}) == (MAX_DRAFTED_TOKENS, {tuning.MAX_CHILDREN})
    best = jaxspec.fastest_tree(ranks, dict.fromkeys((1, 2, 3, 5, 9), 2.0), 0.125)
    assert best.shape.width > 1
    assert played == [chain(tuning.DEFAULT_DEPTH), best]
    assert set(tuned.measured["speedups"]) == {"chain", "tree"}


CONFIG = tiny_config(vocab_size=264, max_position=4096)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_bytes(tmp_path_factory.mktemp("tiny"), CONFIG, random_params(CONFIG, 3))


@pytest.mark.slow
def test_the_command(directory, tmp_path, capsys, monkeypatch):
    """`tune` writes a file, `generate --tuned` writes the plain text with it; so does `--schedule`."""
    monkeypatch.chdir(tmp_path)
    path = str(tmp_path / "t.json")
    common = ["--target", str(directory), "--max-new-tokens", "40", "--no-chat", "abcabc"]
    drafter = ["--drafter", "early-exit", "--drafter-option", "exit_layers=1"]
    assert main(["tune", *common, "a" * 9000, *drafter, "--draft-length", "2", "--out", path, "--record", "toy"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("left out: prompt 2: prompt and new tokens make 90") == 1
    assert shown.out.splitlines()[0].split() == [
        "depth",
        "ms/round",
        "accepted",
        "times",
        "plain",
    ]
    assert jaxspec.Drafting.load(path).drafter_options == {"exit_layers": 1}
    record, page = recorded("toy")
    assert record.values == dict(jaxspec.Drafting.load(path).measured)
    assert page.count("\n| ") == 4
    written = []
    for words in (["--drafter", "none"], ["--tuned", path], [*drafter, "--schedule", "confidence"]):
        assert main(["generate", *common, "--json", *words]) == 0
        written.append(json.loads(capsys.readouterr().out)[0]["tokens"])
    assert written[0] == written[1] == written[2]


def test_wrong_command_lines(directory, tmp_path, capsys):
    path = str(tmp_path / "t.json")
    TUNED.save(path)
    words = ["--target", str(directory), "abc"]
    for command, said in (
        (["generate", *words, "--tuned", path, "--draft-length", "3"], "--tuned sets how to draft"),
        (["generate", *words, "--tuned", path], "needs --draft-model"),
        (["generate", *words, "--schedule", "adaptve"], "Did you mean 'adaptive'"),
        (["tune", *words, "--out", path], "--drafter"),
        (["tune", "--drafter", "none", "--out", path], "no PROMPT"),
        (["tune", *words, "--drafter", "none", "--out", str(tmp_path / "no" / "t.json")], "there is no folder"),
        (["bench", "--drafters", "model:4@adaptve"], "Did you mean 'adaptive'"),
    ):
        assert main(command) == 2, command
        assert said in capsys.readouterr().err
    assert main(["generate", *words, "--tuned", str(tmp_path / "none.json")]) == 1
    assert "none.json: cannot be read" in capsys.readouterr().err


def test_the_benchmark_takes_schedules(tmp_path):
    """By name behind a drafter, and from a file; each reaches the decoder."""
    methods = bench.parse_drafters("model:4@adaptive,prompt-lookup@plus-minus,model:2x1,none")
    assert [(m.label, m.drafting.schedule) for m in methods] == [
        ("model:4@adaptive", "adaptive"),
        ("prompt-lookup@plus-minus", "plus-minus"),
        ("model:2x1", None),
    ]
    assert methods[0].drafting.tree == 4
    with pytest.raises(UsageError):
        bench.parse_drafters("model:4@")
    setup = BenchSetup(TARGET, "coupled", {})
    assert setup.decoder(bench.complete_method(methods[0], DRAFT, {}, {}))[0].schedule == Adaptive()
    method = Method("tuned", dataclasses.replace(TUNED, draft=DRAFT))
    decoder, _ = setup.decoder(method)
    assert (decoder.schedule, instance(ModelDraft, decoder.drafter).tree) == (TUNED.schedule, TUNED.tree)
    assert as_topology(3) == chain(3)
