"""EAGLE heads in files: the layouts of other systems, and how files in them are read. Nothing here imports JAX."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoints.hf_config import read_config
from jaxspec.checkpoints.hf_wrappers import text_settings
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.heads.eagle_config import EagleConfig, default_eagle_taps
from jaxspec.heads.layered import (
    LayeredKind,
    LayerLayout,
    LayerReader,
    base_entry,
    layer_names,
    layer_settings,
    speculators_settings,
)
from jaxspec.models.config import ModelConfig

LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
"""The key of config.json that states the taps."""
DEFAULT_THETA = 10000.0
"""The base of rotary positions if config.json has none."""
MTP_LAYOUT = "mtp"
"""The layout of a layer for multi-token prediction inside a model."""
_LAYERS, _MIDDLE = "layers.{}.", "midlayer."


def _names(layers: str) -> dict[str, tuple[str, ...]]:
    return layer_names(layers) | {
        "fc": ("fc.weight",),
        "fc_bias": ("fc.bias",),
        "input_norm": ("input_norm.weight",),
        "hidden_norm": (layers.format(0) + "hidden_norm.weight",),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleLayout(LayerLayout):
    """A layout in which another system stores EAGLE heads.

    Attributes:
        version: the `version` of `EagleConfig` that the heads have.
        counts_outputs: True if `LAYER_IDS_KEY` may count the outputs of layers instead of their inputs.
    """

    drafter: str = EagleConfig.drafter
    taps_key: str = LAYER_IDS_KEY
    version: int
    counts_outputs: bool = False


class EagleReader(LayerReader):
    """Reads the sizes of an EAGLE head."""

    entry = "eagle_config"
    _layout: EagleLayout

    def read(self, vocab: int | None, drafted: int | None) -> EagleConfig:
        hidden, reads = self._matrix("fc.weight")
        has = self._shapes.__contains__
        decoder = self._decoder(hidden, vocab, drafted)
        own = {"fc_bias": has("fc.bias"), "own_embedding": has("embed_tokens.weight")}
        more = {} if self._layout.version == 1 else self._eagle3(hidden, drafted)
        try:
            config = EagleConfig(decoder, self._layout.version, **own, **more)
        except InvalidConfig as error:
            raise CheckpointError(f"{self._where}: {error}") from None
        if config.param_shapes()["fc"] != (reads, hidden):
            raise CheckpointError(
                f"{self._where}: tensor fc.weight has shape {[hidden, reads]}, expected "
                f"{list(config.param_shapes()['fc'][::-1])}"
            )
        return config

    def _eagle3(self, hidden: int, drafted: int | None) -> dict[str, Any]:
        norms = sum(re.fullmatch(r"fc_norm\.\d{1,4}\.weight", name) is not None for name in self._shapes)
        more: dict[str, Any] = {
            "taps": self._taps(self._count_taps(hidden), len(default_eagle_taps(1))),
            "target_size": self._target_size(hidden),
            "fc_norm": norms > 0,
            "norm_before_fc": "input_norm.weight" in self._shapes,
            "norm_before_residual": self._flag("norm_before_residual"),
            "norm_output": self._flag("norm_output") or self._flag("return_hidden_post_norm"),
            "own_projection": self.rows is not None,
            "draft_vocab_size": drafted,
        }
        for key in ("fc_norm", "norm_before_fc"):
            if key in self._more and self._flag(key) != more[key]:
                raise CheckpointError(
                    f"{self._where}: config.json says {key} {self._more[key]}, but the file "
                    f"{'has' if more[key] else 'lacks'} its tensors"
                )
        if self._layout.nested and "norm_before_residual" not in self._more:
            raise CheckpointError(
                f"{self._where}: config.json does not state norm_before_residual, whose default is true in "
                "vLLM and false in speculators; add it"
            )
        if self._flag("tie_word_embeddings") and self.rows is not None:
            self.notes.append(
                "config.json ties the projection to the embedding, but the file has a projection of its own; jaxspec "
                "uses the file's projection, and some systems use the embedding"
            )
        if more["norm_output"] and not self._layout.nested:
            self.notes.append(
                "config.json says norm_output; if SpecForge trained this head before September 2026, change it to false"
            )
        return more

    def _taps(self, count: int, default: int | None) -> tuple[int, ...] | None:
        taps = super()._taps(count, default)
        if taps is None or not self._layout.counts_outputs:
            return taps
        if taps[0] == 1:  # as SGLang does
            return tuple(tap + 1 for tap in taps)
        self.notes.append(
            f"config.json says {LAYER_IDS_KEY} {list(taps)}, read as the layers whose inputs the head reads; if it "
            f"means their outputs, as in SpecForge, set the drafter's option taps to {[tap + 1 for tap in taps]}"
        )
        return taps

    def _rope(self, width: int) -> Any:
        if not self._has_theta():
            self.notes.append(
                f"config.json has no rope_theta; {DEFAULT_THETA:.0f} is used, as in EAGLE's own code. If fewer tokens "
                "are accepted than published, set the drafter's option rope_theta to the target's value"
            )
        return super()._rope(width)


def mtp_config(target: ModelConfig, layers: int = 1) -> EagleConfig:
    """Returns the sizes of an MTP head of so many layers inside a model.

    Its layers have attention and, if the model has mixtures of experts, such mixtures.
    """
    decoder = dataclasses.replace(
        target,
        num_layers=layers,
        tie_embeddings=False,
        window=None,
        windowed=(),
        window_rope=None,
        delta=None,
        recurrent=(),
        sparse=(),
    )
    return EagleConfig(decoder, 1, norm_output=True, pair_norms=True)


class MtpReader(EagleReader):
    """Reads the sizes of a layer for multi-token prediction, which are those of its model."""

    def read(self, vocab: int | None, drafted: int | None) -> EagleConfig:
        target, _ = read_config(self._where, dict(text_settings(self._settings)))
        return mtp_config(target, self._count_layers())


def _mtp_settings(d: ModelConfig) -> dict[str, Any]:
    """Returns the entries of config.json in which a model of Qwen3.5 with these layers differs from others."""
    rope, more = {"rope_theta": d.rope.theta, "rope_type": "default"}, dict[str, Any]()
    if (experts := d.experts) is not None:
        more = {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.width,
            "shared_expert_intermediate_size": experts.shared_width,
        }
    return more | {
        "architectures": ["Qwen3_5MoeForCausalLM" if more else "Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_moe_text" if more else "qwen3_5_text",
        "layer_types": ["full_attention"] * d.num_layers,
        "mtp_num_hidden_layers": d.num_layers,
        "attn_output_gate": True,
        "rope_parameters": rope | {"partial_rotary_factor": (d.rope.width or d.head_dim) / d.head_dim},
    }


class EagleKind(LayeredKind):
    """EAGLE heads in files."""

    def names(self, config: EagleConfig, layout: EagleLayout) -> Mapping[str, tuple[str, ...]]:
        return {**layout.names, **{f"fc_norms.{i}": (f"fc_norm.{i}.weight",) for i in range(config.num_taps)}}

    def reader_of(self, layout: EagleLayout) -> type[LayerReader]:
        return MtpReader if layout.in_model else EagleReader

    def obstacle(self, config: EagleConfig, layout: EagleLayout) -> str | None:
        if config.pair_norms and not layout.in_model:
            return f"the layout {layout.name} has no norms before the input projection, which an MTP head has"
        if layout.in_model:
            return self._obstacle_in_model(config, layout)
        if config.version != layout.version:
            return (
                f"the layout {layout.name} is for EAGLE-{layout.version} heads, but this is an EAGLE-{config.version} "
                "head"
            )
        if (reason := super().obstacle(config, layout)) is not None:
            return reason
        if config.taps and config.taps[0] == 1 and not layout.nested:
            return f"SGLang reads the taps {config.taps} of the layout {layout.name} as the layers after them"
        if config.norm_before_residual and not layout.nested:
            return f"SGLang and TensorRT-LLM read the layout {layout.name} without norm_before_residual"
        if config.fc_bias and layout.nested:
            return f"the layout {layout.name} cannot hold the bias of the input projection"
        return None

    def _obstacle_in_model(self, config: EagleConfig, layout: EagleLayout) -> str | None:
        """Returns the reason why the files of a Qwen3.5 model cannot hold a head as their own; None if they can."""
        d = config.decoder
        if not config.pair_norms:
            return f"the layout {layout.name} is for layers for multi-token prediction, but this is {config.summary}"
        biases = d.qkv_bias or d.out_bias or d.mlp_bias
        usual = d.out_gate and d.qk_norm and d.activation == "silu" and not (d.post_norms or biases)
        if (experts := d.experts) is not None:
            usual = usual and experts.normalise and experts.shared_width is not None and not d.sparse
        if not (usual and config.norm_output) or config.own_embedding or config.fc_bias:
            return f"the layout {layout.name} is for layers like those of Qwen3.5 with attention"
        if d.rope.divisors or d.rope.scale != 1:
            return f"the layout {layout.name} is written without scaled rotary positions, but this head has them"
        return None

    def sizes_in(self, config: EagleConfig, layout: EagleLayout) -> EagleConfig:
        return dataclasses.replace(config, own_projection=True) if config.version == 3 else config

    def config_json(
        self, config: EagleConfig, layout: EagleLayout, base: str | None, depth: int | None
    ) -> dict[str, Any]:
        layer = layer_settings(config.decoder)
        if layout.in_model:
            return layer | _mtp_settings(config.decoder) | base_entry(base)
        if config.version == 1:
            return layer | {"architectures": ["LlamaForCausalLMEagle"], "bias": config.fc_bias} | base_entry(base)
        switches = {
            "draft_vocab_size": config.rows,
            "target_hidden_size": config.target_size,
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            "fc_norm": config.fc_norm,
            "norm_output": config.norm_output,
        }
        default = config.taps is None or (depth is not None and config.taps == default_eagle_taps(depth))
        taps = None if default else list(config.taps or ())
        if layout.nested:
            return switches | {LAYER_IDS_KEY: taps} | speculators_settings("Eagle3", layer, 5, base)
        if taps is not None:
            switches[LAYER_IDS_KEY] = taps
        if config.target_size is None:
            del switches["target_hidden_size"]
        return layer | {"architectures": ["LlamaForCausalLMEagle3"], "bias": False} | switches | base_entry(base)


EAGLE = EagleKind(
    title="EAGLE heads",
    sizes=EagleConfig,
    network="jaxspec.heads.eagle:EagleHead",
    reader=EagleReader,
    layouts=(
        EagleLayout(
            name="eagle3",
            summary="EAGLE-3 of one layer",
            readers="EAGLE, vLLM, SGLang, TensorRT-LLM",
            mark=r"midlayer\..*",
            version=3,
            layers=_MIDDLE,
            names=_names(_MIDDLE),
            requires_ids=True,
            counts_outputs=True,
        ),
        EagleLayout(
            name="speculators",
            summary="EAGLE-3 with every switch",
            readers="vLLM",
            mark=r"layers\.0\.hidden_norm\.weight",
            version=3,
            names=_names(_LAYERS),
            nested=True,
        ),
        EagleLayout(
            name="eagle1",
            summary="EAGLE-1 and EAGLE-2",
            readers="EAGLE, SGLang",
            mark=r"fc\.weight",
            version=1,
            names=_names(_LAYERS),
            has_ids=False,
        ),
        EagleLayout(
            name=MTP_LAYOUT,
            summary="the layer for multi-token prediction inside a Qwen3.5 model",
            readers="vLLM, SGLang",
            mark=r"fc\.weight",
            prefix="mtp.",
            other_prefixes=(),
            version=1,
            names=_names(_LAYERS)
            | {
                "embed_norm": ("pre_fc_norm_embedding.weight",),
                "hidden_norm": ("pre_fc_norm_hidden.weight",),
            },
            has_ids=False,
            norm_offset=1.0,
            in_model=True,
        ),
    ),
)
