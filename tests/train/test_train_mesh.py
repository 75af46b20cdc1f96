"""Tests that one device and eight give the same losses and the same order of the data."""

import json
import subprocess
import sys

import numpy as np
import pytest

import jaxspec
from helpers.compiling import simulated
from helpers.paths import TESTS

pytestmark = pytest.mark.mesh

KINDS = {
    "medusa": jaxspec.MedusaSettings(heads=3, projection="own"),
    "medusa2": jaxspec.MedusaSettings(heads=2, medusa2=True, medusa2_warmup=1, cache_features=False),
    "eagle1": jaxspec.Eagle1Settings(),
    "eagle3": jaxspec.Eagle3Settings(depth=2, draft_vocab=32),
    "dflash": jaxspec.DFlashSettings(block=3, layers=1, anchors=8),
    "jetspec": jaxspec.JetSpecSettings(block=3, layers=1, anchors=8),
    "dspark": jaxspec.DSparkSettings(block=2, layers=1, anchors=8, markov_rank=4),
    "pard": jaxspec.PardSettings(depth=3, start="draft"),
}
MESHES = ("data=8", "data=4,model=2", "data=2,model=4")

RUNS = """
import dataclasses, json, pathlib, sys
import jaxspec
sys.path.insert(0, sys.argv[1])
from helpers import trainees
from jaxspec.train import placement
from train.test_train_mesh import KINDS
placement.MIN_SPLIT_ELEMENTS = 64

folder, kind = pathlib.Path(sys.argv[2]), sys.argv[3]
of = KINDS[kind]
target = trainees.target(num_kv_heads=4)
if of.trains_model:
    jaxspec.save(target, folder / "draft")
    of = dataclasses.replace(of, start=str(folder / "draft"))
prompts, found = trainees.write_prompts(folder / "prompts.jsonl"), []
for number, mesh in enumerate(sys.argv[4:]):
    changes = dict(mesh=mesh, batch=16, accumulate=2, steps=6, log_every=1, row_tokens=40)
    trained = trainees.train(target, [prompts], folder / str(number), data=folder / "data", of=of, **changes)
    about = [json.loads(path.read_text()) for path in sorted((folder / str(number)).glob("checkpoints/*/about.json"))]
    found.append({"log": trained.log, "order": [one["order"] for one in about], "sha256": about[-1]["sha256"]})
print(json.dumps(found))
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_eight_devices_give_the_losses_of_one(tmp_path, kind):
    """On three meshes, with the same order of rows; the same mesh gives the same bits again."""
    words = [sys.executable, "-c", RUNS, str(TESTS), str(tmp_path), kind, "data=1", *MESHES, MESHES[1]]
    done = subprocess.run(words, env=simulated(8), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    one, *others = json.loads(done.stdout.splitlines()[-1])
    assert others[1]["sha256"] == others[3]["sha256"]
    for other in others:
        assert one["order"] == other["order"]
        losses = [[record["loss"] for record in run["log"] if "loss" in record] for run in (one, other)]
        assert len(losses[0]) == 6
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        held = [run["log"][-1]["held_out"]["accepted_length"] for run in (one, other)]
        assert held[0] == pytest.approx(held[1], rel=1e-3)


STEPS = """
import functools, json, sys
import jax, jax.numpy as jnp, numpy as np
sys.path.insert(0, sys.argv[1])
import jaxspec
from helpers import trainees
from jaxspec.train import losses, placement
from jaxspec.train.batch import Batch
from jaxspec.train.step import Trainable, compute_features, init_state, train_step

placement.MIN_SPLIT_ELEMENTS = 64
target, rng = trainees.target(num_kv_heads=4), np.random.default_rng(0)
tokens = rng.integers(0, 61, (8, 12)).astype(np.int32)
rows = tokens, np.ones_like(tokens), np.ones(tokens.shape, bool)
found = []
for mesh, elements in (("data=1", 2**29), ("data=4,model=2", 2**29), ("data=4,model=2", 0)):
    placement.MAX_WHOLE_ELEMENTS = elements
    settings = jaxspec.MedusaSettings(heads=2, inputs="hidden", loss="kl", projection="own", mesh=mesh, warmup=0)
    here, trainee = placement.Placement.of(settings), settings.trainee(target)
    placed = here.target(jaxspec.shard(target, jaxspec.make_mesh(model=2)))  # wherever the target is
    read = jax.jit(functools.partial(compute_features, placed.lm, placement=here))
    features = read(placed.params, *here.put(rows[:2], here.rows))
    batch = here.put(Batch(*(a[None] for a in (*rows, features))), here.parts)
    frozen = losses.freeze(trainee, placed.lm, placed.params)
    frozen = here.put(frozen, here.whole)
    state = init_state(settings, trainee, Trainable(trainee.init_params(target, None)))
    state = jax.tree.map(jnp.copy, here.put(state, here.split(state)))
    step = jax.jit(functools.partial(train_step, settings, trainee, placed.lm, placement=here), donate_argnums=1)
    values = []
    for _ in range(2):
        state, report = step(frozen, state, batch)
        values.append(float(report.loss))
    shares = [leaf.sharding.shard_shape(leaf.shape) != leaf.shape for leaf in jax.tree.leaves(state.opt)]
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params))
    shapes = [placement.answer_mesh(target.lm, jax.devices(), share * weights) for share in (2, 1)]
    found.append({"answers": [list(mesh.shape.values()) for mesh in shapes], "losses": values,
                  "features": np.asarray(features).tolist(), "split": sum(shares)})
