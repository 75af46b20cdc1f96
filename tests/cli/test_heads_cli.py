"""Tests draft heads on the command line: inspecting, exporting, and drafting with them."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspec
from helpers import medusa_files as files
from helpers.checkpoints import random_params, tiny_config, write_bytes, write_hf
from jaxspec.cli import main
from jaxspec.cli.train import replace_folder
from jaxspec.core.schedule import Constant
from jaxspec.heads.network import init_params

pytestmark = pytest.mark.quick

CONFIG = tiny_config(vocab_size=264, hidden_size=64, num_layers=1, max_position=512)
HELD = files.tensors("v0.1", 2, 1, vocab=264)
TOLD = {"medusa_num_heads": 9, "base_model_name_or_path": "some/model\x1b"}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A model of bytes."""
    return write_bytes(tmp_path_factory.mktemp("target"), CONFIG, random_params(CONFIG, 3))


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return files.write(tmp_path_factory.mktemp("heads"), "v0.1", HELD, TOLD)


@pytest.fixture
def call(capsys):
    def run(*words):
        return main(list(map(str, words))), *capsys.readouterr()

    return run


# --- inspect ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["v0.1", "legacy", "vllm", "vllm-single", "vllm-reduced"])
def test_every_layout_is_named(call, tmp_path, layout):
    held = files.tensors(layout)
    status, out, err = call("inspect", files.write(tmp_path, layout), "--json")
    report = json.loads(out)
    assert (status, err, report["refused"]) == (0, "", [])
    shown = report["heads"]
    assert shown["layout"] == layout.partition("-")[0]
    assert (shown["num_heads"], shown["hidden_size"], shown["vocab_size"]) == (3, 64, 61)
    assert shown["num_layers"] == (1 if layout == "legacy" else 2)
    assert shown["bytes"] == sum(array.nbytes for array in held.values())
    assert shown["draft_vocab_size"] == (20 if layout == "vllm-reduced" else None)
    assert shown["notes"] == []
    assert "layout" in call("inspect", tmp_path)[1]


