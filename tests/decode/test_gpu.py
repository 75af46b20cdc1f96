"""Tests what is of its own on GPUs, the decode loop as XLA compiles it for them, and that the tier finds defects."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import defects, toys
from helpers.tiers import with_slow
from helpers.toys import decoder, lively, texts
from helpers.toys import transformer as toy
from jaxspec.backend import command_buffer, exact_products
from jaxspec.core import laws
from jaxspec.core.records import KV
from jaxspec.core.topology import chain
from jaxspec.decode.state import Weights
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.models.attention import attend
from jaxspec.models.attention_once import MAX_ELEMENTS, MAX_SUMMED_TOKENS, attend_once, block_size
from jaxspec.models.layers import look_up
from jaxspec.rules import coupled
from scripts.library import chains, hlo, kernels, thunks, tier
from scripts.library.loops import Case
from scripts.prove import gpu

pytestmark = pytest.mark.quick

PROGRAM = """
%known_body (p: (s32[])) -> (s32[]) {
  %a = s32[] add(%x, %y)
}
%known_condition (p: (s32[])) -> pred[] {
  %a = pred[] compare(%x, %y)
}
%left (p: (s32[])) -> (s32[]) {
  %w = (s32[]) while(%t), condition=%known_condition, body=%known_body, backend_config={"known_trip_count":{"n":"5"}}
}
%right (p: (s32[])) -> (s32[]) {
  %w = (s32[]) while(%t), condition=%known_condition, body=%known_body, metadata={op_name="jit(run)/blocks/while"}
}
%body (p: (s32[])) -> (s32[]) {
  %c = (s32[]) conditional(%i, %q, %q), branch_computations={%left, %right}
}
%condition (p: (s32[])) -> pred[] {
  %a = pred[] compare(%x, %y)
}
ENTRY %main (p: (s32[])) -> (s32[]) {
  %w = (s32[]) while(%t), condition=%condition, body=%body
}
"""
LISTING = """
001: kCopy  [source       | next=002 (1)] kCopy
002: kWhile [prev=001 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1]
  body:
    004: kCustomKernel [source       | next=005 (1)] loop_add_fusion_30 grid: [16, 1, 1]
    005: kConditional  [prev=010 (1) | next=284 (1)]
      branch_0:
        006: kWhile        [prev=031 (1)  | next=045 (1)]
condition:
            007: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1]
          body:
            008: kCustomKernel [source       | next=035 (1)] loop_dynamic_slice_fusion grid: [2048, 1, 1]
            009: kAllReduceDone [source      | next=035 (1)]
        010: kCustomKernel [source       | next=035 (1)] loop_dynamic_slice_fusion grid: [2048, 1, 1]
      branch_1:
        011: kWhile        [prev=031 (1)  | next=045 (1)]
condition:
            012: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1]
          body:
            013: kCustomKernel [source       | next=035 (1)] loop_dynamic_slice_fusion grid: [2048, 1, 1]
            014: kCopy         [source       | next=038 (1)] kCopy
    015: kCustomKernel [prev=037 (1) | next=039 (1)] loop_maximum_fusion grid: [1, 1, 1]
"""


def test_launches_and_waits_are_counted_by_hand():
    """Two outside, one look at each condition of an unknown loop, the costlier branch; waits only where it is known."""
    parts, listed = hlo.computations(PROGRAM), thunks.read(LISTING)
    captured = thunks.read(
        "000: kCommandBuffer [source | sink]\n" + "".join(f"    {a}\n" for a in LISTING.split("\n") if a)
    )
    for turns, launches, waits in ((0, 2 + 1 + 6, 2), (1, 2 + 1 + 6, 2), (3, 2 + 1 + 4 + 6, 2 + 4)):
        cost, held = thunks.of_a_round(listed, parts, lambda _, turns=turns: turns)
        assert (cost.launches, cost.waits, held) == (launches, waits, False)
        cost, held = thunks.of_a_round(captured, parts, lambda _, turns=turns: turns)
        assert (cost.launches, cost.waits, held) == (launches, 0, True)
    with pytest.raises(ValueError, match="no loop"):
        thunks.of_a_round(listed[:1], parts, lambda _: 0)
    assert gpu.turns(2000, next(one for one in parts["right"])) == 7
    assert gpu.turns(2000, next(one for one in parts["left"])) == 1


def test_of_loops_of_which_one_runs_the_costliest_counts():
    """Each has a look at its condition, and the costlier one a turn."""
    parts = hlo.computations("""
