"""One neutral view of a checkpoint, whatever format it lies in, and how it becomes a parameter tree.

A format module (`gguf`, `hf`) reads the headers and hands back a `Checkpoint`: its config and, for every
parameter of `ModelConfig.param_shapes`, a function that reads it. No weight is read before it is asked for.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.errors import CheckpointError, InvalidConfig, UnknownName
from jaxspec.models.config import ModelConfig

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True)
class TokenizerSource:
    """Where a checkpoint keeps its tokenizer; exactly one of the two is given.

    Attributes:
        json_path: path of a `tokenizer.json`.
        gguf: every `tokenizer.*` metadata entry of a GGUF file, under its full key
            (`tokenizer.ggml.tokens`, ...); arrays are lists.
    """

    json_path: str | None = None
    gguf: Mapping[str, object] | None = None

    def __post_init__(self):
        if (self.json_path is None) == (self.gguf is None):
            raise InvalidConfig("TokenizerSource needs exactly one of json_path and gguf")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with its headers read and its weights not yet.

    Attributes:
        config: sizes and constants of the model.
        source: what the user named.
        tensors: canonical parameter name -> a function that reads it, float32, in the canonical layout.
        stop_ids: ids that end a text (end of sequence, end of turn).
        bos_id: id of the beginning-of-sequence token, if there is one.
        add_bos: the model expects `bos_id` in front of a text.
        tokenizer: where the tokenizer is, or None.
        chat_template: Jinja source of the chat template, or None.
        special_tokens: the spelling of `bos_token`, `eos_token`, ... as chat templates use them.
    """

    config: ModelConfig
    source: str
    tensors: Mapping[str, Callable[[], np.ndarray]]
    stop_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    add_bos: bool = False
    tokenizer: TokenizerSource | None = None
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        ids = self.stop_ids if self.bos_id is None else (*self.stop_ids, self.bos_id)
        for token in ids:
            if type(token) is not int or not 0 <= token < self.config.vocab_size:
                last = self.config.vocab_size - 1
                raise CheckpointError(f"{self.source}: special token id {token!r}, expected 0 .. {last}")


def open_source(
    source: str | os.PathLike, revision: str | None = None, report: Callable[[str], object] | None = None
) -> Checkpoint:
    """Opens what a user names: a preset, a path, or a `organization/name` repository of the Hugging Face Hub.

    Args:
        source: the name; a preset comes before a path of the same name (write `./name` for the path).
        revision: branch, tag or commit of a Hub repository.
        report: called with one line of text per step of a download.

    Raises:
        UnknownName: it is none of the three.
        FetchError: the download failed.
        CheckpointError: what was found is not a checkpoint that can be read.
    """
    from jaxspec.models import hub, presets

    name = os.fspath(source)
    if name in presets.PRESETS:
        return dataclasses.replace(open_checkpoint(presets.fetch(name, report=report)), source=name)
    if os.path.exists(os.path.expanduser(name)):
        return open_checkpoint(name)
    if name.endswith(".gguf") or name.startswith((".", "~", "/")):
        raise CheckpointError(f"{name}: no such file or directory")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII):
        return dataclasses.replace(open_checkpoint(hub.fetch_repository(name, revision)), source=name)
    raise UnknownName("model (a preset, a path or a Hub repository)", name, presets.PRESETS)


def open_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """Opens a GGUF file or a Hugging Face directory.

    Raises:
        CheckpointError: it does not exist, is neither, is malformed, or is of a model that is not read.
    """
    from jaxspec.models import gguf, hf

    place = pathlib.Path(path).expanduser()
    if os.path.isdir(place):
        return hf.open_hf(place)
    if place.suffix.lower() == ".gguf" and os.path.isfile(place):
        return gguf.open_gguf(place)
    if not os.path.exists(place):
        raise CheckpointError(f"{place}: no such file or directory")
    raise CheckpointError(
        f"{place}: not a checkpoint that is read; give a .gguf file, or a directory with config.json and "
        "safetensors weights (for a .safetensors file, give its directory)"
    )


