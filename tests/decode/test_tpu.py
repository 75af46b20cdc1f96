"""Tests the decode loop as XLA compiles it for TPUs, on two layers, and the checks of both tiers."""

import dataclasses

import jax
import pytest

from helpers import defects
from jaxspec.backend import layout
from jaxspec.models.layer_calls_tpu import TpuCalls
from scripts.library import hlo, loops, tier
from scripts.library.loops import Case
from scripts.prove import mesh_layers, tpu, tpu_layers

pytestmark = pytest.mark.quick

MODULE = """
HloModule m
%body.1 (p: (s32[])) -> (s32[]) {
  %copy.3 = u16[2,1,8,2048,128]{4,3,2,1,0} copy(%p.0)
  %select.4 = u16[2,1,8,256,128]{4,3,2,1,0} select(%p.1, %p.2, %p.3)
  %o.1 = token[] outfeed(%p.0, %p.1)
}

ENTRY %main.9 (p: (s32[])) -> (s32[]) {
  %copy.1 = bf16[4096,6144]{0,1} copy(%p.0)
  %copy.2 = f32[4096]{0} copy(%p.1)
  %while.1 = (s32[]) while(%t.1), condition=%c, body=%body.1
  %while.2 = (s32[]) while(%t.2), condition=%c, body=%body.1
}

%c (p: (s32[])) -> pred[] {
  %true = pred[] constant(true)
}
"""

ROUND = """
%inner (p.1: bf16[1024,512], p.2: s32[]) -> bf16[8,512] {
  %p.1 = bf16[1024,512]{1,0} parameter(0)
  %p.2 = s32[] parameter(1)
  %same = bf16[1024,512]{1,0} bitcast(%p.1)
  ROOT %rows = bf16[8,512]{1,0} dynamic-slice(%same, %p.2, %p.2), dynamic_slice_sizes={8,512}
}

%through (p.3: bf16[512,256]) -> bf16[512,256] {
  %p.3 = bf16[512,256]{1,0} parameter(0)
  ROOT %b = bf16[512,256]{1,0} bitcast(%p.3)
}

%product (p.4: bf16[1024,512], p.5: s32[], p.6: bf16[512,256]) -> f32[8,256] {
  %p.4 = bf16[1024,512]{1,0} parameter(0)
  %p.5 = s32[] parameter(1)
  %p.6 = bf16[512,256]{1,0} parameter(2)
  %few = bf16[8,512]{1,0} fusion(%p.4, %p.5), kind=kLoop, calls=%inner
  %all = bf16[512,256]{1,0} fusion(%p.6), kind=kLoop, calls=%through
  ROOT %dot = f32[8,256]{1,0} convolution(%few, %all)
}

%update (p.7: u16[4,2048,128], p.8: u16[4,9,128], p.9: s32[]) -> u16[4,2048,128] {
  %p.7 = u16[4,2048,128]{2,1,0} parameter(0)
  %p.8 = u16[4,9,128]{2,1,0} parameter(1)
  %p.9 = s32[] parameter(2)
  ROOT %new = u16[4,2048,128]{2,1,0} dynamic-update-slice(%p.7, %p.8, %p.9, %p.9, %p.9)
}

%plain (q: (s32[])) -> (f32[100]) {
  ROOT %a = f32[100]{0} add(%x, %y)
}

%drafts (q: (s32[])) -> (f32[1000]) {
  ROOT %a = f32[1000]{0} negate(%x)
}

%body (q: (bf16[1024,512], bf16[512,256], u16[4,2048,128], /*index=3*/bf16[64,64])) -> (s32[]) {
  %q = (bf16[1024,512]{1,0}, bf16[512,256]{1,0}, u16[4,2048,128]{2,1,0}, bf16[64,64]{1,0}, s32[]) parameter(0)
  %table = bf16[1024,512]{1,0} get-tuple-element(%q), index=0
  %matrix = bf16[512,256]{1,0} get-tuple-element(%q), index=1
  %cache = u16[4,2048,128]{2,1,0} get-tuple-element(%q), index=2
  %small = bf16[64,64]{1,0} get-tuple-element(%q), index=3
  %i = s32[] get-tuple-element(%q), index=4
  %fetch = (bf16[64,64]{1,0:S(1)}, bf16[64,64]{1,0}, u32[]{:S(2)}) copy-start(%small)
  %near = bf16[64,64]{1,0:S(1)} copy-done(%fetch)
  %used = f32[64,64]{1,0:S(1)} convert(%near)
  %d = f32[8,256]{1,0:S(1)} fusion(%table, %i, %matrix), kind=kOutput, calls=%product
  %n = u16[4,9,128]{2,1,0:S(1)} custom-call(%d), custom_call_target="ConcatBitcast"
  %c = u16[4,2048,128]{2,1,0} fusion(%cache, %n, %i), kind=kLoop, calls=%update
  %e = (f32[100]{0}) conditional(%i, %q, %q), branch_computations={%plain, %drafts}
}
"""