%body (p: (s32[])) -> (s32[]) {
  %w.1 = (s32[]) while(%t), condition=%test, body=%none, metadata={op_name="jit(run)/alternatives/while"}
  %w.2 = (s32[]) while(%t), condition=%test, body=%none, metadata={op_name="jit(run)/alternatives/while"}
}
%none (p: (s32[])) -> (s32[]) {
  %a = s32[] add(%x, %y)
}
%test (p: (s32[])) -> pred[] {
  %a = pred[] compare(%x, %y)
}
ENTRY %main (p: (s32[])) -> (s32[]) {
  %w = (s32[]) while(%t), condition=%test, body=%body
}
""")
    listed = thunks.read("""
001: kWhile [source | sink]
condition:
    002: kCustomKernel [source | sink] test
  body:
    003: kWhile [source | sink]
condition:
        004: kCustomKernel [source | sink] test
      body:
        005: kCustomKernel [source | sink] one
    006: kWhile [source | sink]
condition:
        007: kCustomKernel [source | sink] test
      body:
        008: kCustomKernel [source | sink] one
        009: kCustomKernel [source | sink] two
""")
    cost, _ = thunks.of_a_round(listed, parts, lambda _: 1)
    assert (cost.launches, cost.waits) == (1 + 2 + (1 + 2), 1 + 2 + 1)


def test_a_condition_without_launches_has_no_line_of_its_own():
    """XLA writes the heading of the body behind "No thunks."; the loop's body still counts once in each turn."""
    parts = hlo.computations("""
%body (p: (s32[])) -> (s32[]) {
  %w = (s32[]) while(%t), condition=%test, body=%none
}
%none (p: (s32[])) -> (s32[]) {
  %a = s32[] add(%x, %y)
}
%test (p: (s32[])) -> pred[] {
  %a = pred[] compare(%x, %y)
}
ENTRY %main (p: (s32[])) -> (s32[]) {
  %w = (s32[]) while(%t), condition=%test, body=%body
}
""")
    listed = thunks.read("""
001: kWhile [source | sink]
condition:
    002: kCustomKernel [source | sink] test
  body:
    003: kWhile [source | sink]
condition:
        No thunks.      body:
        004: kCustomKernel [source | sink] one
        005: kCustomKernel [source | sink] two
    006: kCustomKernel [source | sink] three
""")
    for turns in (0, 1, 3):
        cost, _ = thunks.of_a_round(listed, parts, lambda _, turns=turns: turns)
        assert (cost.launches, cost.waits) == (1 + 2 * turns + 1, turns + 1 + 1)


FUSIONS = """
%inside (a: f32[4,96], b: f32[4,5]) -> f32[4,6] {
  %a = f32[4,96]{1,0} parameter(0)
  %b = f32[4,5]{1,0} parameter(1)
  %r = f32[4]{0} reduce(%a, %zero), dimensions={1}, to_apply=%add
  %r1 = f32[4,1]{1,0} bitcast(%r)
  ROOT %c = f32[4,6]{1,0} concatenate(%b, %r1), dimensions={1}
}
%plain (a: f32[4,96]) -> f32[4,96] {
  ROOT %n = f32[4,96]{1,0} negate(%a)
}
ENTRY %main (p: (s32[])) -> (s32[]) {
  %input_concatenate_fusion = f32[4,6] fusion(%x, %y), kind=kInput, calls=%inside
  %input_reduce_fusion = f32[4,6] fusion(%x, %y), kind=kInput, calls=%inside
  %softmax = f32[4,6] fusion(%x, %y), kind=kCustom, calls=%inside
  %loop_negate_fusion = f32[4,96] fusion(%x), kind=kLoop, calls=%plain
}
"""


def test_sums_by_one_thread_are_counted_by_hand():
    found = hlo.serial_sums(hlo.computations(FUSIONS))
    assert found == [("input_concatenate_fusion", 96), ("loop_negate_fusion", 1)]


def chained(lengths: list[int], op: str = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") -> str:
    """PTX of accumulators that are summed in so many steps each, in turns."""
    lines = []
    for step in range(max(lengths)):
        for number, length in enumerate(lengths):
            registers = [f"{{%f{number}_{at}_0, %f{number}_{at}_1}}" for at in (step, step + 1)]
            lines += [f"{op} {registers[1]}, {{%r1}}, {{%r2}}, {registers[0]};"] * (step < length)
    return "\n".join(lines)


def test_chains_of_sums_are_read_from_ptx():
    one = chains.read(chained([8, 8]))
    assert (one.lengths, one.one_chain_each) == ((8, 8), True)
    assert one.instructions == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}
    assert not chains.read(chained([8, 4])).one_chain_each
    assert not chains.read(chained([8]) + chained([8], "mma.sync.aligned.m16n8k8.row.col.f32")).one_chain_each
    in_place = "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%f1, %f2}, %rd1, %rd2, 1, 1, 1, 0, 0;\n"
    assert chains.read(in_place * 8).lengths == (8,)
    assert chains.read("add.f32 %f1, %f2, %f3;") == (frozenset(), ())


