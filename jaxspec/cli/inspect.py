"""Shows what a checkpoint holds, and the memory it would take. No weight is read.

Of draft heads it shows the layout, the sizes, and what is odd; with --target also whether they fit, and, by decoding a
few prompts with them, whether they work.
"""

import argparse
import collections
import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.cli.options import SOURCES, Parser, UsageError, add_dtype, whole
from jaxspec.cli.wrap import wrap
from jaxspec.core import sizes
from jaxspec.errors import CapacityError, CheckpointError, JaxspecError
from jaxspec.files import check_path

if TYPE_CHECKING:
    from jaxspec.models.checkpoint import Checkpoint, StoredTensor
    from jaxspec.models.config import ModelConfig
    from jaxspec.text.tokenizer import Tokenizer

LENGTH = 2048
AS_THEY_ARE = ("settings", "stored", "tensors", "head_tensors")
"""Sections whose entries have names of the file."""
SHOWN, LONGEST = 8, 88  # items of a list and characters of a text; the JSON has all of them


def add_options(parser: Parser) -> None:
    """All but --debug, which every command has."""
    add = parser.add_argument
    add("source", metavar="SOURCE", help=SOURCES)
    add("--revision", metavar="NAME", help="branch, tag or commit of a Hub repository")
    add("--batch", type=whole(1), default=1, metavar="N", help="rows decoded together (default: 1)")
    add("--length", type=whole(1), metavar="N", help=f"tokens of each row (default: {LENGTH}, or the context if less)")
    add_dtype(add)
    add("--target", metavar="SOURCE", help="of heads: the model they are to draft for")
    add("--prompt", action="append", metavar="TEXT", help="to try heads on, with --target; repeatable")
    add("--allow-pickle", action="store_true", help="read heads also from .pt files; nothing of them is run")
    add("--json", action="store_true", help="a JSON object; what ends in _bytes is in bytes")


def run(args: argparse.Namespace) -> int:
    """Shows it, then raises what would keep the model from being loaded, if anything would."""
    from jaxspec.cli import show
    from jaxspec.models.checkpoint import find_source
    from jaxspec.models.head_layouts import FILES, find_layout

    place = check_path(find_source(args.source, args.revision, show.say, args.allow_pickle))
    layout = find_layout(place)
    if layout is None and (args.target or args.prompt or args.allow_pickle):
        raise UsageError("--target, --prompt and --allow-pickle are for draft heads, which are not there")
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    files = files or [place / name for name in FILES if (place / name).is_file()]
    report: dict[str, Any] = {"source": args.source, "path": str(place)}
    report |= {"files": len(files), "file_size_bytes": sum(file.stat().st_size for file in files)}
    refused: list[JaxspecError] = []
    if layout in (None, "v1.0"):
        report |= checkpoint_sections(place, args, refused)
    if layout is not None:
        from jaxspec.cli.inspect_heads import heads_sections

        report |= heads_sections(place, args, refused)
    if args.json:
        report["refused"] = [str(error) for error in refused]
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        from rich.console import Console

        print("\n".join(as_lines(report, Console().width)))
    if refused:
        raise refused[0]
    return 0


def checkpoint_sections(place: pathlib.Path, args: argparse.Namespace, refused: list[JaxspecError]) -> dict[str, Any]:
    """What is to be said of a model. What would keep it from being loaded goes to `refused`."""
    from jaxspec.models.checkpoint import open_checkpoint, read_headers

    report: dict[str, Any] = {}
    try:
        checkpoint = open_checkpoint(place)
    except CheckpointError as error:
        refused.append(error)
        try:
            headers = read_headers(place)
        except CheckpointError:
            pass  # nothing more to be seen
        else:
            report |= {"settings": {key: brief(value) for key, value in headers.settings.items()}}
            report |= {"stored": by_type(headers.stored.values()), "tensors": by_name(headers.stored)}
    else:
        config = checkpoint.config
        length = args.length or min(LENGTH, config.max_position)
        report |= {"architecture": checkpoint.architecture, "model": model_section(config)}
        report |= {"stored": by_type(checkpoint.stored.values()), "tokenizer": text_section(checkpoint, refused)}
        report |= {"memory": memory_section(config, args.dtype, args.batch, length)}
        if length > config.max_position:
            refused.append(CapacityError(f"--length {length} is more than the context, {config.max_position} tokens"))
    return report


def model_section(config: "ModelConfig") -> dict[str, Any]:
    """Every field of the config that has no default, or is not at it."""
    given, plain = {}, dataclasses.asdict(config)
    for field in dataclasses.fields(config):
        value, factory = getattr(config, field.name), field.default_factory
        if value != (field.default if factory is dataclasses.MISSING else factory()):
            given[field.name] = brief(plain[field.name])
    return given | {"parameters": sum(map(math.prod, config.param_shapes().values()))}


def by_type(stored: Iterable["StoredTensor"]) -> dict[str, Any]:
    """How many tensors there are of each type, and their bytes; the largest share first."""
    tensors, total = collections.Counter(), collections.Counter()
    for tensor in stored:
        tensors[tensor.type] += 1
        total[tensor.type] += tensor.bytes
    return {kind: {"tensors": tensors[kind], "bytes": size} for kind, size in total.most_common()}


