"""Tests mixtures of experts: their forms against a plain sum, broken rows, gradients, vmap, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.moe import CONFIG, LM, layer_for_pallas
from jaxspec.errors import InvalidConfig
from jaxspec.kernels import calls, library
from jaxspec.models import experts, experts_pallas
from jaxspec.models.config import EXPERT_MATRICES, Experts, ModelConfig
from jaxspec.models.exact import resolve_exact
from jaxspec.models.execution import Execution
from jaxspec.models.experts import ExpertParams, feed
from jaxspec.models.packed import pack_params, unpack_params
from jaxspec.models.quantized import Quantized, quantize

SIZES = Experts(7, 3, 20, shared_width=12)
WIDTH = 24


def random_params(seed: int, sizes: Experts = SIZES) -> dict:
    shapes = dataclasses.replace(CONFIG, hidden_size=WIDTH, experts=sizes, sparse=()).layer_shapes(0)
    rng = np.random.default_rng(seed)
    return {
        name: jax.device_put((rng.normal(size=shape) * shape[-2] ** -0.5).astype(np.float32))
        for name, shape in shapes.items()
        if name in ("router", "experts_gate_up", "experts_down") or name.startswith("shared")
    }


@functools.partial(jax.jit, static_argnums=2)
def run(params: dict, rows, sizes: Experts = SIZES):
    order = "router", "experts_gate_up", "experts_down", "shared_gate_up", "shared_down", "shared_gate"
    return feed(rows, ExpertParams(*(params.get(name) for name in order)), sizes, "silu")


def reference(params: dict, rows, sizes: Experts = SIZES) -> np.ndarray:
    """The sum over the experts of each row, one after the other, in float64."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}

    def mlp(x, both, down):
        gate, up = np.split(x @ both, 2)
        return gate / (1 + np.exp(-gate)) * up @ down

    out = np.zeros(rows.shape)
    for place in np.ndindex(*rows.shape[:2]):
        x = np.asarray(rows[place], np.float64)
        scores = np.exp(x @ p["router"])
        scores /= scores.sum()
        chosen = np.argsort(-scores)[: sizes.per_token]
        weights = scores[chosen] / (scores[chosen].sum() if sizes.normalise else 1)
        for expert, weight in zip(chosen, weights):
            out[place] += weight * mlp(x, p["experts_gate_up"][expert], p["experts_down"][expert])
        if sizes.shared_width:
            gate = 1 / (1 + np.exp(-x @ p["shared_gate"]))
            out[place] += gate * mlp(x, p["shared_gate_up"], p["shared_down"])
    return out


def test_the_forms_for_accelerators_have_the_same_sum():
    """An expert that overflows harms only its own rows in these forms, too."""
    params, rows = random_params(14), rows_of(15, 1, 9)
    logits, matrices = rows[0] @ params["router"], [params[name] for name in EXPERT_MATRICES]
    how = experts._How(SIZES, "silu", 1)
    expected = jax.jit(functools.partial(experts._with_loop, how))(rows[0], logits, *matrices)
    huge = [matrices[0], matrices[1].at[int(jnp.argmax(logits[0]))].set(3e38)]
    of_form = jax.jit(functools.partial(experts._grouped, how))
    np.testing.assert_allclose(of_form(rows[0], logits, *matrices), expected, atol=1e-5)
    sound = np.isfinite(of_form(100 * rows[0], logits, *huge)).all(1)
    assert not sound[0]
    assert sound.any()


@pytest.mark.parametrize(("kind", "biases"), [("bfloat16", False), ("bfloat16", True), ("int8", False)])
def test_the_kernels_for_gpus_have_the_same_sum_and_no_row_depends_on_another(kind, biases):
    how, rows, logits, gate_up, down, bias = layer_for_pallas(kind, biases)
    kernels = jax.jit(functools.partial(experts._with_pallas, how, interpret=True))
    all_rows = np.asarray(kernels(rows, logits, gate_up, down, bias))
    expected = jax.jit(functools.partial(experts._with_loop, how))(rows, logits, gate_up, down, bias)
    # On a CPU, the loop does not round rows for int8 matrices.
    np.testing.assert_allclose(all_rows, expected, atol=0.02 if kind == "int8" else 2e-6)
    for first, count in [(58, 70), (95, 33), (112, 16), (3, 5), *((row, 1) for row in range(20))]:
        own = slice(first, first + count)
        np.testing.assert_array_equal(kernels(rows[own], logits[own], gate_up, down, bias), all_rows[own])
    broken, changed = rows.at[3, 5].set(jnp.nan), logits.at[4].set(jnp.nan)
    out = np.asarray(kernels(broken, changed, gate_up, down, bias))
    assert np.isnan(out[[3, 4]]).all()
    np.testing.assert_array_equal(np.delete(out, [3, 4], 0), np.delete(all_rows, [3, 4], 0))