ROUND = """
%normed (a: f32[16,64]) -> f32[16,64] {{
  %a = f32[16,64]{{1,0}} parameter(0)
  %square{0} = f32[16,64]{{1,0}} multiply(%a, %a)
  %sum{0} = f32[16]{{0}} reduce(%square{0}, %zero), dimensions={{1}}, to_apply=%add
  ROOT %out{0} = f32[16,64]{{1,0}} divide(%a, %sum{0})
}}
%product (a: bf16[16,64], b: bf16[64,1000]) -> f32[16,1000] {{
  %a = bf16[16,64]{{1,0}} parameter(0)
  %b = bf16[64,1000]{{1,0}} parameter(1)
  ROOT %dot = f32[16,1000]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
%drafting (t: s32[16]) -> s32[16] {{
  %t = s32[16]{{0}} parameter(0)
  ROOT %n = s32[16]{{0}} negate(%t)
}}
%body (p: (s32[])) -> (s32[]) {{
  %p = (s32[], bf16[64,1000]{{1,0}}) parameter(0)
  %text = s32[16]{{0}} get-tuple-element(%p), index=0
  %head = bf16[64,1000]{{1,0}} get-tuple-element(%p), index=1
  %guess = f32[16]{{0}} fusion(%text), kind=kLoop, calls=%drafting
  %tokens = s32[16]{{0}} fusion(%guess), kind=kLoop, calls=%drafting
  %rows = f32[16,64]{{1,0}} fusion(%tokens), kind=kLoop, calls=%drafting
  %norm{0} = f32[16,64]{{1,0}} fusion(%rows), kind=kCustom, calls=%normed, metadata={{op_name="{0}"}}{1}
  %narrow = bf16[16,64]{{1,0}} fusion(%norm{0}), kind=kLoop, calls=%drafting
  %logits = f32[16,1000]{{1,0}} fusion(%narrow, %head), kind=kCustom, calls=%product
}}
ENTRY %main (p: (s32[])) -> (s32[]) {{
  %w = (s32[]) while(%t), condition=%body, body=%body
}}
"""


def test_kernels_before_the_logits_are_compared_without_their_names():
    """A draft reaches the logits as integers; another tile of a norm is found, another name is not."""
    tile = ', backend_config={"block_level_fusion_config":{"tile":"%s"}}'
    one, renamed, other = (
        kernels.before_logits(hlo.computations(ROUND.format(*words)), 1000)
        for words in ((".1", tile % 128), (".2", tile % 128), (".1", tile % 256))
    )
    assert [each.name for each in one] == ["rows", "norm.1", "narrow", "logits"]
    assert [each.rounds for each in one] == [False, True, False, True]
    assert kernels.compare(renamed, one) == (4, 4, (), 0)
    assert kernels.compare(other, one) == (4, 3, ("+ norm.1 f32[16,64]", "- norm.1 f32[16,64]"), 0)


