"""Descriptions of jobs as JSON: two jobs with equal descriptions generate the same texts.

The layout of matrices, the kind of device and the batch size are not part of a description. With the coupled rule, the
drafter is not part of it either, because the text does not depend on the drafter.
"""

import dataclasses
import enum
import functools
import hashlib
import json
import math
import re
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.core import noise
from jaxspec.core.draw import Noise
from jaxspec.generation.job import Job
from jaxspec.models.columns import file_order
from jaxspec.models.packed import Packed, is_packed, unpack_param
from jaxspec.models.transformer import TransformerLM
from jaxspec.text.tokenizer import Tokenizer

_MAX_DEPTH = 24  # levels of nested values that are described; deeper values are described by their type


_EARLIER_NAMES = {
    "jaxspec.core.topology.Dynamic": "jaxspec.core.tree.Dynamic",
    "jaxspec.core.topology.Topology": "jaxspec.core.tree.Topology",
    "jaxspec.heads.medusa_config.HeadsConfig": "jaxspec.heads.config.HeadsConfig",
}
"""Classes that were moved to another module. Results files that were begun before the move keep their descriptions."""
LATER_FIELDS = {
    "jaxspec.models.config.ModelConfig": ("out_gate", "delta", "recurrent", "experts", "sparse", "sinks"),
    "jaxspec.models.config.Experts": ("biases",),
    "jaxspec.heads.eagle_config.EagleConfig": ("pair_norms",),
    "jaxspec.schedules.best_width.BestWidth": ("experts",),
}
"""Fields that classes got after results files and manifests of training were written. With its default, such a field
is not described."""


def describe_job(job: Job, stops: tuple[str, ...]) -> dict[str, Any]:
    """Describes everything that determines the texts of a job, by name.

    Args:
        job: the job.
        stops: the stop strings.
    """
    decoder, lm = job.decoder, job.target.lm
    settings = {f.name: getattr(job.sampling, f.name) for f in dataclasses.fields(job.sampling)}
    processors = settings.pop("processors")
    # None and the missing entry describe settings without processors, as in results files from before there were any.
    sampling = {name: _numbers(value) for name, value in settings.items()} | {"logit_bias": None}
    if processors:
        rows = jax.tree.map(_without_copies, [one.rows(len(job.turns), lm.vocab) for one in processors])
        sampling["processors"] = describe_static(rows)
    drafter_free = decoder.rule.noise is Noise.SHARED and not decoder.width_matched
    drafting = (decoder.drafter, decoder.schedule, decoder.width_matched or decoder.widths)
    drafts = [describe_static(drafting), describe_weights(job.weights.draft)]
    if job.history is not None:
        drafts.append(job.history.tolist())
    return {
        "noise": noise.NOISE_VERSION,
        "network": describe_static(lm),
        "context": lm.context,
        "weights": digest(describe_weights(file_order(lm, job.target.params))),
        "tokenizer": None if job.target.tokenizer is None else _tokens(job.target.tokenizer),
        "prompts": digest(job.ids),
        "key": digest(np.asarray(jax.random.key_data(job.keys)).tolist()),
        "sampling": digest(sampling),
        "max_new_tokens": int(job.max_new_tokens),
        "samples": int(job.samples),
        "stops": digest([list(stops), np.asarray(job.stop_ids).tolist()]),
        "rule": describe_static(decoder.rule),
        "logprobs": job.logprobs,
        "drafter": "any" if drafter_free else digest(drafts),
    }