print(json.dumps(found))
"""


def test_a_step_on_eight_devices_is_the_step_on_one():
    """Features and losses of a mesh with both axes, moments that stay split, and gradients that XLA adds up."""
    words = [sys.executable, "-c", STEPS, str(TESTS)]
    done = subprocess.run(words, env=simulated(8), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    one, *others = json.loads(done.stdout.splitlines()[-1])
    assert len(others) == 2
    for eight in others:
        assert one["losses"] == pytest.approx(eight["losses"], rel=1e-5)
        np.testing.assert_allclose(one["features"], eight["features"], atol=1e-5)
        assert (one["split"], eight["split"] > 4) == (0, True)
        assert eight["answers"] == [[8, 1], [4, 2]]


CHECKPOINTS = """
import json, pathlib, sys
import jax, jax.numpy as jnp
sys.path.insert(0, sys.argv[1])
import jaxspec
from helpers.damage import damaged
from train.test_training_checkpoints import state
from jaxspec.train import placement
from jaxspec.train.checkpoints import Checkpoints, DamagedCheckpoint, TrainCheckpoint
from jaxspec.train.files import fingerprint

placement.MIN_SPLIT_ELEMENTS = 4
folder = pathlib.Path(sys.argv[2])
store, given = Checkpoints(folder), state(3)
given = given._replace(params=given.params._replace(heads={"weight": jnp.arange(96.0).reshape(3, 32)}))
places = [placement.Placement(jaxspec.make_mesh(*shape)) for shape in ((4, 2), (8, 1), (2, 2), (1, 1))]
store.save(TrainCheckpoint(places[0].put(given, places[0].split(given)), {"at": 3}, None, places[0].devices))
found = {"sha256": [fingerprint(given)], "split": [], "refused": 0}
for place in places:
    like = place.describe(given)
    loaded = store.load(3, like)
    assert (loaded.order, loaded.devices) == ({"at": 3}, places[0].devices)
    pairs = list(zip(jax.tree.leaves(loaded.state), jax.tree.leaves(like)))
    assert all(leaf.sharding == wanted.sharding for leaf, wanted in pairs)
    found["split"].append(sum(not leaf.sharding.is_fully_replicated for leaf, _ in pairs))
    found["sha256"].append(fingerprint(loaded.state))
for what in damaged(folder / "step-00000003", 12, seed=0):
    try:
        store.load(3, places[1].describe(given))
    except DamagedCheckpoint:
        found["refused"] += 1
print(json.dumps(found))
"""


def test_a_checkpoint_of_split_arrays_is_read_on_other_meshes(tmp_path):
    """With the same bits and with the shardings of the other mesh; damage is found as for whole arrays."""
    words = [sys.executable, "-c", CHECKPOINTS, str(TESTS), str(tmp_path)]
    done = subprocess.run(words, env=simulated(8), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(set(found["sha256"])) == 1
    assert (found["split"], found["refused"]) == ([1, 1, 1, 0], 12)


ELSEWHERE = """
import json, pathlib, shutil, sys
import jaxspec
sys.path.insert(0, sys.argv[1])
from helpers import trainees
from jaxspec.train import placement
from jaxspec.train.log import Watch
from train.test_train_mesh import KINDS
placement.MIN_SPLIT_ELEMENTS = 64

folder, target = pathlib.Path(sys.argv[2]), trainees.target(num_kv_heads=4)
prompts = trainees.write_prompts(folder / "prompts.jsonl")


def run(name, mesh, stop=99):
    said = []

    def step(now, *_):
        if now == stop:
            raise KeyboardInterrupt

    changes = dict(mesh=mesh, batch=16, accumulate=2, steps=6, log_every=1, save_every=2, row_tokens=40)
    watch = Watch(step=step, say=said.append)
    trained = trainees.train(
        target, [prompts], folder / name, watch, data=folder / "data", of=KINDS["eagle3"], **changes
    )
    about = json.loads(max((folder / name).glob("checkpoints/*/about.json")).read_text())
    losses = [record["loss"] for record in trained.log if "loss" in record]
    return {"losses": losses, "order": about["order"], "sha256": about["sha256"], "said": said}


found = [run("whole", sys.argv[3])]
try:
    run("part", sys.argv[3], stop=4)
except KeyboardInterrupt:
    pass
for number, mesh in enumerate(sys.argv[3:]):
    shutil.copytree(folder / "part", folder / str(number))
    found.append(run(str(number), mesh))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(tmp_path):
    """On the same mesh with the same bits; on others with the same order of rows and losses that are rounded."""
    words = [sys.executable, "-c", ELSEWHERE, str(TESTS), str(tmp_path), "data=4,model=2", "data=8", "data=1"]
    done = subprocess.run(words, env=simulated(8), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    whole, same, *others = json.loads(done.stdout.splitlines()[-1])
    assert (same["sha256"], same["losses"]) == (whole["sha256"], whole["losses"])
    assert "resumes after step 2" in same["said"]
    assert not any("round differently" in line for line in same["said"])
    for other in others:
        assert any("data=4, model=2; sums on " in line for line in other["said"])
        assert other["order"] == whole["order"]
        assert other["losses"] == pytest.approx(whole["losses"], rel=1e-5)


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
