"""Tests that a model is the same on whatever devices it is placed, for everything that reads its parameters."""

import json
import subprocess
import sys
from typing import Any

import chex
import jax
import numpy as np
import pytest

from helpers import placed
from helpers.checkpoints import tiny_config
from helpers.compiling import simulated
from helpers.paths import TESTS
from helpers.toys import transformer
from jaxspec.models.columns import gather, group_by_shard, ungroup
from jaxspec.models.config import DeltaSizes, Experts
from jaxspec.models.placement import FUSED_PARAMS

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
from helpers import placed
print(json.dumps(placed.run(bool(int(sys.argv[2])))))
"""


@pytest.mark.slow
@pytest.mark.mesh
@pytest.mark.parametrize("every", [0, 1])
def test_a_placed_model_is_read_as_on_one_device(every):
    """Every reader, on meshes of 2 to 8 devices, in each dtype: `save`, exports, checksums, drafts, heads, kernels."""
    assert len(placed.cases(bool(every))) > (120 if every else 50)
    words = [sys.executable, "-c", PROGRAM, str(TESTS), str(every)]
    done = subprocess.run(words, env=simulated(8), capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.quick
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("name", FUSED_PARAMS)
def test_grouping_is_undone(name, shards):
    sizes: dict[str, Any] = {"delta": DeltaSizes(4, 8, 8, 8), "recurrent": (True, False), "num_layers": 2}
    sizes |= {"experts": Experts(3, 1, 8, shared_width=4, biases=True), "sparse": (True, False)}
    config = tiny_config(num_heads=8, num_kv_heads=4, qkv_bias=True, mlp_bias=True, **sizes)
    shapes = config.layer_shapes(0) | config.layer_shapes(1)
    leaf = np.arange(np.prod(shapes[name])).reshape(shapes[name])
    grouped = group_by_shard(name, leaf, config, shards)
    assert np.array_equal(ungroup(name, grouped, config, shards), leaf)
    assert np.array_equal(grouped, leaf) == (shards == 1)


@pytest.mark.quick
def test_parameters_that_are_on_the_host_are_gathered_too():
    """As a trained target is after a run of several processes."""
    lm = transformer(num_heads=4, num_kv_heads=4)
    params = lm.init_params(jax.random.key(0))
    split = lm.with_execution(shards=2)
    layers = [
        {name: group_by_shard(name, np.asarray(leaf), lm.config, 2) if name in FUSED_PARAMS else np.asarray(leaf)
         for name, leaf in layer.items()}
        for layer in params["layers"].values()
    ]  # fmt: skip
    held = {name: leaf if name == "layers" else np.asarray(leaf) for name, leaf in params.items()}
    one, whole = gather(split, held | {"layers": dict(enumerate(layers))})
    assert one.execution.shards == 1
    chex.assert_trees_all_equal(whole, params)