def digest(value: Any) -> str:
    """Returns the first 16 hexadecimal digits of the sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def find_difference(before: Any, now: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Returns the dotted name of the first difference of two descriptions, and both values; None if they are equal."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*now, *(key for key in before if key not in now)]:
            if different := find_difference(before.get(key), now.get(key), f"{name}.{key}" if name else key):
                return different
        return None
    return None if before == now else (name, before, now)


def describe_static(value: Any, depth: int = 0) -> Any:
    """Describes a static value as JSON, the same in every process: dataclasses by fields, functions by code."""
    below = functools.partial(describe_static, depth=depth + 1)
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if depth > _MAX_DEPTH:
        return _name(type(value))
    if isinstance(value, TransformerLM):
        return _describe_transformer(value, depth)
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return digest(describe_weights(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = _name(type(value))
        later = LATER_FIELDS.get(kind, ())
        fields = {f.name: f.default for f in dataclasses.fields(value)}
        described = (n for n, default in fields.items() if n not in later or getattr(value, n) != default)
        return {"kind": kind} | {name: below(getattr(value, name)) for name in described}
    if isinstance(value, Mapping):
        return {str(key): below(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (set, frozenset)):
        return sorted(map(below, value), key=json.dumps)
    if isinstance(value, (tuple, list)):
        return list(map(below, value))
    if isinstance(value, functools.partial):
        return [below(value.func), below(value.args), below(value.keywords)]
    if isinstance(value, types.MethodType):
        return [below(value.__self__), below(value.__func__)]
    if isinstance(value, types.FunctionType):
        captured = [cell.cell_contents for cell in value.__closure__ or ()]
        return [_name(value), _code(value.__code__), *map(below, (value.__defaults__, value.__kwdefaults__, captured))]
    if inner := getattr(value, "__wrapped__", None):  # jax.jit
        return below(inner)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _describe_transformer(lm: TransformerLM, depth: int) -> dict[str, Any]:
    """Describes what a network computes, without its `Execution`. `known` of None means the whole vocabulary."""
    fields = {f.name: getattr(lm, f.name) for f in dataclasses.fields(lm) if f.name != "execution"}
    described = {name: describe_static(value, depth + 1) for name, value in (fields | {"known": lm.vocab}).items()}
    # These two are constants: results files and training manifests have contained them since the first version.
    return {"kind": _name(TransformerLM), "kernels": False, "shards": 1} | described


def _name(value: Any) -> str:
    """Returns the full name of a class or function as it is written in results files."""
    name = f"{value.__module__}.{value.__qualname__}"
    return _EARLIER_NAMES.get(name, name)


def _code(code: types.CodeType) -> str:
    """Describes what a function does, independently of where it is defined."""
    inner = [_code(value) if isinstance(value, types.CodeType) else describe_static(value) for value in code.co_consts]
    return digest([code.co_code.hex(), inner, code.co_names, code.co_varnames, code.co_freevars])


def _numbers(value: Any) -> Any:
    """Returns a sampling setting as the float32 numbers that are used in sampling."""
    return np.asarray(value, np.float32).tolist()


def _without_copies(leaf: Any) -> Any:
    """Returns an array of rows; one row, if all rows are the same memory."""
    return leaf[:1] if isinstance(leaf, np.ndarray) and len(leaf) and leaf.strides[0] == 0 else leaf


def _tokens(tokenizer: Tokenizer) -> str:
    """Returns a digest of the text of each token id; encoding is described by the ids of the prompts."""
    digest = hashlib.sha256(repr((tokenizer.strips_space, sorted(tokenizer.special_ids))).encode())
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.token_bytes(token)
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.hexdigest()[:16]


def describe_weights(params: Any) -> list[list]:
    """Returns the name, shape, dtype and checksum of every array of a pytree.

    Packed floats are described as unpacked floats. Packed int8 values and blocks are described as they are: products
    with them also round the rows of the other factor, which makes a different model.
    """
    descriptions = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_packed):
        values = unpack_param(path[-1].key, leaf) if isinstance(leaf, Packed) and leaf.scale is None else leaf
        for inner, array in jax.tree_util.tree_leaves_with_path(values):
            array = jnp.asarray(array)
            if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
                array = jax.random.key_data(array)
            sums = "".join(f"{int(part):08x}" for part in _checksum(array))
            descriptions.append([jax.tree_util.keystr((*path, *inner)), list(array.shape), str(array.dtype), sums])
    return descriptions


@jax.jit
def _checksum(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes two sums modulo 2^32 of each number's bits mixed with its index.

    Integer sums are exact in any order, so they are the same on every device and mesh. They cost one pass over the
    weights on the device.
    """
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    width = jnp.dtype(array.dtype).itemsize
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array, width = jnp.stack([array.real, array.imag], axis=-1), width // 2
    if width == 8:
        bits = lax.bitcast_convert_type(array, jnp.uint32)  # adds an axis of size 2
    else:
        bits = lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * width}")).astype(jnp.uint32)
    index, step = jnp.zeros(bits.shape, jnp.uint32), 1
    for axis in reversed(range(bits.ndim)):
        index += lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * np.uint32(step % 2**32)
        step *= bits.shape[axis]

    def mixed(seed: int) -> jax.Array:  # the finalizer of MurmurHash3
        word = bits ^ (index * np.uint32(0x9E3779B1) + np.uint32(seed))
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            word = (word ^ (word >> shift)) * np.uint32(factor)
        return jnp.sum(word ^ (word >> 16), dtype=jnp.uint32)

    return mixed(0x243F6A88), mixed(0x13198A2E)
