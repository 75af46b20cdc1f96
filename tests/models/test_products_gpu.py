"""Tests what the fixed-order kernels compile to for GPUs, and that the checks of `make gpu` find defects."""

import itertools

import jax
import pytest

from jaxspec.models import products_pallas as products
from jaxspec.models import shared_layers
from jaxspec.models.layer_calls_pallas import PallasCalls
from jaxspec.models.layers import look_up
from scripts.library import chains
from scripts.prove import gpu_layers, mesh_layers

PTX = """
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %f1, %f2 }, { %r1, %r2 }, { %r3 }, { %f91, %f92 };
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %f3, %f4 }, { %r1, %r2 }, { %r4 }, { %f93, %f94 };
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %f5, %f6 }, { %r5, %r6 }, { %r7 }, { %f1, %f2 };
"""


@pytest.mark.quick
def test_chains_are_read_by_hand():
    assert gpu_layers.read_chains(PTX) == ({gpu_layers.INSTRUCTION}, [2, 1])


@pytest.fixture
def compiler(monkeypatch):
    """What the tier needs, or the test is skipped."""
    pytest.importorskip("nvidia.cuda_nvcc")
    monkeypatch.delenv("XLA_FLAGS", raising=False)


CALLS = [
    *itertools.product(["qkv, bfloat16", "out, bfloat16", "gate_up, int8"], [16, 48, 64, 128]),
    *itertools.product(["expert units, bfloat16", "expert outputs, int8"], [16, 32, 64, 128]),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "rows"), CALLS)
def test_accumulators_are_single_chains_at_any_number_of_rows(compiler, name, rows):
    row = gpu_layers.look_at_call("h100", name, rows)
    assert not row["wrong"]
    assert row["temporary_bytes"] == 0


@pytest.mark.gpu
def test_shares_of_devices_are_rounded_as_on_one_device(compiler, tmp_path):
    """A product and a sum that are rounded once (FMA) would depend on the kernel that they are in."""
    one = gpu_layers.calls("h100", 16)["out, int8"]
    rows, (x, scale) = one.arguments[0].shape[0], one.arguments[2:]
    shares = jax.ShapeDtypeStruct((2, rows, x.shape[1]), "float32", sharding=x.sharding)

    def add_shares(shares, x, scale):
        return products.add_shares(shares, x, scale, output_scale=scale)

    for name, function, arguments in (
        ("one", one.function, one.arguments), ("shares", add_shares, (shares, x, scale)),
    ):  # fmt: skip
        jax.jit(function).lower(*arguments).compile({"xla_dump_to": str(tmp_path / name)})
        ptx = "".join(path.read_text() for path in (tmp_path / name).glob("*.ptx"))
        assert "mul.rn.f32" in ptx
        assert "fma" not in ptx
        assert "shfl" not in ptx  # sums of squares have an order of their own


@pytest.mark.gpu
def test_a_norm_is_summed_alike_for_any_share_of_the_outputs(compiler, tmp_path):
    """The squares of a norm are summed by a reduction of Triton, whose order depends on the kernel around it."""
    found = {}
    for rows, name, share in itertools.product((16, 64), ("qkv", "gate_up"), (1, 2, 8)):
        call = gpu_layers.calls("h100", rows)[f"{name}, bfloat16"]
        prepared, weight = call.arguments
        inputs, outputs = weight.shape
        own = jax.ShapeDtypeStruct((inputs, outputs // share), weight.dtype, sharding=weight.sharding)
        folder = tmp_path / f"{rows}-{name}-{share}"
        jax.jit(call.function).lower(prepared, own).compile({"xla_dump_to": str(folder)})
        ptx = next(text for path in folder.glob("*.ptx") if "rsqrt" in (text := path.read_text()))
        found[folder.name] = chains.steps_of_norm(ptx)
    assert len(set(found.values())) == 1, found.keys()
    assert any("shfl" in step for step in found["16-qkv-1"])


@pytest.mark.gpu
def test_nothing_of_xla_sums_between_embedding_and_logits(compiler):
    row = gpu_layers.look_at_layers("h100", 16)
    assert not row["wrong"]
    assert row["launches_of_a_layer"] == gpu_layers.MAX_LAUNCHES


@pytest.mark.gpu
def test_the_check_finds_a_second_tile_of_inputs(compiler, monkeypatch):
    by_size = products.tile_size

    def tile(size: int, most: int, what: str) -> int:
        return by_size(size, 64 if what == "inputs" else most, what)

    expected = gpu_layers.calls("h100", 32)["qkv, bfloat16"].inputs
    monkeypatch.setattr(products, "tile_size", tile)
    wrong = gpu_layers.look_at_call("h100", "qkv, bfloat16", 32)["wrong"]
    assert wrong == [f"chains of [4] products for {expected} inputs of an iteration"]


@pytest.mark.gpu
def test_the_check_finds_a_norm_that_is_left_to_xla(compiler, monkeypatch):
    monkeypatch.setattr(PallasCalls, "finish", lambda self, read, norm: norm(self.residual(read)))
    assert any("XLA sums" in one for one in gpu_layers.look_at_layers("h100", 16)["wrong"])


@pytest.mark.gpu
@pytest.mark.parametrize("int8", [False, True])
def test_devices_that_share_layers_only_gather(compiler, int8):
    assert not mesh_layers.look_at_layers("h100", 16, int8)["wrong"]


@pytest.mark.gpu
def test_the_check_finds_a_sum_that_is_left_to_nccl(compiler, monkeypatch):
    monkeypatch.setattr(shared_layers, "gather", lambda share: jax.lax.psum(share, "model")[None])
    monkeypatch.setattr(shared_layers, "look_up_share", lambda table, tokens, size: look_up(table, tokens))
    wrong = mesh_layers.look_at_layers("h100", 16, False)["wrong"]
    assert any("the devices exchange numbers by all-reduce" in one for one in wrong)
