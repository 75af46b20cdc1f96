"""The GGUF format: reads metadata as a `ModelConfig` and maps tensors to canonical parameters."""

import dataclasses
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
    make_config,
)
from jaxspec.checkpoints.gguf_blocks import join, read_native, rotation_halves
from jaxspec.checkpoints.gguf_header import MAX_STRINGS, decode, describe_tensor
from jaxspec.checkpoints.gguf_parts import LocatedTensor, open_parts, read_part_headers
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.models import rope as ropes
from jaxspec.models.config import DeltaSizes, Experts, ModelConfig
from jaxspec.models.rope import Rope
from jaxspec.text.gguf_vocab import adds_bos

_BLOCK = "blk.{}."
_NAMES = {
    "embed": ("token_embd.weight",),
    "attn_norm": (_BLOCK + "attn_norm.weight",),
    "qkv": tuple(f"{_BLOCK}attn_{name}.weight" for name in "qkv"),
    "qkv_bias": tuple(f"{_BLOCK}attn_{name}.bias" for name in "qkv"),
    "q_norm": (_BLOCK + "attn_q_norm.weight",),
    "k_norm": (_BLOCK + "attn_k_norm.weight",),
    "out": (_BLOCK + "attn_output.weight",),
    "out_bias": (_BLOCK + "attn_output.bias",),
    "post_attn_norm": (_BLOCK + "post_attention_norm.weight",),
    "mlp_norm": (_BLOCK + "ffn_norm.weight",),
    "gate_up": (_BLOCK + "ffn_gate.weight", _BLOCK + "ffn_up.weight"),
    "down": (_BLOCK + "ffn_down.weight",),
    "post_mlp_norm": (_BLOCK + "post_ffw_norm.weight",),
    "norm": ("output_norm.weight",),
    "head": ("output.weight",),
    "qkvz": (_BLOCK + "attn_qkv.weight", _BLOCK + "attn_gate.weight"),
    "rates": (_BLOCK + "ssm_beta.weight", _BLOCK + "ssm_alpha.weight"),
    "conv": (_BLOCK + "ssm_conv1d.weight",),
    "decay": (_BLOCK + "ssm_a",),
    "decay_bias": (_BLOCK + "ssm_dt.bias",),
    "gate_norm": (_BLOCK + "ssm_norm.weight",),
    "router": (_BLOCK + "ffn_gate_inp.weight",),
    "experts_gate_up": (_BLOCK + "ffn_gate_exps.weight", _BLOCK + "ffn_up_exps.weight"),
    "experts_down": (_BLOCK + "ffn_down_exps.weight",),
    "shared_gate_up": (_BLOCK + "ffn_gate_shexp.weight", _BLOCK + "ffn_up_shexp.weight"),
    "shared_down": (_BLOCK + "ffn_down_shexp.weight",),
    "shared_gate": (_BLOCK + "ffn_gate_inp_shexp.weight",),
}
_SHARED_GATE = ".ffn_gate_inp_shexp.weight"
_RECURRENT_OUT = _BLOCK + "ssm_out.weight"
_DRAFTING_NAMES = {
    "fc": (_BLOCK + "nextn.eh_proj.weight",),
    "embed_norm": (_BLOCK + "nextn.enorm.weight",),
    "hidden_norm": (_BLOCK + "nextn.hnorm.weight",),
    "norm": (_BLOCK + "nextn.shared_head_norm.weight",),
}
"""The tensors of a block for multi-token prediction, besides those of a layer with attention."""
_OTHER_PARTS = ("v.", "mm.", "a.")
"""Prefixes of the tensors of encoders of images and sound, which some files contain in addition to the text model."""
_ROTARY_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The differences of a `general.architecture` from Llama.

    Attributes:
        parts: fields of `ModelConfig` that are not in the metadata.
        names: file tensors of the parameters that are named differently.
        interleaved: whether rotary embeddings rotate adjacent entries instead of halves.
        full_every: with a sliding window, every n-th layer has full attention; 0 if no layer has full attention.
        rope_theta: default of the rotary base.
        window_theta: default of the rotary base of layers with a sliding window; None for the base of other layers.
        embed_scaled: whether embeddings are multiplied by the square root of their width.
        recurrent: whether some layers have Gated DeltaNet in place of attention.
        experts: whether all layers have mixtures of experts.
    """

    parts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    names: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    interleaved: bool = False
    full_every: int = 0
    rope_theta: float = 10000.0
    window_theta: float | None = None
    embed_scaled: bool = False
    recurrent: bool = False
    experts: bool = False

    def all_names(self, config: ModelConfig) -> dict[str, tuple[str, ...]]:
        """Returns the file's tensors of each kind of parameter, and of single parameters by their full names."""
        recurrent = filter(config.is_recurrent, range(config.num_layers))
        return _NAMES | dict(self.names) | {f"layers.{i}.out": (_RECURRENT_OUT,) for i in recurrent}


