"""Readers of the parameters of placed models, which test_columns.py runs on simulated devices."""

import dataclasses
import itertools
import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from helpers.checkpoints import hf_config, random_params, tiny_config
from jaxspec.checkpoints import hf_write
from jaxspec.checkpoints.base import FLOAT_DTYPES
from jaxspec.generation.drafting import Drafting
from jaxspec.generation.fingerprint import describe_static, describe_weights
from jaxspec.heads.copies import share_tables
from jaxspec.heads.eagle_config import EagleConfig
from jaxspec.heads.export import projection_of
from jaxspec.heads.medusa_config import HeadsConfig
from jaxspec.heads.network import init_params
from jaxspec.kernels.library import kernels_available
from jaxspec.models.columns import file_order
from jaxspec.models.kernels import with_kernels
from jaxspec.models.packed import unpack_params
from jaxspec.models.quantized import quantize
from jaxspec.models.transformer import TransformerLM
from jaxspec.train.files import fingerprint

SIZES = {
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position": 64,
}
KINDS = {
    "llama": tiny_config(**SIZES),
    "biases": tiny_config(**SIZES, qkv_bias=True, out_bias=True, mlp_bias=True, tie_embeddings=False),
    "qwen3": tiny_config(**SIZES, qk_norm=True, num_layers=1),
    "gemma": tiny_config(**SIZES, qk_norm=True, post_norms=True, activation="gelu_tanh"),
}
MESHES = [(1, 2), (2, 2), (1, 4), (4, 1), (2, 1), (4, 2)]
DTYPES_OF_CASES = ["float32", "bfloat16", "int8"]


