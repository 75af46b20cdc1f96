"""Tests the argument `exact` of `load`: what it selects on each platform, and what it refuses."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from helpers import toys
from jaxspec.backend import command_buffer, exact_products
from jaxspec.core.records import Window
from jaxspec.core.topology import chain
from jaxspec.decode import target_call
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.errors import InvalidConfig
from jaxspec.models import attention_pallas, transformer
from jaxspec.models.config import DeltaSizes, ModelConfig
from jaxspec.models.exact import check_shared, find_gap, resolve_exact
from jaxspec.models.execution import Execution
from jaxspec.models.rope import Rope

pytestmark = pytest.mark.quick

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=128, intermediate_size=96, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64
)


@dataclasses.dataclass(frozen=True)
class WithOptions(transformer.TransformerLM):
    """A network on XLA's operations, whose programs are compiled as on a GPU."""

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        return exact_products.OPTIONS


class ReadTwice(transformer.TransformerLM):
    """A network on XLA's operations that reads one token as on a GPU."""

    @property
    def _exact_in_pallas(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_flags(monkeypatch):
    """Tests of their own may set the flags."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def resolve(exact: bool | None = True, execution: Execution = Execution(), **changes) -> Execution:
    arguments: dict[str, Any] = {"dtype": "bfloat16", "config": CONFIG, "platform": "gpu"} | changes
    return resolve_exact(execution, exact, **arguments)


def config(**changes) -> ModelConfig:
    return dataclasses.replace(CONFIG, **changes)


def test_without_it_nothing_changes():
    assert resolve(None) == resolve(False) == Execution()


def test_a_cpu_uses_its_kernels_or_refuses():
    kernels = Execution(kernels=True)
    assert resolve(execution=kernels, platform="cpu") == Execution(kernels=True, exact=True)
    with pytest.raises(InvalidConfig, match="exact=True needs the CPU kernels on a CPU, and they are not used"):
        resolve(platform="cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_gpu_uses_attention_and_products_in_pallas(dtype):
    found = resolve(dtype=dtype)
    assert found == Execution(exact=True, products="pallas")
    there, here = (dataclasses.replace(found, platform=platform).resolve() for platform in ("gpu", "cpu"))
    assert (there.attention, there.products) == ("pallas", "pallas")
    assert (here.attention, here.products) == ("xla", "xla")
    assert found.of_head() == Execution()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_tpu_uses_attention_and_products_in_pallas(dtype):
    found = resolve(dtype=dtype, platform="tpu", config=config(head_dim=128, intermediate_size=384, vocab_size=50257))
    assert found == Execution(exact=True, products="pallas")
    there = dataclasses.replace(found, platform="tpu").resolve()
    assert (there.attention, there.products) == ("pallas", "pallas")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 50257}, "a multiple of 16 for vocab_size, got 50257; use 'xla'"),
        ({"hidden_size": 100}, "a multiple of 16 for hidden_size, got 100; use 'xla'"),
        ({"intermediate_size": 90}, "a multiple of 16 for intermediate_size, got 90; use 'xla'"),
    ],
)
def test_sizes_without_a_pallas_kernel_leave_the_products_to_xla(changes, message):
    lines: list[str] = []
    found = resolve(config=config(**changes), report=lines.append)
    assert found == Execution(exact=True)
    assert len(lines) == 1
    assert lines[0].startswith("exact=True leaves the products to XLA: products='pallas' ")
    assert message in lines[0]
    assert dataclasses.replace(found, platform="gpu").resolve().attention == "pallas"


def read_abstractly(config: ModelConfig) -> None:
    """Traces a call of the network with products in Pallas, which raises where a kernel is missing."""
    lm = transformer.TransformerLM(config, "bfloat16", execution=Execution(False, platform="gpu", exact=True))
    lm = lm.with_execution(products="pallas")
    params = jax.eval_shape(lm.init_params, jax.random.key(0))
    cache = jax.eval_shape(lambda: lm.init_cache(1, 256))
    window = Window(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1, 1), bool))

    def run(params, cache):
        return lm.head(params, lm.apply(params, window, cache)[0])

    jax.eval_shape(run, params, cache)


def test_the_sizes_that_pass_the_check_are_those_that_the_kernels_take(seed):
    rng, kept = np.random.default_rng(seed), 0
    for _ in range(25):
        heads, shared = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        sizes = {
            "hidden_size": 4 * int(rng.integers(4, 40)), "intermediate_size": 8 * int(rng.integers(2, 30)),
            "vocab_size": 8 * int(rng.integers(3, 30)), "num_heads": heads * shared, "num_kv_heads": shared,
            "head_dim": int(rng.choice([16, 32, 64])), "rope": Rope(width=int(rng.choice([4, 8, 12, 16]))),
        }  # fmt: skip
        if rng.random() < 0.6:
            sizes |= {name: -(-sizes[name] // 16) * 16 for name in ("hidden_size", "intermediate_size", "vocab_size")}
        gap = find_gap(config(**sizes))
        kept += gap is None
        if gap is None:
            read_abstractly(config(**sizes))
        else:
            with pytest.raises(InvalidConfig, match="products='pallas'"):
                read_abstractly(config(**sizes))
    assert 3 < kept < 22


def test_the_form_is_shown():
    lm = toys.transformer(num_layers=1)
    params = lm.init_params(jax.random.key(0))

    def shown(**changes) -> str:
        return repr(jaxspec.Model(lm.with_execution(**changes), params))

    assert "exact" not in shown()
    assert ", exact)" in shown(exact=True)
    assert ", exact, products by XLA)" in shown(exact=True, platform="gpu")
    for platform in ("gpu", "tpu"):
        assert ", exact, products in Pallas)" in shown(exact=True, platform=platform, products="pallas")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"platform": "METAL"}, "exact=True is for CPUs, GPUs and TPUs, the model runs on 'METAL'"),
        ({"platform": "tpu"}, "needs heads whose width is a multiple of 128 on a TPU, got 64"),
        ({"platform": "tpu", "dtype": "float32"}, "exact=True on a TPU needs weights in bfloat16 or int8, got float32"),
        (
            {"platform": "tpu", "config": config(head_dim=128)},
            "exact=True on a TPU runs the products in Pallas, but products='pallas' needs a multiple of 128 for "
            "intermediate_size, got 96; leave it out",
        ),
        ({"dtype": "float32"}, "exact=True on a GPU needs weights in bfloat16 or int8, got float32"),
        ({"dtype": "file"}, "exact=True on a GPU needs weights in bfloat16 or int8, got file"),
        ({"execution": Execution(shards=3)}, "splits layers over 1, 2, 4 or 8 devices, got 3"),
        (
            {"execution": Execution(shards=4)},
            "exact=True with layers split over 4 devices runs the products in Pallas, but products='pallas' needs a "
            "multiple of 64 for intermediate_size on 4 devices, got 96; leave it out",
        ),
        (
            {"execution": Execution(shards=4), "config": config(intermediate_size=256)},
            "a multiple of 4 for num_kv_heads on 4 devices, got 2",
        ),
        (
            {"execution": Execution(shards=2), "config": config(head_dim=16, num_heads=6, num_kv_heads=2)},
            "a multiple of 64 for the width of queries, keys and values on 2 devices, got 160",
        ),
        (
            {"execution": Execution(shards=2), "config": config(vocab_size=80)},
            "a multiple of 32 for vocab_size on 2 devices, got 80",
        ),
        (
            {"execution": Execution(shards=2), "platform": "tpu", "config": config(head_dim=128)},
            "a multiple of 256 for intermediate_size on 2 devices, got 96",
        ),
        ({"config": config(delta=DeltaSizes(1, 1, 16, 16), recurrent=(True,))}, "without recurrent layers"),
        ({"config": config(head_dim=80)}, "needs heads whose width is a power of two"),
    ],
)
def test_what_it_cannot_hold_is_refused(changes, message):
    with pytest.raises(InvalidConfig, match=message):
        resolve(**changes)


def test_devices_share_layers_with_products_in_pallas():
    found = resolve(execution=Execution(shards=2))
    assert found == Execution(shards=2, exact=True, products="pallas")
    assert dataclasses.replace(found, platform="gpu").resolve().attention == "pallas"
    with pytest.raises(InvalidConfig, match="splits layers over devices only with products in Pallas, got 2 devices"):
        Execution(shards=2, exact=True)


def test_a_placed_model_that_devices_cannot_share_is_refused():
    def check(platform: str = "gpu", shards: int = 2, **changes) -> None:
        execution = dataclasses.replace(Execution(exact=True, products="pallas"), **changes)
        check_shared(execution, CONFIG, platform, shards)

    check()
    check(shards=1, products="xla")
    check(platform="cpu", shards=1)
    with pytest.raises(InvalidConfig, match="exact=True with products by XLA is for layers on one device, got 2"):
        check(products="xla")
    with pytest.raises(InvalidConfig, match="exact=True on a CPU is for layers on one device, got 2"):
        check("cpu")
    with pytest.raises(InvalidConfig, match="a multiple of 64 for intermediate_size on 4 devices, got 96; use another"):
        check(shards=4)


def test_layers_that_devices_share_run_on_a_mesh_only():
    lm = transformer.TransformerLM(CONFIG, "bfloat16", execution=Execution(exact=True, products="pallas", shards=2))
    lm = lm.with_execution(platform="gpu")
    params, features = lm.init_params(jax.random.key(0)), jnp.zeros((1, 1, CONFIG.hidden_size))
    with pytest.raises(InvalidConfig, match="split over 2 devices and run on a mesh only; pass it"):
        lm.head(params, features)
    assert jax.eval_shape(lm.head, params, features).shape == (1, 1, CONFIG.vocab_size)


def test_other_values_are_refused():
    not_a_flag: Any = "yes"
    with pytest.raises(InvalidConfig, match="exact must be True or False"):
        resolve(not_a_flag)


def test_options_that_xla_does_not_know_are_refused(monkeypatch):
    monkeypatch.setattr(exact_products, "OPTIONS", {**exact_products.OPTIONS, "xla_gpu_gone": 1})
    with pytest.raises(InvalidConfig, match=r"needs XLA's option xla_gpu_gone, which JAX .* does not know"):
        resolve(config=config(vocab_size=60))
    assert resolve().products == "pallas"


def test_options_of_the_user_are_refused(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_cublas_fallback=true")
    with pytest.raises(InvalidConfig, match="exact=True sets XLA's option xla_gpu_cublas_fallback"):
        resolve(config=config(vocab_size=60))
    assert resolve().products == "pallas"


def test_products_in_pallas_need_no_options_for_products():
    by_xla = toys.transformer().with_execution(exact=True, platform="gpu")
    assert by_xla.compiler_options == exact_products.OPTIONS
    assert by_xla.with_execution(products="pallas").compiler_options == {"xla_allow_excess_precision": False}
    assert by_xla.with_execution(products="pallas", platform="cpu").compiler_options == {}


def test_programs_of_an_exact_target_are_compiled_with_its_options(monkeypatch):
    """This XLA knows the options of GPUs, whatever it compiles for."""
    seen = []

    def compiled(lowered, options, needed=types.MappingProxyType({})):
        seen.append(dict(needed))
        return lowered.compile(dict(needed))

    monkeypatch.setattr(command_buffer, "compile", compiled)
    lm = toys.transformer(num_layers=1)
    with_options = WithOptions(lm.config, lm.dtype)
    model = jaxspec.Model(lm, lm.init_params(jax.random.key(0)))
    jaxspec.decode.session.clear_executables()
    jaxspec.generate(model, [[1, 2]], max_new_tokens=2, drafter="none", verbose=False)
    assert seen
    assert not any(seen)
    seen.clear()
    jaxspec.generate(
        jaxspec.Model(with_options, model.params), [[1, 2]], max_new_tokens=2, drafter="none", verbose=False
    )
    assert seen
    assert all(options == exact_products.OPTIONS for options in seen)


def test_needed_options_are_kept_if_others_are_unknown():
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    assert command_buffer.compile(lowered, {"xla_gpu_nonsense": "1"}, exact_products.OPTIONS)(1.0) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_other"):
        command_buffer.compile(lowered, {"xla_gpu_nonsense": "1"}, {"xla_gpu_other": "1"})


def test_deeper_trees_than_attention_sums_are_refused():
    assert transformer.EXACT_PATH == attention_pallas.GROUP_TOKENS == target_call.MAX_PATH
    target = toys.transformer().with_execution(exact=True, platform="gpu")
    toys.decoder(target, PromptLookup(chain(31)))
    with pytest.raises(
        InvalidConfig, match="the draft tree is 32 deep, and a target with exact=True allows a depth of 31"
    ):
        toys.decoder(target, PromptLookup(chain(32)))


def test_one_token_is_read_as_two():
    """Norms of one row have another kernel on a GPU; the copies do not see each other."""
    lm = toys.transformer(num_layers=2)
    params, cache = lm.init_params(jax.random.key(0)), lm.init_cache(1, 256)
    exact = ReadTwice(lm.config)
    first = Window(jnp.array([[5]]), jnp.array([[0]]), jnp.ones((1, 1, 1), bool))
    features, entries = lm.apply(params, first, cache)
    twice, same = exact.apply(params, first, cache)
    assert jax.tree.map(jnp.shape, (twice, same)) == jax.tree.map(jnp.shape, (features, entries))
    np.testing.assert_allclose(twice, features, rtol=1e-5, atol=1e-5)
    second = Window(jnp.array([[7]]), jnp.array([[1]]), jnp.ones((1, 1, 2), bool), jnp.array([[[0, -1]]]))
    ours, theirs = (network.apply(params, second, cache, entries)[0] for network in (exact, lm))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    wide = transformer._twice(second)
    assert wide.mask.tolist() == [[[True, True, False], [True, False, True]]]
    assert wide.paths is not None
    assert wide.paths.tolist() == [[[0, -1], [1, -1]]]
