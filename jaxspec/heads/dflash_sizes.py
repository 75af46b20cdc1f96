"""Infers the sizes of a DFlash head: from its tensors, and from config.json only what they do not tell."""

from collections.abc import Mapping
from typing import Any

from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.heads.dflash_config import DFlashConfig
from jaxspec.heads.dflash_layouts import LAYERS, SLIDING, DFlashLayout
from jaxspec.heads.layer_sizes import LayerReader

KINDS = {"dflash": False, "dspark": True}
"""The kinds of heads of speculators that are read, and whether the first row of their blocks names a token."""
NEUTRAL: dict[str, Any] = {
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
"""Entries of config.json that change the law of some heads, with the values that change nothing."""


class SizeReader(LayerReader):
    """Reads the sizes of a DFlash head."""

    def __init__(
        self, where: str, layout: DFlashLayout, shapes: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any]
    ):
        """Takes the tensors' shapes without those of a reduced vocabulary; names have no prefix."""
        super().__init__(where, LAYERS, shapes, settings, layout.nested, "dflash_config")
        self._layout = layout

    def read(self, vocab: int | None, drafted: int | None) -> DFlashConfig:
        """Returns the sizes.

        Args:
            vocab: the size of the vocabulary, if tensors say it.
            drafted: the number of tokens that are drafted; None for all.

        Raises:
            CheckpointError: a tensor is missing, or sizes are missing or do not fit together, or config.json says that
                the head computes what is not understood.
        """
        self._check_settings()
        hidden, reads = self._matrix("fc.weight")
        target = self._whole("target_hidden_size")
        count, rest = divmod(reads, target or hidden)
        if rest:
            raise CheckpointError(
                f"{self._where}: fc.weight reads {reads} numbers, which are no whole states of {target or hidden}"
            )
        rows = self._shapes.get("lm_head.weight", (None,))[0]
        windowed = self._windowed()
        window = self._window() if any(windowed) else None
        decoder = self._decoder(hidden, vocab or self.vocab or (None if drafted else rows), rows, window=window,
                                windowed=windowed if any(windowed) else ())  # fmt: skip
        causal = self._causal(windowed)
        try:
            return DFlashConfig(
                decoder,
                block_size=self._stated("block_size"),
                mask_token=self._stated("mask_token_id"),
                from_anchor=self._from_anchor(),
                causal=causal if any(causal) else (),
                target_size=None if target == hidden else target,
                taps=self._taps(count),
                draft_vocab_size=drafted,
                own_embedding="embed_tokens.weight" in self._shapes,
                own_projection=rows is not None,
                **self._small_heads(hidden),
                **self._second(hidden),
            )
        except InvalidConfig as error:
            raise CheckpointError(f"{self._where}: {error}") from None

    def _check_settings(self) -> None:
        kind = self._settings.get("speculators_model_type")
        if self._layout.nested and (not isinstance(kind, str) or kind not in KINDS):
            raise CheckpointError(f"{self._where}: speculators_model_type is {kind!r:.40}, expected dflash or dspark")
        for key, value in NEUTRAL.items():
            if (said := self._more.get(key, self._entries.get(key, value))) != value:
                raise CheckpointError(f"{self._where}: config.json says {key} {said!r:.40}, which is not understood")
        if not self._has_theta():
            raise CheckpointError(f"{self._where}: config.json does not say rope_theta")

    def _from_anchor(self) -> bool:
        if "sample_from_anchor" in self._more:
            return self._flag("sample_from_anchor")
        if self._layout.nested:
            return KINDS[self._settings["speculators_model_type"]]
        if "dflash_config" in self._settings and "markov_head.markov_w1.weight" in self._shapes:
            raise CheckpointError(
                f"{self._where}: config.json does not say sample_from_anchor: whether the first row of a block names "
                "a token, as in DeepSpec's files, or none, as in DFlash's"
            )
        return "dflash_config" not in self._settings

    def _windowed(self) -> tuple[bool, ...]:
        layers, types = self._count_layers(), self._entries.get("layer_types")
        if types is None:
            if self._entries.get("use_sliding_window", False) is not False:
                raise CheckpointError(f"{self._where}: config.json says use_sliding_window, and no layer_types")
            return (False,) * layers
        known = ("full_attention", SLIDING)
        if not isinstance(types, list) or len(types) != layers or not all(kind in known for kind in types):
            raise CheckpointError(
                f"{self._where}: layer_types is {types!r:.80}, expected {' or '.join(known)} for {layers} layers each"
            )
        return tuple(kind == SLIDING for kind in types)

    def _window(self) -> int:
        value = self._more.get("swa_window_size", self._entries.get("sliding_window"))
        if type(value) is not int or not 0 < value < 1 << 31:
            raise CheckpointError(f"{self._where}: sliding_window is {value!r:.80}, expected a positive whole number")
        return value

    def _causal(self, windowed: tuple[bool, ...]) -> tuple[bool, ...]:
        """Returns whether each layer is causal inside a block, by the first of its statements, as vLLM does."""
        if self._layout.nested:
            both_ways = self._flag("sliding_window_non_causal")
            return tuple(window and not both_ways for window in windowed)
        for key in ("is_causal", "causal"):
            if key in self._more:
                return (self._flag(key),) * len(windowed)
        return windowed

    def _taps(self, count: int) -> tuple[int, ...] | None:
        key = self._layout.taps_key
        ids = self._more.get(key)
        if ids is None:
            if self._layout.nested or count != self._count_layers():
                raise CheckpointError(
                    f"{self._where}: the head reads {count} layers of the target, and config.json does not say which; "
                    f"write {key}"
                )
            return None
        if not isinstance(ids, list) or not all(type(i) is int and -1 <= i < 1 << 16 for i in ids):
            raise CheckpointError(f"{self._where}: {key} is {ids!r:.80}, expected a list of layers")
        if len(ids) != count or sorted(ids) != ids:
            raise CheckpointError(
                f"{self._where}: {key} is {ids!r:.80}, expected {count} layers in ascending order, since fc.weight "
                "reads as many"
            )
        taps = tuple(i + self._layout.first_tap for i in ids)
        if taps[0] < 1:
            raise CheckpointError(f"{self._where}: {key} names the target's embedding, which cannot be tapped")
        return taps

    def _small_heads(self, hidden: int) -> dict[str, Any]:
        """Returns the sizes of the Markov head and of the confidence head."""
        has = self._shapes.__contains__
        found: dict[str, Any] = {}
        said: dict[str, Any] = {"markov_rank": 0, "enable_confidence_head": has("confidence_head.proj.weight")}
        if has("markov_head.markov_w1.weight"):
            kind = "gated" if has("markov_head.gate_proj.weight") else "vanilla"
            kind = "rnn" if has("markov_head.joint_proj.weight") else kind
            found |= {"markov": kind, "markov_rank": self._matrix("markov_head.markov_w1.weight")[1]}
            said |= {"markov_rank": found["markov_rank"], "markov_head_type": kind}
        if has("confidence_head.proj.weight"):
            reads_token = self._matrix("confidence_head.proj.weight")[1] != hidden
            found |= {"confidence": True, "confidence_reads_token": reads_token}
            said["confidence_head_with_markov"] = reads_token
        for key, value in said.items():
            if key in self._more and self._more[key] != value:
                raise CheckpointError(
                    f"{self._where}: config.json says {key} {self._more[key]!r:.40}, the tensors {value!r}"
                )
        return found

    def _second(self, hidden: int) -> dict[str, Any]:
        """Returns the sizes of the convolutions and of the selector of DFlash 2."""
        found: dict[str, Any] = {}
        first = f"{LAYERS.format(0)}attention_conv."
        if (base := self._shapes.get(f"{first}base_kernel")) is not None:
            rows = self._matrix(f"{first}kernel_projection.weight")[0]
            if len(base) != 3 or base[0] != 2 or 0 in base or rows % (2 * base[1]) or hidden % (rows // (2 * base[1])):
                raise CheckpointError(
                    f"{self._where}: {first}base_kernel has shape {list(base)} and its kernel_projection {rows} rows, "
                    f"expected [2, rows, {hidden}] and kernels for groups of channels"
                )
            found |= {"conv_size": base[1], "conv_group": hidden // (rows // (2 * base[1]))}
        if "candidate_selector.hidden_projection.weight" in self._shapes:
            rank = self._matrix("candidate_selector.hidden_projection.weight")[0]
            found |= {"selector_rank": rank, "selector_top": self._stated("selector_top_k")}
        keys = {"conv_size": "conv_kernel_size", "conv_group": "conv_group_size", "selector_rank": "selector_rank"}
        for ours, key in keys.items():
            if key in self._more and self._more[key] != found.get(ours, 0):
                raise CheckpointError(
                    f"{self._where}: config.json says {key} {self._more[key]!r:.40}, the tensors {found.get(ours, 0)}"
                )
        return found

    def _stated(self, key: str) -> int:
        value = self._more.get(key)
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise CheckpointError(f"{self._where}: {key} is {value!r:.80}, expected a whole number")
        return value
