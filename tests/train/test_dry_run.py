"""Tests what a dry run says before a run, against the run's own arrays and programs."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers import defects, toys, trainees
from helpers.narrow import instance
from jaxspec.backend.chips import Chip, without_xla_flags
from jaxspec.cli import main, show
from jaxspec.errors import InvalidConfig
from jaxspec.train import dry_run as planned
from jaxspec.train import placement
from jaxspec.train.head_trainee import HeadTrainee
from jaxspec.train.step import Trainable, init_state

SETTINGS = jaxspec.MedusaSettings(heads=2, inputs="hidden", batch=4, row_tokens=32, draft_vocab=32)


def shapes() -> jaxspec.Model:
    return jaxspec.Model(trainees.LM, planned.shapes_of(trainees.LM), name="tiny")


def test_the_bytes_are_those_of_the_runs_own_arrays():
    found = planned.dry_run(shapes(), SETTINGS)
    target = trainees.target()
    trainee = instance(HeadTrainee, SETTINGS.trainee(target))
    state = init_state(SETTINGS, trainee, Trainable(trainee.init_params(target, np.arange(32))))

    def count(tree):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

    assert found.held["target"] == count(target.params)
    assert found.held["heads and trained target"] == count(state.params)
    assert found.held["moments"] == count(state.opt)
    assert [program.name for program in found.programs] == ["features", "step"]
    assert found.fits
    assert found.lines()[-1] == "it fits"


def test_products_in_loops_are_counted_in_full():
    def program(a, b):
        def body(total, _):
            return total + jnp.dot(a, b), None

        return jax.lax.scan(body, jnp.zeros((3, 5)), None, length=7)[0]

    jaxpr = jax.make_jaxpr(program)(jnp.zeros((3, 4)), jnp.zeros((4, 5))).jaxpr
    assert planned.count_flops(jaxpr) == 7 * 2 * 3 * 4 * 5


def test_collectives_are_read_from_the_program():
    """Fusions that hide one all-gather name its chain; an all-reduce of which a device keeps a slice is in a fusion."""

    text = """
