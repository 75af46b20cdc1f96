"""The layouts in which other systems store DFlash and DSpark heads: a row of `DFLASH_LAYOUTS` each. Without JAX.

All have tensors of the same names, those of a Qwen3 model without the prefix `model.`; linear maps are [out, in]. Their
config.json differ, and tell them apart.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxspec.checkpoints.folder import WHOLE
from jaxspec.heads.dflash_config import DFlashConfig
from jaxspec.heads.eagle_layouts import layer_names, layer_settings, named, scales_positions, speculators_settings

LAYERS = "layers.{}."
"""The prefix of a layer's tensors."""
SLIDING = "sliding_attention"
NAMES = layer_names(LAYERS) | {
    "fc": ("fc.weight",),
    "hidden_norm": ("hidden_norm.weight",),
    "markov_in": ("markov_head.markov_w1.weight",),
    "markov_out": ("markov_head.markov_w2.weight",),
    "confidence": ("confidence_head.proj.weight",),
    "confidence_bias": ("confidence_head.proj.bias",),
    "attention_base": (LAYERS + "attention_conv.base_kernel",),
    "attention_mix": (LAYERS + "attention_conv.kernel_projection.weight",),
    "mlp_base": (LAYERS + "mlp_conv.base_kernel",),
    "mlp_mix": (LAYERS + "mlp_conv.kernel_projection.weight",),
    "selector_mix": ("candidate_selector.hidden_projection.weight",),
    "selector_in": ("candidate_selector.predecessor_codebook",),
    "selector_out": ("candidate_selector.successor_codebook",),
}
"""The tensors of each kind of parameter, as in `Family.all_names`, without those of `mix_names`."""


def mix_names(markov: str) -> dict[str, tuple[str, ...]]:
    """Returns the tensors with which a Markov head of the kind "gated" or "rnn" mixes what it reads."""
    name = "markov_head.gate_proj" if markov == "gated" else "markov_head.joint_proj"
    return {"markov_mix": (f"{name}.weight",), "markov_mix_bias": (f"{name}.bias",)}


def second_settings(config: DFlashConfig) -> dict[str, int]:
    """Returns the entries of config.json about the convolutions and the selector of DFlash 2."""
    return {
        "conv_kernel_size": config.conv_size,
        "conv_group_size": config.conv_group,
        "selector_rank": config.selector_rank,
        "selector_top_k": config.selector_top,
    }


