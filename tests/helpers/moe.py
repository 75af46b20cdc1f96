"""Small networks with mixtures of experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from helpers.narrow import not_none
from helpers.toys import SIZES, lively, noisy
from jaxspec.core.mesh import make_mesh
from jaxspec.core.records import Window
from jaxspec.models import experts
from jaxspec.models.columns import group_by_shard
from jaxspec.models.config import DeltaSizes, Experts, ModelConfig
from jaxspec.models.quantized import Quantized, quantize
from jaxspec.models.sharding import shard
from jaxspec.models.transformer import TransformerLM

CONFIG = dataclasses.replace(
    SIZES, hidden_size=48, num_layers=3, experts=Experts(6, 2, 32, shared_width=24), sparse=(True, False, True)
)
LM = TransformerLM(CONFIG)
PARAMS = lively(LM.init_params(jax.random.key(0)))
DRAFT = noisy(PARAMS, 1, 0.05)
HYBRID = TransformerLM(
    dataclasses.replace(CONFIG, out_gate=True, delta=DeltaSizes(2, 4, 16, 16), recurrent=(True, False, True))
)
ON_FOUR = """
import json, sys
sys.path.insert(0, sys.argv[1])
from helpers import moe
found = [moe.on_four(config, int8) for config in (moe.ONE_LAYER, moe.GPT_OSS) for int8 in (False, True)]
print(json.dumps([found, [moe.with_kernels_for_gpus(int8) for int8 in (False, True)]]))
"""


ONE_LAYER = dataclasses.replace(CONFIG, num_layers=1, sparse=())
GPT_OSS = dataclasses.replace(
    ONE_LAYER,
    experts=Experts(6, 2, 32, biases=True),
    activation="clamped_silu",
    sinks=True,
    window=3,
    qkv_bias=True,
    out_bias=True,
)
"""What gpt-oss is made of."""


def on_four(config: ModelConfig, int8: bool) -> dict:
    """Compares the logits of one layer on one device and on four, of which two share the layer."""
    lm = TransformerLM(config)
    params = noisy(lm.init_params(jax.random.key(0)), 1, 0.1)
    model = jaxspec.Model(lm, quantize(params) if int8 else params)
    mesh = make_mesh(2, 2, devices=jax.devices())
    placed = shard(model, mesh)

    def logits(model, params):
        tokens = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
        mask = jnp.broadcast_to(jnp.tri(4, dtype=bool), (2, 4, 4))
        window = Window(tokens, jnp.tile(jnp.arange(4), (2, 1)), mask)
        features, _ = model.lm.apply(params, window, model.lm.init_cache(2, 64))
        return model.lm.head(params, features)

    with jax.set_mesh(mesh):
        program = jax.jit(functools.partial(logits, placed)).lower(placed.params).compile()
        found = program(placed.params)
    expected = jax.jit(functools.partial(logits, model))(model.params)
    down = jax.tree.leaves(placed.params["layers"][0]["experts_down"])[0]
    return {
        "difference": float(jnp.abs(found - expected).max()),
        "sums": not_none(program.as_text()).count(" all-reduce("),
        "share": down.addressable_shards[0].data.size / down.size,
    }


def layer_for_pallas(kind: str, biases: bool = False) -> tuple:
    """Returns a layer of 12 experts whose sizes suit the kernels for GPUs: how it is computed, and its arrays."""
    sizes, rng = Experts(12, 3, 64, biases=biases), np.random.default_rng(20)
    how = experts._How(sizes, "clamped_silu" if biases else "silu", 1)
    shapes = (12, 64, 128), (12, 64, 64)
    matrices = [(rng.normal(size=shape) * shape[1] ** -0.5).astype(np.float32) for shape in shapes]
    stored = [Quantized.quantize(a) if kind == "int8" else jnp.asarray(a, kind) for a in matrices]
    rows, router = rng.normal(size=(128, 64)).astype(np.float32), rng.normal(size=(64, 12))
    bias = rng.normal(size=(12, 128)).astype(np.float32) if biases else None
    return how, *jax.device_put((rows, (rows @ router).astype(np.float32), *stored, bias))


def with_kernels_for_gpus(int8: bool) -> dict:
    """Compares two devices that share each expert, and two that have all experts, with one device."""
    how, *arrays = layer_for_pallas("int8" if int8 else "bfloat16")
    expected = experts._with_pallas(how, *arrays, interpret=True)
    own = dataclasses.replace(CONFIG, experts=how.sizes)
    grouped = [*arrays[:2], group_by_shard("experts_gate_up", arrays[2], own, 2), *arrays[3:]]
    found = {}
    with jax.set_mesh(make_mesh(1, 2)):
        for name, shards, given in (("whole experts", 1, arrays), ("shared experts", 2, grouped)):
            form = functools.partial(experts._with_pallas, how._replace(shards=shards), interpret=True)
            found[name] = float(jnp.abs(jax.jit(form)(*given) - expected).max())
    return found