def test_it_fits_a_narrow_terminal(call, heads, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    lines = call("inspect", heads)[1].splitlines()
    assert len(lines) > 10
    assert max(len(line) for line in lines if str(heads) not in line) <= 60, "but for a path, which stays whole"


def test_what_config_says_differently(call, heads):
    status, out, _ = call("inspect", heads)
    assert status == 0
    assert "config.json says medusa_num_heads 9, but the tensors say 2" in out
    assert "some/model\\x1b" in out
    assert json.loads(call("inspect", heads / "medusa_lm_head.safetensors", "--json")[1])["heads"]["num_layers"] == 1


def test_a_model_with_its_heads(call, tmp_path):
    config = tiny_config(vocab_size=61)
    place = write_hf(tmp_path, config, random_params(config), shards=2, tensors=files.tensors("v1.0"))
    report = json.loads(call("inspect", place, "--json")[1])
    assert report["model"]["vocab_size"] == 61
    assert report["heads"]["layout"] == "v1.0"
    assert "they draft for that model" in report["heads"]["notes"][0]


def test_what_is_refused_is_shown(call, tmp_path):
    held = files.tensors("v0.1")
    del held["1.2.weight"]
    status, out, err = call("inspect", files.write(tmp_path, "v0.1", held), "--json")
    report = json.loads(out)
    assert status == 1
    assert "1.2.weight" in err
    assert report["refused"] == [err.removeprefix("jaxspec: error: ").removesuffix("\n")]
    assert report["head_tensors"]["N.N.linear.weight"] == ["F32 64x64, 6 of them"]
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    files.write_torch(tmp_path / "medusa_lm_head.pt", files.tensors("v0.1"))
    status, _, err = call("inspect", tmp_path)
    assert (status, "--allow-pickle" in err) == (1, True)
    status, out, _ = call("inspect", tmp_path, "--allow-pickle", "--json")
    assert (status, json.loads(out)["heads"]["num_heads"]) == (0, 3)


def test_the_probe(call, target, heads, tmp_path):
    status, out, _ = call("inspect", heads, "--target", target, "--prompt", "abcabc", "--json")
    probe = json.loads(out)["probe"]
    assert status == 0
    assert (probe["prompts"], probe["tokens"]) == (1, 32)
    assert len(probe["acceptance_by_position"]) == 2
    model, loaded = jaxspec.load(target), jaxspec.load_heads(heads)
    stats = jaxspec.generate(model, "abcabc", drafter="medusa", heads=loaded, tree=2, max_new_tokens=32,
                             ignore_eos=True).stats  # fmt: skip
    assert probe["acceptance_by_position"] == [round(share, 4) for share in stats.acceptance_by_position]
    assert probe["tokens_per_round"] == round(stats.tokens_per_round, 4)
    assert ("do not work" in probe["verdict"]) == (stats.acceptance_by_position[0] < 0.1)
    other = files.write(tmp_path, "v0.1", files.tensors("v0.1"))
    status, out, err = call("inspect", other, "--target", target)
    assert status == 1
    assert "the heads are for a vocabulary of 61" in err
    assert "layout" in out
    status, _, err = call("inspect", target, "--target", target)
    assert (status, "are for draft heads" in err) == (2, True)


# --- export -------------------------------------------------------------------------------------------------


def test_export(call, target, heads, tmp_path):
    status, _, err = call("export", heads, "--layout", "vllm", "--out", tmp_path / "vllm", "--base", "org/name")
    assert status == 0
    assert "written: " in err
    assert "medusa_num_heads 9" in err
    told = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert (told["num_heads"], told["base_model_name_or_path"]) == (2, "org/name")
    assert call("export", tmp_path / "vllm", "--out", tmp_path / "back")[0] == 0
    back = load_file(tmp_path / "back" / "medusa_lm_head.safetensors")
    assert back.keys() == HELD.keys()
    for name, array in HELD.items():
        np.testing.assert_array_equal(back[name], array)
    shared = files.write(tmp_path / "shared", "legacy", told={"vocab_size": 264})
    status, _, err = call("export", shared, "--out", tmp_path / "own")
    assert (status, "--target" in err) == (1, True)
    assert call("export", shared, "--out", tmp_path / "own", "--target", target)[0] == 0
    written = load_file(tmp_path / "own" / "medusa_lm_head.safetensors")
    np.testing.assert_array_equal(written["2.1.weight"], jaxspec.load(target, kernels=False).params["embed"])
    assert call("export", heads, "--layout", "v2", "--out", tmp_path / "x")[0] == 2


# --- drafting -----------------------------------------------------------------------------------------------


def test_generate_with_heads(call, target, heads, tmp_path):
    words = ["generate", "abcabc", "--target", target, "--max-new-tokens", "32", "--ignore-eos", "--json"]
    status, out, err = call(*words, "--drafter", "medusa", "--heads", heads, "--draft-length", "2")
    (record,) = json.loads(out)
    assert status == 0
    assert "config.json says medusa_num_heads 9" in err
    assert record["stats"]["drafted"] > 0
    tuned = jaxspec.Drafting("medusa", tree=jaxspec.chain(2), schedule=Constant())
    tuned.save(tmp_path / "tuned.json")
    status, out, _ = call(*words, "--tuned", tmp_path / "tuned.json", "--heads", heads)
    assert json.loads(out)[0]["stats"] == record["stats"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "x", "--target", "m", "--drafter", "medusa"], "the drafter medusa needs --heads"),
        (["generate", "x", "--heads", "h"], "--heads is for the drafter medusa or eagle or dflash, not prompt-lookup"),
        (
            ["chat", "--drafter", "none", "--heads", "h"],
            "for the drafter medusa or eagle or dflash, not none",
        ),
        (["bench", "--target", "m", "--drafters", "medusa"], "the drafter medusa needs --heads"),
        (["bench", "--target", "m", "--drafters", "none,eagle"], "the drafter eagle needs --heads SOURCE"),
        (["generate", "x", "--target", "m", "--drafter", "eagle"], "the drafter eagle needs --heads SOURCE"),
        (
            ["bench", "--drafters", "none", "--heads", "h"],
            "is for the drafter medusa or eagle or dflash, not ",
        ),
        (
            ["tune", "x", "--target", "m", "--drafter", "medusa", "--out", "o"],
            "the drafter medusa needs --heads",
        ),
    ],
)
def test_options_that_exclude_or_need_one_another(call, words, said):
    status, _, err = call(*words)
    assert status == 2
    assert said in err


