"""The view of a checkpoint that does not depend on its format, and the checks that all formats share.

A format module (`gguf`, `hf`, `saved`) reads the headers and returns a `Checkpoint`: its config and, for every
parameter of `ModelConfig.param_shapes`, a function that reads it. Weights are read lazily.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.models.config import EXPERT_BIASES, EXPERT_MATRICES, DeltaSizes, Experts, ModelConfig, is_table
from jaxspec.models.rope import Rope

if TYPE_CHECKING:
    from jaxspec.text.chat import ChatTemplate
    from jaxspec.text.tokenizer import Tokenizer

FLOAT_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
FILE_DTYPE = "file"
WEIGHT_DTYPES = (*FLOAT_DTYPES, "int8", FILE_DTYPE)
"""Supported dtypes of a model's matrices; "file" keeps the dtypes of a GGUF file."""

DRAFTING_TENSOR = re.compile(r"mtp\.fc\.weight|blk\.\d+\.nextn\.eh_proj\.weight", re.ASCII)
"""The name of the input projection of a layer for multi-token prediction: in Hugging Face files, and in GGUF files."""


def activation_dtype(dtype: str) -> str:
    """Returns the dtype of caches and draft heads for a model with matrices of this dtype."""
    return dtype if dtype in FLOAT_DTYPES else "bfloat16"


@dataclasses.dataclass(frozen=True)
class TokenizerSource:
    """The location of a checkpoint's tokenizer; exactly one of the two attributes is set.

    Attributes:
        json_path: path of a `tokenizer.json`.
        gguf: every `tokenizer.*` metadata entry of a GGUF file, under its full key
            (`tokenizer.ggml.tokens`, ...); arrays are lists.
    """

    json_path: str | None = None
    gguf: Mapping[str, object] | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self):
        if (self.json_path is None) == (self.gguf is None):
            raise InvalidConfig("TokenizerSource needs exactly one of json_path and gguf")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """The type, shape and size of a tensor in a file.

    Attributes:
        type: the name of the number format in the file, such as "Q4_1" or "BF16".
        shape: shape in the file, rows first.
        bytes: size in the file; 0 if the type is not known.
    """

    type: str
    shape: tuple[int, ...]
    bytes: int


