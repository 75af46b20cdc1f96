"""The GGUF format: opens files, and maps their tensors to canonical parameters."""

import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxspec.checkpoints.base import (
    Checkpoint,
    Headers,
    StoredTensor,
    TokenizerSource,
    canonical_tensors,
    check_finite,
    grouped_rows,
)
from jaxspec.checkpoints.gguf_architectures import (
    BLOCK,
    DRAFTING_NAMES,
    NAMES,
    OTHER_PARTS,
    ROTARY_TENSORS,
    Architecture,
)
from jaxspec.checkpoints.gguf_blocks import join, read_native, rotation_halves
from jaxspec.checkpoints.gguf_config import ConfigReader, as_list
from jaxspec.checkpoints.gguf_header import MAX_STRINGS, decode, describe_tensor
from jaxspec.checkpoints.gguf_parts import LocatedTensor, open_parts, read_part_headers
from jaxspec.errors import CheckpointError
from jaxspec.models.config import ModelConfig
from jaxspec.text.gguf_vocab import adds_bos

_SHARED_GATE = ".ffn_gate_inp_shexp.weight"
TEMPLATE_PREFIX = "tokenizer.chat_template."
_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}


def open_gguf(path: str | os.PathLike, context: int | None = None) -> Checkpoint:
    """Opens a GGUF file; weights are read lazily from its memory map.

    Args:
        path: the file, or any part of a split file.
        context: length of the longest text to decode; see `open_source`.

    Raises:
        CheckpointError: the file is malformed, or its model is not supported.
    """
    where = os.fspath(path)
    metadata, tensors = open_parts(where)

    def read_file(name: str) -> np.ndarray:
        located = tensors[name]
        return _convert(located.where, name, check_finite(located.where, name, decode(located.data, located.tensor)))

    reader = ConfigReader(where, metadata, tensors, read_file, context)
    config, kind = reader.config(), reader.architecture
    other_parts = (*OTHER_PARTS, *(BLOCK.format(i) for i in reader.drafting_layers))
    left_out = tuple(name for name in tensors if name.startswith(other_parts))

    order = functools.partial(_order_rows, kind, config)

    def read_blocks(name: str) -> Any:
        located = tensors[name]
        return read_native(located.where, name, located.data, located.tensor, functools.partial(order, name))

    unread = {*ROTARY_TENSORS, *left_out}
    shapes = {name: _shape(name, located) for name, located in tensors.items() if name not in unread}
    canonical = functools.partial(canonical_tensors, where, config, kind.all_names(config, shapes), shapes)
    text = _tokenizer_entries(where, metadata)
    tokens = text.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens[:1]):
        raise CheckpointError(f"{where}: metadata tokenizer.ggml.tokens is not an array of strings")
    if tokens and len(tokens) != config.vocab_size:
        raise CheckpointError(
            f"{where}: tokenizer.ggml.tokens has {len(tokens)} items, but token_embd.weight has {config.vocab_size} "
            "rows; expected the same number"
        )
    ids = {name: text.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL_TOKENS.items()}
    ends: list[Any] = [ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None]
    template = text.get("tokenizer.chat_template")
    return Checkpoint(
        config=config,
        source=where,
        tensors=canonical(lambda name: order(name, read_file(name))),
        native=canonical(read_blocks, join=join),
        stop_ids=tuple(token for i, token in enumerate(ends) if token not in ends[:i]),
        bos_id=ids["bos"],
        add_bos=adds_bos(text) and ids["bos"] is not None,
        tokenizer=TokenizerSource(gguf=text) if tokens else None,
        chat_template=template if isinstance(template, str) else None,
        named_templates={
            key.removeprefix(TEMPLATE_PREFIX): source
            for key, source in text.items()
            if key.startswith(TEMPLATE_PREFIX) and isinstance(source, str)
        },
        special_tokens={
            f"{name}_token": tokens[token]
            for name, token in ids.items()
            if isinstance(token, int) and 0 <= token < len(tokens)
        },
        architecture=str(metadata["general.architecture"]),
        stored={name: describe_tensor(located.tensor.kind, located.tensor.shape) for name, located in tensors.items()},
        left_out=left_out,
    )