def test_an_expert_that_overflows_in_the_kernels_for_gpus_harms_only_its_rows():
    how, rows, logits, gate_up, down, _ = layer_for_pallas("bfloat16", False)
    expert = int(logits[0].argmax())
    huge = down.at[expert].set(3e38)
    out = np.asarray(experts._with_pallas(how, 100 * rows, logits, gate_up, huge, interpret=True))
    mine = (np.asarray(experts.route(how.sizes, logits).chosen) == expert).any(1)
    assert 0 < mine.sum() < len(mine)
    np.testing.assert_array_equal(np.isfinite(out).all(1), ~mine)


@pytest.mark.parametrize(
    ("rows", "changes", "expected"),
    [(128, {}, True), (129, {}, False), (4, {"dtype": "float32"}, False), (4, {"width": 40}, False)],
)
def test_the_kernels_for_gpus_are_for_few_rows_and_for_their_types_and_sizes(rows, changes, expected):
    """Int8 matrices of 2 GiB are too large for the offsets."""
    width, dtype = changes.get("width", 48), changes.get("dtype", "bfloat16")
    matrices = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((12, 64, 2 * width), (12, width, 64)))
    assert experts_pallas.has_kernels(rows, *matrices) is expected
    shapes = (256, 2048, 4096), (255, 2048, 4096)
    large, smaller = (Quantized(jax.ShapeDtypeStruct(shape, "int8"), None) for shape in shapes)
    assert [experts_pallas.has_kernels(4, one, one) for one in (large, smaller)] == [False, True]


@pytest.mark.parametrize(("capability", "expected"), [("7.5", False), ("8.0", True), ("12.0", True), ("gfx942", True)])
def test_gpus_without_products_of_bfloat16_use_no_kernels_for_experts(monkeypatch, capability, expected):
    class Device:
        platform, compute_capability = "gpu", capability

    how, rows, _, gate_up, down, _ = layer_for_pallas("bfloat16")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert experts._suits_pallas(how, len(rows), gate_up, down) is expected


def rows_of(seed: int, batch: int, tokens: int):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, tokens, WIDTH)), jnp.float32)


@pytest.mark.parametrize("sizes", [SIZES, Experts(7, 3, 20, normalise=False), Experts(2, 2, 4)])
def test_the_sum_is_that_of_each_rows_experts(sizes):
    params = random_params(0, sizes)
    for batch, tokens in ((1, 1), (2, 5)):
        rows = rows_of(1, batch, tokens)
        np.testing.assert_allclose(run(params, rows, sizes), reference(params, rows, sizes), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_packed_and_rounded_matrices(dtype):
    """Every matrix has the model's dtype, except the router's and the shared expert's gate."""
    params, rows = random_params(2), rows_of(3, 2, 4)
    if dtype == "int8":
        params = quantize(params)
    else:
        small = ("router", "shared_gate")
        params = {name: value if name in small else value.astype(dtype) for name, value in params.items()}
    assert params["router"].dtype == params["shared_gate"].dtype == jnp.float32
    exact = {
        name: value if isinstance(value, jax.Array) else value.astype(jnp.float32).swapaxes(-1, -2)
        for name, value in params.items()
    }
    tolerance = 1e-5 if dtype == "float32" else 0.03
    np.testing.assert_allclose(run(params, rows), reference(exact, rows), atol=tolerance)
    packed = pack_params(params)
    jax.tree.map(np.testing.assert_array_equal, unpack_params(packed), params)
    np.testing.assert_allclose(run(packed, rows), reference(exact, rows), atol=max(tolerance, 1e-5))


def test_broken_rows_and_experts_that_overflow_harm_no_other_row():
    params, rows = random_params(4), rows_of(5, 1, 6)
    good, chosen = run(params, rows), np.asarray(experts.route(SIZES, rows[0] @ params["router"]).chosen)
    np.testing.assert_array_equal(
        run(params, rows.at[0, 2, 3].set(jnp.nan))[0, [0, 1, 3, 4, 5]], good[0, [0, 1, 3, 4, 5]]
    )
    assert np.isnan(run(params, rows.at[0, 2, 3].set(jnp.nan))[0, 2]).all()
    expert = chosen[0, 0]
    huge = params | {"experts_down": params["experts_down"].at[expert].set(3e38)}
    mine = (chosen == expert).any(1)
    out = np.asarray(run(huge, 100 * rows))
    assert mine.any()
    assert not mine.all()
    assert np.isfinite(out[0, ~mine]).all()
    assert not np.isfinite(out[0, mine]).all()


def test_gradients_are_those_of_the_plain_sum():
    """Of the rows, the router and every expert, by finite differences in one random direction."""
    params, rows = random_params(6), rows_of(7, 1, 5)
    both = params, rows

    def loss(params, rows):
        return (run(params, rows) ** 2).sum()

    slope = jax.jit(jax.grad(loss, argnums=(0, 1)))(*both)
    rng = np.random.default_rng(8)
    step = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(np.float64), both)
    ends = [
        (reference(*jax.tree.map(lambda a, d, e=e: np.asarray(a, np.float64) + e * d, both, step)) ** 2).sum()
        for e in (1e-5, -1e-5)
    ]
    found = sum(jax.tree.leaves(jax.tree.map(lambda a, d: float((np.asarray(a) * d).sum()), slope, step)))
    assert found == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-3)
    packed = pack_params(params)
    np.testing.assert_allclose(jax.jit(jax.grad(loss, argnums=1))(packed, rows), slope[1], rtol=1e-3, atol=1e-3)


