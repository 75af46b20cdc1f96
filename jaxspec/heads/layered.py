"""Files of other systems with heads that have transformer layers of their own: the code that such kinds share.

The tensors have the names of a Llama model without the prefix `model.`. Linear maps are [out, in]. Nothing here imports
JAX.
"""

import abc
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxspec.checkpoints.base import canonical_tensors, file_parts, make_config, split_parts
from jaxspec.checkpoints.folder import WEIGHTS_FILE, LazyTensor, check_types
from jaxspec.checkpoints.hf_config import read_activation
from jaxspec.checkpoints.hf_families import FAMILIES, FUSED_EXPERTS
from jaxspec.checkpoints.hf_rope import RopeReader
from jaxspec.errors import CheckpointError
from jaxspec.heads.kinds import ForeignHeads, HeadKind, Layout
from jaxspec.heads.tensors import MEMBERS, OFFSETS, finite_reader, read_ids, write_ids
from jaxspec.models.config import EXPERT_MATRICES, ModelConfig
from jaxspec.models.rope import MAX_WIDTH

_BLOCKS = "model.layers.{}."


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerLayout(Layout):
    """A layout in which another system stores heads with transformer layers of their own.

    Attributes:
        names: the tensors of each kind of parameter, as in `Family.all_names`.
        layers: the prefix of a layer's tensors, with `{}` for its number; without `{}`, there is one layer.
        taps_key: the key of config.json that states the taps.
        first_tap: the number to add to the taps in config.json to get the taps of `jaxspec.core.networks.TappedTarget`.
        nested: True if config.json describes the layers in an entry of their own, as speculators does.
        has_ids: True if the file may have the ids of a reduced vocabulary.
        requires_ids: True if the file has ids even if the vocabulary is not reduced.
        norm_offset: the number to add to the weights of norms.
    """

    files: tuple[str, ...] = (WEIGHTS_FILE,)
    other_prefixes: tuple[str, ...] = ("model.",)
    names: Mapping[str, tuple[str, ...]]
    layers: str = "layers.{}."
    taps_key: str = ""
    first_tap: int = 0
    nested: bool = False
    has_ids: bool = True
    requires_ids: bool = False
    norm_offset: float = 0.0