def _order_rows(kind: Architecture, config: ModelConfig, name: str, rows: np.ndarray) -> np.ndarray:
    """Returns the rows of a tensor in the order of the model."""
    if config.delta is not None and name.endswith((".ssm_ba.weight", ".ssm_in.weight")):
        return rows[grouped_rows(config.delta, "rates" if name.endswith("_ba.weight") else "qkvz")]
    if not kind.interleaved or not (found := re.search(r"attn_(q|k|qkv)\.(weight|bias)$", name)):
        return rows
    rotated = sum(config.projections("qkv")[:2]) if found[1] == "qkv" else len(rows)
    return np.concatenate([rotation_halves(rows[:rotated], config.head_dim), rows[rotated:]])


class DraftingBlock(NamedTuple):
    """The block for multi-token prediction of a GGUF file, with the headers checked and no weight read.

    Attributes:
        target: the sizes of the model in the same file.
        names: the block's tensors of each kind of parameter, as in `canonical_tensors`.
        stored: the block's tensors.
        shapes: the shapes of these tensors as `read` returns them.
        read: reads one tensor.
    """

    target: ModelConfig
    names: Mapping[str, tuple[str, ...]]
    stored: Mapping[str, StoredTensor]
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]


def open_drafting_block(path: str | os.PathLike) -> DraftingBlock:
    """Opens the block for multi-token prediction of a GGUF file.

    Raises:
        CheckpointError: the file is malformed, its model is not supported, or it does not have exactly one such block.
    """
    where = os.fspath(path)
    metadata, tensors = open_parts(where)

    def read(name: str) -> np.ndarray:
        located = tensors[name]
        return _convert(located.where, name, check_finite(located.where, name, decode(located.data, located.tensor)))

    reader = ConfigReader(where, metadata, tensors, read, None)
    config, blocks = reader.config(), reader.drafting_layers
    if len(blocks) != 1:
        raise CheckpointError(f"{where}: has {len(blocks)} blocks for multi-token prediction, expected 1")
    prefix = BLOCK.format(blocks[0])
    block = {name: located for name, located in tensors.items() if name.startswith(prefix)}
    stored = {name: describe_tensor(located.tensor.kind, located.tensor.shape) for name, located in block.items()}
    shapes = {name: _shape(name, located) for name, located in block.items()}
    kind = reader.architecture
    kinds = NAMES | dict(kind.names) | kind.layer_names(blocks[0], block) | DRAFTING_NAMES
    names = {kind: tuple(name.replace(BLOCK, prefix) for name in parts) for kind, parts in kinds.items()}
    return DraftingBlock(config, names, stored, shapes, read)


def read_gguf_headers(path: str | os.PathLike) -> Headers:
    """Reads the metadata and the tensor table, even if the file is truncated or the model is not supported.

    Raises:
        CheckpointError: the header is malformed.
    """
    where = os.fspath(path)
    metadata, entries = read_part_headers(where)
    metadata = {key: as_list(value) for key, value in metadata.items()}
    return Headers(metadata, {name: describe_tensor(kind, shape) for name, (kind, shape, _) in entries.items()})


def _shape(name: str, located: LocatedTensor) -> tuple[int, ...]:
    """Returns the shape of a tensor as it is read."""
    shape = located.tensor.shape
    if name.endswith(_SHARED_GATE) and len(shape) == 1:
        return (1, *shape)
    return (shape[0], 1, *shape[1:]) if name.endswith(".ssm_conv1d.weight") else shape


def _convert(where: str, name: str, array: np.ndarray) -> np.ndarray:
    """Returns a tensor of a layer with Gated DeltaNet or experts in the canonical form; others are not changed.

    Files hold the factors of decays, which are negative, and not the logarithms of their magnitudes.
    """
    if name.endswith(_SHARED_GATE) and array.ndim == 1:
        return array[None]
    if name.endswith(".ssm_conv1d.weight"):
        return array[:, None]
    if not name.endswith(".ssm_a"):
        return array
    if not (array < 0).all():
        raise CheckpointError(f"{where}: tensor {name} has factors of decays that are not negative")
    return np.log(-array)


def _tokenizer_entries(where: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of the tokenizer, with arrays as lists; the number of their items is limited.

    Raises:
        CheckpointError: the arrays have too many items.
    """
    text = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    if (total := sum(len(value) for value in text.values() if isinstance(value, memoryview))) > 2 * MAX_STRINGS:
        raise CheckpointError(
            f"{where}: the arrays of the tokenizer have {total} numbers, expected at most {2 * MAX_STRINGS}"
        )
    return {key: value.tolist() if isinstance(value, memoryview) else value for key, value in text.items()}
