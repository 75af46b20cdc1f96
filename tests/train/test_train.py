"""Tests a training run: it learns, leaves the target unchanged, resumes bit for bit, and reports errors."""

import json
import os
import pathlib
import resource
import shutil
import signal
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers import trainees
from helpers.narrow import not_none
from helpers.tiers import with_slow
from helpers.trainees import train
from jaxspec.checkpoints import orbax
from jaxspec.cli import main
from jaxspec.errors import MissingPackage, StorageError, TrainingError
from jaxspec.heads.medusa_config import HeadsConfig
from jaxspec.heads.network import init_params
from jaxspec.train import dataset, evaluate, monitor
from jaxspec.train import run as running
from jaxspec.train.checkpoints import Checkpoints, TrainCheckpoint
from jaxspec.train.features import CachedFeatures
from jaxspec.train.files import fingerprint
from jaxspec.train.log import LOG_FILE, Watch
from jaxspec.train.medusa import MedusaTrainee
from jaxspec.train.step import Trainable, init_state


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return trainees.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="module")
def run(prompts, tmp_path_factory):
    """One whole run, its folder, and what became of the target."""
    target, folder = trainees.target(), tmp_path_factory.mktemp("run")
    before = fingerprint(target.params)
    lines = []
    trained = train(target, [prompts], folder, Watch(say=lines.append), steps=60)
    return trained, folder, before, fingerprint(target.params), lines


def test_it_learns_and_the_target_stays_as_it_is(run):
    trained, folder, before, after, lines = run
    assert before == after
    records = [json.loads(line) for line in (folder / LOG_FILE).read_text().splitlines()]
    assert records == trained.log
    first, last = (next(r for r in order if "loss" in r) for order in (records, records[::-1]))
    assert sum(last["loss_by_token"]) < sum(first["loss_by_token"])
    held = [r["held_out"] for r in records if "held_out" in r]
    assert held[-1]["accepted_length"] > 1.2
    assert trained.skipped == 0
    assert any("tokens to train on" in line for line in lines)


@pytest.mark.slow
def test_heads_draft_what_they_learnt(run):
    trained = run[0]
    target = trained.target
    plain = jaxspec.generate(target, trained.data.prompts[:4], drafter="none", max_new_tokens=16)
    drafted = jaxspec.generate(
        target, trained.data.prompts[:4], drafter="medusa", heads=trained.heads, max_new_tokens=16, width_matched=False
    )
    assert [row.tokens for row in drafted] == [row.tokens for row in plain]
    assert drafted.stats.tokens_per_round > 1.2


