"""How Medusa heads lie in the files of other systems: the names of their tensors, and what config.json says of them.

    v0.1    Medusa 0.1, TensorRT-LLM, TGI    {i}.{j}.linear.weight and .bias, {i}.{num_layers}.weight [V, E]
    legacy  Medusa's legacy trainer, TGI V2  {i}.0.linear.weight and .bias; the target's projection is shared
    v1.0    Medusa 1.0, axolotl              v0.1's names after `medusa_head.`, in a model trained with its heads
    vllm    vLLM                             blocks.{i}.layers.{j}.weight (and .bias), lm_heads.{i}.weight or one
                                             lm_head.weight, and token_map where the vocabulary is reduced; with or
                                             without `medusa_heads.` before them

Head i, block j. Torch's linear maps are stored [out, in], ours [in, out]; projections are [rows, E] in both.
"""

import collections
import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.checkpoints import folder
from jaxspec.errors import CheckpointError

if TYPE_CHECKING:
    from jaxspec.checkpoints.base import StoredTensor
    from jaxspec.heads.network import HeadsConfig

MANIFEST = "heads.json"
PICKLES = (".pt", ".pth", ".bin")
FILES = ("medusa_lm_head.safetensors", *(f"medusa_lm_head{suffix}" for suffix in PICKLES))

_N = r"(\d{1,4})"
_BLOCK = {"vllm": rf"blocks\.{_N}\.layers\.{_N}\.(weight|bias)", "": rf"{_N}\.{_N}\.linear\.(weight|bias)"}
_PROJECTION = {"vllm": rf"lm_heads\.{_N}\.weight", "": rf"{_N}\.{_N}\.weight"}
TOKENS, SINGLE, FIRST = "token_map", "lm_head.weight", "lm_heads.0.weight"