def test_a_tuned_file_of_medusa_needs_heads(call, tmp_path):
    jaxspec.Drafting("medusa", tree=jaxspec.chain(2), schedule=Constant()).save(tmp_path / "tuned.json")
    status, _, err = call("generate", "x", "--target", "m", "--tuned", tmp_path / "tuned.json")
    assert status == 2
    assert "the drafter medusa needs --heads" in err


def test_benchmark_of_heads(call, target, heads, tmp_path):
    """Every drafter has the heads that are for it."""
    layer = dataclasses.replace(CONFIG, rope=dataclasses.replace(CONFIG.rope, theta=300.0))
    config = jaxspec.EagleConfig(layer, taps=(1, 1), fc_norm=True)
    eagle = jaxspec.save_heads(
        jaxspec.DraftHeads(config, init_params(config, key=jax.random.key(0))), tmp_path / "eagle"
    )
    (tmp_path / "p.jsonl").write_text('{"prompt": "abcabc"}\n')
    words = ["bench", "--target", target, "--tasks", tmp_path / "p.jsonl", "--repeats", "1", "--max-new-tokens", "8"]
    words += ["--no-chat", "--heads", heads]
    status, out, err = call(*words, "--heads", eagle, "--drafters", "medusa:2,eagle:1")
    assert status == 0, err
    assert "medusa:2" in out
    assert "eagle:1" in out
    status, _, err = call(*words, "--heads", heads)
    assert (status, "other heads for medusa are given" in err) == (2, True)
    status, _, err = call(*words, "--heads", eagle, "--drafters", "medusa:2")
    assert (status, "heads are for eagle, which is not in --drafters" in err) == (2, True)


@pytest.mark.slow
def test_an_eagle_head(call, target, tmp_path):
    """Looked at, tried with both bases of rotary positions, drafted with, measured and exported."""
    layer = dataclasses.replace(CONFIG, rope=dataclasses.replace(CONFIG.rope, theta=300.0))
    config = jaxspec.EagleConfig(layer, taps=(1, 1), fc_norm=True)
    heads = jaxspec.DraftHeads(config, init_params(config, key=jax.random.key(0)))
    place = jaxspec.save_heads(heads, tmp_path / "eagle")
    status, out, _ = call("inspect", place, "--target", target, "--json", "--prompt", "abc")
    found = json.loads(out)
    assert (found["heads"]["version"], found["heads"]["taps"], found["heads"]["rope_theta"]) == (3, "1, 1", 300.0)
    assert found["heads"]["exported_to"] == "speculators", "SGLang would read other layers"
    for key in ("acceptance_by_position", "acceptance_with_rope_theta_10000"):
        assert len(found["probe"][key]) == 5
    assert "rope theta" in call("inspect", place)[1]
    words = ["--target", target, "--heads", place, "--no-chat", "--max-new-tokens", "8"]
    drafting = ["--drafter", "eagle", "--tree", "2x1", "--drafter-option", "taps=1,1"]
    assert call("generate", "abc", *words, *drafting)[0] == 0
    (tmp_path / "p.jsonl").write_text('{"prompt": "abcabc"}\n')
    words = [*words, "--tasks", tmp_path / "p.jsonl", "--repeats", "1"]
    status, out, _ = call("bench", *words, "--drafters", "eagle:2")
    assert status == 0
    assert "eagle:2" in out
    assert call("export", place, "--target", target, "--out", tmp_path / "out")[0] == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["fc_norm"] is True


