"""The Hugging Face format: config.json (see `hf_config`), safetensors weights, tokenizer.json.

Code from a directory is never executed: pickles are not opened, and code of the repository is not imported.
"""

import contextlib
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoints import base as common
from jaxspec.checkpoints import folder
from jaxspec.checkpoints.base import Checkpoint, Headers, StoredTensor, TokenizerSource
from jaxspec.checkpoints.hf_config import read_config
from jaxspec.checkpoints.hf_experts import open_experts
from jaxspec.checkpoints.hf_families import FUSED_EXPERTS, Family
from jaxspec.checkpoints.hf_wrappers import check_ties, text_names, text_settings
from jaxspec.errors import CheckpointError
from jaxspec.models.config import ModelConfig

TEMPLATES_FOLDER = "additional_chat_templates"
"""The folder in which transformers stores named chat templates."""


def open_hf(path: str | os.PathLike, context: int | None = None) -> Checkpoint:
    """Opens a Hugging Face directory; weights are read lazily from memory maps.

    Args:
        path: the directory.
        context: length of the longest text to decode; see `open_source`.

    Raises:
        CheckpointError: a file is missing, malformed, or outside the directory, or the model is not supported.
    """
    directory = pathlib.Path(path)
    settings = folder.read_optional_json(directory, "config.json")
    if settings is None:
        raise CheckpointError(f"{directory}: has no config.json")
    check_ties(str(directory / "config.json"), settings)
    settings = text_settings(settings)
    config, family = read_config(str(directory / "config.json"), settings, context)
    generation = folder.read_optional_json(directory, "generation_config.json") or {}
    text = folder.read_optional_json(directory, "tokenizer_config.json") or {}
    tokenizer = folder.inside(directory, "tokenizer.json")
    bos_id = settings.get("bos_token_id", generation.get("bos_token_id"))
    default_template, named_templates = _chat_templates(directory, text)
    stop_ids, other_stop_ids = _stop_ids(generation, settings)
    adds_bos = text.get("add_bos_token")
    if adds_bos is None and tokenizer:
        adds_bos = _begins_with_special(
            (folder.read_optional_json(directory, "tokenizer.json") or {}).get("post_processor")
        )
    named = {key: value for key, value in text.items() if key.endswith("_token")}
    named = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    readers, stored, left_out = _tensors(directory, config, family)
    return Checkpoint(
        config=config,
        source=str(directory),
        tensors=readers,
        stop_ids=stop_ids,
        other_stop_ids=other_stop_ids,
        bos_id=bos_id,
        add_bos=bool(adds_bos) and bos_id is not None,
        tokenizer=TokenizerSource(json_path=str(tokenizer)) if tokenizer else None,
        chat_template=default_template,
        named_templates=named_templates,
        special_tokens={key: value for key, value in named.items() if isinstance(value, str)},
        architecture=str(settings["model_type"]),
        stored=stored,
        settings=settings,
        generation=generation,
        left_out=left_out,
    )


def read_hf_headers(path: str | os.PathLike) -> Headers:
    """Reads config.json and the headers of the safetensors files; skips files that cannot be read."""
    directory = pathlib.Path(path)
    settings, stored = {}, {}
    with contextlib.suppress(CheckpointError):
        settings = folder.read_optional_json(directory, "config.json") or {}
    for file in sorted(directory.glob("*.safetensors")):
        with contextlib.suppress(CheckpointError):
            stored |= {key: tensor.stored for key, tensor in folder.open_shard(directory, file.name).items()}
    return Headers(settings, stored)