def make_model(kind: str, dtype: str) -> jaxspec.Model:
    """Makes a model on one device, without kernels."""
    config = KINDS[kind]
    params: Any = random_params(config)
    params["layers"] = dict(enumerate(params["layers"]))
    cast = FLOAT_DTYPES["float32" if dtype == "int8" else dtype]
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf if leaf.ndim < 2 else leaf.astype(cast)), params)
    lm = TransformerLM(config, "float32" if dtype == "float32" else "bfloat16")
    return jaxspec.Model(lm, quantize(params) if dtype == "int8" else params, stop_ids=(3,), name=kind)


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def saved(model: Any) -> list[np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        place = jaxspec.save(model, pathlib.Path(folder) / "model")
        return leaves(jaxspec.load(place, dtype=str(model.params["embed"].dtype), kernels=False).params)


def exported(model: Any) -> list[np.ndarray]:
    """The tensors that `export_model` writes, by the directory of a Llama model."""
    config = model.lm.config
    with tempfile.TemporaryDirectory() as folder:
        like, place = pathlib.Path(folder) / "like", pathlib.Path(folder) / "model"
        like.mkdir()
        settings = hf_config(config, attention_bias=config.out_bias, mlp_bias=config.mlp_bias)
        (like / "config.json").write_text(json.dumps(settings))
        hf_write.export_model(model, place, like)
        return leaves(jaxspec.load(place, dtype=str(model.params["embed"].dtype), kernels=False).params)


def described(model: Any) -> list:
    """What identifies the model in a results file and in the manifest of a training run."""
    ordered = file_order(model.lm, model.params)
    return [describe_static(model.lm), describe_weights(ordered), fingerprint(ordered)]


def as_draft(model: Any) -> list:
    """The network and the parameters of a drafter that drafts with the model."""
    target = make_model("llama", "float32")
    drafter, params = Drafting("model", draft=dataclasses.replace(model, tokenizer=None)).build_drafter(target)
    return [describe_static(drafter), *leaves(params)]


def of_heads(model: Any) -> list[np.ndarray]:
    """What heads take of the target: rows of its projection, and its tables where their own are copies."""
    config, ids = model.lm.config, np.arange(3, 40, 5)
    sizes = HeadsConfig(config.hidden_size, config.vocab_size, 1, projection="single", draft_vocab_size=len(ids))
    started = init_params(sizes, model.lm.unembedding(model.params), ids)
    decoder = dataclasses.replace(tiny_config(**SIZES), vocab_size=config.vocab_size, tie_embeddings=False)
    table = jnp.asarray(projection_of(dataclasses.replace(model, params=with_embedding(model)), None))
    eagle = EagleConfig(decoder, 1, own_embedding=True)
    shared, _ = share_tables(eagle, {"embed": table}, model)
    return [np.asarray(projection_of(model, ids)), *leaves(started), np.asarray(shared.own_embedding)]


def with_embedding(model: Any) -> Any:
    """The parameters with the embedding as the projection."""
    return {**model.params, "head": model.params["embed"]}


def packed(model: Any) -> list[np.ndarray]:
    fast: Any = with_kernels(model)
    assert fast.lm.with_execution(platform=None) == model.lm.with_execution(shards=1, kernels=True, platform=None)
    return leaves(unpack_params(fast.params))


def moved(model: Any) -> list[np.ndarray]:
    """The parameters after the model was placed on another mesh."""
    other: Any = jaxspec.shard(model, jaxspec.make_mesh(1, 4 if model.lm.execution.shards == 2 else 2))
    assert other.lm.execution.shards != model.lm.execution.shards
    return leaves(file_order(other.lm, other.params))


def rounded(model: Any) -> list[np.ndarray]:
    return leaves(file_order(model.lm, quantize(model.params)))


READERS: dict[str, Callable[[Any], Any]] = {
    "save": saved,
    "export": exported,
    "describe": described,
    "draft": as_draft,
    "heads": of_heads,
    "kernels": packed,
    "shard": moved,
    "quantize": rounded,
}
FLOATS = ("save", "export", "quantize")
"""Readers that take no rounded weights."""


def cases(every: bool) -> list[tuple[str, str, tuple[int, int], str]]:
    """Every reader with every mesh and dtype, or with eight such pairs; each pair has a family of its own."""
    found, kinds = [], list(KINDS)
    for reader, (i, mesh), (j, dtype) in itertools.product(READERS, enumerate(MESHES), enumerate(DTYPES_OF_CASES)):
        kind = kinds[(i + j) % len(kinds)]
        if reader == "export" and kind not in ("llama", "biases"):  # those that a config.json of Llama describes
            kind = "llama"
        if not every and (i >= 4 or (i + j) % 3 == 2):
            continue
        if not (reader in FLOATS and dtype == "int8"):
            found.append((reader, kind, mesh, dtype))
    return found


def run(every: bool) -> list[str]:
    """Runs the cases; returns those in which a placed model is read as another than on one device."""
    models = {(kind, dtype): make_model(kind, dtype) for kind in KINDS for dtype in DTYPES_OF_CASES}
    plain: dict[Any, Any] = {}
    placed: dict[Any, Any] = {}
    wrong = []
    for reader, kind, mesh, dtype in cases(every):
        if reader == "kernels" and not kernels_available():
            continue
        model, key = models[kind, dtype], (reader, kind, dtype)
        if reader in ("save", "export", "quantize"):
            expected = leaves(quantize(model.params) if reader == "quantize" else model.params)
        elif reader in ("kernels", "shard"):
            expected = leaves(model.params)
        else:
            expected = plain[key] if key in plain else plain.setdefault(key, READERS[reader](model))
        where = kind, dtype, mesh
        placed.setdefault(where, jaxspec.shard(model, jaxspec.make_mesh(*mesh)))
        try:
            found = READERS[reader](placed[where])
            same = len(found) == len(expected) and all(map(_same, found, expected))
        except Exception as error:
            same, found = False, f"{type(error).__name__}: {error}"
        if not same:
            wrong.append(f"{reader} {kind} {dtype} on {mesh}: {found if isinstance(found, str) else 'differs'}")
    return wrong


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return one == other
