"""The sections of `jaxspec inspect` about a model."""

import argparse
import dataclasses
import math
import pathlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jaxspec.cli.inspect_format import count_types, group_tensors, shorten
from jaxspec.core import sizes
from jaxspec.errors import CapacityError, CheckpointError, InvalidConfig, JaxspecError, MissingTokenizer

if TYPE_CHECKING:
    from jaxspec.checkpoints.base import Checkpoint, StoredTensor
    from jaxspec.models.config import ModelConfig
    from jaxspec.text.tokenizer import Tokenizer

INSPECT_LENGTH = 2048


def checkpoint_sections(place: pathlib.Path, args: argparse.Namespace, refused: list[JaxspecError]) -> dict[str, Any]:
    """Returns the sections about a model; errors that would prevent loading are appended to `refused`."""
    from jaxspec.checkpoints.base import FILE_DTYPE, check_native
    from jaxspec.checkpoints.pard2 import is_pard2, parse_pard2
    from jaxspec.checkpoints.source import open_checkpoint, read_headers

    report: dict[str, Any] = {}
    try:
        checkpoint = open_checkpoint(place)
    except CheckpointError as error:
        refused.append(error)
        try:
            headers = read_headers(place)
        except CheckpointError:
            pass  # nothing more can be shown
        else:
            report |= {"settings": {key: shorten(value) for key, value in headers.settings.items()}}
            report |= {"stored": count_types(headers.stored.values()), "tensors": group_tensors(headers.stored)}
    else:
        config = checkpoint.config
        length = args.length or min(INSPECT_LENGTH, config.max_position)
        report |= {"architecture": checkpoint.architecture, "model": model_section(config)}
        if (token := checkpoint.settings.get("pard_token")) is not None:
            report["pard_token"] = token
        if is_pard2(checkpoint.settings):
            try:
                report["pard2_target_layers"] = ", ".join(map(str, parse_pard2(str(place), checkpoint.settings).layers))
            except CheckpointError as error:
                refused.append(error)
        report |= {"stored": count_types(checkpoint.stored.values()), "tokenizer": text_section(checkpoint, refused)}
        report |= {"memory": memory_section(config, args.dtype, args.batch, length, checkpoint.stored.values())}
        if args.dtype == FILE_DTYPE:
            try:
                check_native(checkpoint)
            except InvalidConfig as error:
                refused.append(error)
        if length > config.max_position:
            refused.append(CapacityError(f"--length {length} is more than the context of {config.max_position} tokens"))
    return report


def model_section(config: "ModelConfig") -> dict[str, Any]:
    """Returns the fields of the config that have no default or differ from it, and the number of parameters."""
    changed, plain = {}, dataclasses.asdict(config)
    for field in dataclasses.fields(config):
        value, factory = getattr(config, field.name), field.default_factory
        if value != (field.default if factory is dataclasses.MISSING else factory()):
            changed[field.name] = shorten(plain[field.name])
    return changed | {"parameters": sum(map(math.prod, config.param_shapes().values()))}


def text_section(checkpoint: "Checkpoint", refused: list[JaxspecError]) -> dict[str, Any] | None:
    """Returns the section about tokenizer and chat template; their errors are appended to `refused`."""
    from jaxspec.text.tokenizer import Tokenizer

    section: dict[str, Any] = {}
    try:
        size = checkpoint.config.vocab_size
        tokenizer = Tokenizer.from_source(checkpoint.tokenizer, size) if checkpoint.tokenizer else None
    except JaxspecError as error:
        refused.append(error)
        tokenizer = None
    if tokenizer is not None:
        rows = checkpoint.config.vocab_size
        section |= {"kind": tokenizer.kind, "tokens": tokenizer.vocab_size}
        section |= {"padding_of_the_vocabulary": max(rows - tokenizer.vocab_size, 0)}
        section |= {"tokens_without_a_row": max(tokenizer.vocab_size - rows, 0)}
        section |= {"special": [token_text(tokenizer, token) for token in sorted(tokenizer.special_ids)]}
        section |= {"begins_with": token_text(tokenizer, checkpoint.bos_id) if checkpoint.add_bos else None}
    source, template = checkpoint.chat_template, None
    try:
        template = checkpoint.open_template()
    except JaxspecError as error:
        refused.append(error)
    try:
        if tokenizer is not None:
            section |= {"stop": [token_text(tokenizer, token) for token in checkpoint.end_ids(tokenizer, template)]}
    except JaxspecError as error:
        refused.append(error)
    lines = [line.strip() for line in (source or "").splitlines() if line.strip()]
    section |= {"named_chat_templates": ", ".join(checkpoint.named_templates)} if checkpoint.named_templates else {}
    return section | {"chat_template": None if source is None else next(iter(lines), "")}