def by_name(stored: Mapping[str, "StoredTensor"]) -> dict[str, Any]:
    """The tensors, those of a kind together: the number of the layer stands as N."""
    kinds = collections.Counter(
        (re.sub(r"(^|\.)\d+(?=\.)", r"\1N", name), t.type, t.shape) for name, t in stored.items()
    )
    table: dict[str, Any] = {}
    for (name, kind, shape), count in kinds.items():
        table.setdefault(name, []).append(f"{kind} {'x'.join(map(str, shape))}, {count} of them")
    return table


def text_section(checkpoint: "Checkpoint", refused: list[JaxspecError]) -> dict[str, Any] | None:
    """Tokenizer and chat template. What is wrong with them goes to `refused`."""
    from jaxspec.text import ChatTemplate, Tokenizer

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
        section |= {"special": [spelt(tokenizer, token) for token in sorted(tokenizer.special_ids)]}
        section |= {"stop": [spelt(tokenizer, token) for token in checkpoint.stop_ids]}
        section |= {"begins_with": spelt(tokenizer, checkpoint.bos_id) if checkpoint.add_bos else None}
    template = checkpoint.chat_template
    if template is not None:
        try:
            ChatTemplate(template, checkpoint.special_tokens)
        except JaxspecError as error:
            refused.append(error)
    lines = [line.strip() for line in (template or "").splitlines() if line.strip()]
    return section | {"chat_template": None if template is None else next(iter(lines), "")}


def spelt(tokenizer: "Tokenizer", token: int | None) -> str | None:
    """A token as text and number."""
    if token is None or token >= tokenizer.vocab_size:
        return None if token is None else str(token)
    return f"{tokenizer.token_bytes(token).decode(errors='replace')} ({token})"


def memory_section(config: "ModelConfig", dtype: str, batch: int, length: int) -> dict[str, Any]:
    """What decoding takes; the cache as for drafts of up to 64 tokens."""
    from jaxspec.models.checkpoint import DTYPES, beside
    from jaxspec.models.config import is_table

    size = DTYPES[beside(dtype)].itemsize
    slots = sizes.shared(sizes.slots(length, sizes.CHUNK))
    parameters = 0
    for name, shape in config.param_shapes().items():
        if len(shape) == 1:  # vectors stay float32
            parameters += 4 * shape[0]
        elif dtype == "int8":  # with a scale for each output
            parameters += math.prod(shape) + 4 * shape[0 if is_table(name) else 1]
        else:
            parameters += size * math.prod(shape)
    cache = 2 * size * config.num_layers * batch * config.num_kv_heads * slots * config.head_dim
    return {
        "dtype": dtype,
        "batch": batch,
        "length": length,
        "parameters_bytes": parameters,
        "cache_slots_per_row": slots,
        "cache_bytes": cache,
        "logits_per_drafted_token_bytes": 4 * batch * config.vocab_size,
        "parameters_and_cache_bytes": parameters + cache,
    }


def brief(value: Any) -> Any:
    """A value of a file's settings for JSON: long lists by their length, and no number that JSON has not."""
    if isinstance(value, Mapping):
        return {str(key): brief(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [brief(item) for item in value] if len(value) <= SHOWN else f"{len(value)} items"
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def as_lines(report: Mapping[str, Any], width: int) -> Iterator[str]:
    """The report for reading: an entry per line, or more where it is wider than `width`; sections are indented."""
    for key, value in report.items():
        if isinstance(value, Mapping):
            label = _printable if key in AS_THEY_ARE else _label
            labels = [f"  {label(name)}" for name in value]
            column = min(max(map(len, labels), default=0) + 2, width // 2)
            yield f"\n{_label(key)}"
            for shown, (name, item) in zip(labels, value.items()):
                yield from _entry(shown, _shown(name, item), column, width)
        else:
            yield from _entry(_label(key), _shown(key, value), 14, width)


def _entry(label: str, value: str, column: int, width: int) -> Iterator[str]:
    """A label with its value from `column` on, or below it where one of them is too wide; wrapped between words."""
    first, *more = wrap(value, width - column)
    if len(label) + 2 <= column and max(map(len, [first, *more])) <= width - column:
        yield f"{label:<{column}}{first}".rstrip()
    else:
        yield label
        column, more = 4, wrap(value, width - 4)
    yield from (" " * column + line for line in more)


def _label(key: str) -> str:
    return _printable(key.removesuffix("_bytes").replace("_", " "))


def _shown(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{_label(name)} {_shown(name, item)}" for name, item in value.items()) or "none"
    if isinstance(value, list):
        more = f", and {len(value) - SHOWN} more" if len(value) > SHOWN else ""
        return ", ".join(_shown("", item) for item in value[:SHOWN]) + more if value else "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, int) and key.endswith("bytes"):
        unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if value >= u), (1e3, "kB"))
        return f"{value / unit:.2f} {name}"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return _printable(value if len(value) <= LONGEST else value[: LONGEST - 1] + "…")


def _printable(text: str) -> str:
    """What a file says of itself must not steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
