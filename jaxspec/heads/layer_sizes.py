"""Infers the sizes of a head's layers: from its tensors, and from config.json only what they do not tell."""

import re
from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoints.base import make_config
from jaxspec.checkpoints.hf_families import read_activation
from jaxspec.checkpoints.hf_rope import RopeReader
from jaxspec.errors import CheckpointError
from jaxspec.models.config import ModelConfig
from jaxspec.models.rope import MAX_WIDTH


class LayerReader:
    """Reads the sizes of a head's layers from the shapes of its tensors and the content of config.json.

    Attributes:
        notes: what users should know about the file, one sentence each.
    """

    def __init__(
        self,
        where: str,
        layers: str,
        shapes: Mapping[str, tuple[int, ...]],
        settings: Mapping[str, Any],
        nested: bool,
        own: str,
    ):
        """Takes the sources of the sizes.

        Args:
            where: the file, for messages.
            layers: the prefix of a layer's tensors, with `{}` for its number; without, there is one layer.
            shapes: the tensors' shapes without those of a reduced vocabulary; names have no prefix.
            settings: the content of config.json.
            nested: whether it describes the layers in the entry `transformer_layer_config`, as speculators does.
            own: the key of its entry about this kind of heads.
        """
        self._where, self._layers, self._shapes = where, layers, shapes
        self.notes: list[str] = []
        self._settings = {key: value for key, value in settings.items() if value is not None}
        inner = self._object("transformer_layer_config") if nested else {}
        self._entries = {key: value for key, value in (inner or self._settings).items() if value is not None}
        self._more = self._settings | {key: value for key, value in self._object(own).items() if value is not None}

    @property
    def vocab(self) -> int | None:
        """The size of the vocabulary by config.json; None if it does not say it."""
        return self._whole("vocab_size")

    def _decoder(self, hidden: int, vocab: int | None, rows: int | None, **more: Any) -> ModelConfig:
        """Returns the sizes of the layers.

        Args:
            hidden: E.
            vocab: the size of the vocabulary, if tensors say it.
            rows: the number of rows of the head's own projection, which config.json may state.
            more: further fields of `ModelConfig`.

        Raises:
            CheckpointError: a tensor is missing, or sizes are missing or do not fit together.
        """
        first = self._layers.format(0)
        queries, keys = (self._matrix(f"{first}self_attn.{name}_proj.weight")[0] for name in "qk")
        width = self._head_dim(first, queries)
        if queries % width or keys % width:
            raise CheckpointError(f"{self._where}: {queries} queries and {keys} keys are no whole heads of {width}")
        has = self._shapes.__contains__
        if vocab is None:
            raise CheckpointError(f"{self._where}: config.json does not say vocab_size")
        decoder = make_config(
            self._where,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=self._matrix(f"{first}mlp.gate_proj.weight")[0],
            num_layers=self._count_layers(),
            num_heads=queries // width,
            num_kv_heads=keys // width,
            head_dim=width,
            norm_eps=self._entries.get("rms_norm_eps", 1e-6),
            tie_embeddings=False,
            max_position=self._whole("max_position_embeddings") or 2048,
            rope=self._rope(width),
            activation=read_activation(self._where, self._entries),
            qkv_bias=has(f"{first}self_attn.q_proj.bias"),
            out_bias=has(f"{first}self_attn.o_proj.bias"),
            mlp_bias=has(f"{first}mlp.gate_proj.bias"),
            qk_norm=has(f"{first}self_attn.q_norm.weight"),
            **more,
        )
        self._compare(decoder, rows)
        return decoder

    def _rope(self, width: int) -> Any:
        reader = RopeReader(self._where, self._entries, width, self._whole("max_position_embeddings") or 2048, None)
        return reader.read("full_attention")

    def _has_theta(self) -> bool:
        """Returns whether config.json states the base of rotary positions."""
        scaled = self._entries.get("rope_parameters") or self._entries.get("rope_scaling") or {}
        return "rope_theta" in self._entries or (isinstance(scaled, dict) and "rope_theta" in scaled)

    def _head_dim(self, first: str, queries: int) -> int:
        norm, heads = self._shapes.get(f"{first}self_attn.q_norm.weight"), self._whole("num_attention_heads")
        stated = self._whole("head_dim")
        if norm is not None and len(norm) == 1:
            width = norm[0]
        elif heads is not None and queries % heads == 0:
            width = queries // heads
        elif stated is not None:
            width = stated
        else:
            raise CheckpointError(
                f"{self._where}: config.json says {heads} num_attention_heads, which do not divide the "
                f"{queries} rows of q_proj.weight"
            )
        if not 0 < width <= MAX_WIDTH:
            raise CheckpointError(f"{self._where}: the width of a head is {width}, expected 1 to {MAX_WIDTH}")
        return width

    def _count_layers(self) -> int:
        pattern = re.escape(self._layers).replace(r"\{\}", r"(\d{1,4})")
        found = {match[1] for name in self._shapes if (match := re.match(pattern, name, re.ASCII)) and match.groups()}
        return max(map(int, found), default=0) + 1

    def _compare(self, decoder: Any, rows: int | None) -> None:
        """Notes where config.json differs from the tensors."""
        sizes = {
            "hidden_size": decoder.hidden_size,
            "intermediate_size": decoder.intermediate_size,
            "num_hidden_layers": decoder.num_layers,
            "num_attention_heads": decoder.num_heads,
            "num_key_value_heads": decoder.num_kv_heads,
            "head_dim": decoder.head_dim,
            "vocab_size": decoder.vocab_size,
        }
        said = self._settings | self._entries
        for key, size in (sizes | ({} if rows is None else {"draft_vocab_size": rows})).items():
            if key in said and said[key] != size:
                self.notes.append(f"config.json says {key} {said[key]!r:.40}, the tensors {size}")

    def _matrix(self, name: str) -> tuple[int, int]:
        shape = self._shapes.get(name)
        if shape is None:
            raise CheckpointError(f"{self._where}: tensors missing: {name}")
        if len(shape) != 2 or 0 in shape:
            raise CheckpointError(f"{self._where}: tensor {name} has shape {list(shape)}, expected a matrix")
        return shape[0], shape[1]

    def _whole(self, key: str) -> int | None:
        value = self._entries.get(key, self._settings.get(key))
        if value is not None and (type(value) is not int or not 0 < value < 1 << 31):
            raise CheckpointError(f"{self._where}: {key} is {value!r:.80}, expected a positive whole number")
        return value

    def _flag(self, key: str) -> bool:
        value = self._more.get(key, self._entries.get(key, False))
        if not isinstance(value, bool):
            raise CheckpointError(f"{self._where}: {key} is {value!r:.80}, expected true or false")
        return value

    def _object(self, key: str) -> dict[str, Any]:
        value = self._settings.get(key, {})
        if not isinstance(value, dict):
            raise CheckpointError(f"{self._where}: {key} is {value!r:.80}, expected an object")
        return value
