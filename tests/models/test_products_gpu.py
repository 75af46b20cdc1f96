"""Tests what the fixed-order kernels compile to for GPUs, and that the checks of `make gpu` find defects."""

import pytest

from jaxspec.models import products_pallas as products
from jaxspec.models.layer_calls_pallas import PallasCalls
from scripts.prove import gpu_layers

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


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 48, 64, 128])
@pytest.mark.parametrize("name", ["qkv, bfloat16", "out, bfloat16", "gate_up, int8"])
def test_accumulators_are_single_chains_at_any_number_of_rows(compiler, name, rows):
    row = gpu_layers.look_at_call("h100", name, rows)
    assert not row["wrong"]
    assert row["temporary_bytes"] == 0


@pytest.mark.gpu
def test_nothing_of_xla_sums_between_embedding_and_logits(compiler):
    row = gpu_layers.look_at_layers("h100", 16)
    assert not row["wrong"]
    assert row["launches_of_a_layer"] == gpu_layers.MAX_LAUNCHES


@pytest.mark.gpu
def test_the_check_finds_a_second_tile_of_inputs(compiler, monkeypatch):
    by_size = products._tile

    def tile(size: int, most: int, what: str) -> int:
        return by_size(size, 64 if what == "inputs" else most, what)

    expected = gpu_layers.calls("h100", 32)["qkv, bfloat16"].inputs
    monkeypatch.setattr(products, "_tile", tile)
    wrong = gpu_layers.look_at_call("h100", "qkv, bfloat16", 32)["wrong"]
    assert wrong == [f"chains of [4] products for {expected} inputs of an iteration"]


@pytest.mark.gpu
def test_the_check_finds_a_norm_that_is_left_to_xla(compiler, monkeypatch):
    monkeypatch.setattr(PallasCalls, "finish", lambda self, read, norm: norm(self.residual(read)))
    assert any("XLA sums" in one for one in gpu_layers.look_at_layers("h100", 16)["wrong"])
