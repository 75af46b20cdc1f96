"""Reads the metadata of a GGUF file as a `ModelConfig`."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoints.base import make_config
from jaxspec.checkpoints.gguf_architectures import ARCHITECTURES
from jaxspec.checkpoints.gguf_parts import LocatedTensor
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.models import rope as ropes
from jaxspec.models.config import DeltaSizes, Experts, ModelConfig
from jaxspec.models.rope import Rope

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


class ConfigReader:
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
            problem = "is missing" if value is None else f"is {str(as_list(value))[:80]!r}, expected one number"
            raise CheckpointError(f"{self._where}: metadata {self._name}.{key} {problem}")
        with np.errstate(over="ignore"):  # the shortest decimal: 1e-05, not 9.999999747378752e-06
            return float(str(np.float32(value))) if isinstance(value, float) else value

    def _whole(self, key: str, default: int | None = None) -> int:
        if type(value := self._get(key, default)) is not int or value < 0:
            raise CheckpointError(f"{self._where}: metadata {self._name}.{key} is {value!r}, expected a whole number")
        return value

    def _flags(self, key: str, layers: int) -> tuple[bool, ...] | None:
        """Returns a boolean for each layer of the model; None if the metadata has none."""
        if (value := self._metadata.get(f"{self._name}.{key}")) is None:
            return None
        if isinstance(value, bool):  # for all layers
            return (value,) * layers
        blocks = layers + len(self.drafting_layers)
        if not isinstance(value, memoryview) or value.format != "?" or len(value) != blocks:
            raise CheckpointError(
                f"{self._where}: metadata {self._name}.{key} is {str(as_list(value))[:80]!r}, expected a boolean for "
                f"each of the {blocks} blocks"
            )
        return tuple(map(bool, value[:layers]))

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
            "qkv_bias": any(name.endswith(("attn_q.bias", "attn_qkv.bias")) for name in tensors),
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
        found = self._flags("attention.recurrent_layers", layers)
        found = tuple(bool((layer + 1) % every) for layer in range(layers)) if found is None else found
        if not any(found):
            return {}
        shared, width = self._whole("ssm.group_count"), self._whole("ssm.inner_size") // heads
        sizes = shared, heads, self._whole("ssm.state_size"), width, self._whole("ssm.conv_kernel")
        # llama.cpp repeats the key heads as a whole, so most of its files hold the value heads in that order.
        delta = self._checked(DeltaSizes, *sizes, heads != shared and not self.architecture.grouped)
        return {"recurrent": found, "delta": delta}

    def _experts(self, width: int) -> dict[str, Any]:
        """Returns `experts` and `intermediate_size` of the config; `width` is the file's width of an MLP, or 0."""
        count, each = self._whole("expert_count"), self._whole("expert_used_count")
        own = self._whole("expert_feed_forward_length", width // each if each else 0)
        shared = self._whole("expert_shared_feed_forward_length", 0) or None
        experts = self._checked(Experts, count, each, own, True, shared, self.architecture.expert_biases)
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
            turns = self._get("rope.scaling.yarn_beta_fast", 32.0), self._get("rope.scaling.yarn_beta_slow", 1.0)
            if not (0 < turns[1] <= turns[0] < float("inf")):
                raise CheckpointError(
                    f"{self._where}: YaRN needs positive numbers of rotations, got yarn_beta_fast {turns[0]} and "
                    f"yarn_beta_slow {turns[1]}"
                )
            divisors = ropes.yarn(theta, width, factor, original, *turns, self.architecture.truncates_yarn)
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


def as_list(value: Any) -> Any:
    """Returns a metadata value for display: a short array of numbers as a list, a long one as its length."""
    if not isinstance(value, memoryview):
        return value
    return value.tolist() if len(value) <= 64 else f"{len(value)} items"
