"""The layouts in which other systems store draft heads: one row of `LAYOUTS` each. Nothing here imports JAX.

Those of EAGLE heads are in `jaxspec.heads.eagle_layouts`, those of DFlash heads in `jaxspec.heads.dflash_layouts`.

A row is all that jaxspec knows about a layout: recognition, reading, export, inspection, the choices of
`jaxspec export` and the files to fetch from the Hub depend on it alone. So a new layout is a new row.

Other systems store linear maps as torch does, [out, in]; a `kernel` of jaxspec is [in, out]. Projections are [rows, E]
in both.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from jaxspec.checkpoints.folder import WHOLE
from jaxspec.heads.config import HeadsConfig
from jaxspec.heads.dflash_layouts import DFLASH_LAYOUTS, DFlashLayout
from jaxspec.heads.eagle_layouts import EAGLE_LAYOUTS, EagleLayout

CONFIG = "config.json"
PICKLES = (".pt", ".pth", ".bin")
"""Suffixes of files that `torch.save` writes."""
TORCH = "pytorch_model.bin"
"""The name of such a file with a model or an EAGLE head; it is opened where there is no other file."""
_MEDUSA_FILES = ("medusa_lm_head.safetensors", *(f"medusa_lm_head{suffix}" for suffix in PICKLES))
_MEDUSA_NAMES = {
    "blocks.{head}.{block}.kernel": "{head}.{block}.linear.weight",
    "blocks.{head}.{block}.bias": "{head}.{block}.linear.bias",
    "projections.{head}": "{head}.{num_layers}.weight",
}
_MEDUSA_SETTINGS = {
    "medusa_num_heads": "num_heads",
    "medusa_num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout in which another system stores heads.

    In `names`, a field in braces stands for a number of up to four digits.

    Attributes:
        name: the name that users write.
        summary: one line for the help of `jaxspec export`.
        readers: the systems that read the layout.
        files: the names that its file of tensors may have; `export_heads` writes the first.
        mark: a regular expression for the names, after the prefix, of the tensors that identify the layout.
        names: the name of the tensor for each parameter of `HeadsConfig.param_shapes`; `{num_layers}` is
            `HeadsConfig.num_layers`.
        settings: the attribute of `HeadsConfig` that each key of config.json states.
        projections: the kinds of projection (`HeadsConfig.projection`) that it holds; heads with another kind are
            exported with the first.
        prefix: the beginning of every name.
        other_prefixes: prefixes that files may have instead.
        single: the name of the projection that all heads share.
        requires_bias: True if every block must have a bias.
        num_layers: the number of blocks of every head; None: any number.
        aliases: a key of `settings` by a regular expression for the keys that mean the same.
        constants: further entries of config.json, written but not read.
        in_model: True if the tensors are among those of the target, which was trained with the heads.
        exported: True if `export_heads` writes the layout.
    """

    name: str
    summary: str
    readers: str
    files: tuple[str, ...]
    mark: str
    names: Mapping[str, str]
    settings: Mapping[str, str]
    projections: tuple[str, ...]
    prefix: str = ""
    drafter: ClassVar[str] = HeadsConfig.drafter
    other_prefixes: tuple[str, ...] = ()
    single: str = "lm_head.weight"
    requires_bias: bool = True
    num_layers: int | None = None
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    in_model: bool = False
    exported: bool = True

    @property
    def tokens(self) -> str | None:
        """The name of the tensor with the ids of a reduced vocabulary; None if the layout has no place for one."""
        return self.prefix + self.names["tokens"] if "tokens" in self.names else None

    def tensor(self, config: HeadsConfig, parameter: str) -> str:
        """Returns the name of the tensor that holds a parameter of `HeadsConfig.param_shapes`."""
        if parameter.startswith("projections.") and config.projection == "single":
            return self.prefix + self.single
        for ours, theirs in self.names.items():
            if match := _match(ours, parameter):
                return self.prefix + theirs.format(**match.groupdict(), num_layers=config.num_layers)
        raise KeyError(f"the layout {self.name} has no place for {parameter}")

    def parameter(self, tensor: str) -> str | None:
        """Returns the name of the parameter that a tensor holds; None if the layout has no such tensor."""
        for ours, theirs in self.names.items():
            if match := _match(theirs, tensor.removeprefix(self.prefix)):
                return ours.format(**match.groupdict())
        return None

    def key(self, attribute: str) -> str | None:
        """Returns the key of config.json that states an attribute of `HeadsConfig`, or None."""
        return next((key for key, stated in self.settings.items() if stated == attribute), None)

    def config_json(self, config: HeadsConfig, base: str | None) -> dict[str, Any]:
        """Returns the content of config.json for heads whose target is named `base`."""
        named = {} if base is None else {"base_model_name_or_path": base}
        return {**self.constants, **self._stated(config), **named}

    def differences(self, settings: Mapping[str, Any], config: HeadsConfig) -> list[str]:
        """Returns the differences between config.json and the tensors, one sentence each."""
        said = {self._canonical(key): (key, value) for key, value in settings.items()}
        return [
            f"{CONFIG} says {said[key][0]} {said[key][1]!r:.40}, the tensors {value}"
            for key, value in self._stated(config).items()
            if key in said and said[key][1] is not None and said[key][1] != value
        ]

    def _stated(self, config: HeadsConfig) -> dict[str, Any]:
        return {key: getattr(config, attribute) for key, attribute in self.settings.items()}

    def _canonical(self, key: str) -> str:
        return next((name for pattern, name in self.aliases.items() if re.search(pattern, key)), key)


