"""Tests the command line of training: its help for each kind, and what is refused before a target is loaded."""

import dataclasses
import json
import os
import re

import jax
import pytest

import jaxspec
from helpers import trainees
from helpers.narrow import instance
from jaxspec.cli import main, show
from jaxspec.core.descriptions import describe_fields
from jaxspec.errors import InvalidConfig
from jaxspec.heads.medusa_config import HeadsConfig
from jaxspec.heads.network import init_params
from jaxspec.registry import TRAINEES, find
from jaxspec.train.medusa import MedusaTrainee
from jaxspec.train.monitor import STEP_LINES, Monitor
from jaxspec.train.settings import TrainSettings, own_fields

KINDS = {name: find("kind of heads", name) for name in TRAINEES}
FIELDS = sorted({field.name for kind in KINDS.values() for field in own_fields(kind)})
OF_KINDS = [(name, field) for name in KINDS for field in FIELDS]


def help_of(capsys, *words: str) -> str:
    assert main(["train", *words, "--help"]) == 0
    return capsys.readouterr().out


def option(text: str, field: str) -> str:
    """The help of an option, in one line; empty if it is not listed."""
    found = re.search(rf"^  --{field.replace('_', '-')}[ ,\n].*\n(?:   .*\n)*", text, re.MULTILINE)
    return "" if found is None else " ".join(found[0].replace("-\n", "-").split())


@pytest.fixture(scope="module")
def pages():
    return {}


def page(pages, capsys, kind: str) -> str:
    if kind not in pages:
        pages[kind] = help_of(capsys, kind)
    return pages[kind]


@pytest.mark.quick
@pytest.mark.parametrize(("kind", "field"), OF_KINDS)
def test_the_help_of_a_kind_lists_its_own_settings_with_its_own_defaults(pages, capsys, kind, field):
    own = {each.name: each for each in own_fields(KINDS[kind])}
    shown = option(page(pages, capsys, kind), field)
    if field not in own:
        assert not shown
        return
    default = own[field].default
    written = {True: "yes", False: "no", "": "empty"}.get(default, default) if default not in (0, 1) else default
    written = {True: "yes", False: "no"}[default] if isinstance(default, bool) else written
    assert shown.endswith(f"(default: {written})")
    assert shown.count("(default:") == 1
    assert " ".join(describe_fields(KINDS[kind])[field].split()[:4]) in shown


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_the_help_of_a_kind_begins_with_it_and_has_its_usual_values(pages, capsys, kind):
    shown = page(pages, capsys, kind)
    assert shown.startswith(f"usage: jaxspec train {kind} --prompts FILE [FILE ...] --out DIR [options]\n")
    assert option(shown, "learning_rate").endswith(f"(default: {KINDS[kind].learning_rate})")
    assert option(shown, "loss").endswith(f"(default: {KINDS[kind].loss})")
    assert "(default: )" not in shown
    others = [name for name in KINDS if f"settings of {name}:" in shown]
    assert others == [kind]


@pytest.mark.quick
def test_the_help_without_a_kind_lists_what_all_kinds_share(capsys):
    shown = help_of(capsys)
    assert shown.startswith("usage: jaxspec train KIND --prompts FILE [FILE ...] --out DIR [options]\n")
    assert all(option(shown, field.name) for field in dataclasses.fields(TrainSettings))
    assert not any(option(shown, field) for field in FIELDS)
    assert "settings of" not in shown.replace("lists the settings of a kind", "")
    assert option(shown, "learning_rate").endswith("(default: depends on the kind)")
    assert "'jaxspec train KIND --help' lists the settings of a kind as well: medusa, eagle1" in shown


@pytest.fixture
def unloadable(monkeypatch):
    """Weights that must not be read."""

    def load(*_, **__):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(show, "load_model", load)


@pytest.mark.usefixtures("unloadable")
def test_what_needs_no_target_is_refused_before_one_is_loaded(tmp_path, capsys):
    prompts = trainees.write_prompts(tmp_path / "prompts.jsonl", 4)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"colour": "hi"}\n')
    (tmp_path / "file").write_text("")
    more = jax.device_count() + 1
    cases: list[tuple[str, list, str]] = [
        ("missing.jsonl", [], "missing.jsonl"),
        (str(tmp_path), [], "is a directory, expected a file"),
        ("empty.jsonl", [], "empty.jsonl"),
        ("rows.jsonl", [], "rows.jsonl"),
        (prompts, ["--bad-rows", "refuse", "--split", "word"], "split"),
        (prompts, ["--dtype", "file"], "--dtype file: the blocks of a GGUF file have no gradients"),
        (prompts, ["--out", tmp_path / "file"], "--out"),
        (prompts, ["--data", tmp_path / "file"], "--data"),
        (prompts, ["--mesh", f"data={more}", "--batch", more], f"mesh 'data={more}' needs {more} devices, but JAX has"),
        (prompts, ["--mesh", "8"], "mesh must be such as 'data=8' or 'data=4,model=2', got '8'"),
        (prompts, ["--start", tmp_path / "nothing"], "nothing"),
        (prompts, ["--start", tmp_path / "file"], "file"),
    ]
    for file, words, said in cases:
        path = tmp_path / file if file.endswith(".jsonl") and not os.path.isabs(file) else file
        command = ["train", "medusa", "--target", "t", "--prompts", str(path), "--out", str(tmp_path / "run")]
        assert main([*command, *map(str, words)]) in (1, 2), said
        error = capsys.readouterr().err
        assert said in error
        assert error.startswith("jaxspec: error: ")
        assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("inputs", "given"), [("recurrent", "hidden"), ("hidden", "recurrent"), ("hidden", "hidden")])
