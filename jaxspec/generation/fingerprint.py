"""What decides the texts of a job, as JSON: two jobs with equal descriptions write the same texts.

Which way round matrices are stored, the kind of device and the batch are no part of it. With the coupled rule the
drafter is none either, since the text does not depend on it.
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
from jaxspec.models.out_major import OutMajor
from jaxspec.models.transformer import TransformerLM
from jaxspec.text.tokenizer import Tokenizer

_DEPTH = 24  # of nested values that are described; deeper ones are named by their type


def describe(job: Job, stops: tuple[str, ...]) -> dict[str, Any]:
    """Everything that decides the texts of a job, by name.

    Args:
        job: the job.
        stops: the strings that end a text.
    """
    decoder, lm = job.decoder, job.target.lm
    sampling = {f.name: _numbers(getattr(job.sampling, f.name)) for f in dataclasses.fields(job.sampling)}
    free = decoder.rule.noise is Noise.SHARED and bool(decoder.widths)
    drafting = (decoder.drafter, decoder.schedule, decoder.widths)
    return {
        "noise": noise.VERSION,
        "network": static(lm),
        "context": lm.context,
        "weights": digest(weights(job.target.params)),
        "tokenizer": None if job.target.tokenizer is None else _tokens(job.target.tokenizer),
        "prompts": digest(job.ids),
        "key": digest(np.asarray(jax.random.key_data(job.keys)).tolist()),
        "sampling": digest(sampling),
        "max_new_tokens": int(job.max_new_tokens),
        "samples": int(job.samples),
        "stops": digest([list(stops), np.asarray(job.stop_ids).tolist()]),
        "rule": static(decoder.rule),
        "logprobs": job.logprobs,
        "drafter": "any" if free else digest([static(drafting), weights(job.weights.draft)]),
    }


def digest(value: Any) -> str:
    """The first 16 digits of the sha256 of a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def difference(there: Any, here: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first place where two descriptions differ: its dotted name and both values; None if they are equal."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in [*here, *(key for key in there if key not in here)]:
            if found := difference(there.get(key), here.get(key), f"{name}.{key}" if name else key):
                return found
        return None
    return None if there == here else (name, there, here)


def static(value: Any, depth: int = 0) -> Any:
    """A static value as JSON, the same in every process: dataclasses by their fields, functions by their code."""
    below = functools.partial(static, depth=depth + 1)
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if depth > _DEPTH:
        return _name(type(value))
    if isinstance(value, TransformerLM):
        value = dataclasses.replace(value, known=value.vocab)  # None is all of them
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return digest(weights(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"kind": _name(type(value))} | {f.name: below(getattr(value, f.name)) for f in dataclasses.fields(value)}
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
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        return [_name(value), _code(value.__code__), *map(below, (value.__defaults__, value.__kwdefaults__, held))]
    if inner := getattr(value, "__wrapped__", None):  # jax.jit
        return below(inner)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _code(code: types.CodeType) -> str:
    """What a function does; where it was defined is no part of it."""
    inner = [_code(one) if isinstance(one, types.CodeType) else static(one) for one in code.co_consts]
    return digest([code.co_code.hex(), inner, code.co_names, code.co_varnames, code.co_freevars])


def _numbers(value: Any) -> Any:
    """A sampling setting as the float32 numbers that it is used as."""
    if isinstance(value, Mapping):
        return sorted([int(token), float(np.float32(bias))] for token, bias in value.items())
    return None if value is None else np.asarray(value, np.float32).tolist()


def _tokens(tokenizer: Tokenizer) -> str:
    """A digest of what decides the text of token ids; how text is encoded shows in the prompts' ids."""
    found = hashlib.sha256(repr((tokenizer.strips_space, sorted(tokenizer.special_ids))).encode())
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.token_bytes(token)
        found.update(len(piece).to_bytes(4, "little") + piece)
    return found.hexdigest()[:16]


def weights(params: Any) -> list[list]:
    """What tells parameters apart: the name, shape, dtype and checksum of every array.

    A float matrix has the same checksum whichever way round it is stored.
    """

    def turned(leaf: Any) -> bool:
        return isinstance(leaf, OutMajor) and leaf.scale is None

    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=turned):
        held = jnp.asarray(leaf.values if turned(leaf) else leaf)
        if jnp.issubdtype(held.dtype, jax.dtypes.prng_key):
            held = jax.random.key_data(held)
        sums = [f"{int(part):08x}" for part in _checksum(held, turned(leaf))]
        shape = held.shape[::-1] if turned(leaf) else held.shape
        found.append([jax.tree_util.keystr(path), list(shape), str(held.dtype), "".join(sums)])
    return found


@functools.partial(jax.jit, static_argnums=1)
def _checksum(array: jax.Array, turned: bool) -> tuple[jax.Array, jax.Array]:
    """Two sums, modulo 2^32, of every number's bits mixed with its place; of the transpose where `turned`.

    Sums of integers are exact in any order, so they are the same on every device and mesh, and reading the weights
    once on the device is all that they cost.
    """
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    width = jnp.dtype(array.dtype).itemsize
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array, width = jnp.stack([array.real, array.imag], axis=-1), width // 2
    if width == 8:
        bits = lax.bitcast_convert_type(array, jnp.uint32)  # with an axis of two more
    else:
        bits = lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * width}")).astype(jnp.uint32)
    place, step = jnp.zeros(bits.shape, jnp.uint32), 1
    for axis in range(bits.ndim) if turned else reversed(range(bits.ndim)):
        place += lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * np.uint32(step % 2**32)
        step *= bits.shape[axis]

    def mixed(seed: int) -> jax.Array:  # the finalizer of MurmurHash3
        word = bits ^ (place * np.uint32(0x9E3779B1) + np.uint32(seed))
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            word = (word ^ (word >> shift)) * np.uint32(factor)
        return jnp.sum(word ^ (word >> 16), dtype=jnp.uint32)

    return mixed(0x243F6A88), mixed(0x13198A2E)
