"""Infers the sizes of an EAGLE head: from its tensors, and from config.json only what they do not tell."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoints.base import make_config
from jaxspec.checkpoints.folder import LazyTensor
from jaxspec.checkpoints.hf_families import read_activation
from jaxspec.checkpoints.hf_rope import RopeReader
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.heads.eagle_config import EagleConfig, default_taps
from jaxspec.heads.eagle_layouts import LAYER_IDS, EagleLayout
from jaxspec.models.rope import MAX_WIDTH

OFFSETS, MEMBERS = "d2t", "t2d"
"""Tensors of a reduced vocabulary: what to add to the number of each row for its token, and which tokens have one."""
DEFAULT_THETA = 10000.0


class SizeReader:
    """Reads the sizes of a head from the shapes of its tensors and the content of config.json.

    Attributes:
        notes: what users should know about the file, one sentence each.
    """

    def __init__(
        self, where: str, layout: EagleLayout, shapes: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any]
    ):
        """Takes the tensors' shapes without those of a reduced vocabulary; names have no prefix."""
        self._where, self._layout, self._shapes = where, layout, shapes
        self.notes: list[str] = []
        self._settings = {key: value for key, value in settings.items() if value is not None}
        inner = self._object("transformer_layer_config") if layout.nested else {}
        self._entries = {key: value for key, value in (inner or self._settings).items() if value is not None}
        self._more = self._settings | self._object("eagle_config")

    @property
    def vocab(self) -> int | None:
        """The size of the vocabulary by config.json; None if it does not say it."""
        return self._whole("vocab_size")

    def read(self, vocab: int | None, drafted: int | None) -> EagleConfig:
        """Returns the sizes.

        Args:
            vocab: the size of the vocabulary, if tensors say it.
            drafted: the number of tokens that are drafted; None for all.

        Raises:
            CheckpointError: a tensor is missing, or sizes are missing or do not fit together.
        """
        first = self._layout.layers.format(0)
        hidden, reads = self._matrix("fc.weight")
        queries, keys = (self._matrix(f"{first}self_attn.{name}_proj.weight")[0] for name in "qk")
        width = self._head_dim(first, queries)
        if queries % width or keys % width:
            raise CheckpointError(f"{self._where}: {queries} queries and {keys} keys are no whole heads of {width}")
        has = self._shapes.__contains__
        rows = self._shapes.get("lm_head.weight", (None,))[0]
        vocab = vocab or self.vocab or (None if drafted else rows)
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
        )
        self._compare(decoder, rows)
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

    def _rope(self, width: int) -> Any:
        scaled = self._entries.get("rope_parameters") or self._entries.get("rope_scaling") or {}
        if "rope_theta" not in self._entries and not (isinstance(scaled, dict) and "rope_theta" in scaled):
            self.notes.append(
                f"config.json has no rope_theta; {DEFAULT_THETA:.0f} is used, as by EAGLE's own code. If fewer tokens "
                "are accepted than published, try the target's by the option rope_theta of the drafter"
            )
        reader = RopeReader(self._where, self._entries, width, self._whole("max_position_embeddings") or 2048, None)
        return reader.read("full_attention")

    def _count_layers(self) -> int:
        pattern = re.escape(self._layout.layers).replace(r"\{\}", r"(\d{1,4})")
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


def read_ids(
    where: str, tensors: Mapping[str, LazyTensor], vocab: int | None, rows: int | None
) -> tuple[int | None, np.ndarray | None]:
    """Returns the size of the vocabulary, if it is known, and the ids of a reduced one, ascending.

    Args:
        where: the file, for messages.
        tensors: those of the file.
        vocab: the size of the vocabulary, if config.json or another tensor say it.
        rows: the number of rows of the projection, if there is one.

    Raises:
        CheckpointError: the ids are missing, malformed, or contradict one another.
    """
    members = _vector(where, tensors, MEMBERS, ("BOOL",))
    offsets = _vector(where, tensors, OFFSETS, ("I64", "I32"))
    vocab = len(members) if members is not None else vocab
    count = rows if rows is not None else None if offsets is None else len(offsets)
    if count is None or vocab is None or count == vocab:
        return vocab, None  # no map is read then
    if offsets is None:
        raise CheckpointError(
            f"{where}: the head drafts {count} of {vocab} tokens, and the file does not say which: it has no {OFFSETS}"
        )
    if len(offsets) != count:
        raise CheckpointError(f"{where}: tensor {OFFSETS} has {len(offsets)} entries, expected {count}")
    known = None if members is None else np.flatnonzero(members)
    for ids in (np.arange(count) + offsets, offsets):  # some files hold the ids themselves
        sound = ids[0] >= 0 and ids[-1] < vocab and bool((np.diff(ids) > 0).all())
        if sound and known is None and np.array_equal(offsets, np.arange(count)):
            raise CheckpointError(
                f"{where}: tensor {OFFSETS} counts 0, 1, 2, ..., where offsets are expected: zeros for the first "
                f"{count} tokens"
            )
        if sound and (known is None or np.array_equal(ids, known)):
            return vocab, ids.astype(np.int32)
    raise CheckpointError(
        f"{where}: tensor {OFFSETS} does not lead to {count} ascending ids below {vocab}"
        + ("" if known is None else f", or not to the {len(known)} of {MEMBERS}")
    )


def _vector(where: str, tensors: Mapping[str, LazyTensor], name: str, types: tuple[str, ...]) -> np.ndarray | None:
    held = tensors.get(name)
    if held is None:
        return None
    if held.stored.type not in types or len(held.stored.shape) != 1 or not held.stored.shape[0]:
        raise CheckpointError(
            f"{where}: tensor {name} has type {held.stored.type} and shape {list(held.stored.shape)}, expected one of "
            f"{types} and one axis"
        )
    return held.read()
