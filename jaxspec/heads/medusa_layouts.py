"""Medusa heads in files: the layouts of other systems, and how files in them are read. Nothing here imports JAX.

Other systems store linear maps as torch does, [out, in]; a `kernel` of jaxspec is [in, out]. Projections are [rows, E]
in both.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxspec.checkpoints.base import StoredTensor
from jaxspec.checkpoints.folder import WEIGHTS_FILE, LazyTensor
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.heads.kinds import CONFIG_JSON, PICKLE_SUFFIXES, ForeignHeads, HeadKind, Layout
from jaxspec.heads.medusa_config import HeadsConfig
from jaxspec.heads.tensors import check_tensors, finite_reader, read_tokens

WHOLE_MODEL_NOTE = (
    "the heads are part of a model that was trained with them: they draft for that model, and the text is that "
    "model's, not that of the model from which its training started"
)
_FILES = ("medusa_lm_head.safetensors", *(f"medusa_lm_head{suffix}" for suffix in PICKLE_SUFFIXES))
_NAMES = {
    "blocks.{head}.{block}.kernel": "{head}.{block}.linear.weight",
    "blocks.{head}.{block}.bias": "{head}.{block}.linear.bias",
    "projections.{head}": "{head}.{num_layers}.weight",
}
_SETTINGS = {
    "medusa_num_heads": "num_heads",
    "medusa_num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaLayout(Layout):
    """A layout in which another system stores Medusa heads.

    In `names`, a field in braces stands for a number of up to four digits.

    Attributes:
        names: the name of the tensor for each parameter of `HeadsConfig.param_shapes`; `{num_layers}` is
            `HeadsConfig.num_layers`.
        settings: the attribute of `HeadsConfig` that each key of config.json states.
        projections: the kinds of projection (`HeadsConfig.projection`) that the layout holds; heads with another kind
            are exported with the first of these kinds.
        single: the name of the projection that all heads share.
        requires_bias: True if every block must have a bias.
        num_layers: the number of blocks of every head; None: any number.
        aliases: for each regular expression, the key of `settings` that means the same as the keys of config.json that
            match.
        constants: further entries of config.json, which are written but not read.
    """

    drafter: str = HeadsConfig.drafter
    names: Mapping[str, str]
    settings: Mapping[str, str]
    projections: tuple[str, ...]
    single: str = "lm_head.weight"
    requires_bias: bool = True
    num_layers: int | None = None
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def tokens(self) -> str | None:
        """The name of the tensor with the ids of a reduced vocabulary; None if the layout cannot hold one."""
        return self.prefix + self.names["tokens"] if "tokens" in self.names else None

    def tensor(self, config: HeadsConfig, parameter: str) -> str:
        """Returns the name of the tensor that holds a parameter of `HeadsConfig.param_shapes`."""
        if parameter.startswith("projections.") and config.projection == "single":
            return self.prefix + self.single
        for ours, theirs in self.names.items():
            if match := _match(ours, parameter):
                return self.prefix + theirs.format(**match.groupdict(), num_layers=config.num_layers)
        raise KeyError(f"the layout {self.name} cannot hold {parameter}")

    def parameter(self, tensor: str) -> str | None:
        """Returns the name of the parameter that a tensor holds; None if the layout has no such tensor."""
        for ours, theirs in self.names.items():
            if match := _match(theirs, tensor.removeprefix(self.prefix)):
                return ours.format(**match.groupdict())
        return None

    def key(self, attribute: str) -> str | None:
        """Returns the key of config.json that states an attribute of `HeadsConfig`, or None."""
        return next((key for key, stated in self.settings.items() if stated == attribute), None)

    def differences(self, settings: Mapping[str, Any], config: HeadsConfig) -> list[str]:
        """Returns the differences between config.json and the tensors, one sentence each."""
        named = {self._canonical(key): (key, value) for key, value in settings.items()}
        return [
            f"{CONFIG_JSON} says {named[key][0]} {named[key][1]!r:.40}, but the tensors say {value}"
            for key, value in self.stated(config).items()
            if key in named and named[key][1] is not None and named[key][1] != value
        ]

    def stated(self, config: HeadsConfig) -> dict[str, Any]:
        """Returns the entries of config.json that `settings` names."""
        return {key: getattr(config, attribute) for key, attribute in self.settings.items()}

    def _canonical(self, key: str) -> str:
        return next((name for pattern, name in self.aliases.items() if re.search(pattern, key)), key)


class ProjectionRows(NamedTuple):
    """The rows of a projection.

    Attributes:
        stored: the number of rows in the file.
        selected: the rows that are read, in this order; None: all.
        tokens: the ids of the reduced vocabulary, ascending, one for each row that is read; None: the vocabulary is not
            reduced.
    """

    stored: int
    selected: np.ndarray | None = None
    tokens: np.ndarray | None = None


def infer_sizes(
    layout: MedusaLayout, where: str, stored: Mapping[str, StoredTensor], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the fields of `HeadsConfig` without the vocabulary, and `rows`, the number of rows of a projection.

    If tensors disagree, the most frequent size is returned. Names that the layout does not have are skipped here, and
    are reported when the tensors of the file are compared with the expected tensors.

    Args:
        layout: the layout of the file, with its prefix.
        where: the file, for messages.
        stored: the tensors of the file.
        settings: the content of config.json.

    Raises:
        CheckpointError: a head or a block has a higher number than there are tensors.
    """
    blocks, projections = set(), set()
    widths, rows = collections.Counter(), collections.Counter()
    has_bias, single = False, layout.prefix + layout.single
    for name, tensor in stored.items():
        kind, *numbers = (layout.parameter(name) or "").split(".")
        if kind == "blocks":
            blocks.add((int(numbers[0]), int(numbers[1])))
            has_bias = has_bias or numbers[2] == "bias"
        if kind == "projections":
            projections.add(int(numbers[0]))
        if tensor.shape and kind != "tokens":
            widths[tensor.shape[-1]] += 1
            rows.update(tensor.shape[:1] if kind == "projections" or name == single else ())
    heads = 1 + max({head for head, _ in blocks} | projections, default=0)
    layers = max((block + 1 for _, block in blocks), default=0)
    if heads * max(layers, 1) > len(stored):
        raise CheckpointError(
            f"{where}: has {max(stored, key=_numbers)}, but only {len(stored)} tensors, expected tensors for {heads} "
            f"heads of {layers} blocks"
        )
    return {
        "hidden_size": widths.most_common(1)[0][0] if widths else 0,
        "rows": rows.most_common(1)[0][0] if rows else 0,
        "num_heads": heads,
        "num_layers": layers,
        "projection": _projection(layout, single in stored, projections, settings),
        "bias": has_bias or layout.requires_bias,
    }