def test_what_must_not_be_there_is_found():
    lm = loops.llama(2)
    cache = jax.eval_shape(lambda: lm.init_cache(1, 2048))
    weights = {"qkv": jax.ShapeDtypeStruct((4096, 6144), "bfloat16"), "norm": jax.ShapeDtypeStruct((4096,), "float32")}
    wrong = tier.findings(hlo.computations(MODULE), weights, cache.stores)
    said = [
        "2 loops at the top",
        "a copy of a matrix before",
        "a copy of a whole cache inside",
        "it speaks to the host: outfeed",
    ]
    assert len(wrong) == 4
    assert all(line.startswith(start) for line, start in zip(wrong, said))
    table = [jax.ShapeDtypeStruct((4096, 6144), "int32")]
    assert any(
        "a copy of a drafter's table before" in line
        for line in tier.findings(hlo.computations(MODULE), {}, (), tables=table)
    )
    fine = MODULE.replace(" copy(", " bitcast(").replace(" outfeed(", " tuple(").replace(" while(%t.2)", " tuple(%t.2)")
    assert tier.findings(hlo.computations(fine), weights, cache.stores) == []


STATES = """
%commit (p.1: f32[1,4,8,16], p.2: f32[4,8,16]) -> f32[1,4,8,16] {
  %p.1 = f32[1,4,8,16]{3,2,1,0} parameter(0)
  %p.2 = f32[4,8,16]{2,1,0} parameter(1)
  ROOT %a = f32[1,4,8,16]{3,2,1,0} add(%p.1, %p.2)
}

%body (q: (f32[1,4,8,16])) -> (f32[1,4,8,16]) {
  %new = f32[1,4,8,16]{3,2,1,0} fusion(%old, %added), kind=kLoop, calls=%commit
  %wide = f32[8,64]{1,0} add(%x, %y)
  %same = f32[4,8,16]{2,1,0} copy(%new)
}
"""


def test_writes_of_states_are_counted():
    """By shape: an array of as many elements is not a state. On a mesh each device has a quarter of two rows."""
    parts = hlo.computations(STATES)
    assert tier.state_writes(parts, "body", [jax.ShapeDtypeStruct((1, 4, 8, 16), "float32")]) == {"add": 1, "copy": 1}
    assert tier.state_writes(parts, "body", [jax.ShapeDtypeStruct((2, 8, 8, 16), "float32")], 2) == {
        "add": 1,
        "copy": 1,
    }
    assert tier.state_writes(parts, "body", [jax.ShapeDtypeStruct((1, 8, 8, 8), "float32")]) == {}


def test_the_bytes_of_a_round_are_counted_by_hand():
    """Of what is sliced its part, through nested fusions, too; of a cache its update; of branches the larger."""
    rows, matrix, fetched = 8 * 512 * 2, 512 * 256 * 2, 64 * 64 * 2
    indices, update, branch = 2 * 4, 4 * 9 * 128 * 2, 1000 * 4
    counted = hlo.moved(hlo.computations(ROUND), "body")
    assert counted == rows + matrix + fetched + update + branch + indices


def test_of_loops_of_which_one_runs_the_costliest_counts():
    loops = """
%few (p: (f32[100])) -> (f32[100]) {
  %a = f32[100]{0} add(%x, %y)
}

%many (p: (f32[100])) -> (f32[100]) {
  %a = f32[300]{0} add(%x, %y)
}

%test (p: (f32[100])) -> pred[] {
  %a = pred[] constant(true)
}

ENTRY %main (p: (f32[100])) -> (f32[100]) {
  %w.1 = (f32[100]) while(%t), condition=%test, body=%few, metadata={op_name="jit(run)/alternatives/while"}
  %w.2 = (f32[100]) while(%w.1), condition=%test, body=%many, metadata={op_name="jit(run)/alternatives/while"}
  %w.3 = (f32[100]) while(%w.2), condition=%test, body=%few, metadata={op_name="jit(run)/alternatives/while/body/while"}
}
"""
    assert hlo.moved(hlo.computations(loops), "ENTRY") == 300 * 4 + 100 * 4


