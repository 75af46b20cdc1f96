"""Reads GGUF files (versions 2 and 3, little endian) of the llama architecture.

The header is parsed here, over a memory map, and nothing in it is believed: every count, length, dimension
and offset is held against the bytes that are left before anything is made from it. Only the blocks of
quantised tensors are decoded by the `gguf` package.
"""

import dataclasses
import functools
import math
import mmap
import os
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.errors import CheckpointError
from jaxspec.models.checkpoint import Checkpoint, TokenizerSource, canonical_tensors, finite, make_config
from jaxspec.models.config import ModelConfig

ARCHITECTURES = ("llama",)

_NAMES = {
    "embed": ("token_embd.weight",),
    "attn_norm": ("blk.{}.attn_norm.weight",),
    "qkv": ("blk.{}.attn_q.weight", "blk.{}.attn_k.weight", "blk.{}.attn_v.weight"),
    "out": ("blk.{}.attn_output.weight",),
    "mlp_norm": ("blk.{}.ffn_norm.weight",),
    "gate_up": ("blk.{}.ffn_gate.weight", "blk.{}.ffn_up.weight"),
    "down": ("blk.{}.ffn_down.weight",),
    "norm": ("output_norm.weight",),
    "head": ("output.weight",),
}
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {kind: struct.Struct("<" + code) for kind, code in _FORMATS.items()}
_STRING, _ARRAY = 8, 9
_MAX_ITEMS = 1 << 24  # of one metadata array
_SMALLEST_ENTRY, _SMALLEST_TENSOR = 8 + 1 + 4 + 1, 8 + 1 + 4 + 8 + 4 + 8
_SPECIAL = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}
# Tokenizers whose models expect the beginning-of-sequence token although their file need not say so.
_ADDS_BOS = ("llama-bpe", "llama3", "llama-v3")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One entry of the tensor table: type, numpy shape (rows first), and its bytes [start, stop)."""

    kind: int
    shape: tuple[int, ...]
    start: int
    stop: int


class _Cursor:
    """Reads the header in order, and never past the end."""

    def __init__(self, data, where: str):
        self.data, self.where, self.at = data, where, 0

    def fail(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {problem} (at byte {self.at})")

    def skip(self, size: int, what: str) -> int:
        """Moves past `size` bytes; gives where they begin."""
        left = len(self.data) - self.at
        if size > left:
            raise self.fail(f"{what} takes {size} bytes, {left} are left: truncated or malformed")
        self.at += size
        return self.at - size

    def scalar(self, kind: int, what: str):
        reader = _SCALARS[kind]
        return reader.unpack_from(self.data, self.skip(reader.size, what))[0]

    def count(self, smallest: int, what: str) -> int:
        """A count of items of at least `smallest` bytes each, which must still fit the file."""
        count, left = self.scalar(10, what), len(self.data) - self.at
        if count > left // smallest:
            raise self.fail(f"{what} is {count}, {left} bytes are left: truncated or malformed")
        return count

    def string(self, what: str) -> str:
        size = self.count(1, f"the length of {what}")
        start = self.skip(size, what)
        try:
            return self.data[start : start + size].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def name(self, what: str, taken: Mapping[str, object]) -> str:
        name = self.string(what)
        if not name or len(name) > 65535 or name in taken:
            raise self.fail(f"{what} {name[:80]!r} is empty, too long or given twice")
        return name

    def value(self, key: str):
        kind = self.scalar(4, f"the type of {key}")
        if kind == _ARRAY:
            return self.array(key)
        if kind == _STRING:
            return self.string(key)
        if kind not in _SCALARS:
            raise self.fail(f"{key} has type {kind}, expected 0 .. 12")
        return self.scalar(kind, key)

    def array(self, key: str) -> list:
        kind = self.scalar(4, f"the item type of {key}")
        if kind not in _SCALARS and kind != _STRING:
            raise self.fail(f"{key} is an array of type {kind}; arrays of numbers and of strings are read")
        size = 8 if kind == _STRING else _SCALARS[kind].size
        count = self.count(size, f"the number of items of {key}")
        if count > _MAX_ITEMS:
            raise self.fail(f"{key} has {count} items, expected at most {_MAX_ITEMS}")
        if kind == _STRING:
            return [self.string(key) for _ in range(count)]
        start = self.skip(count * size, key)
        return list(struct.unpack_from(f"<{count}{_FORMATS[kind]}", self.data, start))

    def tensor(self, name: str) -> tuple[int, tuple[int, ...], int]:
        """Type, numpy shape and offset of one entry of the tensor table."""
        dimensions = self.scalar(4, f"the number of dimensions of {name}")
        if not 1 <= dimensions <= 4:
            raise self.fail(f"tensor {name} has {dimensions} dimensions, expected 1 .. 4")
        shape = tuple(self.scalar(10, f"the shape of {name}") for _ in range(dimensions))[::-1]
        if 0 in shape or math.prod(shape) >= 1 << 63:
            raise self.fail(f"tensor {name} has shape {list(shape)}: empty or too large")
        return self.scalar(4, f"the type of {name}"), shape, self.scalar(10, f"the offset of {name}")


def parse_header(data, where: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Parses the header of a GGUF file.

    Args:
        data: the whole file, as bytes or a memory map.
        where: its name, for messages.

    Returns:
        The metadata (arrays as lists) and the tensors by name.

    Raises:
        CheckpointError: anything is malformed, truncated, overlapping, given twice, or of a type not read.
    """
    cursor = _Cursor(data, where)
    start = cursor.skip(4, "the magic number")
    if (magic := bytes(data[start : start + 4])) != b"GGUF":
        raise CheckpointError(f"{where}: begins with {magic!r}, expected b'GGUF': not a GGUF file")
    version = cursor.scalar(4, "the version")
    if version in (2 << 24, 3 << 24):
        raise CheckpointError(f"{where}: a big-endian GGUF file; only little-endian ones are read")
    if version not in (2, 3):
        raise CheckpointError(f"{where}: GGUF version {version}, expected 2 or 3; convert the model again")
    num_tensors = cursor.count(_SMALLEST_TENSOR, "the number of tensors")
    num_entries = cursor.count(_SMALLEST_ENTRY, "the number of metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.name("a metadata key", metadata)
        metadata[key] = cursor.value(key)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, expected a power of two")
    entries: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for _ in range(num_tensors):
        name = cursor.name("a tensor name", entries)
        entries[name] = cursor.tensor(name)
    base = -(-cursor.at // alignment) * alignment
    tensors = {name: _locate(where, name, entry, base, alignment) for name, entry in entries.items()}
    end, before = base, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start < end:
            raise CheckpointError(f"{where}: tensors {before} and {name} overlap")
        if tensor.stop > len(data):
            raise CheckpointError(
                f"{where}: tensor {name} ends at byte {tensor.stop}, the file at {len(data)}: truncated"
            )
        end, before = tensor.stop, name
    return metadata, tensors


def open_gguf(path: str | os.PathLike) -> Checkpoint:
    """Opens a GGUF file; the weights are read from its memory map when asked for.

    Raises:
        CheckpointError: the file is malformed, or of a model that is not read.
    """
    where = os.fspath(path)
    try:
        with open(where, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{where}: cannot be read: {error}") from None
    metadata, tensors = parse_header(data, where)
    config = _config(where, metadata, tensors)

    def read(name: str) -> np.ndarray:
        array = finite(where, name, _decode(data, tensors[name]))
        rotates = name.endswith(("attn_q.weight", "attn_k.weight"))
        return _rotation_halves(array, config.head_dim) if rotates else array

    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    readers = canonical_tensors(where, config, _NAMES, shapes, read)
    text = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    tokens = text.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens[:1]):
        raise CheckpointError(f"{where}: metadata tokenizer.ggml.tokens is not an array of strings")
    if tokens and len(tokens) != config.vocab_size:
        raise CheckpointError(
            f"{where}: tokenizer.ggml.tokens has {len(tokens)} items, token_embd.weight {config.vocab_size} "
            "rows; expected as many"
        )
    ids = {name: text.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    ends: list[Any] = [ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None]
    model, kind = text.get("tokenizer.ggml.model"), text.get("tokenizer.ggml.pre")
    adds_bos = text.get("tokenizer.ggml.add_bos_token", model == "llama" or kind in _ADDS_BOS)
    template = text.get("tokenizer.chat_template")
    return Checkpoint(
        config=config,
        source=where,
        tensors=readers,
        stop_ids=tuple(token for i, token in enumerate(ends) if token not in ends[:i]),
        bos_id=ids["bos"],
        add_bos=bool(adds_bos) and ids["bos"] is not None,
        tokenizer=TokenizerSource(gguf=text) if tokens else None,
        chat_template=template if isinstance(template, str) else None,
        special_tokens={
            f"{name}_token": tokens[token]
            for name, token in ids.items()
            if isinstance(token, int) and 0 <= token < len(tokens)
        },
    )


def _config(where: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ModelConfig:
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(f"{where}: architecture {architecture!r} is not read; read: {', '.join(ARCHITECTURES)}")

    def get(key: str, default=None) -> Any:
        value = metadata.get(f"llama.{key}", default)
        if type(value) not in (int, float):
            problem = "is missing" if value is None else f"is {str(value)[:80]!r}, expected one number"
            raise CheckpointError(f"{where}: metadata llama.{key} {problem}")
        with np.errstate(over="ignore"):  # taken as the shortest decimal: 1e-05, not 9.999999747378752e-06
            return float(str(np.float32(value))) if isinstance(value, float) else value

    for name in ("token_embd.weight", "output_norm.weight"):
        if name not in tensors:
            raise CheckpointError(f"{where}: tensors missing: {name}")
    rows = tensors["token_embd.weight"].shape[0]
    hidden, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", hidden // heads if heads else 0)
    for key, plain in {
        "vocab_size": rows,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "expert_count": 0,
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scale_linear": 1.0,
    }.items():
        if (value := metadata.get(f"llama.{key}", plain)) != plain:
            raise CheckpointError(
                f"{where}: metadata llama.{key} is {value!r}, expected {plain!r}; no other is supported yet"
            )
    if "rope_freqs.weight" in tensors:
        raise CheckpointError(f"{where}: tensor rope_freqs.weight: scaled rotary is not supported yet")
    return make_config(
        where,
        vocab_size=rows,
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_layers=get("block_count"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        rope_theta=get("rope.freq_base", 10000.0),
        norm_eps=get("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in tensors,
        max_position=get("context_length"),
    )


def _locate(where: str, name: str, entry: tuple, base: int, alignment: int) -> Tensor:
    kind, shape, offset = entry
    type_name, block, size = _layout(kind)
    if not block:
        raise CheckpointError(f"{where}: tensor {name} has type {type_name}, which is not read")
    if shape[-1] % block:
        raise CheckpointError(
            f"{where}: tensor {name} has rows of {shape[-1]}, expected a multiple of {block} for {type_name}"
        )
    if offset % alignment:
        raise CheckpointError(f"{where}: tensor {name} has offset {offset}, not a multiple of {alignment}")
    return Tensor(kind, shape, base + offset, base + offset + math.prod(shape) // block * size)


@functools.cache
def _layout(kind: int) -> tuple[str, int, int]:
    """Name of a tensor type, weights and bytes of one block; 0 weights when it cannot be decoded."""
    import gguf

    try:
        known = gguf.GGMLQuantizationType(kind)
        block, size = gguf.GGML_QUANT_SIZES[known]
        gguf.quants.dequantize(np.zeros((1, size), np.uint8), known)
    except (ValueError, KeyError, NotImplementedError):
        return str(kind), 0, 0
    return known.name, block, size


def _decode(data, tensor: Tensor) -> np.ndarray:
    """The float32 array of one tensor."""
    import gguf

    raw = np.frombuffer(data, np.uint8, tensor.stop - tensor.start, tensor.start)
    raw = raw.reshape(*tensor.shape[:-1], -1)
    with np.errstate(all="ignore"):  # what overflows is found as not finite, and named
        array = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(tensor.kind))
    return np.asarray(array, np.float32).reshape(tensor.shape)


def _rotation_halves(array: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of a query or key matrix, from pairs (0, 1), (2, 3), ... of each head to its two halves.

    Conversion to GGUF interleaves them because llama.cpp rotates neighbours; this library rotates halves.
    """
    return array.reshape(-1, head_dim // 2, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