def find_rows(
    layout: MedusaLayout, tensors: Mapping[str, LazyTensor], stored: int, settings: Mapping[str, Any]
) -> tuple[int | None, ProjectionRows]:
    """Returns the size of the vocabulary, None if the file does not state it, and the rows of a projection.

    Args:
        layout: the layout of the file, with its prefix.
        tensors: the tensors of the file.
        stored: the number of rows of a projection in the file; 0 if the file has no projection.
        settings: the content of config.json.

    Raises:
        CheckpointError: the ids of a reduced vocabulary are malformed.
    """
    stated = settings.get(layout.key("vocab_size") or "")
    stated = stated if type(stated) is int and stated > 0 else None
    if not stored:
        return stated, ProjectionRows(0)
    if layout.tokens is None:
        return stored, ProjectionRows(stored)
    if layout.tokens not in tensors:
        # vLLM takes the first ids if only config.json says that the vocabulary is reduced.
        if stated is not None and stored < stated and settings.get(layout.key("rows") or "") == stored:
            return stated, ProjectionRows(stored, None, np.arange(stored))
        return stored, ProjectionRows(stored)
    vocab = stored if stored > math.prod(tensors[layout.tokens].stored.shape) else stated
    tokens = read_tokens(layout.tokens, tensors[layout.tokens], vocab)
    order = np.argsort(tokens, kind="stable")
    if stored > tokens.size:
        return vocab, ProjectionRows(stored, tokens[order], tokens[order])
    return vocab, ProjectionRows(tokens.size, None if (np.diff(order) > 0).all() else order, tokens[order])


def _projection(layout: MedusaLayout, has_single: bool, numbers: set[int], settings: Mapping[str, Any]) -> str:
    """Returns `HeadsConfig.projection` for a file; `numbers` are the numbers of its projections."""
    # vLLM also takes the first head's projection as the single one if config.json says so.
    stated = layout.key("has_single_projection")
    if has_single or (numbers <= {0} and stated is not None and settings.get(stated)):
        return "single"
    return "own" if numbers or "shared" not in layout.projections else "shared"


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if re.fullmatch(r"\d{1,4}", part, re.ASCII)]


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


