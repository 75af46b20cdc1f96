"""Tests meshes: tokens equal those of one device, and groups that share no row exchange nothing."""

import json
import re
import socket
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

import jaxspec
from helpers.compiling import simulated
from helpers.paths import TESTS
from helpers.tiers import with_slow
from helpers.toys import transformer
from jaxspec.errors import InvalidConfig
from jaxspec.testing import TableLM

pytestmark = pytest.mark.mesh

EIGHT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from helpers import meshes
print(json.dumps(eval(sys.argv[2])))
"""
TWO = """
import json, sys
sys.path.insert(0, sys.argv[1])
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("127.0.0.1:" + sys.argv[2], 2, int(sys.argv[3]))
from helpers import meshes
print(json.dumps(meshes.on_two()))
"""


MESHES, MORE_MESHES = ["2x4"], ["8x1", "4x2", "1x8"]
WAYS = [
    "eagle",
    "another vocabulary",
    "rejection",
    "medusa",
    "dflash",
    "early-exit",
    "grammar",
    "grammar without a draft",
]
ALL_MESHES = with_slow([*MESHES, *MORE_MESHES], MORE_MESHES)


@pytest.fixture(scope="module")
def eight():
    return of_eight("meshes.on_eight()")


@pytest.fixture(scope="module")
def more():
    return of_eight(f"meshes.more_on_eight({WAYS})")


@pytest.fixture
def found(mesh, request):
    return request.getfixturevalue("eight" if mesh in MESHES else "more")


def of_eight(call):
    words = [sys.executable, "-c", EIGHT, str(TESTS), call]
    done = subprocess.run(words, env=simulated(8), capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mesh", ALL_MESHES)
def test_tokens_are_those_of_one_device(found, mesh):
    """Greedy and sampled rows that end at different times, a draft model on a tree; as many rows as no mesh divides."""
    assert len({len(row) for row in found["one"]}) > 6
    assert len({str(row) for row in found["one"]}) > 8
    assert found[mesh]["tokens"] == found["one"]
    assert found[mesh]["accepted"] > 50


@pytest.mark.parametrize("mesh", ALL_MESHES)
def test_groups_exchange_nothing(found, mesh):
    """Every collective of the compiled loop is among the devices of one group; with groups of one there is none."""
    data, model = map(int, mesh.split("x"))
    groups = found[mesh]["groups"]
    assert bool(groups) == (model > 1)
    own = [list(range(i * model, (i + 1) * model)) for i in range(data)]
    for line in groups:
        assert all(any(set(some) <= set(group) for group in own) for some in line), line


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_other_drafters_and_rules_too(way, more):
    """Two groups of four devices; `rejection` writes texts of its own, the drafters those of plain decoding."""
    one, shared = more["others"][way]
    assert one == shared
    assert (one[0] == more["one"]) == (way != "rejection" and "grammar" not in way)
    if "grammar" in way:
        assert one[0] == more["others"]["grammar without a draft"][0][0]
    assert one[1] > 10 or way == "grammar without a draft", "tokens of the draft were accepted"


@pytest.mark.slow
def test_stop_strings_end_rows_on_a_mesh(more):
    one, shared = more["stop"]
    assert one == shared
    cut = [row for row, (tokens, _, _) in zip(more["one"], one) if len(tokens) < len(row)]
    assert len(cut) > 4
    assert all(whole[: len(tokens)] == tokens for whole, (tokens, _, _) in zip(more["one"], one))


@pytest.mark.slow
def test_a_mesh_can_be_compiled_for_beforehand(more):
    compiled, later = more["precompile"]
    assert compiled > 0
    assert later == 0


def test_a_checkpoint_is_read_into_its_shards(eight):
    """The bits and the layout of `shard`, and each device is sent its quarter of a matrix, whatever way round."""
    loaded = eight["loaded"]
    assert loaded["same"]
    assert loaded["whole"]
    assert loaded["lm"]
    assert loaded["shares"] == [0.25] * 2


@pytest.mark.slow
def test_devices_that_share_no_layer_run_the_kernels(more):
    if more["kernels"] is None:
        pytest.skip("the kernels were not built")
    one, other = more["kernels"]
    assert one == other


def test_rounded_weights_are_shared_too(eight):
    assert eight["int8 shares"] == [0.25] * 3


@pytest.mark.slow
def test_texts_of_rounded_weights_are_those_of_one_device(more):
    one, shared = more["int8"]
    assert one == shared
    assert len({str(row) for row in one}) > 8


@pytest.mark.slow
def test_two_processes(eight):
    """Two processes of four devices each, on loopback, call the same function; rows take turns, each gets all texts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-c", TWO, str(TESTS), str(port)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([*words, str(i)], env=simulated(4), **pipes) for i in range(2)]
    try:
        ended = [one.communicate(timeout=1200) for one in running]
    finally:
        for one in running:
            one.kill()
    for one, (out, err) in zip(running, ended):
        assert one.returncode == 0, err[-3000:]
        found = json.loads(out.splitlines()[-1])
        assert found["devices"] == 8
        assert found["tokens"] == eight["one"]


def test_what_is_no_mesh_is_refused(eight):
    assert eight["refused"] == "model has 8 heads in a layer, which 3 devices cannot share evenly; use another mesh"
    target = jaxspec.Model(TableLM(4), TableLM(4).init_params(jax.random.key(0)))
    device = np.asarray(jax.devices()[:1])
    explicit = jax.sharding.Mesh(device, ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    refused: list[Any] = ["data", jax.sharding.Mesh(device, ("x",)), explicit]
    for wrong in refused:
        with pytest.raises(InvalidConfig, match="mesh"):
            jaxspec.generate(target, [[1]], mesh=wrong)
    lm = transformer()
    split = jaxspec.Model(lm.with_execution(shards=2), lm.init_params(jax.random.key(0)))
    with pytest.raises(InvalidConfig, match=r"split over 2 devices; pass the mesh"):
        jaxspec.generate(split, [[1]])
    with pytest.raises(InvalidConfig, match=re.escape("a mesh of 99 x 1 needs 99 devices")):
        jaxspec.make_mesh(data=99)
    with pytest.raises(InvalidConfig, match="data must be a whole number from 1"):
        jaxspec.make_mesh(data=0)