@dataclasses.dataclass(frozen=True)
class Headers:
    """The headers of a checkpoint; its model need not be supported.

    Attributes:
        settings: metadata of a GGUF file, or the content of config.json.
        stored: the file's tensors, by name.
    """

    settings: Mapping[str, Any]
    stored: Mapping[str, StoredTensor]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: its headers, and functions that read its weights.

    Attributes:
        config: sizes and constants of the model.
        source: the preset, path or repository that it was opened from.
        tensors: maps each canonical parameter name to a function that reads it, in float32 and in the canonical layout.
        native: the same without converting the numbers of the file: quantized matrices as `Blocks`, others in the
            file's float type (float16 as float32). Empty for formats without quantized blocks.
        stop_ids: ids that the checkpoint lists as ends of a text (end of sequence, end of turn); see `end_ids`.
        other_stop_ids: ids of a list that `stop_ids` overrides.
        has_all_stop_ids: whether `stop_ids` contains all end tokens, which is true for a model that jaxspec saved.
        bos_id: id of the beginning-of-sequence token; None if there is none.
        add_bos: whether the model expects `bos_id` at the beginning of a text.
        tokenizer: location of the tokenizer, or None.
        chat_template: Jinja source of the chat template, or None.
        named_templates: sources of further chat templates, by name.
        special_tokens: spelling of `bos_token`, `eos_token`, ..., as used by chat templates.
        architecture: the file's own name of the architecture.
        stored: the file's tensors, by their names in the file.
        settings: see `jaxspec.Model`.
        generation: the content of generation_config.json; empty if there is no such file.
        left_out: the file's tensors that do not belong to the text model, such as encoders of images.
        path: the path of the files; empty if `source` is the path.
    """

    config: ModelConfig
    source: str
    tensors: Mapping[str, Callable[[], np.ndarray]] = dataclasses.field(repr=False)
    native: Mapping[str, Callable[[], Any]] = dataclasses.field(default_factory=dict, repr=False)
    stop_ids: tuple[int, ...] = ()
    other_stop_ids: tuple[int, ...] = ()
    has_all_stop_ids: bool = False
    bos_id: int | None = None
    add_bos: bool = False
    tokenizer: TokenizerSource | None = None
    chat_template: str | None = dataclasses.field(default=None, repr=False)
    named_templates: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    architecture: str = ""
    stored: Mapping[str, StoredTensor] = dataclasses.field(default_factory=dict, repr=False)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    left_out: tuple[str, ...] = ()
    path: str = ""

    def __post_init__(self):
        for token in (*self.stop_ids, *(() if self.bos_id is None else (self.bos_id,))):
            if type(token) is not int or not 0 <= token < self.config.vocab_size:
                last = self.config.vocab_size - 1
                raise CheckpointError(f"{self.source}: special token id {token!r:.80}, expected 0 .. {last}")
        for template in (self.chat_template, *self.named_templates.values()):
            if template is not None and not isinstance(template, str):
                raise CheckpointError(f"{self.source}: the chat template is {template!r:.80}, expected a string")
        for name, text in self.special_tokens.items():
            if not isinstance(text, str):
                raise CheckpointError(f"{self.source}: special token {name!r:.80} is {text!r:.80}, expected a string")

    @property
    def has_drafting_layer(self) -> bool:
        """Whether the file also holds a layer for multi-token prediction; see `jaxspec.heads.eagle_layouts`."""
        return any(DRAFTING_TENSOR.fullmatch(name) for name in self.left_out)

    def open_template(self) -> "ChatTemplate | None":
        """Compiles the chat template; returns None if there is none.

        Raises:
            CheckpointError: the template cannot be compiled.
        """
        from jaxspec.text.chat import ChatTemplate

        if self.chat_template or self.named_templates:
            return ChatTemplate(self.chat_template or None, self.special_tokens, self.named_templates)
        return None

    def end_ids(self, tokenizer: "Tokenizer | None", template: "ChatTemplate | None") -> tuple[int, ...]:
        """Returns the ids of all tokens that end an answer or a text; see `jaxspec.text.ends`."""
        from jaxspec.text.ends import end_ids

        if self.has_all_stop_ids:
            return self.stop_ids
        return end_ids(tokenizer, template, self.stop_ids, self.other_stop_ids, self.config.vocab_size)


def describe_left_out(checkpoint: Checkpoint) -> str | None:
    """Returns a sentence about the tensors that are not read, or None."""
    if not (names := checkpoint.left_out):
        return None
    more = " ..." if len(names) > 3 else ""
    return (
        f"{checkpoint.source}: only the text model is loaded; {len(names)} tensors of other parts are left out: "
        f"{', '.join(names[:3])}{more}"
    )


def check_native(checkpoint: Checkpoint) -> None:
    """Raises InvalidConfig if the checkpoint cannot be loaded with dtype "file"."""
    if not checkpoint.native:
        raise InvalidConfig(
            f"{checkpoint.source}: dtype 'file' needs a GGUF file, whose blocks it keeps; choose another dtype"
        )


# --- for the format modules ---------------------------------------------------------------------------------


def make_config(where: str, **values: Any) -> ModelConfig:
    """Creates a `ModelConfig` from a file's values; `norm_eps` may be an integer.

    Raises:
        CheckpointError: a value is invalid; the message names the file.
    """
    try:
        if type(values["norm_eps"]) is int:
            values["norm_eps"] = float(values["norm_eps"])
        return ModelConfig(**values)
    except (InvalidConfig, OverflowError) as error:
        raise CheckpointError(f"{where}: {error}") from None


def parse_config(where: str, values: Mapping[str, Any]) -> ModelConfig:
    """Creates a `ModelConfig` from the JSON of its fields.

    Raises:
        CheckpointError: a value is invalid; the message names the file.
        InvalidConfig, KeyError, TypeError, ValueError: a field is invalid, missing or unknown.
    """
    values = dict(values)
    if values.get("delta") is not None:
        values["delta"] = DeltaSizes(**values["delta"])
    if values.get("experts") is not None:
        values["experts"] = Experts(**values["experts"])
    for name in ("recurrent", "sparse"):
        values[name] = tuple(values.get(name, ()))
    for name in ("rope", "window_rope"):
        if values[name] is not None:
            values[name] = Rope(**values[name] | {"divisors": tuple(values[name]["divisors"])})
    values["windowed"] = tuple(values["windowed"])
    return make_config(where, **values)


def canonical_tensors(
    where: str,
    config: ModelConfig,
    names: Mapping[str, tuple[str, ...]],
    stored: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Any],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    join: Callable[[list[Any], bool], Any] | None = None,
) -> dict[str, Callable[[], Any]]:
    """Maps a file's tensors to canonical parameters. Every tensor must belong to exactly one parameter.

    Args:
        where: the file, for messages.
        config: sizes and constants of the model.
        names: maps each kind of parameter ("embed", "qkv", ...), or its full name, to the names of the tensors that it
            consists of, in order; `{}` stands for the index of the layer, and `{expert}` for the index of an expert.
        stored: the file's tensors and their shapes; matrices are `[out, in]`.
        read: reads one tensor of the file.
        shapes: the parameters; `config.param_shapes()` by default.
        join: returns a parameter, given its tensors and whether the model needs it transposed; None for `join_arrays`.

    Returns:
        A function for each canonical parameter that reads it.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or its shape does not match the config.
    """
    if config.num_layers > len(stored):  # before anything is allocated per layer
        raise CheckpointError(f"{where}: {config.num_layers} layers, but only {len(stored)} tensors")
    expected: dict[str, tuple[int, ...]] = {}
    readers = {}
    for canonical, shape in (config.param_shapes() if shapes is None else shapes).items():
        parts = file_parts(config, names, canonical, shape)
        expected |= parts.shapes
        readers[canonical] = functools.partial(_read_parts, read, parts, join or join_arrays)
    check_names(where, expected, stored)
    for name, shape in expected.items():
        check_shape(where, name, stored[name], shape)
    return readers


def grouped_rows(sizes: DeltaSizes, kind: str) -> np.ndarray:
    """Returns the row of a file's tensor for each row of a parameter, for tensors whose rows are grouped by key head.

    Args:
        sizes: the sizes of the layer with Gated DeltaNet.
        kind: the parameter: "qkvz" or "rates".
    """
    each = sizes.value_heads // sizes.key_heads
    values = each * sizes.value_width
    widths = [each, each] if kind == "rates" else [sizes.key_width, sizes.key_width, values, values]
    groups = np.arange(sizes.key_heads * sum(widths)).reshape(sizes.key_heads, -1)
    return np.concatenate([part.ravel() for part in np.split(groups, np.cumsum(widths)[:-1], axis=1)])


class FileParts(NamedTuple):
    """The tensors of a file that a parameter consists of.

    Attributes:
        shapes: the shape of each tensor in the file, by name and in order.
        groups: the names of the tensors that lie side by side; a group for each expert if the file has tensors of
            single experts, otherwise one group.
        single: whether each expert has tensors of its own.
        transposed: whether matrices are `[out, in]` in the file.
        axis: the axis along which tensors lie side by side; None for that of the rows of matrices.
    """

    shapes: dict[str, tuple[int, ...]]
    groups: list[list[str]]
    single: bool
    transposed: bool
    axis: int | None = None


def file_parts(
    config: ModelConfig, names: Mapping[str, tuple[str, ...]], canonical: str, shape: tuple[int, ...]
) -> FileParts:
    """Returns the file's tensors that a parameter of this shape consists of; `names` as in `canonical_tensors`."""
    *layer, kind = canonical.split(".")
    if kind in EXPERT_BIASES:
        files, _ = file_names(names, canonical)
        widths = shape[1:] if len(files) == 1 else config.projections(kind)
        stored = {name: (shape[0], width) for name, width in zip(files, widths, strict=True)}
        return FileParts(stored, [files], False, False, axis=1)
    if kind not in EXPERT_MATRICES:
        files, kind = file_names(names, canonical)
        shapes = file_shapes(config, kind, shape, len(files))
        return FileParts(dict(zip(files, shapes, strict=True)), [files], False, not is_table(kind) and len(shape) == 2)
    templates = names.get(canonical) or names[kind]
    count, inputs, outputs = shape
    single = "{expert}" in templates[0]
    groups = [
        [template.format(*layer[1:], expert=expert) for template in templates]
        for expert in range(count if single else 1)
    ]
    widths = (outputs,) if len(templates) == 1 else config.projections(kind)
    lead = () if single else (count,)
    shapes = {name: (*lead, width, inputs) for group in groups for name, width in zip(group, widths, strict=True)}
    return FileParts(shapes, groups, single, True)