class LayerReader(abc.ABC):
    """Reads the sizes of a head from the shapes of its tensors, and from config.json only what tensors do not show.

    Attributes:
        entry: the key of an entry of config.json about this kind of heads.
        ignored: the names of tensors that are not read: rotary frequencies, which follow from rope_theta.
        known: the names of all tensors that such heads may have; None if only the layout lists the names.
        notes: what users should know about the file, one sentence each.
    """

    entry: ClassVar[str]
    ignored: ClassVar[re.Pattern[str]] = re.compile(r"(.*\.)?rotary_emb\.inv_freq", re.DOTALL)
    known: ClassVar[re.Pattern[str] | None] = None

    def __init__(
        self, where: str, layout: LayerLayout, shapes: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any]
    ):
        """Takes the sources of the sizes.

        Args:
            where: the file, for messages.
            layout: the layout of the file.
            shapes: the shapes of the tensors, without the tensors of a reduced vocabulary. The names have no prefix.
            settings: the content of config.json.
        """
        self._where, self._layout, self._shapes = where, layout, shapes
        self.notes: list[str] = []
        self._settings = {key: value for key, value in settings.items() if value is not None}
        inner = self._object("transformer_layer_config") if layout.nested else {}
        self._entries = {key: value for key, value in (inner or self._settings).items() if value is not None}
        own = {key: value for key, value in self._object(self.entry).items() if value is not None}
        self._more = self._settings | own

    def check(self) -> None:
        """Refuses files with tensors that are not known.

        Raises:
            CheckpointError: there are such tensors; the message names them.
        """
        if self.known and (unknown := sorted(name for name in self._shapes if not self.known.fullmatch(name))):
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            raise CheckpointError(
                f"{self._where}: this head has tensors that jaxspec does not know, and drafts badly without them: "
                f"{', '.join(unknown[:3])}{more}"
            )

    @abc.abstractmethod
    def read(self, vocab: int | None, drafted: int | None) -> Any:
        """Returns the sizes.

        Args:
            vocab: the size of the vocabulary, if the tensors show it.
            drafted: the number of tokens that are drafted; None for all.

        Raises:
            CheckpointError: a tensor is missing, sizes are missing or do not fit together, or config.json says that
                the head computes something that is not supported.
        """

    @property
    def vocab(self) -> int | None:
        """The size of the vocabulary that config.json states; None if config.json states no size."""
        return self._whole("vocab_size")

    @property
    def rows(self) -> int | None:
        """The number of rows of the head's own projection; None without a projection."""
        return next(iter(self._shapes.get("lm_head.weight", ())), None)

    def _decoder(self, hidden: int, vocab: int | None, drafted: int | None, **more: Any) -> ModelConfig:
        """Returns the sizes of the layers.

        Args:
            hidden: E, the width of the head's states.
            vocab: the size of the vocabulary, if the tensors show it.
            drafted: the number of tokens that are drafted; None for all.
            more: further fields of `ModelConfig`.

        Raises:
            CheckpointError: a tensor is missing, or sizes are missing or do not fit together.
        """
        first = self._layout.layers.format(0)
        queries, keys = (self._matrix(f"{first}self_attn.{name}_proj.weight")[0] for name in "qk")
        width = self._head_dim(first, queries)
        if queries % width or keys % width:
            raise CheckpointError(
                f"{self._where}: q_proj.weight has {queries} rows and k_proj.weight {keys}, expected multiples of the "
                f"head width {width}"
            )
        has = self._shapes.__contains__
        vocab = vocab or self.vocab or (None if drafted else self.rows)
        if vocab is None:
            raise CheckpointError(f"{self._where}: config.json does not state vocab_size; add it")
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
        self._compare(decoder)
        return decoder

    def _count_taps(self, hidden: int) -> int:
        """Returns the number of taps that the input projection `fc` reads, each as wide as the target's states."""
        reads, target = self._matrix("fc.weight")[1], self._whole("target_hidden_size")
        count, rest = divmod(reads, target or hidden)
        if rest:
            raise CheckpointError(
                f"{self._where}: fc.weight has {reads} columns, expected a multiple of the width {target or hidden} "
                "of the target's states"
            )
        return count

    def _target_size(self, hidden: int) -> int | None:
        target = self._whole("target_hidden_size")
        return None if target == hidden else target

    def _taps(self, count: int, default: int | None) -> tuple[int, ...] | None:
        """Returns the taps that config.json states, or None for the default taps.

        Args:
            count: the number of taps that the head reads.
            default: the number of taps of a head whose config.json need not state them; None if it must.
        """
        key, first = self._layout.taps_key, self._layout.first_tap
        ids = self._more.get(key)
        if ids is None:
            if count != default:
                raise CheckpointError(
                    f"{self._where}: the head reads {count} layers of the target, but config.json does not state which "
                    f"layers; add {key}"
                )
            return None
        if not isinstance(ids, list) or not all(type(i) is int and -1 <= i < 1 << 16 for i in ids):
            raise CheckpointError(f"{self._where}: {key} is {ids!r:.80}, expected a list of layers")
        if len(ids) != count or sorted(ids) != ids:
            raise CheckpointError(
                f"{self._where}: {key} is {ids!r:.80}, expected {count} layers in ascending order, because fc.weight "
                f"reads {count}"
            )
        if ids[0] + first < 1:
            raise CheckpointError(f"{self._where}: {key} names the target's embedding, which cannot be tapped")
        return tuple(i + first for i in ids)

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
                f"{self._where}: the width of an attention head is not known: num_attention_heads is {heads}, and "
                f"q_proj.weight has {queries} rows; add head_dim to config.json"
            )
        if not 0 < width <= MAX_WIDTH:
            raise CheckpointError(
                f"{self._where}: the width of an attention head is {width}, expected 1 to {MAX_WIDTH}"
            )
        return width

    def _count_layers(self) -> int:
        pattern = re.escape(self._layout.layers).replace(r"\{\}", r"(\d{1,4})")
        numbers = {match[1] for name in self._shapes if (match := re.match(pattern, name, re.ASCII)) and match.groups()}
        return max(map(int, numbers), default=0) + 1

    def _compare(self, decoder: ModelConfig) -> None:
        """Adds a note for each size that config.json states differently from the tensors."""
        sizes = {
            "hidden_size": decoder.hidden_size,
            "intermediate_size": decoder.intermediate_size,
            "num_hidden_layers": decoder.num_layers,
            "num_attention_heads": decoder.num_heads,
            "num_key_value_heads": decoder.num_kv_heads,
            "head_dim": decoder.head_dim,
            "vocab_size": decoder.vocab_size,
        }
        stated = self._settings | self._entries
        for key, size in (sizes | ({} if self.rows is None else {"draft_vocab_size": self.rows})).items():
            if key in stated and stated[key] != size:
                self.notes.append(f"config.json says {key} {stated[key]!r:.40}, but the tensors say {size}")

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