%async_collective_fusion.3 (p: bf16[1,4]) -> bf16[8,4] {
  %all-gather = bf16[8,4]{1,0} all-gather(%p), channel_id=1, frontend_attributes={chain_id="1"}
  %all-gather.1 = bf16[8,4]{1,0} all-gather(%p), channel_id=1, frontend_attributes={chain_id="1"}
}
%all-reduce-scatter.1 (input: f32[16,4]) -> f32[2,4] {
  %all-reduce.3 = f32[16,4]{1,0} all-reduce(%input), channel_id=5, to_apply=%add
}
ENTRY %main (p: bf16[1,4]) -> f32[3] {
  %all-gather.2 = bf16[8,4]{1,0} all-gather(%p), channel_id=1, dimensions={0}
  %all-reduce-start = f32[] all-reduce-start(%q), channel_id=2, to_apply=%add
  %all-reduce.4 = (f32[], f32[3]{0}) all-reduce(%q, %r), channel_id=3, to_apply=%add
  %permute = (f32[2,4]{1,0}, f32[2,4]{1,0}, u32[], u32[]) collective-permute-start(%s), channel_id=4
  %fusion = f32[3] fusion(%all-reduce-done)
}
"""

    found = planned.list_collectives(text)
    assert planned.Program("step", 0, 0.0, found).sum_collectives() == {
        "all-gather": (2, 128), "reduce-scatter": (1, 32), "all-reduce": (3, 20), "collective-permute": (1, 32),
    }  # fmt: skip
    assert found[0] == planned.Collective("all-gather", "bf16", (8, 4))


def test_what_does_not_fit_is_said():
    found = planned.dry_run(shapes(), SETTINGS)
    small = Chip(1e9, 1e9, 1000.0)
    lines = dataclasses.replace(found, chip=small).lines()
    assert lines[-1].startswith("it does not fit")
    refused = found.programs[1]._replace(temporaries=None)
    full = dataclasses.replace(found, programs=[refused])
    assert not full.fits
    assert "  at once: does not fit" in full.lines()


def test_collectives_that_cannot_be_read_are_not_none():
    found = planned.dry_run(shapes(), SETTINGS)
    step, features = (found.programs[i]._replace(name=f"program {i}", collectives=[None, []][i]) for i in range(2))
    lines = dataclasses.replace(found, programs=[step, features]).lines()
    assert "collectives of the program 0: not known, because the program cannot be compiled or printed" in lines
    assert "collectives of the program 1: none" in lines


def test_settings_that_no_machine_has():
    with pytest.raises(InvalidConfig, match="mesh 'data=4096' needs more than"):
        planned.dry_run(shapes(), jaxspec.MedusaSettings(mesh="data=4096", batch=4096))
    with pytest.raises(InvalidConfig, match="a topology is such as v5e:2x4"):
        planned.dry_run(shapes(), SETTINGS, on="abacus")


CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


def test_the_command_reads_a_config_alone(tmp_path, capsys, monkeypatch):
    """No weights, no prompts, and no folder of a run."""

    def load(*_, **__):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(show, "load_model", load)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ["--target", tmp_path / "config.json", "--prompts", "p", "--out", tmp_path / "run", "--row-tokens", 16]
    command = ["train", "eagle3", "--depth", 2, "--batch", 2, *words]
    assert main([*map(str, command), "--dry-run"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "2 rows of 16 tokens a step" in shown[0]
    assert any(line.startswith("  target: ") for line in shown)
    assert shown[-1] == "it fits"
    assert not (tmp_path / "run").exists()
    assert main([*map(str, command), "--on", "v5e:2x4"]) == 2
    assert "add --dry-run" in capsys.readouterr().err
    assert main([*map(str, command), "--dry-run", "--dtype", "int8"]) == 2


VOCAB, DRAFTED = 2**14, 2**12
SIZES = {"vocab_size": VOCAB, "hidden_size": 512, "intermediate_size": 1024, "num_heads": 8, "num_kv_heads": 8}
SIZES |= {"num_layers": 2, "head_dim": 64}
DEPTH = 3
"""Guesses of the heads. A step multiplies by each matrix once for each guess."""


def compile_for_tpus(name: str, monkeypatch) -> tuple[planned.Program, list[tuple[int, ...]]]:
    """Returns the features or the step of EAGLE-3 heads on eight chips, and the shapes of the large matrices."""
    pytest.importorskip("libtpu")
    monkeypatch.setattr(placement, "MIN_SPLIT_ELEMENTS", 2**16)
    lm = toys.transformer("bfloat16", **SIZES)
    target = jaxspec.Model(lm, planned.shapes_of(lm), name="wide")
    settings = jaxspec.Eagle3Settings(
        depth=DEPTH, taps="1,2", draft_vocab=DRAFTED, batch=8, row_tokens=256, precision="bfloat16"
    )
    plan = planned.plan_run(target, settings, on="v5e:2x4")
    with without_xla_flags():
        program = planned.compile_program(next(one for one in plan.traced if one.name == name))
    if name == "features":
        return program, [leaf.shape for leaf in jax.tree.leaves(target.params["layers"]) if leaf.ndim > 1]
    trainee = instance(HeadTrainee, settings.trainee(trainees.target(**SIZES)))
    heads = jax.eval_shape(lambda: trainee.init_params(trainees.target(**SIZES), np.arange(DRAFTED)))
    return program, [leaf.shape for leaf in jax.tree.leaves(heads) if leaf.size >= 2**16]


def find_wrong(name: str, monkeypatch) -> list[str]:
    """Returns what is exchanged between devices and should not be, in one of the programs of a step."""
    program, matrices = compile_for_tpus(name, monkeypatch)
    assert program.collectives is not None
    by_kind: dict[str, list[planned.Collective]] = {}
    for one in program.collectives:
        by_kind.setdefault(one.kind, []).append(one)
    wrong = [f"a table: {one}" for one in program.collectives if VOCAB in one.shape]
    gathers = by_kind.get("all-gather", [])
    wrong += [f"no matrix: {one}" for one in gathers if one.shape not in matrices and one.bytes > 10**5]
    wrong += [f"not in bfloat16: {one}" for one in gathers if one.shape in matrices and one.dtype != "bf16"]
    if sorted(one.shape for one in gathers if one.shape in matrices) != sorted(matrices):
        wrong.append("not each matrix once")
    reduced = sum(one.bytes for one in by_kind.get("all-reduce", []))
    if reduced > 10**6:
        wrong.append(f"all-reduce of {reduced} bytes")
    parts, whole = by_kind.get("reduce-scatter", []), sum(4 * math.prod(shape) for shape in matrices)
    if name == "step" and (len(parts) != len(matrices) or 8 * sum(one.bytes for one in parts) != whole):
        wrong.append(f"gradients are not added up once in parts: {parts}")
    return wrong


@pytest.mark.tpu
@pytest.mark.parametrize("name", ["features", "step"])
def test_a_tpu_collects_each_matrix_and_adds_up_each_gradient_once(name, monkeypatch):
    """In bfloat16, and nothing else: no activations, no whole gradient and no embedding."""
    assert find_wrong(name, monkeypatch) == []


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("defect", "name", "said"),
    [
        (defects.gathered_activations, "features", "no matrix"),
        (defects.gathered_embedding, "features", "a table"),
        (defects.added_activations, "features", "all-reduce of"),
        (defects.whole_gradients, "step", "gradients are not added up once in parts"),
    ],
)
def test_exchanges_that_cost_more_are_found(defect, name, said, monkeypatch):
    defect(monkeypatch)
    assert any(line.startswith(said) for line in find_wrong(name, monkeypatch))
