"""One neutral view of a checkpoint, whatever format it lies in.

A format module (`gguf`, `hf`) reads the headers and hands back a `Checkpoint`: its config and, for every
parameter of `ModelConfig.param_shapes`, a function that reads it. No weight is read before it is asked for.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.models.config import ModelConfig

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
WEIGHTS = (*DTYPES, "int8")
"""What a model's matrices may be kept in."""


def beside(dtype: str) -> str:
    """What caches and heads are kept in beside such matrices."""
    return "float32" if dtype == "int8" else dtype


@dataclasses.dataclass(frozen=True)
class TokenizerSource:
    """Where a checkpoint keeps its tokenizer; exactly one of the two is given.

    Attributes:
        json_path: path of a `tokenizer.json`.
        gguf: every `tokenizer.*` metadata entry of a GGUF file, under its full key
            (`tokenizer.ggml.tokens`, ...); arrays are lists.
    """

    json_path: str | None = None
    gguf: Mapping[str, object] | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self):
        if (self.json_path is None) == (self.gguf is None):
            raise InvalidConfig("TokenizerSource needs exactly one of json_path and gguf")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """How a file holds one tensor.

    Attributes:
        type: the file's name of the number format, such as "Q4_1" or "BF16".
        shape: rows first, as the file has it.
        bytes: in the file; 0 where the type is not known.
    """

    type: str
    shape: tuple[int, ...]
    bytes: int


@dataclasses.dataclass(frozen=True)
class Headers:
    """What a checkpoint says of itself, whether or not its model is read.

    Attributes:
        settings: the metadata of a GGUF file, or what config.json holds.
        stored: the file's tensors.
    """

    settings: Mapping[str, Any]
    stored: Mapping[str, StoredTensor]


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
        architecture: the file's own name of the kind of model.
        stored: the file's tensors, under its own names.
    """

    config: ModelConfig
    source: str
    tensors: Mapping[str, Callable[[], np.ndarray]] = dataclasses.field(repr=False)
    stop_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    add_bos: bool = False
    tokenizer: TokenizerSource | None = None
    chat_template: str | None = dataclasses.field(default=None, repr=False)
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    architecture: str = ""
    stored: Mapping[str, StoredTensor] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self):
        ids = self.stop_ids if self.bos_id is None else (*self.stop_ids, self.bos_id)
        for token in ids:
            if type(token) is not int or not 0 <= token < self.config.vocab_size:
                last = self.config.vocab_size - 1
                raise CheckpointError(f"{self.source}: special token id {token!r:.80}, expected 0 .. {last}")
        template = self.chat_template
        if template is not None and not isinstance(template, str):
            raise CheckpointError(f"{self.source}: the chat template is {template!r:.80}, expected a text")
        for name, text in self.special_tokens.items():
            if not isinstance(text, str):
                raise CheckpointError(f"{self.source}: special token {name!r:.80} is {text!r:.80}, expected a text")


# --- for the format modules ---------------------------------------------------------------------------------


def make_config(where: str, **values: Any) -> ModelConfig:
    """`ModelConfig(**values)`, where floats may stand as whole numbers and a bad value is the file's.

    Raises:
        CheckpointError: a size or constant has a value it cannot have.
    """
    try:
        if type(values["norm_eps"]) is int:
            values["norm_eps"] = float(values["norm_eps"])
        return ModelConfig(**values)
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
        expected |= zip(parts, _file_shapes(config, kind, shape, len(parts)), strict=True)
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


def _file_shapes(config: ModelConfig, kind: str, shape: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    """The shapes of the file's tensors that make one parameter: matrices stand [out, in], fused ones may be apart."""
    if parts == 1:
        return [shape if kind in ("embed", "head") else shape[::-1]]
    *inputs, outputs = shape
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    widths = (query, key, key) if kind.startswith("qkv") else (outputs // parts,) * parts
    return [(width, *inputs) for width in widths]


def _reader(read: Callable[[str], np.ndarray], parts: list[str], transpose: bool) -> Callable[[], np.ndarray]:
    def reader() -> np.ndarray:
        arrays = [read(part) for part in parts]
        array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return np.ascontiguousarray(array.T) if transpose else array

    return reader