def read_params(
    checkpoint: Checkpoint, dtype: str = "float32", progress: Callable[[int, int, str], object] | None = None
) -> dict:
    """Reads all weights, one parameter at a time.

    Args:
        checkpoint: what `open_checkpoint` gave.
        dtype: "float32" or "bfloat16", for every parameter.
        progress: called as `progress(done, total, name)` after each parameter.

    Returns:
        A tree of numpy arrays: `{"embed": [V, E], "layers": [{"attn_norm": [E], "qkv": ..., ...}, ...],
        "norm": [E]}`, and `"head": [V, E]` unless the config ties it; see `ModelConfig.param_shapes`.

    Raises:
        InvalidConfig: the dtype is neither of the two.
        CheckpointError: a parameter is missing, unknown, of the wrong shape, or not finite.
    """
    if dtype not in DTYPES:
        raise InvalidConfig(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    shapes = checkpoint.config.param_shapes()
    refuse_difference(checkpoint.source, shapes, checkpoint.tensors)
    tree: dict = {"layers": [{} for _ in range(checkpoint.config.num_layers)]}
    for done, (name, shape) in enumerate(shapes.items(), start=1):
        array = checkpoint.tensors[name]()
        check_shape(checkpoint.source, name, array.shape, shape)
        array = finite(checkpoint.source, name, np.ascontiguousarray(array, DTYPES[dtype]))
        *layer, leaf = name.split(".")
        (tree["layers"][int(layer[1])] if layer else tree)[leaf] = array
        if progress is not None:
            progress(done, len(shapes), name)
    return tree


# --- for the format modules ---------------------------------------------------------------------------------


def make_config(where: str, **values: Any) -> ModelConfig:
    """`ModelConfig(**values)`, where floats may stand as whole numbers and a bad value is the file's.

    Raises:
        CheckpointError: a size or constant has a value it cannot have.
    """
    try:
        floats: dict[str, Any] = {
            key: float(values[key]) for key in ("rope_theta", "norm_eps") if type(values[key]) is int
        }
        return ModelConfig(**values | floats)
    except (InvalidConfig, OverflowError) as error:
        raise CheckpointError(f"{where}: {error}") from None


def canonical_tensors(
    where: str,
    config: ModelConfig,
    names: Mapping[str, tuple[str, ...]],
    found: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
) -> dict[str, Callable[[], np.ndarray]]:
    """Maps a file's tensors to canonical parameters, and refuses the file unless they match one to one.

    Args:
        where: the file, for messages.
        config: what the model should be.
        names: parameter kind ("embed", "qkv", ...) -> the file's tensors it is made of, in order, with `{}`
            for the number of the layer.
        found: the file's tensors and their shapes; matrices stand [out, in].
        read: gives one tensor of the file, float32.

    Raises:
        CheckpointError: a tensor is missing, left over, or has another shape than the config says.
    """
    if config.num_layers > len(found):  # before anything is made per layer
        raise CheckpointError(f"{where}: {config.num_layers} layers and only {len(found)} tensors")
    expected: dict[str, tuple[int, ...]] = {}
    readers = {}
    for canonical, shape in config.param_shapes().items():
        *layer, kind = canonical.split(".")
        parts = [name.format(*layer[1:]) for name in names[kind]]
        stands_out_in = kind not in ("embed", "head") and len(shape) == 2
        expected |= zip(parts, _file_shapes(config, kind, shape) if stands_out_in else [shape], strict=True)
        readers[canonical] = _reader(read, parts, stands_out_in)
    refuse_difference(where, expected, found)
    for name, shape in expected.items():
        check_shape(where, name, found[name], shape)
    return readers


def refuse_difference(where: str, expected: Iterable[str], found: Iterable[str]) -> None:
    """Raises CheckpointError, naming them, when tensors are missing or left over."""
    missing = sorted(set(expected) - set(found))
    extra = sorted(set(found) - set(expected))
    for names, problem in ((missing, "missing"), (extra, "not expected")):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise CheckpointError(f"{where}: tensors {problem}: {', '.join(names[:5])}{more}")


def check_shape(where: str, name: str, got: Iterable[int], expected: Iterable[int]) -> None:
    """Raises CheckpointError when the shape of tensor `name` is not the expected one."""
    if tuple(got) != tuple(expected):
        raise CheckpointError(f"{where}: tensor {name} has shape {list(got)}, expected {list(expected)}")


def finite(where: str, name: str, array: np.ndarray) -> np.ndarray:
    """Gives the array back; raises CheckpointError when it holds a NaN or an infinity."""
    if not np.isfinite(array).all():
        raise CheckpointError(f"{where}: tensor {name} has weights that are not finite")
    return array


def _file_shapes(config: ModelConfig, kind: str, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    inputs, outputs = shape
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    widths = {"qkv": (query, key, key), "gate_up": (outputs // 2,) * 2}.get(kind, (outputs,))
    return [(width, inputs) for width in widths]


def _reader(read: Callable[[str], np.ndarray], parts: list[str], transpose: bool) -> Callable[[], np.ndarray]:
    def reader() -> np.ndarray:
        arrays = [read(part) for part in parts]
        array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return np.ascontiguousarray(array.T) if transpose else array

    return reader
