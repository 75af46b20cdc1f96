"""Reads Hugging Face directories: config.json (see `families`), safetensors weights, tokenizer.json.

Nothing of a directory is ever executed: no pickle is opened and no code of the repository is imported. Every
file must lie in the directory itself, or in the blobs of the Hub cache the directory belongs to.
"""

import contextlib
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxspec.errors import CheckpointError
from jaxspec.models import checkpoint as common
from jaxspec.models.checkpoint import Checkpoint, Headers, StoredTensor, TokenizerSource
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import Family, read_config

_DTYPES = ("F32", "F16", "BF16")
_MAX_JSON = 1 << 28


def open_hf(path: str | os.PathLike, context: int | None = None) -> Checkpoint:
    """Opens a Hugging Face directory; the weights are read from memory maps when asked for.

    `context` is the longest text that will be decoded; see `open_source`.

    Raises:
        CheckpointError: a file is missing, malformed, outside the directory, or of a model that is not read.
    """
    directory = pathlib.Path(path)
    settings = _read_json(directory, "config.json")
    if settings is None:
        files = sorted(directory.glob("*.gguf"))
        hint = f"; to open its GGUF file, name it: {files[0]}" if files else ""
        raise CheckpointError(f"{directory}: has no config.json{hint}")
    config, family = read_config(str(directory / "config.json"), settings, context)
    generation = _read_json(directory, "generation_config.json") or {}
    text = _read_json(directory, "tokenizer_config.json") or {}
    tokenizer = _inside(directory, "tokenizer.json")
    bos_id = settings.get("bos_token_id", generation.get("bos_token_id"))
    stop_ids = generation.get("eos_token_id", settings.get("eos_token_id"))
    adds_bos = text.get("add_bos_token")
    if adds_bos is None and tokenizer:
        adds_bos = _begins_with_special((_read_json(directory, "tokenizer.json") or {}).get("post_processor"))
    named = {key: value for key, value in text.items() if key.endswith("_token")}
    named = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    readers, stored = _tensors(directory, config, family)
    return Checkpoint(
        config=config,
        source=str(directory),
        tensors=readers,
        stop_ids=tuple(stop_ids) if isinstance(stop_ids, list) else () if stop_ids is None else (stop_ids,),
        bos_id=bos_id,
        add_bos=bool(adds_bos) and bos_id is not None,
        tokenizer=TokenizerSource(json_path=str(tokenizer)) if tokenizer else None,
        chat_template=_chat_template(directory, text),
        special_tokens={key: value for key, value in named.items() if isinstance(value, str)},
        architecture=str(settings["model_type"]),
        stored=stored,
    )


def read_headers(path: str | os.PathLike) -> Headers:
    """What config.json says and which tensors lie in the safetensors files; what cannot be read is left out."""
    directory = pathlib.Path(path)
    settings, stored = {}, {}
    with contextlib.suppress(CheckpointError):
        settings = _read_json(directory, "config.json") or {}
    for file in sorted(directory.glob("*.safetensors")):
        with contextlib.suppress(CheckpointError):
            stored |= {key: _stored(part) for key, part in _open_shard(directory, file.name)[1].items()}
    return Headers(settings, stored)


