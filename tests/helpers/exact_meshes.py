"""The programs that test_exact_mesh.py runs on simulated devices, with Pallas kernels as plain operations."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cases
import jaxspec
from helpers import pallas
from helpers.quantizing import quantize_by_powers
from helpers.toys import lively, noisy
from jaxspec.core.mesh import manual_axes
from jaxspec.core.records import KV, Cache, Window
from jaxspec.core.topology import chain
from jaxspec.generation import job
from jaxspec.models import sharding
from jaxspec.models.config import ModelConfig
from jaxspec.models.execution import Execution
from jaxspec.models.transformer import TransformerLM

CONFIG = ModelConfig(
    vocab_size=128, hidden_size=128, intermediate_size=256, num_layers=1, num_heads=16, num_kv_heads=8, head_dim=16,
    tie_embeddings=False,
)  # fmt: skip
"""Eight devices can share it, and another order of the sums over devices changes bits."""
FOR_TPU = dataclasses.replace(CONFIG, intermediate_size=1024, num_heads=8, head_dim=128)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [7, 8, 9, 7, 8], [*range(1, 40), *range(1, 40)], [5, 4] * 6]
OPTIONS: dict[str, Any] = {
    "key": jax.random.key(0),
    "sampling": jaxspec.Sampling(temperature=[0.8, 0.0, 0.8, 1.2], top_p=0.95),
    "max_new_tokens": 14,
    "logprobs": 2,
    "capacity": 256,
    "verbose": False,
}


@functools.cache
def model(kind: str, layers: int = 1) -> jaxspec.Model:
    """Returns a toy with weights of this type, on a GPU or a TPU ("tpu int8")."""
    platform = "tpu" if kind.startswith("tpu") else "gpu"
    execution = Execution(platform=platform, exact=True, products="pallas")
    config = dataclasses.replace(FOR_TPU if platform == "tpu" else CONFIG, num_layers=layers)
    lm = TransformerLM(config, "bfloat16", execution=execution)
    params = lively(noisy(lm.init_params(jax.random.key(0)), 0, 0.1), 3.0)
    return jaxspec.Model(lm, quantize_by_powers(params) if kind.endswith("int8") else params)


def layers_for(name: str) -> int:
    """Returns the number of layers of a target for a drafter."""
    return 2 if name in ("early-exit", "eagle") else 1


def drafting(name: str, kind: str) -> dict[str, Any]:
    """Returns the arguments of `generate` for a drafter."""
    given = cases.arguments(name, model(kind, layers_for(name)))
    return given | {"tree": chain(3)} if name == "prompt-lookup" else given


def texts(kind: str, layers: int, name: str, mesh: tuple[int, int] | None) -> list:
    """Returns tokens and log-probabilities of all rows with a drafter, on one device or on a mesh."""
    where = None if mesh is None else jaxspec.make_mesh(*mesh)
    rows = range(len(PROMPTS))
    out = jaxspec.generate(model(kind, layers), PROMPTS, mesh=where, **OPTIONS, **drafting(name, kind))
    return [[out[row].tokens, out[row].logprobs, out[row].sampled_logprobs] for row in rows]


@contextlib.contextmanager
def simulating() -> Iterator[None]:
    """Runs kernels as plain operations, and takes this machine's devices for those that a model was made for."""
    with pytest.MonkeyPatch.context() as patch:
        pallas.interpret(patch)
        patch.setattr(sharding, "platform_of", lambda mesh: "cpu")
        shard = sharding.shard

        def shard_there(target: jaxspec.Model, mesh: Any) -> jaxspec.Model:
            lm: Any = target.lm
            patch.setattr(sharding, "platform_of", lambda mesh: lm.execution.platform)
            return shard(target, mesh)

        patch.setattr(job, "shard", shard_there)
        patch.setattr(jaxspec, "shard", shard_there)
        yield


def texts_on_meshes(asked: list[tuple[str, str, tuple[int, int]]]) -> list[str]:
    """Returns in which cases (weights, drafter, mesh) a text differs from plain decoding on one device."""
    wrong = []
    with simulating():
        plain = functools.cache(lambda kind, layers: texts(kind, layers, "none", None))
        for kind, name, mesh in asked:
            layers = layers_for(name)
            found, expected = texts(kind, layers, name, mesh), plain(kind, layers)
            if found != expected:
                rows = [row for row, (one, other) in enumerate(zip(found, expected)) if one != other]
                wrong.append(f"{kind}, {name} on {mesh}: rows {rows}")
            assert len({str(row[0]) for row in expected}) > 3
    return wrong


def logits(kind: str, mesh: tuple[int, int] | None) -> list[np.ndarray]:
    """Returns features, logits, and new keys and values of windows of two rows after random texts of 70 and 3 tokens.

    The features are not rounded to bfloat16, so they show the order of every sum of the last layer.
    """
    target, size = model(kind), 5
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, size))
    length = jnp.asarray([70, 3])
    window = Window(
        jnp.asarray(tokens), length[:, None] + jnp.arange(size), jnp.tri(size, dtype=bool)[None].repeat(2, 0)
    )
    stores: Any = target.lm.init_cache(2, 256).stores
    values = [jax.random.normal(jax.random.key(i), stores.keys.shape).astype(jnp.bfloat16) for i in (1, 2)]
    bits = stores.keys.dtype == jnp.uint16
    cache = Cache(KV(*(a.view(jnp.uint16) if bits else a for a in values)), length)
    where = None if mesh is None else jaxspec.make_mesh(*mesh)
    placed: Any = target if where is None else jaxspec.shard(target, where)

    def run(params: Any, window: Window, cache: Cache) -> tuple[Any, Any]:
        features, entries = placed.lm.apply(params, window, cache)
        return (features, placed.lm.head(params, features)), entries

    if where is not None:
        by_row: Any = P("data")
        rows = by_row, Cache(P(None, "data"), by_row)
        run = jax.shard_map(
            run, mesh=where, in_specs=(P(), *rows), out_specs=(P("data"), P(None, "data")),
            axis_names=manual_axes(where), check_vma=False,
        )  # fmt: skip
    return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(jax.jit(run)(placed.params, window, cache))]


def logits_on_meshes(asked: list[tuple[str, tuple[int, int]]]) -> list[str]:
    """Returns in which cases (weights, mesh) logits or entries differ from those of one device."""

    def differ(kind: str, mesh: tuple[int, int]) -> bool:
        pairs = zip(logits(kind, mesh), one(kind), strict=True)
        return not all(np.array_equal(ours, expected) for ours, expected in pairs)

    with simulating():
        one = functools.cache(lambda kind: logits(kind, None))
        return [f"{kind} on {mesh}" for kind, mesh in asked if differ(kind, mesh)]