def test_the_command_fits_a_tree_and_writes_what_it_measured(run, prompts, tmp_path, monkeypatch, capsys):
    """On the whole run's answers, in a relative folder; what it writes is loaded, drafted with, and fingerprinted."""
    monkeypatch.chdir(tmp_path)
    deciding, measure = [], evaluate.measure_trees
    monkeypatch.setattr(evaluate, "TREE_SIZES", (1, 3))
    monkeypatch.setattr(evaluate, "measure_trees", lambda *a, **o: deciding.append(a[0]) or measure(*a, **o))
    target = jaxspec.save(trainees.target(), tmp_path / "target")
    words = ["train", "medusa", "--target", str(target), "--prompts", prompts, "--out", "run"]
    words += ["--data", os.path.relpath(run[1]), "--fit-prompts", "1", "--fit-dtype", "bfloat16"]
    for name, value in (trainees.TINY | trainees.SIZES | {"steps": 60}).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "Medusa heads for target" in out
    assert "target in bfloat16, greedily" in out
    assert "bfloat16" in {str(leaf.dtype) for leaf in jax.tree.leaves(deciding[0].params)}
    assert "step 60 of 60" in err
    folder = tmp_path / "run" / "heads"
    heads = jaxspec.load_heads(folder)
    assert fingerprint(heads.params) == fingerprint(run[0].heads.params)
    assert not_none(heads.tree).shape.nodes == 3
    measured = json.loads((folder / "evaluation.json").read_text())
    assert [tree["nodes"] for tree in measured["trees"]] == [1, 3]
    assert measured["trees"][0]["tokens_per_round"] == 1 < measured["trees"][1]["tokens_per_round"]
    held = [record["held_out"] for record in run[0].log if "held_out" in record]
    best = max(held, key=lambda one: one["accepted_length"])
    assert measured["top1"] == pytest.approx(best["top1"], abs=1e-6)
    assert main(["fingerprint", "run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("  log.jsonl")
    assert lines[-1] == f"{fingerprint(heads.params)}  heads"
    assert main(["fingerprint", str(target)]) == 1
    assert "holds neither a training run nor heads" in capsys.readouterr().err


def test_a_target_that_is_trained_decides_as_it_was_trained(tmp_path, capsys):
    words = ["train", "medusa", "--prompts", "prompts.jsonl", "--out", str(tmp_path / "run"), "--medusa2"]
    assert main([*words, "--no-cache-features", "--fit-dtype", "bfloat16"]) == 2
    assert "--fit-dtype bfloat16: the target is trained in --dtype float32" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_nothing_of_the_target_has_a_gradient_or_a_moment(run):
    """Every array of the optimizer's state is a scalar or shaped like a head's."""
    trained = run[0]
    heads = trained.heads
    state = init_state(jaxspec.MedusaSettings(), MedusaTrainee.of(heads.config), Trainable(heads.params))
    shapes = set(heads.config.param_shapes().values())
    moments = [leaf.shape for leaf in jax.tree.leaves(state.opt)]
    assert {shape for shape in moments if shape} <= shapes
    total = sum(int(np.prod(shape)) for shape in moments if shape)
    assert total == 2 * sum(int(np.prod(shape)) for shape in heads.config.param_shapes().values())


@pytest.mark.parametrize(("stop", "after"), with_slow([(3, None), (9, 6)], (9,)))
def test_a_run_that_was_ended_goes_on_to_the_same_bits(run, prompts, tmp_path, stop, after):
    """Ended by an exception before its checkpoint: heads and log are those of a run in one go."""

    class Ended(Exception):
        pass

    def end(step, steps, record):
        if step >= stop:
            raise Ended

    whole, folder = run[:2]
    target = trainees.target()
    with pytest.raises(Ended):
        train(target, [prompts], tmp_path, Watch(step=end), steps=60)
    lines = []
    parts = train(target, [prompts], tmp_path, Watch(say=lines.append), steps=60)
    assert [line for line in lines if "resumes" in line] == ([f"resumes after step {after}"] if after else [])
    assert fingerprint(parts.heads.params) == fingerprint(whole.heads.params)
    assert (tmp_path / LOG_FILE).read_bytes() == (folder / LOG_FILE).read_bytes()
    again = train(target, [prompts], tmp_path, steps=60)  # nothing is left to do
    assert fingerprint(again.heads.params) == fingerprint(whole.heads.params)


@pytest.mark.slow
def test_runs_may_share_answers_and_features(run, prompts, tmp_path):
    """Another loss on what is there: nothing is answered or read again."""
    before = {path: path.stat().st_mtime_ns for name in ("answers", "features") for path in (run[1] / name).iterdir()}
    changes = {"steps": 3, "loss": "lk-lambda", "draft_vocab": 20, "head_weights": "acceptance"}
    trained = train(trainees.target(), [prompts], tmp_path, data=run[1], **changes)
    assert trained.heads.config.rows == 20
    assert {path.name for path in tmp_path.iterdir()} >= {"settings.json", "log.jsonl", "checkpoints"}
    assert not (tmp_path / "answers").exists()
    assert before == {path: path.stat().st_mtime_ns for path in before}


class Reached(Exception):
    """A place was come to, and nothing after it is of interest."""


def reach(*_, **__):
    raise Reached


def test_a_folder_is_bound_by_what_was_made_with_a_setting(run, prompts, tmp_path, monkeypatch):
    """A run by what decides what is learnt, features by what divides the texts, answers by what asks for them."""

    def refused(words, folder, shelf=None, **changes: Any):
        changes = {"steps": 60} | changes
        with pytest.raises(TrainingError, match=words) as error:
            train(trainees.target(), [prompts], folder, data=shelf, **changes)
        assert "\n" not in str(error.value)

    whole = run[1]
    refused(
        r"holds a run made with learning_rate=0.003, now 1.0: use the same values, or another folder \(--out\); "
        rf"to keep the answers and features, add --data {whole}",
        whole,
        learning_rate=1.0,
    )
    refused(
        r"a run made with held_out=0.2, now 0.5: .*; to keep the answers, copy .*/answers into", whole, held_out=0.5
    )
    refused(
        r"a run made with answer_tokens=24, now 12: use the same values, or another folder \(--out\)$",
        whole,
        answer_tokens=12,
    )
    other = tmp_path / "other"
    refused(r"answers holds answers made with answer_tokens=24, now 12: use the same", other, whole, answer_tokens=12)
    refused(
        r"features holds features made with held_out=0.2, now 0.5: remove the folders features and held-out",
        other,
        whole,
        held_out=0.5,
    )
    more = trainees.write_prompts(tmp_path / "more.jsonl", 25)
    with pytest.raises(TrainingError, match="holds answers made with other prompts: use the same values"):
        train(trainees.target(), more, other, data=whole)
    assert not (other / "checkpoints").exists()

    # Greedy answers depend on no seed, and nothing on how often it is saved: what is there is taken.
    again = train(trainees.target(), prompts, whole, steps=60, save_every=7, bad_rows="refuse")
    assert fingerprint(again.heads.params) == fingerprint(run[0].heads.params)
    monkeypatch.setattr(running, "init_state", reach)
    with pytest.raises(Reached):
        train(trainees.target(), prompts, other, data=whole, seed=7)


def test_too_few_prompts_are_noticed_before_any_is_answered(prompts, tmp_path, monkeypatch):
    """And the folder is then free for the settings that the message asks for."""
    monkeypatch.setattr(dataset, "answer_prompts", reach)
    with pytest.raises(TrainingError, match=r"24 usable prompts are too few .* 0.03; use at least 34 or set held_out"):
        train(trainees.target(), prompts, tmp_path, held_out=0.03)
    with pytest.raises(Reached):
        train(trainees.target(), prompts, tmp_path, held_out=0.042)


def test_answers_that_were_never_given_bind_nothing(prompts, tmp_path, monkeypatch):
    """A run that ended before the first answer: its folder is free for others."""
    answers = tmp_path / "answers"
    answers.mkdir()
    (answers / "answers.json").write_text('{"answer_tokens": 5}')
    (answers / "answers.jsonl").write_text('{"texts": 1, "max_new_tokens": 5}\n')
    monkeypatch.setattr("jaxspec.train.self_distill.generate", reach)
    with pytest.raises(Reached):
        train(trainees.target(), prompts, tmp_path)
    assert [path.name for path in answers.iterdir()] == ["answers.json"]


def test_a_package_that_is_missing_is_named_before_anything_is_made(prompts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(MissingPackage, match="training needs the package grain"):
        train(trainees.target(), prompts, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def keyboard():
    """Ctrl-C as a terminal has it: a process that a shell started in the background ignores it."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def press(times: int, at: int):
    """Presses Ctrl-C while the batch of a step is read."""
    features, calls = CachedFeatures.at, []

    def pressed(self, places):
        calls.append(1)
        for _ in range(times if len(calls) == at else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return features(self, places)

    return pressed


@pytest.mark.usefixtures("keyboard")
@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint_and_the_same_call_goes_on(run, prompts, tmp_path, monkeypatch):
    """Between two checkpoints, and again while that one is saved; then to the bits of a run in one go."""
    whole, folder = run[:2]
    lines, write = [], orbax.write_tree
    shutil.copytree(folder / "answers", tmp_path / "answers")

    def noticed():
        return any(line.startswith("interrupted: this step is finished and saved first") for line in lines)

    def impatient(*args):
        os.kill(os.getpid(), signal.SIGINT)
        write(*args)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(CachedFeatures, "at", press(1, at=5))
        patch.setattr(orbax, "write_tree", lambda place, tree: (impatient if noticed() else write)(place, tree))
        with pytest.raises(KeyboardInterrupt):
            train(trainees.target(), prompts, tmp_path, Watch(say=lines.append), steps=60)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert noticed()
    assert lines[-1] == f"interrupted after step 5, which is saved in {tmp_path / 'checkpoints'}"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000003",
        "step-00000005-interrupted",
    ]
    parts = train(trainees.target(), prompts, tmp_path, Watch(say=lines.append), steps=60)
    assert "resumes after step 5" in lines
    assert fingerprint(parts.heads.params) == fingerprint(whole.heads.params)
    assert (tmp_path / LOG_FILE).read_bytes() == (folder / LOG_FILE).read_bytes()
    assert Checkpoints(tmp_path / "checkpoints").fingerprints() == Checkpoints(folder / "checkpoints").fingerprints()


@pytest.mark.usefixtures("keyboard")
def test_a_second_ctrl_c_ends_a_step_at_once(run, prompts, tmp_path, monkeypatch):
    shutil.copytree(run[1] / "answers", tmp_path / "answers")
    monkeypatch.setattr(CachedFeatures, "at", press(2, at=5))
    with pytest.raises(KeyboardInterrupt):
        train(trainees.target(), prompts, tmp_path, steps=60)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [3]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_command_that_was_interrupted_says_how_to_go_on(prompts, tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "train_heads", interrupted)
    target = jaxspec.save(trainees.target(), tmp_path / "target")
    assert main(["train", "medusa", "--target", str(target), "--prompts", prompts, "--out", "run"]) == 130
    assert (
        "the run so far is kept in run; the same command resumes it\n\njaxspec: interrupted" in capsys.readouterr().err
    )


def test_the_command_needs_texts_that_are_held_out(tmp_path, capsys):
    assert (
        main(["train", "medusa", "--prompts", "prompts.jsonl", "--out", str(tmp_path / "run"), "--held-out", "0"]) == 2
    )
    assert "--held-out 0: the tree and the card need held-out texts" in capsys.readouterr().err


def test_the_plot_is_of_the_whole_log_however_often_the_run_was_ended(run, tmp_path, monkeypatch):
    shutil.copy(run[1] / LOG_FILE, tmp_path / LOG_FILE)
    plotted = []
    monkeypatch.setattr(monitor, "plot_log", lambda records, path: plotted.append(records))
    with monitor.Monitor(tmp_path) as shown:
        shown.watch.step(60, 60, run[0].log[-1])
    with monitor.Monitor(tmp_path):
        pass
    assert plotted == [run[0].log]


@pytest.fixture
def copied(run, tmp_path):
    """The whole run's folder, to be damaged."""
    shutil.copytree(run[1], tmp_path / "copied")
    return tmp_path / "copied"


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_damaged_checkpoint_is_passed_over_and_kept(run, prompts, copied):
    lines = []
    newest = sorted((copied / "checkpoints").glob("step-*"))[-1]
    order = bytearray((newest / "about.json").read_bytes())
    order[order.index(b'"order"') + 3] ^= 1
    (newest / "about.json").write_bytes(order)
    again = train(trainees.target(), prompts, copied, Watch(say=lines.append), steps=60)
    assert any("about.json are not those that were written; it is kept as damaged-" in line for line in lines)
    assert any(line.startswith("resumes after step") for line in lines)
    assert fingerprint(again.heads.params) == fingerprint(run[0].heads.params)
    assert (copied / LOG_FILE).read_bytes() == (run[1] / LOG_FILE).read_bytes()
    assert (newest.with_name(f"damaged-{newest.name}") / "about.json").read_bytes() == bytes(order)


def test_a_checkpoint_that_cannot_be_read_ends_the_run_and_nothing_is_lost(prompts, copied, monkeypatch):
    def fails(*_):
        raise orbax.OrbaxError("Checkpoint path should be absolute")

    before = contents(copied)
    monkeypatch.setattr(orbax, "read_tree", fails)
    with pytest.raises(TrainingError, match=r"cannot be read: Checkpoint path should be absolute; nothing was changed"):
        train(trainees.target(), prompts, copied, steps=60)
    for path in (copied / "checkpoints").glob("step-*/about.json"):
        path.unlink()
        before.pop(path)
    with pytest.raises(
        TrainingError, match=r"about.json is missing, and no checkpoint in .* is intact; nothing was changed"
    ):
        train(trainees.target(), prompts, copied, steps=60)
    assert contents(copied) == before


def test_heads_that_are_not_the_best_ones_are_said_to_be(run, prompts, copied):
    """The best checkpoint is deleted: the newest is taken, and that is said."""
    best = Checkpoints(copied / "checkpoints").about(60)["best"][0]
    assert best < 60
    shutil.rmtree(copied / "checkpoints" / f"step-{best:08d}")
    lines = []
    trained = train(trainees.target(), prompts, copied, Watch(say=lines.append), steps=60)
    assert lines[-1].endswith(
        f"the checkpoint of step {best} is missing. It was the best step; the heads of step 60 are used instead"
    )
    assert fingerprint(trained.heads.params) != fingerprint(run[0].heads.params)


@pytest.mark.slow
def test_medusa_2_trains_the_target_after_its_warm_up(run, prompts, tmp_path):
    """A target of its own comes out, the given one stays; the log judges the heads with the new one's features."""
    given, settings = trainees.target(), {"medusa2": True, "cache_features": False, "steps": 4, "medusa2_warmup": 2}
    settings |= {"log_every": 1, "save_every": 1, "eval_every": 4, "inputs": "hidden", "batch": 2}
    before = fingerprint(given.params)
    trained = train(given, [prompts], tmp_path, data=run[1], **settings)
    assert fingerprint(given.params) == before != fingerprint(trained.target.params)
    like = Trainable(init_params(HeadsConfig(64, given.lm.vocab, 3)), given.params)
    store = Checkpoints(tmp_path / "checkpoints")
    assert store.steps() == [3, 4]
    newest = store.load(4, init_state(trained.settings, trained.trainee, like)).state.params
    assert fingerprint(newest.target) == fingerprint(trained.target.params)
    found = evaluate.rank_tokens(trained.target, trained.heads, trained.data.answered, 64)
    assert found.top1 == pytest.approx(trained.log[-1]["held_out"]["top1"], abs=1e-6)


def test_losses_that_are_not_finite_are_skipped_and_end_the_run(prompts, tmp_path):
    settings = {"learning_rate": 1e38, "max_bad_steps": 2, "clip": 0.0, "warmup": 0}
    with pytest.raises(TrainingError, match="the loss was not finite 2 times in a row"):
        train(trainees.target(), [prompts], tmp_path, **settings)
    for line in (tmp_path / LOG_FILE).read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    """No file may grow past two kilobytes: the cause in one line, and what was saved is whole."""
    config = HeadsConfig(64, 61, 2)
    begun = init_state(jaxspec.MedusaSettings(), MedusaTrainee.of(config), Trainable(init_params(config)))
    store = Checkpoints(tmp_path)
    store.save(TrainCheckpoint(begun, {"next_index": 0}, None))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        with pytest.raises(
            StorageError, match=r"step-00000001 cannot be written: .*; earlier checkpoints are intact"
        ) as error:
            store.save(TrainCheckpoint(begun._replace(step=jnp.int32(1)), {"next_index": 1}, None))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(error.value)
    assert store.steps() == [0]
    found, wrong = store.load_newest(begun)
    assert not wrong
    assert fingerprint(not_none(found).state.params) == fingerprint(begun.params)
    store.save(TrainCheckpoint(begun._replace(step=jnp.int32(1)), {"next_index": 1}, None))
    assert store.steps() == [0, 1]
    assert not list(tmp_path.glob(".part-*"))


def test_an_unwritable_folder_is_a_one_line_error(prompts, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written: Not a directory") as error:
        train(trainees.target(), [prompts], tmp_path / "file" / "run")
    assert "\n" not in str(error.value)
    assert pathlib.Path(tmp_path / "file").read_text() == ""