def test_options_are_a_gpus_and_the_users_go_first(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert command_buffer.options("cpu") == command_buffer.options("tpu") == {}
    assert command_buffer.options("gpu", layers_split=True) == {}
    assert "WHILE" in command_buffer.options("gpu")["xla_gpu_enable_command_buffer"].split(",")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert command_buffer.options("gpu") == {}


def test_options_that_xla_does_not_know_are_no_error():
    """This XLA knows those of GPUs, whatever it compiles for."""
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    assert command_buffer.compile(lowered, command_buffer.OPTIONS)(1.0) == 2
    assert command_buffer.compile(lowered, {"xla_gpu_nonsense": "1"})(1.0) == 2
    broken = types.SimpleNamespace(compile=lambda *_: lowered.compile({"xla_gpu_other": "1"}))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_other"):
        command_buffer.compile(broken, {"xla_gpu_nonsense": "1"})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("case", with_slow(range(8), range(3, 8)))
def test_attention_in_one_pass_equals_that_in_blocks(case):
    """Prefixes and masks of any kind, sliding windows, and values that are no numbers."""
    rng = np.random.default_rng(case)
    many = (MAX_SUMMED_TOKENS + 1, MAX_SUMMED_TOKENS + 4) if case % 4 == 3 else (1, 6)
    batch, heads, groups, tokens, before = (int(rng.integers(*ends)) for ends in ((1, 4), (1, 3), (1, 3), many, (0, 3)))
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    kv = KV(*(normal(2, batch, heads, 512, 16) for _ in range(2)))
    keys, values = (normal(batch, heads, before + tokens, 16) for _ in range(2))
    values = values.at[0, 0, 0, 3].set(jnp.inf) if case % 3 == 0 else values
    seen = np.broadcast_to(np.tri(tokens, dtype=bool), (batch, tokens, tokens))
    mask = jnp.asarray(np.concatenate([rng.random((batch, tokens, before)) < 0.5, seen], -1))
    first = jnp.asarray(rng.integers(-3, 300, (batch, tokens)), jnp.int32) if case % 2 else None
    length = jnp.asarray(rng.integers(0, 512, batch), jnp.int32)
    queries = normal(batch, heads, groups, tokens, 16)
    blocks = attend(queries, kv, 1, length, (keys, values), mask, None, 0.3, first)
    once = attend_once(queries, kv, 1, length, (keys, values), mask, 0.3, first)
    np.testing.assert_allclose(once, blocks, atol=2e-6)
    assert np.isnan(once).any() <= (case % 3 == 0)


def test_a_gpu_reads_few_blocks():
    def size(batch: int, slots: int) -> int:
        array = jax.ShapeDtypeStruct((32, batch, 8, slots, 128), "bfloat16")
        return block_size(KV(array, array))  # pyright: ignore[reportArgumentType]

    assert size(1, 2048) == 2048
    assert size(16, 2048) == 2048
    assert size(1, 131072) == 8192
    assert size(64, 8192) == 256
    assert size(16, 2304 * 3) == 256
    assert size(1, MAX_ELEMENTS // 1024) == MAX_ELEMENTS // 1024


@pytest.fixture
def as_gpu(monkeypatch):
    """Runs on this machine what `gpu_dependent` chooses for a GPU."""
    for module in (laws, coupled):
        monkeypatch.setattr(module, "gpu_dependent", lambda *arrays, gpu, default: gpu(*arrays))


def test_digits_of_four_bits_find_the_same_scores(request):
    values = jax.random.normal(jax.random.key(0), (3, 4, 500)) * 10
    values = values.at[0, 0].set(jnp.nan).at[1].set(jnp.round(values[1])).at[2, 0, :490].set(-jnp.inf)
    k = jnp.asarray([[1], [7], [500]])
    by_bits, first = laws.kth_highest(values, k), laws.first_highest(values)
    request.getfixturevalue("as_gpu")
    by_digits = laws.kth_highest(values, k)
    np.testing.assert_array_equal(np.asarray(by_bits).view(np.int32), np.asarray(by_digits).view(np.int32))
    np.testing.assert_array_equal(first, laws.first_highest(values))


@pytest.mark.parametrize("size", [1, 2, 61, 64, 1001])
def test_a_gpu_sums_in_the_order_of_a_cpu(size):
    values = jax.random.normal(jax.random.key(size), (3, 2, size))
    one, other = (jax.jit(laws._add_halves, static_argnums=1)(values, barriers) for barriers in (False, True))
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(one, laws.total(values))


def test_one_row_of_a_table_is_looked_up():
    table = jnp.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(look_up(table, jnp.asarray([[2]])), [[[6, 7, 8]]])


@pytest.mark.slow
def test_what_is_compiled_for_a_gpu_writes_the_same_text(request):
    """The forms of its own, run on a CPU: plain decoding and drafts, a width of one and of five, every setting."""
    target = toy()
    weights = Weights(lively(target.init_params(jax.random.key(0))))
    asked = toys.request(
        [[1, 2, 3, 1, 2], [4], [5, 6] * 4], 24, vocab=target.vocab, temperature=[0.0, 1.0, 0.7], top_k=[0, 9, 0],
        top_p=[1.0, 1.0, 0.8], min_p=[0.0, 0.02, 0.0],
    )  # fmt: skip

    def written(target, drafter):
        return texts(jax.jit(lambda w, r: decoder(target, drafter).generate(w, r, 512))(weights, asked))

    plain = written(target, NoDraft())
    request.getfixturevalue("as_gpu")
    on_gpu = target.with_execution(platform="gpu")
    assert written(on_gpu, NoDraft()) == plain
    assert written(on_gpu, PromptLookup(chain(4), min_match=1)) == plain


@pytest.fixture
def compiler(monkeypatch):
    """What the tier needs, or the test is skipped."""
    pytest.importorskip("nvidia.cuda_nvcc")
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def wrong(drafter: str = "none", mesh: bool = False, layers: int = 2) -> str:
    return "; ".join(gpu.look(Case("h100", drafter, mesh, 2, layers=layers))["wrong"])


@pytest.mark.gpu
def test_the_tier_finds_nothing_in_the_loop(compiler):
    assert not wrong()
    assert not wrong(mesh=True)


@pytest.mark.gpu
@pytest.mark.parametrize("mesh", [False, True])
def test_the_tier_finds_nothing_in_a_loop_with_a_grammar(compiler, mesh):
    case = Case("h100", "prompt-lookup, chain 8", mesh, 2, layers=2)
    plain, ruled = gpu.look(case), gpu.look(dataclasses.replace(case, grammar=True))
    assert not ruled["wrong"]
    assert ruled["moved_gb"] < 1.05 * plain["moved_gb"]


@pytest.mark.gpu
def test_attention_in_pallas_moves_little_beside_a_layer_of_the_cache(compiler):
    row = gpu.look(Case("h100", "none", layers=2, attention="pallas"))
    assert not row["wrong"]
    assert 1 < row["attention_mb"] / (row["cache_mb"] / 2) < 1.1


@pytest.mark.gpu
def test_it_finds_a_copied_cache(compiler, monkeypatch):
    defects.copied_cache(monkeypatch)
    assert "of a whole cache inside the loop" in wrong()


@pytest.mark.gpu
def test_it_finds_a_call_of_the_host(compiler, monkeypatch):
    defects.call_of_the_host(monkeypatch)
    assert "the host" in wrong()


@pytest.mark.gpu
def test_it_finds_a_gathered_table(compiler, monkeypatch):
    defects.gathered_table(monkeypatch)
    assert "of a matrix" in wrong(mesh=True)


@pytest.mark.gpu
def test_it_finds_an_uncaptured_loop(compiler, monkeypatch):
    monkeypatch.setattr(command_buffer, "OPTIONS", {})
    assert "not one command buffer" in wrong()


@pytest.mark.gpu
def test_it_finds_sums_by_one_thread(compiler, monkeypatch):
    monkeypatch.setattr("jaxspec.models.attention_once.lax.optimization_barrier", lambda values: values)
    assert "one thread sums 128 elements" in wrong()


@pytest.mark.gpu
def test_it_finds_a_loop_over_the_text(compiler, monkeypatch):
    monkeypatch.setattr("jaxspec.models.attention.block_size", lambda prefix: 256)
    assert "launches more for a longer one" in wrong()


def at_one_width(drafter: str) -> str:
    row = gpu.look(Case("h100", drafter, layers=2, attention="pallas", width=16))
    assert row["kernels"] > 30
    return "; ".join(row["wrong"])


@pytest.mark.gpu
def test_no_kernel_before_the_logits_depends_on_the_drafter(compiler):
    """The head reads taps, whose neighbour in memory is the result of the last norm."""
    assert not at_one_width("eagle (EAGLE-3), chain 4")


@pytest.mark.gpu
def test_it_finds_kernels_that_depend_on_the_drafter(compiler, monkeypatch):
    monkeypatch.setattr(tier, "REFERENCES", {})
    defects.joined_calls(monkeypatch)
    assert "a kernel before the logits depends on the drafter" in at_one_width("eagle (EAGLE-3), chain 4")


@pytest.fixture
def optimised():
    """LLVM keeps an accumulator in the same registers from one instruction to the next, as for users."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.gpu
def test_exact_products_are_one_chain_of_one_instruction(compiler, optimised):
    assert gpu.inexact("h100", rows=(2, 9, 16, 33, 63, 64, 128)) == []
    assert len({gpu.norm("h100", rows) for rows in (2, 16, 128)}) == 1
    assert gpu.norm("h100", 1) != gpu.norm("h100", 2)  # why one token is read as two


@pytest.mark.gpu
def test_it_finds_split_sums(compiler, optimised):
    """XLA's own choice of kernels splits a sum into parts, and adds the parts in a second kernel."""
    parted = dict(exact_products.OPTIONS)
    del parted["xla_gpu_experimental_force_split_k"], parted["xla_gpu_override_gemm_autotuner"]
    assert any("kernels gemm" in line for line in gpu.inexact("h100", parted, (16,)))