AnyLayout = Layout | EagleLayout | DFlashLayout
LAYOUTS: dict[str, AnyLayout] = {
    layout.name: layout
    for layout in (
        Layout(
            name="v0.1",
            summary="a projection for each head",
            readers="Medusa 0.1, TensorRT-LLM, TGI",
            files=_MEDUSA_FILES,
            mark=r"\d{1,4}\.\d{1,4}\.weight",
            names=_MEDUSA_NAMES,
            settings=_MEDUSA_SETTINGS,
            projections=("own",),
        ),
        Layout(
            name="legacy",
            summary="no projections: the heads share the target's",
            readers="Medusa's legacy trainer, TGI",
            files=_MEDUSA_FILES,
            mark=r"\d{1,4}\.\d{1,4}\.linear\.(weight|bias)",
            names=_MEDUSA_NAMES,
            settings=_MEDUSA_SETTINGS,
            projections=("shared",),
            num_layers=1,
            constants={"version": "2"},
        ),
        Layout(
            name="v1.0",
            summary="the heads beside the target that was trained with them",
            readers="Medusa 1.0, in the model they were trained with",
            files=(WHOLE,),
            mark=".*",
            names=_MEDUSA_NAMES,
            settings=_MEDUSA_SETTINGS,
            projections=("own", "shared"),
            prefix="medusa_head.",
            in_model=True,
            exported=False,
        ),
        Layout(
            name="vllm",
            summary="the only one with reduced vocabularies",
            readers="vLLM",
            files=(WHOLE,),
            mark=r"blocks\.\d{1,4}\.layers\.\d{1,4}\.(weight|bias)|lm_heads\.\d{1,4}\.weight",
            names={
                "blocks.{head}.{block}.kernel": "blocks.{head}.layers.{block}.weight",
                "blocks.{head}.{block}.bias": "blocks.{head}.layers.{block}.bias",
                "projections.{head}": "lm_heads.{head}.weight",
                "tokens": "token_map",
            },
            settings={
                "num_heads": "num_heads",
                "num_hidden_layers": "num_layers",
                "hidden_size": "hidden_size",
                "vocab_size": "vocab_size",
                "truncated_vocab_size": "rows",
                "medusa_fc_bias": "bias",
                "original_lm_head": "has_single_projection",
            },
            projections=("single", "own"),
            other_prefixes=("medusa_heads.",),
            requires_bias=False,
            aliases={r"num\w*heads": "num_heads", r"num\w*layers": "num_hidden_layers"},
            constants={"architectures": ["MedusaModel"], "model_type": "medusa", "max_paths": 64, "topk": 10},
        ),
        *DFLASH_LAYOUTS,
        *EAGLE_LAYOUTS,
    )
}
"""The layouts by name. If several match a file, the first is its layout."""
EXPORTED = tuple(name for name, layout in LAYOUTS.items() if layout.exported)
"""The layouts that `export_heads` writes; the first is the default."""
FILES = tuple(dict.fromkeys(name for layout in LAYOUTS.values() for name in layout.files if name != WHOLE))
"""The names of files that hold heads and nothing else."""


def recognise(names: Iterable[str]) -> AnyLayout | None:
    """Returns the layout of a file with tensors of these names, with its prefix; None if it holds no heads."""
    names = list(names)
    for layout in LAYOUTS.values():
        for prefix in (*layout.other_prefixes, layout.prefix):
            after = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
            if any(re.fullmatch(layout.mark, name, re.ASCII | re.DOTALL) for name in after):
                return dataclasses.replace(layout, prefix=prefix)
    return None


def is_transposed(parameter: str) -> bool:
    """Returns True if other systems store the transpose of a parameter."""
    return parameter.endswith("kernel")


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    """Returns the regular expression of a template such as `{head}.{block}.linear.weight`."""
    parts = re.split(r"\{(\w+)\}", template)
    fields = (f"(?P<{part}>\\d{{1,4}})" if i % 2 else re.escape(part) for i, part in enumerate(parts))
    return re.compile("".join(fields), re.ASCII)


def _match(template: str, name: str) -> re.Match[str] | None:
    return _pattern(template).fullmatch(name)
