"""DFlash, DSpark and JetSpec heads in files: the layouts of other systems, and how files in them are read.

The tensors have the same names in all layouts, which are the names of a Qwen3 model without the prefix `model.`. Linear
maps are [out, in]. The layouts differ in the contents of config.json, by which they are recognised. Nothing here
imports JAX.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.heads.dflash_config import DFlashConfig
from jaxspec.heads.kinds import Layout
from jaxspec.heads.layered import (
    LayeredKind,
    LayerLayout,
    LayerReader,
    base_entry,
    layer_names,
    layer_settings,
    speculators_settings,
)

_LAYERS = "layers.{}."
SLIDING_ATTENTION = "sliding_attention"
"""The type of a layer with sliding-window attention in config.json."""
TENSOR_NAMES = layer_names(_LAYERS) | {
    "fc": ("fc.weight",),
    "hidden_norm": ("hidden_norm.weight",),
    "markov_in": ("markov_head.markov_w1.weight",),
    "markov_out": ("markov_head.markov_w2.weight",),
    "confidence": ("confidence_head.proj.weight",),
    "confidence_bias": ("confidence_head.proj.bias",),
    "attention_base": (_LAYERS + "attention_conv.base_kernel",),
    "attention_mix": (_LAYERS + "attention_conv.kernel_projection.weight",),
    "mlp_base": (_LAYERS + "mlp_conv.base_kernel",),
    "mlp_mix": (_LAYERS + "mlp_conv.kernel_projection.weight",),
    "selector_mix": ("candidate_selector.hidden_projection.weight",),
    "selector_in": ("candidate_selector.predecessor_codebook",),
    "selector_out": ("candidate_selector.successor_codebook",),
}
"""The tensors of each kind of parameter, as in `Family.all_names`, except the tensors that `mix_names` returns."""


def mix_names(markov: str) -> dict[str, tuple[str, ...]]:
    """Returns the tensors of the linear map that a Markov head of the kind "gated" or "rnn" has."""
    name = "markov_head.gate_proj" if markov == "gated" else "markov_head.joint_proj"
    return {"markov_mix": (f"{name}.weight",), "markov_mix_bias": (f"{name}.bias",)}


def dflash2_settings(config: DFlashConfig) -> dict[str, int]:
    """Returns the entries of config.json about the convolutions and the selector of DFlash 2."""
    return {
        "conv_kernel_size": config.conv_size,
        "conv_group_size": config.conv_group,
        "selector_rank": config.selector_rank,
        "selector_top_k": config.selector_top,
    }


SPECULATORS_KINDS = {"dflash": False, "dspark": True}
"""The kinds of heads of speculators that can be read, and whether the first row of their blocks guesses a token."""
CAUSAL_KEYS = ("is_causal", "causal", "causal_head")
"""The keys that state whether the layers are causal; files of JetSpec have the last."""
NEUTRAL_ENTRIES: dict[str, Any] = {
    "output_multiplier": 1.0,
    "input_embedding_scale": 1.0,
    "logit_scale": 1.0,
    "final_logit_softcapping": None,
    "fc_layernorm": False,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "is_neox_style": True,
    "use_swa": False,
}
"""Entries of config.json that change what some heads compute, with the values that change nothing."""


class DFlashReader(LayerReader):
    """Reads the sizes of a DFlash, DSpark or JetSpec head."""

    entry = "dflash_config"
    # Files of speculators also have copies of the target's tensors, which only training reads.
    ignored = re.compile(rf"{LayerReader.ignored.pattern}|verifier_(norm|lm_head)\.weight", re.DOTALL)
    known = re.compile(
        "|".join(
            re.escape(name).replace(r"\{\}", r"\d{1,4}")
            for names in (*TENSOR_NAMES.values(), *mix_names("gated").values(), *mix_names("rnn").values())
            for name in names
        )
    )

    def read(self, vocab: int | None, drafted: int | None) -> DFlashConfig:
        self._check_settings()
        hidden, windowed = self._matrix("fc.weight")[0], self._windowed()
        count, causal = self._count_taps(hidden), self._causal(windowed)
        windows = {"window": self._window(), "windowed": windowed} if any(windowed) else {}
        decoder = self._decoder(hidden, vocab, drafted, **windows)
        try:
            return DFlashConfig(
                decoder,
                block_size=self._stated("block_size") - self._is_shifted(any(causal)),
                mask_token=self._stated("mask_token_id"),
                from_anchor=self._from_anchor(),
                causal=causal if any(causal) else (),
                target_size=self._target_size(hidden),
                taps=self._taps(count, None if self._layout.nested else decoder.num_layers),
                draft_vocab_size=drafted,
                own_embedding="embed_tokens.weight" in self._shapes,
                own_projection=self.rows is not None,
                **self._small_heads(hidden),
                **self._second(hidden),
            )
        except InvalidConfig as error:
            raise CheckpointError(f"{self._where}: {error}") from None

    def _check_settings(self) -> None:
        kind = self._settings.get("speculators_model_type")
        if self._layout.nested and (not isinstance(kind, str) or kind not in SPECULATORS_KINDS):
            raise CheckpointError(f"{self._where}: speculators_model_type is {kind!r:.40}, expected dflash or dspark")
        for key, value in NEUTRAL_ENTRIES.items():
            if (stated := self._more.get(key, self._entries.get(key, value))) != value:
                raise CheckpointError(
                    f"{self._where}: config.json says {key} {stated!r:.40}, which is not supported; expected {value!r}"
                )
        if not self._has_theta():
            raise CheckpointError(f"{self._where}: config.json does not state rope_theta; add it")

    def _from_anchor(self) -> bool:
        if "sample_from_anchor" in self._more:
            return self._flag("sample_from_anchor")
        if self._flag("draft_shift"):
            return True
        if self._layout.nested:
            return SPECULATORS_KINDS[self._settings["speculators_model_type"]]
        if "dflash_config" in self._settings and "markov_head.markov_w1.weight" in self._shapes:
            raise CheckpointError(
                f"{self._where}: config.json does not state sample_from_anchor; add it: true if the first row of a "
                "block guesses a token (as in files of DeepSpec), false if it does not (as in files of DFlash)"
            )
        return "dflash_config" not in self._settings

    def _is_shifted(self, causal: bool) -> bool:
        """Returns whether the last row of a block of JetSpec guesses no token, so that a block has one row less.

        The rows before it guess the same tokens without it if they do not see it.
        """
        shifted = self._flag("draft_shift")
        if shifted and not causal:
            raise CheckpointError(
                f"{self._where}: config.json says draft_shift, but not that the layers are causal; add causal_head"
            )
        return shifted

    def _windowed(self) -> tuple[bool, ...]:
        layers, types = self._count_layers(), self._entries.get("layer_types")
        if types is None:
            if self._entries.get("use_sliding_window", False) is not False:
                raise CheckpointError(f"{self._where}: config.json says use_sliding_window, but has no layer_types")
            return (False,) * layers
        known = ("full_attention", SLIDING_ATTENTION)
        if not isinstance(types, list) or len(types) != layers or not all(kind in known for kind in types):
            raise CheckpointError(
                f"{self._where}: layer_types is {types!r:.80}, expected {' or '.join(known)} for {layers} layers each"
            )
        return tuple(kind == SLIDING_ATTENTION for kind in types)

    def _window(self) -> int:
        value = self._more.get("swa_window_size", self._entries.get("sliding_window"))
        if type(value) is not int or not 0 < value < 1 << 31:
            raise CheckpointError(f"{self._where}: sliding_window is {value!r:.80}, expected a positive whole number")
        return value

    def _causal(self, windowed: tuple[bool, ...]) -> tuple[bool, ...]:
        """Returns whether each layer is causal inside a block; as in vLLM, the first key that states it decides."""
        if self._layout.nested:
            both_ways = self._flag("sliding_window_non_causal")
            return tuple(window and not both_ways for window in windowed)
        for key in CAUSAL_KEYS:
            if key in self._more:
                return (self._flag(key),) * len(windowed)
        return windowed

    def _small_heads(self, hidden: int) -> dict[str, Any]:
        """Returns the sizes of the Markov head and of the confidence head."""
        has = self._shapes.__contains__
        sizes: dict[str, Any] = {}
        expected: dict[str, Any] = {"markov_rank": 0, "enable_confidence_head": has("confidence_head.proj.weight")}
        if has("markov_head.markov_w1.weight"):
            kind = "gated" if has("markov_head.gate_proj.weight") else "vanilla"
            kind = "rnn" if has("markov_head.joint_proj.weight") else kind
            sizes |= {"markov": kind, "markov_rank": self._matrix("markov_head.markov_w1.weight")[1]}
            expected |= {"markov_rank": sizes["markov_rank"], "markov_head_type": kind}
        if has("confidence_head.proj.weight"):
            reads_token = self._matrix("confidence_head.proj.weight")[1] != hidden
            sizes |= {"confidence": True, "confidence_reads_token": reads_token}
            expected["confidence_head_with_markov"] = reads_token
        for key, value in expected.items():
            if key in self._more and self._more[key] != value:
                raise CheckpointError(
                    f"{self._where}: config.json says {key} {self._more[key]!r:.40}, but the tensors say {value!r}"
                )
        return sizes

    def _second(self, hidden: int) -> dict[str, Any]:
        """Returns the sizes of the convolutions and of the selector of DFlash 2."""
        sizes: dict[str, Any] = {}
        first = f"{_LAYERS.format(0)}attention_conv."
        if (base := self._shapes.get(f"{first}base_kernel")) is not None:
            rows = self._matrix(f"{first}kernel_projection.weight")[0]
            if len(base) != 3 or base[0] != 2 or 0 in base or rows % (2 * base[1]) or hidden % (rows // (2 * base[1])):
                raise CheckpointError(
                    f"{self._where}: {first}base_kernel has shape {list(base)}, and {first}kernel_projection has "
                    f"{rows} rows; expected [2, rows, {hidden}], and 2 * rows for each group of channels"
                )
            sizes |= {"conv_size": base[1], "conv_group": hidden // (rows // (2 * base[1]))}
        if "candidate_selector.hidden_projection.weight" in self._shapes:
            rank = self._matrix("candidate_selector.hidden_projection.weight")[0]
            sizes |= {"selector_rank": rank, "selector_top": self._stated("selector_top_k")}
        keys = {"conv_size": "conv_kernel_size", "conv_group": "conv_group_size", "selector_rank": "selector_rank"}
        for ours, key in keys.items():
            if key in self._more and self._more[key] != (size := sizes.get(ours, 0)):
                raise CheckpointError(
                    f"{self._where}: config.json says {key} {self._more[key]!r:.40}, but the tensors say {size}"
                )
        return sizes

    def _stated(self, key: str) -> int:
        value = self._more.get(key)
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise CheckpointError(f"{self._where}: {key} is {value!r:.80}, expected a whole number")
        return value


class DFlashKind(LayeredKind):
    """DFlash, DSpark and JetSpec heads in files."""

    def layout_of(self, layout: Layout, settings: Mapping[str, Any]) -> Layout:
        zlab, speculators, deepspec = self.layouts
        other = zlab if "dflash_config" in settings else deepspec
        return dataclasses.replace(speculators if "speculators_model_type" in settings else other, prefix=layout.prefix)

    def names(self, config: DFlashConfig, layout: LayerLayout) -> Mapping[str, tuple[str, ...]]:
        return {**layout.names} | (mix_names(config.markov) if config.markov in ("gated", "rnn") else {})

    def obstacle(self, config: DFlashConfig, layout: LayerLayout) -> str | None:
        if not config.decoder.qk_norm:
            return f"the layout {layout.name} has norms of queries and keys, but this head has none"
        if (reason := super().obstacle(config, layout)) is not None:
            return reason
        if config.is_second and (layout.nested or not (config.conv_size and config.selector_rank)):
            return f"the layout {layout.name} cannot hold the convolutions or the selector of this DFlash 2 head"
        if layout.nested:
            windows = [config.decoder.window_of(layer) is not None for layer in range(config.decoder.num_layers)]
            if any(config.causal) and list(config.causal) != windows:
                return (
                    f"the layout {layout.name} has causal blocks in all layers with sliding windows, and in no others"
                )
            return None
        if config.markov or config.confidence:
            return f"the layout {layout.name} cannot hold the Markov head and the confidence head of DSpark"
        if config.from_anchor and not config.is_all_causal:
            return f"in the layout {layout.name} the first row of a block does not predict a token"
        if config.own_embedding or config.own_projection or config.draft_vocab_size is not None:
            return f"the layout {layout.name} shares the target's embedding and projection, but this head has its own"
        if len(set(config.causal)) > 1:
            return f"the layout {layout.name} has causal blocks in all layers or in none"
        return None

    def sizes_in(self, config: DFlashConfig, layout: LayerLayout) -> DFlashConfig:
        return config if config.draft_vocab_size is None else dataclasses.replace(config, own_projection=True)

    def config_json(
        self, config: DFlashConfig, layout: LayerLayout, base: str | None, depth: int | None
    ) -> dict[str, Any]:
        d = config.decoder
        windows = [d.window_of(layer) is not None for layer in range(d.num_layers)]
        layer = layer_settings(d) | {
            "layer_types": [SLIDING_ATTENTION if window else "full_attention" for window in windows],
            "use_sliding_window": any(windows),
            "sliding_window": d.window if any(windows) else None,
        }
        if config.taps is None and depth is None:
            raise InvalidConfig(
                f"the layout {layout.name} states the taps, but this head reads the default taps of its target; give "
                "the target (target=..., or --target)"
            )
        ids = [tap - layout.first_tap for tap in config.taps_of(depth or 0)]
        if not layout.nested:
            switches = {"mask_token_id": config.mask_token, layout.taps_key: ids, "causal": config.is_causal(0)}
            own: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "block_size": config.block_size}
            if depth is not None:  # DFlash's and JetSpec's code do not load a head without it
                own["num_target_layers"] = depth
            if config.is_all_causal:  # JetSpec reads other keys than vLLM
                own["block_size"] += config.from_anchor
                switches |= {"causal_head": True, "draft_shift": config.from_anchor}
            if config.is_second:
                switches |= {"block_size": own.pop("block_size")} | dflash2_settings(config)
                own |= {"architectures": ["DFlash2DraftModel"]}
            return layer | own | {"dflash_config": switches} | base_entry(base)
        switches = {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token,
            layout.taps_key: ids,
            "sample_from_anchor": config.from_anchor,
            "sliding_window_non_causal": not any(config.causal),
            "draft_vocab_size": config.rows,
            "target_hidden_size": config.target_size,
        }
        kind = "DSpark" if config.markov or config.confidence else "DFlash"  # JetSpec is no kind of speculators
        if kind == "DSpark":
            switches |= {
                "markov_rank": config.markov_rank,
                "markov_head_type": config.markov or "vanilla",
                "enable_confidence_head": config.confidence,
                "confidence_head_with_markov": config.confidence_reads_token,
            }
        return switches | speculators_settings(kind, layer, config.max_depth, base)


def _layout(**more: Any) -> LayerLayout:
    return LayerLayout(drafter=DFlashConfig.drafter, mark=r"hidden_norm\.weight", names=TENSOR_NAMES, **more)


DFLASH = DFlashKind(
    title="DFlash, DSpark or JetSpec heads",
    sizes=DFlashConfig,
    network="jaxspec.heads.dflash:DFlashHead",
    reader=DFlashReader,
    layouts=(
        _layout(
            name="dflash",
            summary="DFlash and JetSpec without tables of their own",
            readers="DFlash, JetSpec, vLLM, SGLang",
            taps_key="target_layer_ids",
            first_tap=1,
        ),
        _layout(
            name="dflash-speculators",
            summary="DFlash and DSpark with every switch",
            readers="vLLM",
            taps_key="aux_hidden_state_layer_ids",
            first_tap=0,
            nested=True,
        ),
        _layout(
            name="deepspec",
            summary="DFlash and DSpark, as DeepSpec trains them",
            readers="DeepSpec, vLLM, SGLang",
            taps_key="target_layer_ids",
            first_tap=1,
            exported=False,
        ),
    ),
)
