"""Tests what a dry run says before a run, against the run's own arrays and programs."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers import toys, trainees
from helpers.narrow import instance
from jaxspec.backend.chips import Chip
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


VOCAB, DRAFTED, WIDTH = 2**14, 2**12, 512


@functools.cache
def compiled_for_tpus() -> tuple[planned.Program, planned.Program, planned.Program, dict[str, list[tuple[int, ...]]]]:
    """The features, the steps of two and of three guesses on eight chips, and the shapes of the large matrices."""
    pytest.importorskip("libtpu")
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 1024, "num_heads": 8, "num_kv_heads": 8}
    lm = toys.transformer("bfloat16", **sizes, head_dim=64)
    target = jaxspec.Model(lm, planned.shapes_of(lm), name="wide")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "MIN_SPLIT_ELEMENTS", 2**16)
        programs = []
        for depth in (2, 3):
            settings = jaxspec.Eagle3Settings(
                depth=depth, taps="1,2,3", draft_vocab=DRAFTED, batch=8, row_tokens=256, precision="bfloat16"
            )
            programs.append(planned.dry_run(target, settings, on="v5e:2x4").programs)
    trainee = instance(HeadTrainee, settings.trainee(trainees.target(**sizes, head_dim=64)))
    heads = jax.eval_shape(lambda: trainee.init_params(trainees.target(**sizes, head_dim=64), np.arange(DRAFTED)))
    matrices = {
        "target": [leaf.shape for leaf in jax.tree.leaves(target.params["layers"]) if leaf.ndim > 1],
        "heads": [leaf.shape for leaf in jax.tree.leaves(heads) if leaf.size >= 2**16],
    }
    return *programs[0], programs[1][1], matrices


@pytest.mark.tpu
def test_a_tpu_collects_each_matrix_once():
    """In bfloat16, and nothing else: no activations, no gradients, and no embedding."""
    features, step, deeper, matrices = compiled_for_tpus()
    for program, expected in ((features, "target"), (step, "heads"), (deeper, "heads")):
        gathers = [one for one in program.collectives if one.kind == "all-gather"]
        assert sorted(one.shape for one in gathers) == sorted(matrices[expected])
        assert {one.dtype for one in gathers} == {"bf16"}
        assert not [one for one in program.collectives if VOCAB in one.shape]


@pytest.mark.tpu
def test_a_tpu_adds_up_no_activations():
    features, step, deeper, _ = compiled_for_tpus()
    for program in (features, step, deeper):
        assert sum(one.bytes for one in program.collectives if one.kind == "all-reduce") < 10**6


@pytest.mark.tpu
def test_a_tpu_adds_up_each_gradient_once_in_parts():
    """However often a step multiplies by a matrix."""
    _, step, deeper, matrices = compiled_for_tpus()
    for program in (step, deeper):
        parts = [one for one in program.collectives if one.kind == "reduce-scatter"]
        assert len(parts) == len(matrices["heads"])
        whole = sum(4 * math.prod(shape) for shape in matrices["heads"])
        assert 8 * sum(one.bytes for one in parts) == pytest.approx(whole, rel=0.1)