@dataclasses.dataclass(frozen=True)
class DFlashLayout:
    """A layout in which another system stores DFlash heads; the first attributes are those of `Layout`.

    Attributes:
        name: the name that users write.
        summary: one line for the help of `jaxspec export`.
        readers: the systems that read the layout.
        taps_key: the key of config.json that states the taps.
        first_tap: what to add to its numbers for the numbers of `jaxspec.core.networks.TappedTarget`.
        nested: True if config.json describes the layers in an entry of their own, as speculators does.
        exported: True if `export_heads` writes the layout.
        prefix: the beginning of every name.
    """

    name: str
    summary: str
    readers: str
    taps_key: str
    first_tap: int
    nested: bool = False
    exported: bool = True
    prefix: str = ""

    drafter: ClassVar[str] = DFlashConfig.drafter
    files: ClassVar[tuple[str, ...]] = (WHOLE,)
    mark: ClassVar[str] = r"hidden_norm\.weight"
    other_prefixes: ClassVar[tuple[str, ...]] = ("model.",)
    in_model: ClassVar[bool] = False

    def names_for(self, config: DFlashConfig) -> dict[str, tuple[str, ...]]:
        """Returns the tensors of each kind of parameter, as in `Family.all_names`."""
        return NAMES | (mix_names(config.markov) if config.markov in ("gated", "rnn") else {})

    def config_json(self, config: DFlashConfig, base: str | None, taps: tuple[int, ...]) -> dict[str, Any]:
        """Returns the content of config.json.

        Args:
            config: sizes of the head.
            base: the target's name, or None.
            taps: the taps.
        """
        d = config.decoder
        windows = [d.window_of(layer) is not None for layer in range(d.num_layers)]
        layer = layer_settings(d) | {
            "layer_types": [SLIDING if window else "full_attention" for window in windows],
            "use_sliding_window": any(windows),
            "sliding_window": d.window if any(windows) else None,
        }
        ids = [tap - self.first_tap for tap in taps]
        if not self.nested:
            switches = {"mask_token_id": config.mask_token, self.taps_key: ids, "causal": config.is_causal(0)}
            own: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "block_size": config.block_size}
            if config.is_second:
                switches |= {"block_size": own.pop("block_size")} | second_settings(config)
                own |= {"architectures": ["DFlash2DraftModel"]}
            return layer | own | {"dflash_config": switches} | named(base)
        switches = {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token,
            self.taps_key: ids,
            "sample_from_anchor": config.from_anchor,
            "sliding_window_non_causal": not any(config.causal),
            "draft_vocab_size": config.rows,
            "target_hidden_size": config.target_size,
        }
        kind = "dspark" if config.markov or config.confidence else "dflash"
        if kind == "dspark":
            switches |= {
                "markov_rank": config.markov_rank,
                "markov_head_type": config.markov or "vanilla",
                "enable_confidence_head": config.confidence,
                "confidence_head_with_markov": config.confidence_reads_token,
            }
        return switches | speculators_settings(kind, layer, config.max_depth, base)

    def obstacle(self, config: Any) -> str | None:
        """Returns the reason why the layout cannot hold a head of these sizes; None if it can."""
        if not isinstance(config, DFlashConfig):
            return f"the layout {self.name} is for DFlash and DSpark heads"
        if not config.decoder.qk_norm:
            return f"the layout {self.name} has norms of queries and keys, this head has none"
        if scales_positions(config.decoder):
            return f"the layout {self.name} has no scaled rotary positions here"
        if config.is_second and (self.nested or not (config.conv_size and config.selector_rank)):
            return f"the layout {self.name} has no place for the convolutions or the selector of this DFlash 2 head"
        taps = config.taps or ()
        if sorted(taps) != list(taps):
            return f"the layout {self.name} has taps in ascending order, this head has {taps}"
        if self.nested:
            windows = [config.decoder.window_of(layer) is not None for layer in range(config.decoder.num_layers)]
            if any(config.causal) and list(config.causal) != windows:
                return f"the layout {self.name} has causal blocks in all layers with sliding windows, and in no others"
            return None
        if config.markov or config.confidence:
            return f"the layout {self.name} has no place for the heads of DSpark"
        if config.from_anchor:
            return f"in the layout {self.name} the first row of a block names no token"
        if config.own_embedding or config.own_projection or config.draft_vocab_size is not None:
            return f"the layout {self.name} shares the target's embedding and projection, this head has its own"
        if len(set(config.causal)) > 1:
            return f"the layout {self.name} has causal blocks in all layers or in none"
        return None


DFLASH_LAYOUTS = (
    DFlashLayout(
        name="dflash",
        summary="DFlash without tables of its own",
        readers="DFlash, vLLM, SGLang",
        taps_key="target_layer_ids",
        first_tap=1,
    ),
    DFlashLayout(
        name="dflash-speculators",
        summary="DFlash and DSpark with every switch",
        readers="vLLM",
        taps_key="aux_hidden_state_layer_ids",
        first_tap=0,
        nested=True,
    ),
    DFlashLayout(
        name="deepspec",
        summary="DFlash and DSpark, as DeepSpec trains them",
        readers="DeepSpec, vLLM, SGLang",
        taps_key="target_layer_ids",
        first_tap=1,
        exported=False,
    ),
)
"""All have the same mark: `jaxspec.heads.dflash_files` finds the layout of a file by its config.json."""


def layout_of(settings: Mapping[str, Any]) -> DFlashLayout:
    """Returns the layout of a file with this content of config.json, without a prefix."""
    zlab, speculators, deepspec = DFLASH_LAYOUTS
    if "speculators_model_type" in settings:
        return speculators
    return zlab if "dflash_config" in settings else deepspec
