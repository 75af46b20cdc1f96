"""The layouts in which other systems store EAGLE heads: one row of `EAGLE_LAYOUTS` each. Nothing here imports JAX.

The tensors are named as those of a Llama model without the prefix `model.`; linear maps are [out, in].
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxspec.checkpoints.folder import WHOLE
from jaxspec.checkpoints.hf_families import FAMILIES
from jaxspec.heads.eagle_config import EagleConfig
from jaxspec.models.config import ModelConfig

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""The key of config.json that states the taps."""
_LLAMA, _BLOCKS = FAMILIES["llama"].all_names(), "model.layers.{}."


def layer_names(layers: str) -> dict[str, tuple[str, ...]]:
    """Returns the tensors of each kind of parameter, as in `Family.all_names`; `layers` is the prefix of a layer's."""
    return {
        kind: tuple(name.replace(_BLOCKS, layers).removeprefix("model.") for name in names)
        for kind, names in _LLAMA.items()
    }


def layer_settings(d: ModelConfig) -> dict[str, Any]:
    """Returns the entries of config.json that describe layers; their rotary positions are not scaled."""
    return {
        "model_type": "qwen3" if d.qk_norm else "llama",
        "hidden_act": {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[d.activation],
        "hidden_size": d.hidden_size,
        "intermediate_size": d.intermediate_size,
        "num_hidden_layers": d.num_layers,
        "num_attention_heads": d.num_heads,
        "num_key_value_heads": d.num_kv_heads,
        "head_dim": d.head_dim,
        "rms_norm_eps": d.norm_eps,
        "rope_theta": d.rope.theta,
        "rope_parameters": {"rope_theta": d.rope.theta, "rope_type": "default"},
        "max_position_embeddings": d.max_position,
        "attention_bias": d.qkv_bias,
        "mlp_bias": d.mlp_bias,
        "tie_word_embeddings": False,
        "vocab_size": d.vocab_size,
    }


@dataclasses.dataclass(frozen=True)
class EagleLayout:
    """A layout in which another system stores EAGLE heads; the first attributes are those of `Layout`.

    Attributes:
        name: the name that users write.
        summary: one line for the help of `jaxspec export`.
        readers: the systems that read the layout.
        mark: a regular expression for the names of the tensors that identify the layout.
        version: of `EagleConfig`.
        layers: the prefix of a layer's tensors, with `{}` for its number; without, there is one layer.
        nested: True if config.json describes the layers in an entry of their own, as speculators does.
        counts_outputs: True if `LAYER_IDS` may count the outputs of layers, in place of what enters them.
        prefix: the beginning of every name.
    """

    name: str
    summary: str
    readers: str
    mark: str
    version: int
    layers: str
    nested: bool = False
    counts_outputs: bool = False
    prefix: str = ""

    drafter: ClassVar[str] = EagleConfig.drafter
    files: ClassVar[tuple[str, ...]] = (WHOLE,)
    other_prefixes: ClassVar[tuple[str, ...]] = ("model.",)
    in_model: ClassVar[bool] = False
    exported: ClassVar[bool] = True

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The tensors of each kind of parameter, as in `Family.all_names`."""
        return layer_names(self.layers) | {
            "fc": ("fc.weight",),
            "fc_bias": ("fc.bias",),
            "input_norm": ("input_norm.weight",),
            "hidden_norm": (self.layers.format(0) + "hidden_norm.weight",),
        }

    def names_for(self, config: EagleConfig) -> dict[str, tuple[str, ...]]:
        """Returns `names`, with those of the norm of each tap."""
        return self.names | {f"fc_norms.{i}": (f"fc_norm.{i}.weight",) for i in range(config.num_taps)}

    def config_json(self, config: EagleConfig, base: str | None, taps: tuple[int, ...] | None) -> dict[str, Any]:
        """Returns the content of config.json.

        Args:
            config: sizes of the head.
            base: the target's name, or None.
            taps: the taps, if they are not the default ones of the target.
        """
        layer = layer_settings(config.decoder)
        if config.version == 1:
            return layer | {"architectures": ["LlamaForCausalLMEagle"], "bias": config.fc_bias} | named(base)
        switches = {
            "draft_vocab_size": config.rows,
            "target_hidden_size": config.target_size,
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            "fc_norm": config.fc_norm,
            "norm_output": config.norm_output,
        }
        if self.nested:
            return (
                switches
                | {LAYER_IDS: None if taps is None else list(taps)}
                | speculators_settings("eagle3", layer, 5, base)
            )
        if taps is not None:
            switches[LAYER_IDS] = list(taps)
        if config.target_size is None:
            del switches["target_hidden_size"]
        return layer | {"architectures": ["LlamaForCausalLMEagle3"], "bias": False} | switches | named(base)

    def obstacle(self, config: Any) -> str | None:
        """Returns the reason why the layout cannot hold a head of these sizes; None if it can."""
        if not isinstance(config, EagleConfig):
            return f"the layout {self.name} is for EAGLE heads"
        if config.version != self.version:
            return f"the layout {self.name} is for EAGLE-{self.version} heads, this is an EAGLE-{config.version} head"
        if config.decoder.num_layers > 1 and "{}" not in self.layers:
            return f"the layout {self.name} has one layer, this head has {config.decoder.num_layers}"
        if scales_positions(config.decoder):
            return f"the layout {self.name} has no scaled rotary positions here"
        taps = config.taps or ()
        if sorted(taps) != list(taps):
            return f"the layout {self.name} has taps in ascending order, this head has {taps}"
        if taps[:1] == (1,) and not self.nested:
            return f"SGLang reads the taps {taps} of the layout {self.name} as the layers after them"
        if config.norm_before_residual and not self.nested:
            return f"SGLang and TensorRT-LLM read the layout {self.name} without norm_before_residual"
        if config.fc_bias and self.nested:
            return f"the layout {self.name} has no bias of the input projection"
        return None


def scales_positions(d: ModelConfig) -> bool:
    """Returns whether the rotary positions are more than their base says."""
    return bool(d.rope.divisors or d.rope.width or d.rope.scale != 1)


def named(base: str | None) -> dict[str, Any]:
    """Returns the entry of config.json that names the target."""
    return {} if base is None else {"base_model_name_or_path": base}


def speculators_settings(kind: str, layer: Mapping[str, Any], tokens: int, base: str | None) -> dict[str, Any]:
    """Returns the entries of config.json that speculators and vLLM require.

    Args:
        kind: of heads: "eagle3", "dflash" or "dspark".
        layer: the entries about the layers.
        tokens: the number of tokens to draft.
        base: the target's name, or None.
    """
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    name = {"eagle3": "Eagle3", "dflash": "DFlash", "dspark": "DSpark"}[kind]
    return {
        "architectures": [f"{name}Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": dict(layer),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": base, "architectures": ["LlamaForCausalLM"]},
        },
    }


EAGLE_LAYOUTS = (
    EagleLayout(
        name="eagle3",
        summary="EAGLE-3 of one layer",
        readers="EAGLE, vLLM, SGLang, TensorRT-LLM",
        mark=r"midlayer\..*",
        version=3,
        layers="midlayer.",
        counts_outputs=True,
    ),
    EagleLayout(
        name="speculators",
        summary="EAGLE-3 with every switch",
        readers="vLLM",
        mark=r"layers\.0\.hidden_norm\.weight",
        version=3,
        layers="layers.{}.",
        nested=True,
    ),
    EagleLayout(
        name="eagle1",
        summary="EAGLE-1 and EAGLE-2",
        readers="EAGLE, SGLang",
        mark=r"fc\.weight",
        version=1,
        layers="layers.{}.",
    ),
)
