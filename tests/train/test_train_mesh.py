"""Tests that one device and eight give the same losses and the same order of the data."""

import json
import subprocess
import sys

import pytest

from helpers.compiling import simulated
from helpers.paths import TESTS

pytestmark = pytest.mark.mesh

PROGRAM = """
import json, pathlib, sys
import jaxspec
sys.path.insert(0, sys.argv[1])
from helpers import trainees

folder, kind = pathlib.Path(sys.argv[2]), sys.argv[3]
of = {
    "medusa": jaxspec.MedusaSettings(heads=3), "eagle3": jaxspec.Eagle3Settings(depth=2),
    "eagle1": jaxspec.Eagle1Settings(),
    "dspark": jaxspec.DSparkSettings(block=2, layers=1, anchors=8, markov_rank=4),
    "pard": jaxspec.PardSettings(depth=3, start=str(folder / "draft")),
}[kind]
prompts = trainees.write_prompts(folder / "prompts.jsonl")
for devices in (1, 8):
    changes = dict(devices=devices, batch=16, accumulate=2, steps=6, log_every=1, row_tokens=40)
    if of.trains_model and devices == 1:
        jaxspec.save(trainees.target(), folder / "draft")
    place, data = folder / str(devices), folder / "data"
    trained = trainees.train(trainees.target(), [prompts], place, data=data, of=of, **changes)
    about = [json.loads(path.read_text()) for path in sorted((folder / str(devices)).glob("checkpoints/*/about.json"))]
    print(json.dumps({"log": trained.log, "order": [one["order"] for one in about]}))
"""


@pytest.mark.parametrize("kind", ["medusa", "eagle1", "eagle3", "dspark", "pard"])
@pytest.mark.slow
def test_one_device_and_eight_agree(tmp_path, kind):
    words = [sys.executable, "-c", PROGRAM, str(TESTS), str(tmp_path), kind]
    done = subprocess.run(words, env=simulated(8), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    one, eight = map(json.loads, done.stdout.splitlines())
    assert one["order"] == eight["order"]
    losses = [[record["loss"] for record in run["log"] if "loss" in record] for run in (one, eight)]
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    held = [run["log"][-1]["held_out"]["accepted_length"] for run in (one, eight)]
    assert held[0] == pytest.approx(held[1], rel=1e-3)


ANSWERS = """
import json, pathlib, sys
import jax
import jaxspec
sys.path.insert(0, sys.argv[1])
from helpers import trainees
from jaxspec.train import evaluate

folder = pathlib.Path(sys.argv[2])
prompts = trainees.write_prompts(folder / "prompts.jsonl", 13)
target, found = trainees.target(), {}
for name, mesh in {"one": None, "model": {"model": 2}, "data": {"data": 2}, "both": {"data": 2, "model": 2}}.items():
    placed = target if mesh is None else jaxspec.shard(target, jaxspec.make_mesh(**mesh))
    changes = dict(steps=3, log_every=1, answer_batch=5)
    if name == "model":  # a finished run is that of the same target, wherever it is placed
        found["one"]["again"] = trainees.train(placed, [prompts], folder / "one", **changes).step
    trained = trainees.train(placed, [prompts], folder / name, **changes)
    lines = (folder / name / "answers" / "answers.jsonl").read_text().splitlines()
    found[name] = {
        "answers": [json.loads(line)["tokens"] for line in lines],
        "losses": [record["loss"] for record in trained.log if "loss" in record],
    }
    if name == "both":
        evaluate.TREE_SIZES = (1, 3)
        ranks = evaluate.rank_tokens(trained.target, trained.heads, trained.data.answered, 64)
        trees = evaluate.measure_trees(trained.target, trained.heads, ranks.acceptance(), trained.data.prompts[:1])
        found[name]["trees"] = [one.tree.shape.nodes for one in trees]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_target_on_a_mesh_answers_there(tmp_path):
    """Self-distillation, features and the fit of the tree take the mesh from the target's own parameters."""
    words = [sys.executable, "-c", ANSWERS, str(TESTS), str(tmp_path)]
    done = subprocess.run(words, env=simulated(4), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("model", "data", "both"):
        assert found[name]["answers"] == found["one"]["answers"]
        assert found[name]["losses"] == pytest.approx(found["one"]["losses"], rel=1e-4)
    assert found["both"]["trees"] == [1, 3]
    assert found["one"]["again"] == 3