ARCHITECTURES = {
    "llama": Architecture(interleaved=True),
    "qwen2": Architecture(parts={"qkv_bias": True}),
    "qwen3": Architecture(parts={"qk_norm": True}),
    "phi3": Architecture(names={"qkv": (_BLOCK + "attn_qkv.weight",), "gate_up": (_BLOCK + "ffn_up.weight",)}),
    "gemma3": Architecture(
        parts={"qk_norm": True, "post_norms": True, "activation": "gelu_tanh"},
        full_every=6,
        rope_theta=1e6,
        window_theta=1e4,
        embed_scaled=True,
    ),
    "qwen35": Architecture(
        parts={"qk_norm": True, "out_gate": True},
        names={"mlp_norm": (_BLOCK + "post_attention_norm.weight",)},
        rope_theta=1e7,
        recurrent=True,
    ),
    "qwen3moe": Architecture(parts={"qk_norm": True}, experts=True),
}
ARCHITECTURES["qwen35moe"] = dataclasses.replace(ARCHITECTURES["qwen35"], experts=True)

_WITHOUT_EXPERTS = {"expert_count": 0}
_WITH_EXPERTS = {
    "expert_gating_func": 1,  # softmax
    "expert_weights_norm": True,
    "leading_dense_block_count": 0,
    "expert_group_count": 0,
}
_SUPPORTED_VALUES = {
    "attention.causal": True,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "rope.scale_linear": 1.0,
}
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

    reader = _ConfigReader(where, metadata, tensors, read_file, context)
    config, kind = reader.config(), reader.architecture
    other_parts = (*_OTHER_PARTS, *(_BLOCK.format(i) for i in reader.drafting_layers))
    left_out = tuple(name for name in tensors if name.startswith(other_parts))

    def order(name: str, rows: np.ndarray) -> np.ndarray:
        rotates = kind.interleaved and re.search(r"attn_[qk]\.(weight|bias)$", name)
        return rotation_halves(rows, config.head_dim) if rotates else rows

    def read_blocks(name: str) -> Any:
        located = tensors[name]
        return read_native(located.where, name, located.data, located.tensor, functools.partial(order, name))

    unread = {*_ROTARY_TENSORS, *left_out}
    shapes = {name: _shape(name, located) for name, located in tensors.items() if name not in unread}
    canonical = functools.partial(canonical_tensors, where, config, kind.all_names(config), shapes)
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

    reader = _ConfigReader(where, metadata, tensors, read, None)
    config, blocks = reader.config(), reader.drafting_layers
    if len(blocks) != 1:
        raise CheckpointError(f"{where}: has {len(blocks)} blocks for multi-token prediction, expected 1")
    prefix = _BLOCK.format(blocks[0])
    block = {name: located for name, located in tensors.items() if name.startswith(prefix)}
    stored = {name: describe_tensor(located.tensor.kind, located.tensor.shape) for name, located in block.items()}
    shapes = {name: _shape(name, located) for name, located in block.items()}
    kinds = _NAMES | dict(reader.architecture.names) | _DRAFTING_NAMES
    names = {kind: tuple(name.replace(_BLOCK, prefix) for name in parts) for kind, parts in kinds.items()}
    return DraftingBlock(config, names, stored, shapes, read)


def read_gguf_headers(path: str | os.PathLike) -> Headers:
    """Reads the metadata and the tensor table, even if the file is truncated or the model is not supported.

    Raises:
        CheckpointError: the header is malformed.
    """
    where = os.fspath(path)
    metadata, entries = read_part_headers(where)
    metadata = {key: _as_list(value) for key, value in metadata.items()}
    return Headers(metadata, {name: describe_tensor(kind, shape) for name, (kind, shape, _) in entries.items()})


def _shape(name: str, located: LocatedTensor) -> tuple[int, ...]:
    """Returns the shape of a tensor as it is read."""
    shape = located.tensor.shape
    if name.endswith(_SHARED_GATE):
        return (1, *shape)
    return (shape[0], 1, *shape[1:]) if name.endswith(".ssm_conv1d.weight") else shape