class MedusaKind(HeadKind):
    """Medusa, Hydra and ReDrafter heads in files."""

    def open(
        self, where: str, layout: MedusaLayout, tensors: Mapping[str, LazyTensor], settings: Mapping[str, Any]
    ) -> ForeignHeads:
        stored = {name: tensor.stored for name, tensor in tensors.items()}
        try:
            sizes = infer_sizes(layout, where, stored, settings)
            if layout.num_layers not in (None, sizes["num_layers"]):
                raise CheckpointError(
                    f"{where}: heads that share the target's projection have one block each in this layout, but these "
                    f"have {sizes['num_layers']}; are projections such as 0.{sizes['num_layers']}.weight missing?"
                )
            vocab, rows = find_rows(layout, tensors, sizes.pop("rows"), settings)
            if rows.tokens is not None:
                sizes["draft_vocab_size"] = len(rows.tokens)
            # No shape depends on a vocabulary that neither tensors nor settings state: any size can be used in checks.
            config = HeadsConfig(vocab_size=vocab or max(rows.stored, 1), **sizes)
        except InvalidConfig as error:
            raise CheckpointError(f"{where}: {error}") from None
        names = _tensor_names(layout, config, rows, tensors)
        shapes = config.param_shapes() | dict.fromkeys(config.projections, (rows.stored, config.hidden_size))
        expected = {
            theirs: shapes[ours][::-1] if is_transposed(ours) else shapes[ours] for ours, theirs in names.items()
        }
        check_tensors(where, expected, tensors, layout.tokens)

        def reader(ours: str) -> Callable[[], np.ndarray]:
            if ours == "tokens":
                return lambda: np.asarray(rows.tokens, np.int32)
            read = finite_reader(names[ours], tensors[names[ours]])
            if is_transposed(ours):
                return lambda: np.ascontiguousarray(read().T)
            selected = rows.selected if ours in config.projections else None
            return read if selected is None else lambda: read()[selected]

        comparable, fields = dict(settings), dataclasses.asdict(config)
        if not vocab:
            comparable.pop("vocab_size", None)
            del fields["vocab_size"]
        notes = (*layout.differences(comparable, config), *([WHOLE_MODEL_NOTE] if layout.in_model else []))
        return ForeignHeads(layout, fields, {ours: reader(ours) for ours in shapes}, notes)

    def obstacle(self, config: HeadsConfig, layout: MedusaLayout) -> str | None:
        if config.reads_words:
            return f"the layout {layout.name} cannot hold heads that read tokens (inputs {config.inputs!r})"
        if config.draft_vocab_size is not None and layout.tokens is None:
            return f"the layout {layout.name} cannot hold a reduced vocabulary"
        if not config.bias and layout.requires_bias:
            return f"the layout {layout.name} has a bias in every block, but these heads have none"
        if config.projection != "shared" and layout.projections == ("shared",):
            return f"the layout {layout.name} shares the target's projection, but these heads have their own"
        if layout.num_layers not in (None, config.num_layers):
            return f"the layout {layout.name} has one block per head, but these heads have {config.num_layers}"
        return None

    def sizes_in(self, config: HeadsConfig, layout: MedusaLayout) -> HeadsConfig:
        fits = config.projection in layout.projections
        return config if fits else dataclasses.replace(config, projection=layout.projections[0])

    def tensors(self, config: HeadsConfig, params: Mapping[str, Any], layout: MedusaLayout) -> dict[str, np.ndarray]:
        tensors = {}
        for ours in config.param_shapes():
            array = np.asarray(params[ours])
            array = array.T if is_transposed(ours) else array.astype(np.int64) if ours == "tokens" else array
            tensors[layout.tensor(config, ours)] = array
        return tensors

    def config_json(
        self, config: HeadsConfig, layout: MedusaLayout, base: str | None, depth: int | None
    ) -> dict[str, Any]:
        entry = {} if base is None else {"base_model_name_or_path": base}
        return {**layout.constants, **layout.stated(config), **entry}

    def advice(self, config: HeadsConfig) -> str | None:
        return "Heads trained with --inputs hidden can be exported" if config.reads_words else None


def _tensor_names(
    layout: MedusaLayout, config: HeadsConfig, rows: ProjectionRows, tensors: Mapping[str, LazyTensor]
) -> dict[str, str]:
    """Returns the name of the tensor of each parameter that a file holds."""
    names = {ours: layout.tensor(config, ours) for ours in config.param_shapes()}
    if rows.tokens is not None and layout.tokens not in tensors:
        del names["tokens"]
    if config.projection == "single" and names["projections.0"] not in tensors:
        first = layout.tensor(dataclasses.replace(config, projection="own"), "projections.0")  # vLLM reads it as well
        names["projections.0"] = first if first in tensors else names["projections.0"]
    return names


MEDUSA = MedusaKind(
    title="Medusa heads",
    sizes=HeadsConfig,
    network="jaxspec.heads.medusa:Heads",
    layouts=(
        MedusaLayout(
            name="v0.1",
            summary="a projection for each head",
            readers="Medusa 0.1, TensorRT-LLM, TGI",
            files=_FILES,
            mark=r"\d{1,4}\.\d{1,4}\.weight",
            names=_NAMES,
            settings=_SETTINGS,
            projections=("own",),
        ),
        MedusaLayout(
            name="legacy",
            summary="no projections: the heads share the target's",
            readers="Medusa's legacy trainer, TGI",
            files=_FILES,
            mark=r"\d{1,4}\.\d{1,4}\.linear\.(weight|bias)",
            names=_NAMES,
            settings=_SETTINGS,
            projections=("shared",),
            num_layers=1,
            constants={"version": "2"},
        ),
        MedusaLayout(
            name="v1.0",
            summary="the heads beside the target that was trained with them",
            readers="Medusa 1.0, in the model they were trained with",
            files=(WEIGHTS_FILE,),
            mark=".*",
            names=_NAMES,
            settings=_SETTINGS,
            projections=("own", "shared"),
            prefix="medusa_head.",
            in_model=True,
            exported=False,
        ),
        MedusaLayout(
            name="vllm",
            summary="the only one with reduced vocabularies",
            readers="vLLM",
            files=(WEIGHTS_FILE,),
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
    ),
)