KERNEL = """
ENTRY %main (p: (s32[])) -> (s32[]) {
  %q = f32[1,8,64,128]{3,2,1,0} parameter(0)
  %cache = u16[2,1,8,2048,128]{4,3,2,1,0} parameter(1)
  %attend.1 = f32[1,8,64,128]{3,2,1,0} custom-call(%q, %cache, /*index=2*/%cache), custom_call_target="tpu_custom_call"
  %other = f32[1,8,64,128]{3,2,1,0} custom-call(%q), custom_call_target="TopK"
}
"""


def test_a_kernel_reads_a_layer_of_a_cache_once():
    rows, layer = 8 * 64 * 128 * 4, 8 * 2048 * 128 * 2
    parts = hlo.computations(KERNEL)
    assert hlo.moved_by_kernels(parts) == [2 * rows + layer]
    assert hlo.moved(parts, "ENTRY") == 2 * rows + layer + 2 * rows


WIDE = """
HloModule m
%in_place (p.1: u16[2,1,8,2048,128], p.2: u16[2,1,8,9,128], p.3: s32[]) -> (u16[2,1,8,2048,128], f32[]) {
  %p.1 = u16[2,1,8,2048,128]{4,3,2,1,0} parameter(0)
  %p.2 = u16[2,1,8,9,128]{4,3,2,1,0} parameter(1)
  %p.3 = s32[] parameter(2)
  %new = u16[2,1,8,2048,128]{4,3,2,1,0} dynamic-update-slice(%p.1, %p.2, %p.3, %p.3, %p.3, %p.3, %p.3)
  %same = u16[2,1,8,2048,128]{4,3,2,1,0} bitcast(%new)
  %none = f32[] constant(0)
  ROOT %both = (u16[2,1,8,2048,128]{4,3,2,1,0}, /*index=1*/f32[]) tuple(%same, /*index=1*/%none)
}

%widened (p.4: bf16[4096,6144]) -> f32[4096,6144] {
  %p.4 = bf16[4096,6144]{1,0} parameter(0)
  ROOT %wide = f32[4096,6144]{1,0} convert(%p.4)
}

%body.1 (p: (s32[])) -> (s32[]) {
  %cache = (u16[2,1,8,2048,128]{4,3,2,1,0}, f32[]) fusion(%p.0, %p.1, %p.2), kind=kLoop, calls=%in_place
  %big = f32[4096,6144]{1,0} fusion(%p.3), kind=kLoop, calls=%widened
  %start = (bf16[2048,6144]{1,0}, bf16[4096,6144]{1,0}) all-gather-start(%p.4), dimensions={0}
  %whole = bf16[4096,6144]{1,0} all-gather-done(%start)
  %told = () custom-call(%p.5), custom_call_target="xla_ffi_python_gpu_callback"
}

%unused (p: (s32[])) -> (s32[]) {
  %copy.9 = bf16[4096,6144]{0,1} copy(%p.0)
}

%c (p: (s32[])) -> pred[] {
  %true = pred[] constant(true)
}

ENTRY %main.9 (p: (s32[])) -> (s32[]) {
  %while.1 = (s32[]) while(%t.1), condition=%c, body=%body.1
}
"""


def test_what_writes_as_much_as_a_matrix_is_found():
    """In a fusion or by a collective; not what is updated in place, and not what no one calls."""
    cache = jax.eval_shape(lambda: loops.llama(2).init_cache(1, 2048))
    weights = {"qkv": jax.ShapeDtypeStruct((4096, 6144), "bfloat16")}
    *wrong, told = tier.findings(hlo.computations(WIDE), weights, cache.stores)
    assert told.startswith("it calls the host")
    assert wrong == [
        "a convert of a matrix inside the loop: big = f32[4096,6144]{1,0}",
        "a all-gather-done of a matrix inside the loop: whole = bf16[4096,6144]{1,0}",
    ]