@dataclasses.dataclass(frozen=True)
class LayeredKind(HeadKind):
    """A kind of heads with transformer layers of their own, whose sizes are a `TappedSizes`.

    Attributes:
        reader: the class that reads the sizes of such heads in files of other systems.
    """

    reader: type[LayerReader]

    def open(
        self, where: str, layout: Any, tensors: Mapping[str, LazyTensor], settings: Mapping[str, Any]
    ) -> ForeignHeads:
        layout = self.layout_of(layout, settings)
        unprefixed = {name.removeprefix(layout.prefix): tensor for name, tensor in tensors.items()}
        used = {name: tensor for name, tensor in unprefixed.items() if not self.reader.ignored.fullmatch(name)}
        id_tensors = (OFFSETS, MEMBERS) if layout.has_ids else ()
        weights = {name: tensor for name, tensor in used.items() if name not in id_tensors}
        shapes = {name: tensor.stored.shape for name, tensor in weights.items()}
        reader, ids = self.reader_of(layout)(where, layout, shapes, settings), None
        reader.check()
        check_types(weights)
        vocab = next(iter(shapes.get("embed_tokens.weight", ())), None) or reader.vocab
        if layout.has_ids:
            vocab, ids = read_ids(where, used, vocab, reader.rows)
        config = reader.read(vocab, None if ids is None else len(ids))
        parameters = {name: shape for name, shape in config.param_shapes().items() if name != "tokens"}

        def read(name: str) -> np.ndarray:
            array = finite_reader(name, weights[name])()
            return array + np.float32(layout.norm_offset) if layout.norm_offset and "norm" in name else array

        names = dict(self.names(config, layout))
        if not any(name.endswith(FUSED_EXPERTS) for name in shapes):
            single = layer_names(layout.layers, fused_experts=False)
            names |= {kind: single[kind] for kind in EXPERT_MATRICES}
        readers = canonical_tensors(where, config.decoder, names, shapes, read, parameters)
        if ids is not None:
            readers["tokens"] = lambda: ids
        return ForeignHeads(layout, dict(vars(config)), readers, tuple(reader.notes))

    def layout_of(self, layout: Any, settings: Mapping[str, Any]) -> Any:
        """Returns the layout of a file; several layouts may have the same tensors and differ in config.json."""
        return layout

    def reader_of(self, layout: Any) -> type[LayerReader]:
        """Returns the class that reads the sizes of heads in a layout."""
        return self.reader

    def names(self, config: Any, layout: Any) -> Mapping[str, tuple[str, ...]]:
        """Returns the tensors of each kind of parameter of heads of these sizes, as in `Family.all_names`."""
        return layout.names

    def obstacle(self, config: Any, layout: Any) -> str | None:
        if config.decoder.num_layers > 1 and "{}" not in layout.layers:
            return f"the layout {layout.name} has one layer, but this head has {config.decoder.num_layers}"
        rope, taps = config.decoder.rope, config.taps or ()
        if rope.divisors or rope.width or rope.scale != 1:
            return f"the layout {layout.name} is written without scaled rotary positions, but this head has them"
        if sorted(taps) != list(taps):
            return f"the layout {layout.name} has taps in ascending order, but this head has {taps}"
        return None

    def tensors(self, config: Any, params: Mapping[str, Any], layout: Any) -> dict[str, np.ndarray]:
        tensors = file_tensors(config, params, self.names(config, layout))
        if layout.norm_offset:
            offset = np.float32(layout.norm_offset)
            tensors = {name: array - offset if "norm" in name else array for name, array in tensors.items()}
        tensors = {layout.prefix + name: array for name, array in tensors.items()}
        if layout.requires_ids or config.draft_vocab_size is not None:
            tensors |= write_ids(np.asarray(params.get("tokens", np.arange(config.rows))), config.vocab_size)
        return tensors


def file_tensors(config: Any, params: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> dict[str, np.ndarray]:
    """Returns the parameters of a head as tensors of these names, without token ids; matrices are `[out, in]`."""
    tensors = {}
    for ours, shape in config.param_shapes().items():
        if ours == "tokens":
            continue
        tensors |= split_parts(file_parts(config.decoder, names, ours, shape), np.asarray(params[ours]))
    return tensors


def layer_names(layers: str, fused_experts: bool = True) -> dict[str, tuple[str, ...]]:
    """Returns the tensors of each kind of parameter, as in `Family.all_names`.

    Args:
        layers: the prefix of a layer.
        fused_experts: whether there is one tensor for the matrices of all experts of a layer, as in exported files.
    """
    return {
        kind: tuple(name.replace(_BLOCKS, layers).removeprefix("model.") for name in names)
        for kind, names in FAMILIES["llama"].all_names(fused=fused_experts).items()
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


def base_entry(base: str | None) -> dict[str, Any]:
    """Returns the entry of config.json that names the target."""
    return {} if base is None else {"base_model_name_or_path": base}


def speculators_settings(name: str, layer: Mapping[str, Any], tokens: int, base: str | None) -> dict[str, Any]:
    """Returns the entries of config.json that speculators and vLLM require.

    Args:
        name: the kind of heads as it appears in the names of classes: "Eagle3", "DFlash" or "DSpark".
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
    return {
        "architectures": [f"{name}Speculator"],
        "speculators_model_type": name.lower(),
        "speculators_version": "0.9.0",
        "transformer_layer_config": dict(layer),
        "speculators_config": {
            "algorithm": name.lower(),
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": base, "architectures": ["LlamaForCausalLM"]},
        },
    }