@pytest.mark.slow
def test_a_dspark_head(call, target, tmp_path):
    """Looked at, tried, measured and exported; the layout of DFlash has no place for it."""
    layer = dataclasses.replace(CONFIG, qk_norm=True)
    config = jaxspec.DFlashConfig(layer, 4, 0, taps=(1, 1), markov="vanilla", markov_rank=8, confidence=True)
    place = jaxspec.save_heads(
        jaxspec.DraftHeads(config, init_params(config, key=jax.random.key(0))), tmp_path / "dspark"
    )
    status, out, err = call("inspect", place, "--target", target, "--json", "--prompt", "abc")
    assert status == 0, err
    found = json.loads(out)
    assert (found["heads"]["block_size"], found["heads"]["markov"], found["heads"]["taps"]) == (4, "vanilla", "1, 1")
    assert found["heads"]["exported_to"] == "dflash-speculators"
    assert len(found["probe"]["acceptance_by_position"]) == 3
    (tmp_path / "p.jsonl").write_text('{"prompt": "abcabc"}\n')
    words = ["--target", target, "--heads", place, "--no-chat", "--max-new-tokens", "8", "--repeats", "1"]
    status, out, err = call("bench", *words, "--tasks", tmp_path / "p.jsonl", "--drafters", "dflash:2x1")
    assert status == 0, err
    assert "dflash:2x1" in out
    status, _, err = call("export", place, "--layout", "dflash", "--out", tmp_path / "out")
    assert (status, "cannot hold the Markov head and the confidence head of DSpark" in err) == (1, True)
    assert call("export", place, "--out", tmp_path / "out")[0] == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["speculators_model_type"] == "dspark"


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle", "dflash", "pard"])
def test_drafters_by_token_are_tuned_measured_and_their_acceptance_computed(drafter, call, target, tmp_path):
    if drafter == "pard":
        place = write_bytes(tmp_path / "pard", CONFIG, random_params(CONFIG, 4))
        settings = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(settings | {"pard_token": 261}))
    elif drafter == "eagle":
        config = jaxspec.EagleConfig(CONFIG, taps=(1, 1), fc_norm=True)
        place = jaxspec.save_heads(
            jaxspec.DraftHeads(config, init_params(config, key=jax.random.key(0))), tmp_path / "h"
        )
    else:
        blocks = jaxspec.DFlashConfig(CONFIG, 6, 0, taps=(1, 1))
        place = jaxspec.save_heads(
            jaxspec.DraftHeads(blocks, init_params(blocks, key=jax.random.key(0))), tmp_path / "h"
        )
    words = ["--target", target, "--draft-model" if drafter == "pard" else "--heads", place, "--no-chat"]
    file, named = tmp_path / "tuned.json", [*words, "--drafter", drafter]
    status, out, err = call("tune", "abc", *named, "--draft-length", "4", "--max-new-tokens", "96", "--out", file)
    assert status == 0, err
    assert json.loads(file.read_text())["drafter"] == drafter
    (tmp_path / "p.jsonl").write_text('{"prompt": "abcabc"}\n')
    asked = ["--tasks", tmp_path / "p.jsonl", "--max-new-tokens", "8", "--repeats", "1"]
    status, out, err = call("bench", *words, *asked, "--drafters", f"{drafter}:2x1", "--tuned", file)
    assert status == 0, err
    assert f"{drafter}:2x1" in out
    options = ["--prompt", "abc", "--prompt", "de", "--max-new-tokens", "6", "--draws", "2"]
    status, out, err = call("acceptance", *named, *options, "--json", tmp_path / "a.json")
    assert status == 0, err
    (run,) = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert {figure["token"] for figure in run["figures"]} == set(range(1, 6))
    assert "token" in out
    assert jaxspec.best_tree(run["by_rank"]["coupled"], 8).shape.nodes == 8


def test_an_earlier_folder_stays_until_the_new_one_is_whole(tmp_path):
    folder = tmp_path / "heads"

    def write(text):
        with replace_folder(folder) as part:
            part.mkdir()
            (part / text).write_text(text)
            if text == "broken":
                raise OSError("full")

    def held():
        return [file.name for file in folder.iterdir()]

    write("first")
    with pytest.raises(OSError, match="full"):
        write("broken")
    assert held() == ["first"]
    write("second")
    assert held() == ["second"]
    assert list(tmp_path.iterdir()) == [folder]
    folder.rename(tmp_path / ".heads.old")  # as a kill between the two renames leaves it
    with pytest.raises(OSError, match="full"):
        write("broken")
    assert held() == ["second"]