@pytest.mark.parametrize(
    ("name", "shape", "order"),
    [("row_major", (1, 5, 64), "2, 1, 0"), ("compact", (1, 256, 64), "1, 2, 0"), ("compact", (1, 256, 128), None)],
)
def test_layouts_are_asked_for_on_a_tpu_alone(name, shape, order):
    """The densest axis is named first."""
    traced = jax.jit(getattr(layout, name)).trace(jax.ShapeDtypeStruct(shape, "float32"))
    asked = f"result_layouts = [dense<[{order}]>"
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert asked in text if order else "LayoutConstraint" not in text
    assert "LayoutConstraint" not in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.fixture
def compiler(monkeypatch):
    """What the tier needs, or the test is skipped."""
    pytest.importorskip("libtpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")


def found(mesh: bool = False) -> str:
    return "; ".join(tpu.look(Case("v6e", "none", mesh, 2, layers=2, capacity=32768))["wrong"])


@pytest.mark.tpu
@pytest.mark.parametrize("mesh", [False, True])
def test_the_tier_finds_nothing_in_the_loop(compiler, mesh):
    assert not found(mesh)


@pytest.mark.tpu
@pytest.mark.parametrize("mesh", [False, True])
def test_the_tier_finds_nothing_in_a_loop_with_a_grammar(compiler, mesh):
    case = Case("v6e", "prompt-lookup, chain 8", mesh, 2, layers=2, capacity=32768)
    plain, ruled = tpu.look(case), tpu.look(dataclasses.replace(case, grammar=True))
    assert not ruled["wrong"]
    assert ruled["moved_gb"] < 1.05 * plain["moved_gb"]


@pytest.mark.tpu
def test_it_finds_a_copied_cache(compiler, monkeypatch):
    defects.copied_cache(monkeypatch)
    assert "of a whole cache inside the loop" in found()


@pytest.mark.tpu
def test_it_finds_a_call_of_the_host(compiler, monkeypatch):
    defects.call_of_the_host(monkeypatch)
    assert "the host" in found()


@pytest.mark.tpu
def test_it_finds_a_gathered_table(compiler, monkeypatch):
    defects.gathered_table(monkeypatch)
    assert "of a matrix" in found(mesh=True)


@pytest.mark.tpu
def test_attention_in_pallas_moves_little_beside_a_layer_of_the_cache(compiler):
    row = tpu.look(Case("v6e", "none", layers=2, capacity=32768, attention="pallas"))
    assert not row["wrong"]
    assert row["temporary_mb"] < row["cache_mb"]
    assert 0 < row["attention_mb"] / (row["cache_mb"] / 2) < 1.1


@pytest.mark.tpu
@pytest.mark.parametrize("chip", tpu.CHIPS)
@pytest.mark.parametrize("int8", [False, True])
def test_nothing_of_xla_sums_in_layers_of_a_fixed_order(compiler, chip, int8):
    assert not tpu_layers.look(chip, 16, int8)["wrong"]


@pytest.mark.tpu
@pytest.mark.parametrize("int8", [False, True])
def test_devices_that_share_layers_of_a_fixed_order_only_gather(compiler, int8):
    assert not mesh_layers.look_at_layers("v5e", 16, int8)["wrong"]


@pytest.mark.tpu
def test_it_finds_a_norm_that_is_left_to_xla(compiler, monkeypatch):
    monkeypatch.setattr(TpuCalls, "finish", lambda self, read, norm: norm(self.residual(read)))
    assert any("XLA sums" in one for one in tpu_layers.look("v5e", 16, False)["wrong"])


@pytest.mark.tpu
@pytest.mark.parametrize("drafter", ["none", "prompt-lookup, chain 8", "medusa, 64 nodes", "eagle (EAGLE-3), chain 4"])
def test_the_tier_finds_nothing_in_an_exact_loop(compiler, drafter):
    case = Case("v5e", drafter, layers=2, capacity=32768, attention="pallas", products="pallas", exact=True)
    assert not tpu.look(case)["wrong"]


@pytest.mark.tpu
def test_products_depend_on_the_drafter(compiler):
    """Why only `exact=True` promises bits on a TPU. If this fails, XLA has changed: docs/guarantees.md may say more."""
    row = tpu.look(Case("v5e", "prompt-lookup, chain 8", layers=2, capacity=32768, attention="pallas", width=16))
    assert not row["wrong"]
    assert 0 < row["same_kernels"] < row["kernels"]