def _tensors(
    directory: pathlib.Path, config: ModelConfig, family: Family
) -> tuple[dict, dict[str, StoredTensor], tuple[str, ...]]:
    """Returns the readers of the canonical parameters, the stored tensors, and the names of the tensors of other
    parts."""
    tensors = folder.open_tensors(directory)
    stored = {key: tensor.stored for key, tensor in tensors.items()}
    named, left_out = text_names(tensors)
    inside = [name for name in named if name.startswith(family.left_out)] if family.left_out else []
    left_out = (*left_out, *(named.pop(name) for name in inside))
    tensors = {name: tensors[name_in_file] for name, name_in_file in named.items()}
    tensors = open_experts(tensors) if family.interleaved_experts else tensors
    folder.check_types(tensors)

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        array = common.check_finite(tensor.where, name, tensor.read().astype(np.float32, copy=False))
        rows, offset = family.rows(name, config), family.offset(name)
        array = array if rows is None else array[rows]
        return array + np.float32(offset) if offset else array

    # Ignore the rotary frequencies in some old files (they follow from rope_theta), Medusa heads (see `jaxspec.heads`),
    # and the projection of a PARD-2 model (see `jaxspec.checkpoints.pard2`; without it the model drafts as PARD does).
    ignored = re.compile(r"medusa_head\..*|target_proj\..*|.*\.rotary_emb\.inv_freq", re.DOTALL)
    shapes = {key: tensor.stored.shape for key, tensor in tensors.items() if not ignored.fullmatch(key)}
    duplicated = config.tie_embeddings and shapes.pop("lm_head.weight", None)
    fused = any(name.endswith(FUSED_EXPERTS) for name in shapes)
    names = family.all_names(config, fused)
    readers = common.canonical_tensors(str(directory), config, names, shapes, read)
    readers = readers | {"embed": lambda: _read_tied(directory, read)} if duplicated else readers
    return readers, stored, left_out


def _read_tied(directory: pathlib.Path, read: Callable[[str], np.ndarray]) -> np.ndarray:
    """Reads the embedding of a file that also contains the output head, although the config ties them."""
    embed = read("model.embed_tokens.weight")
    if not np.array_equal(embed, read("lm_head.weight")):
        raise CheckpointError(
            f"{directory}: tensor lm_head.weight differs from model.embed_tokens.weight, expected equal tensors: "
            "config.json sets tie_word_embeddings"
        )
    return embed


def _chat_templates(directory: pathlib.Path, text: Mapping) -> tuple[str | None, dict[str, str]]:
    """Returns the default chat template and the named chat templates, from the files that transformers reads.

    The default template is read from the first of chat_template.jinja, tokenizer_config.json, and chat_template.json
    (of processors) that has one. Each file in additional_chat_templates has the name of its template.
    """
    template = folder.read_optional_text(directory, "chat_template.jinja") or text.get("chat_template")
    if template is None:
        template = (folder.read_optional_json(directory, "chat_template.json") or {}).get("chat_template")
    named: dict[str, Any] = dict(template) if isinstance(template, dict) else {}
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict) and isinstance(entry.get("name"), str)]
        named = {entry["name"]: entry.get("template") for entry in entries}
    for file in sorted((directory / TEMPLATES_FOLDER).glob("*.jinja")):
        named[file.stem] = folder.read_optional_text(directory, f"{TEMPLATES_FOLDER}/{file.name}")
    named = {name: source for name, source in named.items() if isinstance(source, str)}
    default = named.pop("default", None)
    return template if isinstance(template, str) else default, named


def _stop_ids(*files: Mapping) -> tuple[tuple, tuple]:
    """Returns the end tokens of the first file that lists any, and the end tokens of the other files.

    A config can list them for the text model inside it. Null and an empty list count as missing.
    """
    lists = []
    for file in files:
        inner = file.get("text_config")
        for entries in (file, inner if isinstance(inner, Mapping) else {}):
            ids = entries.get("eos_token_id")
            lists.append(tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,))
    listed = [ids for ids in lists if ids]
    return (listed[0], tuple(i for ids in listed[1:] for i in ids)) if listed else ((), ())


def _begins_with_special(processor: object) -> bool:
    """Returns whether a `post_processor` of tokenizer.json begins a text with a special token."""
    if not isinstance(processor, dict):
        return False
    if isinstance(steps := processor.get("processors"), list):
        return any(map(_begins_with_special, steps))
    single = processor.get("single")
    return isinstance(single, list) and bool(single) and isinstance(single[0], dict) and "SpecialToken" in single[0]