def _convert(where: str, name: str, array: np.ndarray) -> np.ndarray:
    """Returns a tensor of a layer with Gated DeltaNet or experts in the canonical form; others are not changed.

    Files hold the factors of decays, which are negative, and not the logarithms of their magnitudes.
    """
    if name.endswith(_SHARED_GATE):
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


def _as_list(value: Any) -> Any:
    """Returns a metadata value for display: a short array of numbers as a list, a long one as its length."""
    if not isinstance(value, memoryview):
        return value
    return value.tolist() if len(value) <= 64 else f"{len(value)} items"


class _ConfigReader:
    """Reads the metadata of one architecture."""

    def __init__(
        self,
        where: str,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, LocatedTensor],
        read: Callable[[str], np.ndarray],
        context: int | None,
    ):
        name = metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise CheckpointError(f"{where}: architecture {name!r} is not supported; supported: {known}")
        for required in ("token_embd.weight", "output_norm.weight"):
            if required not in tensors:
                raise CheckpointError(f"{where}: tensors missing: {required}")
        self.architecture = ARCHITECTURES[name]
        self._where, self._name, self._metadata, self._tensors = where, name, metadata, tensors
        self._read, self._context = read, context

    def _get(self, key: str, default=None) -> Any:
        value = self._metadata.get(f"{self._name}.{key}", default)
        if type(value) not in (int, float):
            problem = "is missing" if value is None else f"is {str(_as_list(value))[:80]!r}, expected one number"
            raise CheckpointError(f"{self._where}: metadata {self._name}.{key} {problem}")
        with np.errstate(over="ignore"):  # the shortest decimal: 1e-05, not 9.999999747378752e-06
            return float(str(np.float32(value))) if isinstance(value, float) else value

    def _whole(self, key: str, default: int | None = None) -> int:
        if type(value := self._get(key, default)) is not int or value < 0:
            raise CheckpointError(f"{self._where}: metadata {self._name}.{key} is {value!r}, expected a whole number")
        return value

    def config(self) -> ModelConfig:
        """Creates the model's config."""
        kind, tensors = self.architecture, self._tensors
        rows = tensors["token_embd.weight"].tensor.shape[0]
        hidden, heads = self._whole("embedding_length"), self._whole("attention.head_count")
        layers = self._whole("block_count") - len(self.drafting_layers)
        if layers > len(tensors):  # before anything is allocated per layer
            raise CheckpointError(f"{self._where}: {layers} layers, but only {len(tensors)} tensors")
        head_dim = self._whole("attention.key_length", hidden // heads if heads else 0)
        if head_dim > ropes.MAX_WIDTH:
            raise CheckpointError(
                f"{self._where}: the width of a head is {head_dim}, expected at most {ropes.MAX_WIDTH}"
            )
        expected = _SUPPORTED_VALUES | (_WITH_EXPERTS if kind.experts else _WITHOUT_EXPERTS)
        for key, plain in ({"vocab_size": rows, "attention.value_length": head_dim} | expected).items():
            if (value := self._metadata.get(f"{self._name}.{key}", plain)) != plain:
                raise CheckpointError(
                    f"{self._where}: metadata {self._name}.{key} is {value!r}, expected {plain!r}; "
                    "no other value is supported"
                )
        window, windowed = self._windows(layers)
        rope, longest = self._rope(head_dim)
        values: dict[str, Any] = {
            "vocab_size": rows,
            "hidden_size": hidden,
            "intermediate_size": self._whole("feed_forward_length", 0 if kind.experts else None),
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": self._whole("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rope": rope,
            "norm_eps": self._get("attention.layer_norm_rms_epsilon"),
            "tie_embeddings": "output.weight" not in tensors,
            "max_position": longest,
            "window": window,
            "windowed": windowed,
            "qkv_bias": any(name.endswith("attn_q.bias") for name in tensors),
            "out_bias": any(name.endswith("attn_output.bias") for name in tensors),
        }
        if kind.recurrent:
            values |= self._recurrent(layers)
        if kind.experts:
            values |= self._experts(values["intermediate_size"])
        if kind.window_theta and window:
            values["window_rope"] = self._checked(Rope, self._get("rope.freq_base_swa", kind.window_theta))
        if kind.embed_scaled:
            values["embed_scale"] = hidden**0.5
            if layers == 62:  # Gemma 3 27B scales by hidden_size / num_heads, which is not its head_dim
                values["query_scale"] = (hidden // heads) ** -0.5
        return make_config(self._where, **values | dict(kind.parts))

    @property
    def drafting_layers(self) -> range:
        """The numbers of the blocks for multi-token prediction, which follow the layers of the model."""
        blocks, count = self._whole("block_count"), self._whole("nextn_predict_layers", 0)
        return range(blocks - min(count, blocks), blocks)

    def _recurrent(self, layers: int) -> dict[str, Any]:
        """Returns `recurrent` and `delta` of the config."""
        every, heads = self._whole("full_attention_interval", 4), self._whole("ssm.time_step_rank")
        if not every or not heads:
            raise CheckpointError(
                f"{self._where}: metadata {self._name}.full_attention_interval is {every} and "
                f"{self._name}.ssm.time_step_rank is {heads}, expected at least 1"
            )
        found = tuple(bool((layer + 1) % every) for layer in range(layers))
        if not any(found):
            return {}
        shared, width = self._whole("ssm.group_count"), self._whole("ssm.inner_size") // heads
        sizes = shared, heads, self._whole("ssm.state_size"), width, self._whole("ssm.conv_kernel")
        # llama.cpp repeats the key heads as a whole, so its files hold the value heads in that order.
        delta = self._checked(DeltaSizes, *sizes, heads != shared)
        return {"recurrent": found, "delta": delta}

    def _experts(self, width: int) -> dict[str, Any]:
        """Returns `experts` and `intermediate_size` of the config; `width` is the file's width of an MLP, or 0."""
        count, each = self._whole("expert_count"), self._whole("expert_used_count")
        own = self._whole("expert_feed_forward_length", width // each if each else 0)
        shared = self._whole("expert_shared_feed_forward_length", 0) or None
        experts = self._checked(Experts, count, each, own, True, shared)
        return {"experts": experts, "intermediate_size": width or experts.active_width}

    def _windows(self, layers: int) -> tuple[int | None, tuple[bool, ...]]:
        """Returns `window` and `windowed` of the config."""
        reach, every = self._whole("attention.sliding_window", 0), self.architecture.full_every
        if not reach:
            return None, ()
        every = self._whole("attention.sliding_window_pattern", every)
        slides = tuple(not every or bool((i + 1) % every) for i in range(layers))
        return reach, () if all(slides) else slides

    def _rope(self, head_dim: int) -> tuple[Rope, int]:
        """Returns the rotary embeddings and the context length."""
        theta, longest = self._get("rope.freq_base", self.architecture.rope_theta), self._whole("context_length")
        width = self._whole("rope.dimension_count", head_dim)
        if width > head_dim or (self.architecture.interleaved and width != head_dim):
            raise CheckpointError(
                f"{self._where}: metadata {self._name}.rope.dimension_count is {width}, expected {head_dim}"
            )
        kind = self._metadata.get(f"{self._name}.rope.scaling.type", "none")
        divisors, scale = (), 1.0
        original = self._whole("rope.scaling.original_context_length", longest)
        if "rope_freqs.weight" in self._tensors:
            divisors = tuple(self._read("rope_freqs.weight").ravel().tolist())
        elif "rope_factors_short.weight" in self._tensors:
            long = self._context is not None and self._context > original
            divisors = tuple(self._read(f"rope_factors_{'long' if long else 'short'}.weight").ravel().tolist())
            scale = self._get("rope.scaling.attn_factor", 1.0)
            longest = longest if long else min(longest, original)
        elif kind == "linear":
            divisors = ropes.linear(self._factor(), width)
        elif kind == "yarn":
            factor = self._factor()
            if not (theta > 1 and original > 1 and width > 1):
                raise CheckpointError(
                    f"{self._where}: YaRN needs a rotary base and an original context above 1, got {theta} and "
                    f"{original}"
                )
            divisors = ropes.yarn(theta, width, factor, original)
            scale = ropes.yarn_scale(factor) * self._get("rope.scaling.attn_factor", 1.0)
        elif kind != "none":
            raise CheckpointError(
                f"{self._where}: metadata {self._name}.rope.scaling.type is {kind!r:.80}, expected none, linear or yarn"
            )
        return self._checked(Rope, theta, None if width == head_dim else width, divisors, scale), longest

    def _factor(self) -> float:
        if not 1 <= (factor := self._get("rope.scaling.factor")) < float("inf"):
            raise CheckpointError(
                f"{self._where}: metadata {self._name}.rope.scaling.factor is {factor}, expected at least 1"
            )
        return float(factor)

    def _checked(self, make: Callable[..., Any], *values: Any) -> Any:
        try:
            return make(*values)
        except InvalidConfig as error:
            raise CheckpointError(f"{self._where}: {error}") from None