@dataclasses.dataclass(frozen=True)
class Layout:
    """One of the four; `prefix` stands before every name."""

    name: str
    prefix: str = ""

    @property
    def tokens(self) -> str:
        """The name of the reduced vocabulary."""
        return self.prefix + TOKENS

    def tensor(self, config: "HeadsConfig", ours: str) -> str:
        """The layout's name of a parameter that `HeadsConfig.param_shapes` names so."""
        kind, *at, leaf = ours.split(".") if "." in ours else (ours, "")
        vllm = self.name == "vllm"
        match kind:
            case "blocks":
                part = "bias" if leaf == "bias" else "weight"
                name = "blocks.{}.layers.{}.{}" if vllm else "{}.{}.linear.{}"
                return self.prefix + name.format(*at, part)
            case "projections" if config.projection == "single":
                return self.prefix + SINGLE
            case "projections":
                return self.prefix + (f"lm_heads.{leaf}.weight" if vllm else f"{leaf}.{config.num_layers}.weight")
        return self.tokens

    def sizes(self, where: str, stored: Mapping[str, "StoredTensor"], settings: Mapping[str, Any]) -> dict[str, Any]:
        """What the tensors say: keywords of `HeadsConfig` but the vocabulary, and the `rows` of a projection.

        Where they disagree it is most of them that count.

        A name that is none of the layout's is passed over: comparing what is there with what should be finds it.

        Raises:
            CheckpointError: a head has a number that so few tensors cannot have.
        """
        blocks, projections = set(), set()
        widths, rows = collections.Counter(), collections.Counter()
        vllm, bias = "vllm" if self.name == "vllm" else "", False
        for full, tensor in stored.items():
            name = full.removeprefix(self.prefix)
            block, projection = (re.fullmatch(p[vllm], name, re.ASCII) for p in (_BLOCK, _PROJECTION))
            if block:
                blocks.add((int(block[1]), int(block[2])))
                bias = bias or block[3] == "bias"
            if projection:
                projections.add(int(projection[1]))
            if tensor.shape and name != TOKENS:
                widths[tensor.shape[-1]] += 1
                rows.update(tensor.shape[:1] if projection or name == SINGLE else ())
        heads = 1 + max({i for i, _ in blocks} | projections, default=0)
        layers = max((j + 1 for _, j in blocks), default=0)
        if heads * max(layers, 1) > len(stored):
            raise CheckpointError(
                f"{where}: {heads} heads of {layers} blocks and only {len(stored)} tensors, among them "
                f"{max(stored, key=_numbers)}"
            )
        single = self.prefix + SINGLE in stored or (projections <= {0} and vllm and settings.get("original_lm_head"))
        return {
            "hidden_size": widths.most_common(1)[0][0] if widths else 0,
            "rows": rows.most_common(1)[0][0] if rows else 0,
            "num_heads": heads,
            "num_layers": layers,
            "projection": "single" if single else "own" if projections or vllm else "shared",
            "bias": bias if vllm else True,
        }

    def settings(self, config: "HeadsConfig") -> dict[str, Any]:
        """What config.json says of heads of these sizes."""
        sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
        if self.name != "vllm":
            return {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers, **sizes}
        return {
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            **sizes,
            "truncated_vocab_size": config.rows,
            "medusa_fc_bias": config.bias,
            "original_lm_head": config.projection == "single",
        }

    def manifest(self, config: "HeadsConfig", base: str | None) -> dict[str, Any]:
        """The config.json of heads that are written, for a target of this name."""
        named = {} if base is None else {"base_model_name_or_path": base}
        if self.name == "vllm":
            fixed = {"architectures": ["MedusaModel"], "model_type": "medusa", "max_paths": 64, "topk": 10}
        else:
            fixed = {"version": "2"} if self.name == "legacy" else {}
        return fixed | self.settings(config) | named

    def differences(self, settings: Mapping[str, Any], config: "HeadsConfig") -> list[str]:
        """What config.json says differently from the tensors, one sentence each."""
        said = {self._settled(key): (key, value) for key, value in settings.items()}
        return [
            f"config.json says {said[key][0]} {said[key][1]!r:.40}, the tensors {value}"
            for key, value in self.settings(config).items()
            if key in said and said[key][1] is not None and said[key][1] != value
        ]

    def _settled(self, key: str) -> str:
        """vLLM takes any key that names a number of heads or layers."""
        if self.name != "vllm":
            return key
        renamed = {r"num\w*heads": "num_heads", r"num\w*layers": "num_hidden_layers"}
        return next((name for pattern, name in renamed.items() if re.search(pattern, key)), key)


def find_layout(place: pathlib.Path) -> str | None:
    """The name of the layout in which a directory or a file holds heads, "pickle" of what is not looked into.

    "v1.0" is that of a model that also has heads; None: there are none, or nothing can be read.
    """
    if place.is_dir():
        if os.path.exists(place / MANIFEST):
            return "jaxspec"
        name = next((name for name in FILES if os.path.exists(place / name)), None)
        place = place if name is None else place / name
    if place.suffix in PICKLES:
        return "pickle"
    try:
        if place.is_dir():
            layout = recognise(folder.open_tensors(place))
        else:
            whole = place.suffix == ".safetensors"
            layout = recognise(folder.open_shard(place.parent, place.name)) if whole else None
    except CheckpointError:
        return "v0.1" if place.name in FILES else None
    return None if layout is None else layout.name


def recognise(names: Iterable[str]) -> Layout | None:
    """The layout that has tensors of these names; None: they are no heads. Several layouts need none: the first."""
    names = list(names)
    if any(name.startswith("medusa_head.") for name in names):
        return Layout("v1.0", "medusa_head.")
    prefix = "medusa_heads." if any(name.startswith("medusa_heads.") for name in names) else ""

    def any_of(pattern: str) -> bool:
        return any(re.fullmatch(pattern, name.removeprefix(prefix), re.ASCII) for name in names)

    if any_of(_BLOCK["vllm"]) or any_of(_PROJECTION["vllm"]):
        return Layout("vllm", prefix)
    if any_of(_PROJECTION[""]):
        return Layout("v0.1")
    return Layout("legacy") if any_of(_BLOCK[""]) else None


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if re.fullmatch(_N, part, re.ASCII)]
