"""The sections of `jaxspec inspect` about draft heads."""

import argparse
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoints.base import StoredTensor
from jaxspec.cli.inspect_format import count_types, group_tensors, shorten
from jaxspec.errors import JaxspecError
from jaxspec.models.config import ModelConfig

PROBE_PROMPTS = (
    "The capital of France is",
    "Write a short story about a robot who learns to paint.",
    "def fibonacci(n):",
)
PROBE_TOKENS = 32
MIN_WORKING_RATE = 0.1
"""The lowest acceptance rate of the first drafted token for heads that work. The rates of trained heads are at least
three times as high."""


def heads_sections(place: pathlib.Path, args: argparse.Namespace, refused: list[JaxspecError]) -> dict[str, Any]:
    """Returns the sections about heads and, with `--target`, their acceptance rates.

    Errors that would prevent loading are appended to `refused`.
    """
    from jaxspec.checkpoints.base import activation_dtype
    from jaxspec.cli import show
    from jaxspec.heads.files import load_heads
    from jaxspec.heads.headers import open_heads
    from jaxspec.heads.layouts import LAYOUTS
    from jaxspec.heads.serving import list_layouts

    report: dict[str, Any] = {}
    try:
        opened = open_heads(place, allow_pickle=args.allow_pickle)
    except JaxspecError as error:
        refused.append(error)
        stored = _stored(place)
        return {"heads": {"stored": count_types(stored.values())}, "head_tensors": group_tensors(stored)}
    stored = opened.stored.values()
    readers = LAYOUTS[opened.layout].readers if opened.layout in LAYOUTS else "this library"
    heads = {"layout": opened.layout, "read_by": readers} | _sizes(opened.sizes)
    heads |= {
        "bytes": sum(tensor.bytes for tensor in stored),
        "stored": count_types(stored),
        "notes": list(opened.notes),
    }
    if isinstance(base := opened.settings.get("base_model_name_or_path"), str):
        heads["made_for"] = shorten(base)
    heads["exported_to"] = (
        ", ".join(list_layouts(opened.config_of_any_vocabulary())) or "none: only jaxspec serves them"
    )
    report["heads"] = heads
    if args.target is None:
        return report
    try:
        target = show.load_model(args.target, args.dtype)
        loaded = load_heads(place, target=target, dtype=activation_dtype(args.dtype), allow_pickle=args.allow_pickle)
        report["probe"] = probe(target, loaded, args.prompt or PROBE_PROMPTS, not args.quiet)
    except JaxspecError as error:
        refused.append(error)
    return report


def probe(target: Any, heads: Any, prompts: Any, verbose: bool = True) -> dict[str, Any]:
    """Decodes prompts greedily with a chain, and returns the acceptance rate of each drafted token.

    Heads whose drafter has the option `rope_theta` are also tried with the target's base of rotary positions, if their
    own base differs from it.
    """
    import jaxspec
    from jaxspec import registry
    from jaxspec.models.transformer import TransformerLM

    config, rates = heads.config, {}
    takes = registry.find("drafter", config.drafter).takes

    def decode(**options: Any) -> Any:
        return jaxspec.generate(
            target, list(prompts), drafter=config.drafter, heads=heads, tree=config.usual_depth,
            max_new_tokens=PROBE_TOKENS, ignore_eos=True, verbose=verbose, drafter_options=options,
        )  # fmt: skip

    texts = decode()
    stats = texts.stats
    first = stats.acceptance_by_position[0]
    theta = target.lm.config.rope.theta if isinstance(target.lm, TransformerLM) and "rope_theta" in takes else None
    if theta is not None and theta != config.decoder.rope.theta:
        shares = decode(rope_theta=theta).stats.acceptance_by_position
        rates = {f"acceptance_with_rope_theta_{theta:g}": [round(share, 4) for share in shares]}
    return {
        "target": target.name,
        "prompts": len(texts),
        "tokens": stats.committed,
        "tokens_per_round": round(stats.tokens_per_round, 4),
        "acceptance_by_position": [round(share, 4) for share in stats.acceptance_by_position],
        "conditional_acceptance": [round(share, 4) for share in stats.conditional_acceptance],
        **rates,
        "verdict": "they work"
        if first >= MIN_WORKING_RATE
        else "they do not work with this target, or are not trained",
    }


def _sizes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns sizes as a flat mapping, which includes the sizes of the layers of a head."""
    found: dict[str, Any] = {}
    for name, value in sizes.items():
        if isinstance(value, ModelConfig):
            found |= {key: entry for key, entry in vars(value).items() if isinstance(entry, (int, float, str))}
            found["rope_theta"] = value.rope.theta
        else:
            found[name] = ", ".join(map(str, value)) if isinstance(value, tuple) else value
    return found


def _stored(place: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns the tensors of heads that cannot be loaded, from the files that can be read."""
    from jaxspec.checkpoints import folder

    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    found = {}
    for file in files:
        try:
            found |= {name: tensor.stored for name, tensor in folder.open_shard(file.parent, file.name).items()}
        except JaxspecError:
            continue
    return found
