"""Infers the sizes of an EAGLE head: from its tensors, and from config.json only what they do not tell."""

import re
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.heads.eagle_config import EagleConfig, default_taps
from jaxspec.heads.eagle_layouts import LAYER_IDS, EagleLayout
from jaxspec.heads.layer_sizes import LayerReader

DEFAULT_THETA = 10000.0


class SizeReader(LayerReader):
    """Reads the sizes of an EAGLE head."""

    def __init__(
        self, where: str, layout: EagleLayout, shapes: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any]
    ):
        """Takes the tensors' shapes without those of a reduced vocabulary; names have no prefix."""
        super().__init__(where, layout.layers, shapes, settings, layout.nested, "eagle_config")
        self._layout = layout

    def read(self, vocab: int | None, drafted: int | None) -> EagleConfig:
        """Returns the sizes.

        Args:
            vocab: the size of the vocabulary, if tensors say it.
            drafted: the number of tokens that are drafted; None for all.

        Raises:
            CheckpointError: a tensor is missing, or sizes are missing or do not fit together.
        """
        hidden, reads = self._matrix("fc.weight")
        has = self._shapes.__contains__
        rows = self._shapes.get("lm_head.weight", (None,))[0]
        decoder = self._decoder(hidden, vocab or self.vocab or (None if drafted else rows), rows)
        own = {"fc_bias": has("fc.bias"), "own_embedding": has("embed_tokens.weight")}
        more = {} if self._layout.version == 1 else self._eagle3(hidden, reads, rows, drafted)
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

    def _eagle3(self, hidden: int, reads: int, rows: int | None, drafted: int | None) -> dict[str, Any]:
        target = self._whole("target_hidden_size")
        count, rest = divmod(reads, target or hidden)
        if rest:
            raise CheckpointError(
                f"{self._where}: fc.weight reads {reads} numbers, which are no whole states of {target or hidden}"
            )
        norms = sum(re.fullmatch(r"fc_norm\.\d{1,4}\.weight", name) is not None for name in self._shapes)
        more: dict[str, Any] = {
            "target_size": None if target == hidden else target,
            "taps": self._taps(count),
            "fc_norm": norms > 0,
            "norm_before_fc": "input_norm.weight" in self._shapes,
            "norm_before_residual": self._flag("norm_before_residual"),
            "norm_output": self._flag("norm_output") or self._flag("return_hidden_post_norm"),
            "own_projection": rows is not None,
            "draft_vocab_size": drafted,
        }
        for key in ("fc_norm", "norm_before_fc"):
            if key in self._more and self._flag(key) != more[key]:
                raise CheckpointError(
                    f"{self._where}: config.json says {key} {self._more[key]}, the file "
                    f"{'has' if more[key] else 'lacks'} its tensors"
                )
        if self._layout.nested and "norm_before_residual" not in self._more:
            raise CheckpointError(
                f"{self._where}: config.json does not say norm_before_residual, which vLLM takes as true and "
                "speculators as false; write it"
            )
        if self._flag("tie_word_embeddings") and rows is not None:
            self.notes.append(
                "config.json ties the projection to the embedding, and the file has another, which is used; some "
                "systems replace it"
            )
        if more["norm_output"] and not self._layout.nested:
            self.notes.append(
                "config.json says norm_output; heads that SpecForge trained before September 2026 say so too, and are "
                "to be served without (write false)"
            )
        return more

    def _taps(self, count: int) -> tuple[int, ...] | None:
        ids = self._more.get(LAYER_IDS)
        if ids is None:
            if count != len(default_taps(1)):
                raise CheckpointError(
                    f"{self._where}: the head reads {count} layers of the target, and config.json does not say which; "
                    f"write {LAYER_IDS}"
                )
            return None
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 16 for i in ids):
            raise CheckpointError(f"{self._where}: {LAYER_IDS} is {ids!r:.80}, expected a list of layers")
        if not ids or len(ids) != count or sorted(ids) != ids:
            raise CheckpointError(
                f"{self._where}: {LAYER_IDS} is {ids!r:.80}, expected {count} layers in ascending order, since "
                "fc.weight reads as many"
            )
        if self._layout.counts_outputs and ids[0] == 1:  # as SGLang does
            ids = [i + 1 for i in ids]
        elif self._layout.counts_outputs:
            self.notes.append(
                f"config.json says {LAYER_IDS} {ids}, read as the layers before which the head taps; if it counts "
                f"their outputs, as SpecForge does, set the option taps of the drafter to {[i + 1 for i in ids]}"
            )
        if ids[0] < 1:
            raise CheckpointError(f"{self._where}: {LAYER_IDS} names the target's embedding, which cannot be tapped")
        return tuple(ids)

    def _rope(self, width: int) -> Any:
        if not self._has_theta():
            self.notes.append(
                f"config.json has no rope_theta; {DEFAULT_THETA:.0f} is used, as by EAGLE's own code. If fewer tokens "
                "are accepted than published, try the target's by the option rope_theta of the drafter"
            )
        return super()._rope(width)