def test_heads_to_start_from_name_the_size_they_have(tmp_path, inputs, given):
    """A size that is that of the heads may be written, too."""
    target = trainees.target()
    config = HeadsConfig(trainees.LM.config.hidden_size, target.lm.vocab, 2, inputs=inputs)
    start = jaxspec.save_heads(jaxspec.DraftHeads(config, init_params(config)), tmp_path / "heads")
    kind = jaxspec.MedusaSettings(inputs=given)
    heads = jaxspec.load_heads(start)
    if inputs == given:
        assert instance(MedusaTrainee, kind.trainee(target, heads)).config == config
        return
    with pytest.raises(
        InvalidConfig, match=f"inputs .--inputs. is '{given}', but the heads to start from have '{inputs}'"
    ):
        kind.trainee(target, heads)


@pytest.mark.quick
@pytest.mark.parametrize("log_every", [1, 2, 5, 10, 50])
@pytest.mark.parametrize("records", [1, 3, 6, 19, 20, 21, 40, 41, 97, 160])
def test_lines_of_training_are_evenly_spaced(tmp_path, capsys, log_every, records):
    """Every line of the log if they are few, and otherwise every second, third, ... and the last."""
    steps = records * log_every
    record = {"loss": 1.0, "top1": [0.5], "top5": [0.6], "accepted": [0.5], "accepted_length": 1.5, "tokens_per_s": 1.0}
    shown = Monitor(tmp_path, log_every=log_every)
    for step in range(log_every, steps + 1, log_every):
        shown.watch.step(step, steps, record)
    lines = [int(line.split()[1]) for line in capsys.readouterr().err.splitlines()]
    stride = -(-records // STEP_LINES) * log_every
    assert lines == sorted({*range(stride, steps + 1, stride), steps})
    assert len(lines) <= STEP_LINES + 1


def test_a_run_has_the_same_fingerprint_in_any_folder(tmp_path, capsys, monkeypatch):
    """Two copies print the same, by absolute and by relative names; and no file of a run names a place."""
    target = jaxspec.save(trainees.target(), tmp_path / "target")
    prompts = trainees.write_prompts(tmp_path / "prompts.jsonl")
    words = ["train", "medusa", "--target", str(target), "--prompts", prompts, "--fit-prompts", "0"]
    for name, value in (trainees.TINY | trainees.SIZES | {"steps": 3}).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    printed = []
    for folder in (tmp_path / "one", tmp_path / "deeper" / "other"):
        assert main([*words, "--out", str(folder)]) == 0
        capsys.readouterr()
        assert main(["fingerprint", str(folder)]) == 0
        printed.append(capsys.readouterr().out)
    monkeypatch.chdir(tmp_path)
    assert main(["fingerprint", "one"]) == 0
    printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2]
    assert [line.split("  ")[1] for line in printed[0].splitlines()] == [
        "log.jsonl", "checkpoints/step-00000003", "heads",
    ]  # fmt: skip
    files = [path for path in (tmp_path / "one").rglob("*") if path.suffix in (".json", ".jsonl", ".md", ".txt")]
    texts = {path: path.read_text() for path in files if "state" not in path.parts}
    assert len(texts) >= 8
    assert not [path for path, text in texts.items() if str(tmp_path) in text]
    assert main(["fingerprint", "one/heads"]) == 0
    assert capsys.readouterr().out == printed[0].splitlines(keepends=True)[-1]


def test_a_finished_run_names_the_way_to_train_on(tmp_path, capsys):
    target = jaxspec.save(trainees.target(), tmp_path / "target")
    prompts = trainees.write_prompts(tmp_path / "prompts.jsonl", 8)
    out = tmp_path / "run"
    (out / "heads").mkdir(parents=True)
    words = ["train", "medusa", "--target", str(target), "--prompts", prompts, "--held-out", "0.2", "--out", str(out)]
    (out / "heads").rmdir()
    assert main([*words, "--answer-tokens", "4", "--steps", "1", "--fit-prompts", "0", "--row-tokens", "64"]) == 0
    capsys.readouterr()
    assert main([*words, "--answer-tokens", "4", "--steps", "2", "--row-tokens", "64"]) == 1
    error = capsys.readouterr().err
    assert "holds a run made with --steps 1, now 2: use the same values, or another folder (--out)" in error
    assert f"to continue the training of this result there, add --start {out / 'heads'}" in error
    assert json.loads((out / "settings.json").read_text())["steps"] == 1