def bridge_section(target: pathlib.Path, draft: pathlib.Path) -> dict[str, Any]:
    """Returns the section about what a target's and a draft model's vocabularies have in common.

    Raises:
        JaxspecError: one of the models has no tokenizer, or the vocabularies have nothing in common.
    """
    from jaxspec.checkpoints.source import open_checkpoint
    from jaxspec.text.bridge import Side, build_bridge
    from jaxspec.text.tokenizer import Tokenizer, same_vocab

    sides = []
    for place in (target, draft):
        checkpoint = open_checkpoint(place)
        size = checkpoint.config.vocab_size
        if checkpoint.tokenizer is None:
            raise MissingTokenizer(f"{place} has no tokenizer, so its tokens cannot be compared")
        template = checkpoint.open_template()
        tokenizer = Tokenizer.from_source(checkpoint.tokenizer, size)
        sides.append(Side(tokenizer, template, checkpoint.end_ids(tokenizer, template), size, place.name))
    ours, theirs = sides
    section: dict[str, Any] = {"draft_path": str(draft)}
    if ours.vocab == theirs.vocab and same_vocab(ours.tokenizer, theirs.tokenizer):
        return section | {"vocabulary": "the target's"}
    bridge = build_bridge(ours, theirs)
    roles = {
        name: f"{token_text(ours.tokenizer, one)} is {token_text(theirs.tokenizer, other)}"
        for name, one, other in zip(("end_of_turn", "end_of_text", "begin_of_text"), ours.roles, theirs.roles)
        if one is not None and other is not None
    }
    shares = {f"share_of_{name}": round(share, 4) for name, share in bridge.shares.items()}
    tables = (bridge.as_target, bridge.common, bridge.spelling, bridge.starts)
    return section | {
        "tokens": theirs.size,
        "common_tokens": len(bridge.common),
        **shares,
        **roles,
        "tables_bytes": sum(table.nbytes for table in tables),
        "summary": str(bridge),
    }


def token_text(tokenizer: "Tokenizer", token: int | None) -> str | None:
    """Returns a token as text and number."""
    if token is None or token >= tokenizer.vocab_size:
        return None if token is None else str(token)
    return f"{tokenizer.token_bytes(token).decode(errors='replace')} ({token})"


def memory_section(
    config: "ModelConfig", dtype: str, batch: int, length: int, stored: Iterable["StoredTensor"] = ()
) -> dict[str, Any]:
    """Returns the memory that decoding takes, with a cache for drafts of up to 64 tokens.

    Args:
        config: the model's configuration.
        dtype: dtype of the matrices.
        batch: number of rows.
        length: length of the texts in tokens.
        stored: the tensors of the file, for the dtype that keeps them as they are.
    """
    from jaxspec.checkpoints.base import FILE_DTYPE, FLOAT_DTYPES, activation_dtype
    from jaxspec.checkpoints.gguf_blocks import native_bytes
    from jaxspec.models.config import is_matrix, is_table

    size = FLOAT_DTYPES[activation_dtype(dtype)].itemsize
    slots = sizes.round_to_bucket(sizes.required_slots(length, sizes.PROMPT_CHUNK))
    parameters = sum(map(native_bytes, stored)) if dtype == FILE_DTYPE else 0
    for name, shape in config.param_shapes().items() if dtype != FILE_DTYPE else ():
        if not is_matrix(name.split(".")[-1], len(shape)):  # these stay float32
            parameters += 4 * math.prod(shape)
        elif dtype == "int8":  # with a scale for each output
            parameters += math.prod(shape) + 4 * (shape[0] if is_table(name) else math.prod(shape) // shape[-2])
        else:
            parameters += size * math.prod(shape)
    recurrent, delta = sum(config.recurrent), config.delta
    cache = 2 * size * (config.num_layers - recurrent) * batch * config.num_kv_heads * slots * config.head_dim
    states = {}
    if delta is not None:
        cache += (state := 4 * recurrent * batch * delta.store_numbers)
        states = {
            "states_bytes": state,
            "states_per_drafted_token_bytes": 4 * recurrent * batch * delta.entry_numbers,
        }
    return {
        "dtype": dtype,
        "batch": batch,
        "length": length,
        "parameters_bytes": parameters,
        "cache_slots_per_row": slots,
        "cache_bytes": cache,
        **states,
        "logits_per_drafted_token_bytes": 4 * batch * config.vocab_size,
        "parameters_and_cache_bytes": parameters + cache,
    }