def test_vmap_over_rows_and_over_models():
    params, rows = random_params(9), rows_of(10, 3, 4)
    mapped = jax.vmap(lambda rows: run(params, rows[None])[0])(rows)
    np.testing.assert_allclose(mapped, run(params, rows), atol=1e-5)
    both = jax.tree.map(lambda a: jnp.stack([a, -a]), params)
    for one, sign in zip(jax.vmap(run, (0, None))(both, rows), (1, -1)):
        np.testing.assert_allclose(one, run(jax.tree.map(lambda a, s=sign: s * a, params), rows), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"experts": Experts(2, 1, 4), "sparse": (True,)}, "sparse must have one entry for each of the 3 layers"),
        ({"experts": None, "sparse": (True, True, True)}, "needs experts, got 3 entries and experts None"),
    ],
)
def test_configs_without_sense_are_refused(changes, said):
    with pytest.raises(InvalidConfig, match=said):
        dataclasses.replace(CONFIG, **changes)


def test_a_token_has_at_most_all_experts():
    with pytest.raises(InvalidConfig, match=r"per_token \(3\) must be at most count \(2\)"):
        Experts(2, 3, 4)


def test_products_in_pallas_and_exact_bits_on_a_gpu_are_refused():
    with pytest.raises(InvalidConfig, match="products='pallas' has no mixtures of experts"):
        LM.with_execution(attention="pallas", products="pallas")
    with pytest.raises(InvalidConfig, match="exact=True on a GPU is for networks without experts"):
        resolve_exact(Execution(), True, "bfloat16", CONFIG, "gpu")


def test_layers_are_dense_or_sparse_as_the_config_says():
    shapes = [CONFIG.layer_shapes(i) for i in range(3)]
    assert ["router" in layer for layer in shapes] == [True, False, True]
    assert ["gate_up" in layer for layer in shapes] == [False, True, False]
    all_sparse: ModelConfig = dataclasses.replace(CONFIG, sparse=())
    assert all("experts_down" in all_sparse.layer_shapes(i) for i in range(3))


@pytest.mark.skipif(not library.kernels_available(), reason=library.describe_kernels())
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_with_the_kernel_no_row_depends_on_another(kind):
    """Also with equal logits, and beside rows that are not finite. The sizes are no multiples of 16."""
    sizes = Experts(9, 4, 37, normalise=kind != "int8")
    params, rows = random_params(11, sizes), rows_of(12, 1, 70)
    packed = pack_params(quantize(params) if kind == "int8" else {k: v.astype(kind) for k, v in params.items()})
    logits = np.array(np.random.default_rng(13).integers(0, 4, (70, 9)), np.float32)
    logits[5, 3], logits[6, 0] = np.nan, np.inf
    matrices = [packed[name].of_experts() for name in EXPERT_MATRICES]

    @jax.jit
    def call(x, logits):
        return calls.mix_experts(x, logits, matrices[0], matrices[1], "silu", 4, 37, sizes.normalise)

    whole = np.asarray(call(rows[0], logits))
    assert np.isnan(whole[[5, 6]]).all()
    assert np.isfinite(np.delete(whole, [5, 6], 0)).all()
    for start, count in ((0, 1), (7, 1), (3, 4), (20, 9), (5, 33)):
        part = slice(start, start + count)
        np.testing.assert_array_equal(call(rows[0, part], logits[part]), whole[part])
    exact = [packed[name].astype(jnp.float32).swapaxes(-1, -2) for name in EXPERT_MATRICES]
    expected = experts._grouped(experts._How(sizes, "silu", 1), rows[0, 7:], jnp.asarray(logits[7:]), *exact)
    np.testing.assert_allclose(whole[7:], expected, atol=1e-5 if kind == "float32" else 0.1)