def _open_shard(directory: pathlib.Path, name: str) -> tuple[Any, dict[str, Any]]:
    """A safetensors file, and its tensors unread."""
    from safetensors import SafetensorError, safe_open

    file, where = _inside(directory, name), str(directory / name)
    if file is None:
        raise CheckpointError(f"{where}: the index names this shard, and there is no such file")
    try:
        shard = safe_open(file, framework="np")
        return shard, {key: shard.get_slice(key) for key in shard.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{where}: not a safetensors file that can be read: {error}") from None


def _stored(part: Any) -> StoredTensor:
    """From one tensor of `_open_shard`; its type names the bits of a number: BF16, F8_E4M3, I64."""
    dtype, shape = part.get_dtype(), tuple(part.get_shape())
    bits = re.search(r"\d+", dtype)
    return StoredTensor(dtype, shape, math.prod(shape) * int(bits[0] if bits else 8) // 8)


def _tensors(directory: pathlib.Path, config: ModelConfig, family: Family) -> tuple[dict, dict[str, StoredTensor]]:
    """Canonical readers over the one safetensors file or the shards of the index, and how it holds its tensors."""
    index = None
    names = ["model.safetensors"]
    if _inside(directory, names[0]) is None:
        index = _index(directory)
        names = sorted(set(index.values()))
    shards, shapes, stored = {}, {}, {}
    for name in names:
        where = str(directory / name)
        shard, held = _open_shard(directory, name)
        if index is not None:
            common.refuse_difference(where, {key for key, holder in index.items() if holder == name}, held)
        for key, part in held.items():
            if (dtype := part.get_dtype()) not in _DTYPES:
                raise CheckpointError(f"{where}: tensor {key} has type {dtype}, expected one of {_DTYPES}")
            shards[key], stored[key] = (shard, where), _stored(part)
            shapes[key] = stored[key].shape

    def read(name: str) -> np.ndarray:
        shard, where = shards[name]
        array = common.finite(where, name, shard.get_tensor(name).astype(np.float32, copy=False))
        return array + np.float32(family.norm_offset) if name.endswith("norm.weight") else array

    # Rotary frequencies some old files carry; they follow from rope_theta.
    shapes = {key: shape for key, shape in shapes.items() if not key.endswith(".rotary_emb.inv_freq")}
    copied = config.tie_embeddings and shapes.pop("lm_head.weight", None)
    readers = common.canonical_tensors(str(directory), config, family.all_names(), shapes, read)
    return (readers | {"embed": lambda: _tied(directory, read)} if copied else readers), stored


def _tied(directory: pathlib.Path, read: Callable[[str], np.ndarray]) -> np.ndarray:
    """The embedding, when the file holds the head as well although the config ties the two."""
    embed = read("model.embed_tokens.weight")
    if not np.array_equal(embed, read("lm_head.weight")):
        raise CheckpointError(
            f"{directory}: tensor lm_head.weight differs from model.embed_tokens.weight, expected the same: "
            "config.json says tie_word_embeddings"
        )
    return embed


def _index(directory: pathlib.Path) -> dict[str, str]:
    """Tensor -> name of its shard, from the index; every shard name is checked to be a plain file name."""
    name = "model.safetensors.index.json"
    index = _read_json(directory, name)
    if index is None:
        pickles = sorted(file.name for file in directory.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
        why = f"expected model.safetensors, or {name} and its shards"
        if pickles:
            why = f"{', '.join(pickles[:3])} may hold code and are never opened; convert them to safetensors"
        raise CheckpointError(f"{directory}: has no safetensors weights: {why}")
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{directory / name}: weight_map is missing or empty, expected shards")
    for shard in shards.values():
        plain = isinstance(shard, str) and shard.endswith(".safetensors") and not set(shard) & set("/\\:\0")
        if not plain:
            raise CheckpointError(
                f"{directory / name}: shard {shard!r}, expected the plain name of a .safetensors file"
            )
    return shards


def _inside(directory: pathlib.Path, name: str) -> pathlib.Path | None:
    """Path of a file of the directory, or None; a link may only lead to the blobs of the same Hub cache."""
    file, home = directory / name, directory.resolve()
    if not os.path.exists(file):
        return None
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if (real := file.resolve()).parent not in (home, blobs) or not real.is_file():
        raise CheckpointError(f"{file}: leads to {real}, expected a file in {home}")
    return file


def _read_text(directory: pathlib.Path, name: str) -> str | None:
    if (file := _inside(directory, name)) is None:
        return None
    try:
        if (size := file.stat().st_size) > _MAX_JSON:
            raise CheckpointError(f"{file}: {size} bytes, expected at most {_MAX_JSON}")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None


def _read_json(directory: pathlib.Path, name: str) -> dict | None:
    if (text := _read_text(directory, name)) is None:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{directory / name}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{directory / name}: holds a {type(content).__name__}, expected an object")
    return content


def _chat_template(directory: pathlib.Path, text: Mapping) -> str | None:
    template = _read_text(directory, "chat_template.jinja") or text.get("chat_template")
    if isinstance(template, list):  # several, by name
        entries = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = entries[0].get("template") if entries else None
    return template if isinstance(template, str) else None


def _begins_with_special(processor: object) -> bool:
    """Whether a `post_processor` of tokenizer.json puts a special token in front of a single text."""
    if not isinstance(processor, dict):
        return False
    if isinstance(steps := processor.get("processors"), list):
        return any(map(_begins_with_special, steps))
    single = processor.get("single")
    return isinstance(single, list) and bool(single) and "SpecialToken" in single[0]