def split_parts(parts: FileParts, array: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the tensors of a file that a parameter consists of: the inverse of the readers of `canonical_tensors`."""
    array = array.swapaxes(-1, -2) if parts.transposed else array
    tensors = {}
    for group, each in zip(parts.groups, array if parts.single else [array], strict=True):
        axis = 1 if each.ndim == 3 and len(group) > 1 else 0  # after the axis of the experts
        ends = np.cumsum([parts.shapes[name][axis] for name in group])
        tensors |= zip(group, np.split(each, ends[:-1], axis), strict=True)
    return tensors


def file_names(names: Mapping[str, tuple[str, ...]], canonical: str) -> tuple[list[str], str]:
    """Returns the names of the file's tensors that a parameter consists of, and the kind of parameter."""
    *layer, kind = canonical.split(".")
    return [name.format(*layer[1:]) for name in names.get(canonical) or names[kind]], kind


def check_names(where: str, expected: Iterable[str], stored: Iterable[str]) -> None:
    """Raises CheckpointError if tensors are missing or unexpected; the message names them."""
    missing = sorted(set(expected) - set(stored))
    extra = sorted(set(stored) - set(expected))
    for names, problem in ((missing, "missing"), (extra, "not expected")):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise CheckpointError(f"{where}: tensors {problem}: {', '.join(names[:5])}{more}")


def check_shape(where: str, name: str, got: Iterable[int], expected: Iterable[int]) -> None:
    """Raises CheckpointError if tensor `name` does not have the expected shape."""
    if tuple(got) != tuple(expected):
        raise CheckpointError(f"{where}: tensor {name} has shape {list(got)}, expected {list(expected)}")


def check_finite(where: str, name: str, array: np.ndarray) -> np.ndarray:
    """Returns the array; raises CheckpointError if it contains a NaN or an infinity."""
    if not np.isfinite(array).all():
        raise CheckpointError(f"{where}: tensor {name} has weights that are not finite (NaN or infinity)")
    return array


def file_shapes(config: ModelConfig, kind: str, shape: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    """Returns the shapes in the file of a parameter's tensors: matrices are `[out, in]`, and fused matrices can be
    separate."""
    if parts == 1:
        return [shape if is_table(kind) or len(shape) > 2 else shape[::-1]]
    widths = config.projections(kind)
    joined = sum(widths[: len(widths) - parts + 1])  # the first of the tensors may hold several projections
    return [(width, *shape[:-1]) for width in (joined, *widths[len(widths) - parts + 1 :])]


def join_arrays(arrays: list[np.ndarray], transpose: bool) -> np.ndarray:
    """Concatenates matrices or vectors along their rows, and transposes the result if the model needs it."""
    rows = 1 if arrays[0].ndim == 3 else 0  # after the axis of the experts
    array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=rows)
    return np.ascontiguousarray(array.swapaxes(-1, -2)) if transpose else array


def _read_parts(read: Callable[[str], Any], parts: FileParts, join: Callable[[list[Any], bool], Any]) -> Any:
    if parts.axis is not None:
        return np.concatenate([np.asarray(read(name)) for name in parts.groups[0]], axis=parts.axis)
    joined = (join([read(name) for name in group], parts.transposed) for group in parts.groups)
    return np.stack(list(joined)) if parts.single else next(joined)
