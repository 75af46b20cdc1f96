"""The sizes of an EAGLE head. Nothing here imports JAX."""

import dataclasses
import math
from typing import ClassVar

from jaxspec.amounts import plural
from jaxspec.errors import InvalidConfig
from jaxspec.heads.sizes import TappedSizes
from jaxspec.models.config import ModelConfig


def default_eagle_taps(depth: int) -> tuple[int, int, int]:
    """Returns the taps that EAGLE-3 heads read by default from a target of `depth` layers: 2, depth / 2, depth - 3."""
    low, middle, high = sorted(min(max(tap, 1), depth) for tap in (2, depth // 2, depth - 3))
    return low, middle, high


@dataclasses.dataclass(frozen=True)
class EagleConfig(TappedSizes):
    """The sizes of an EAGLE head; static and hashable.

    Attributes:
        decoder: the sizes and constants of the head's own layers. `hidden_size` is E, and `vocab_size` is the target's
            V.
        version: 1 for EAGLE-1 and EAGLE-2, which differ only in their trees; 3 for EAGLE-3 and EAGLE-3.1.
        target_size: the width of the target's features; None for `hidden_size`.
        taps: the taps of the target that an EAGLE-3 head reads (`jaxspec.core.networks.TappedTarget`); None for the
            `default_eagle_taps` of the target.
        draft_vocab_size: the number of tokens that can be guessed; their ids are among the parameters. None: all
            tokens of the vocabulary.
        fc_bias: whether the input projection has a bias.
        fc_norm: whether each tap is normed before the input projection (EAGLE-3.1).
        norm_before_fc: whether all taps are normed as one vector before the input projection.
        norm_before_residual: whether the first layer's residual is its normed state instead of the state itself.
        norm_output: whether a drafted token reads the normed state of the token before it (EAGLE-3.1, and the MTP
            layers of Qwen3.5).
        pair_norms: whether an EAGLE-1 head is an MTP layer (DeepSeek-V3, arXiv:2412.19437, section 2.2): embedding and
            state are normed before the input projection, the first layer has a norm, and logits are projected from
            normed states.
        own_embedding: whether the head has its own embedding instead of the target's.
        own_projection: whether the head has its own projection to logits instead of the target's.

    Raises:
        InvalidConfig: a value is out of range or of another type, or two values cannot be used together.
    """

    decoder: ModelConfig
    version: int = 3
    target_size: int | None = None
    taps: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    fc_bias: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    pair_norms: bool = False
    own_embedding: bool = False
    own_projection: bool = False

    drafter: ClassVar[str] = "eagle"

    def _check_combinations(self) -> None:
        if type(self.version) is not int or self.version not in (1, 3):
            raise InvalidConfig(f"version of an EAGLE head must be 1 or 3, got {self.version!r:.80}")
        if self.version == 1 and (
            self.taps or self.draft_vocab_size is not None or self.own_projection or any(self._switches)
        ):
            raise InvalidConfig(
                "an EAGLE-1 head reads the target's last feature and shares its projection: it has no taps, norms of "
                "taps, or vocabulary of its own"
            )
        if self.version == 1 and self.norm_output and not self.pair_norms:
            raise InvalidConfig("norm_output of an EAGLE-1 head needs pair_norms, since there is no norm without them")
        if self.version == 3 and self.pair_norms:
            raise InvalidConfig("pair_norms is for EAGLE-1 heads; an EAGLE-3 head always norms embeddings and states")
        if self.version == 3 and self.taps == ():
            raise InvalidConfig("taps is empty, but an EAGLE-3 head reads at least one tap of the target")
        if self.fc_norm and self.norm_before_fc:
            raise InvalidConfig("fc_norm and norm_before_fc cannot both be true")
        if self.decoder.window is not None:
            raise InvalidConfig("decoder has a window, but an EAGLE head has no sliding-window attention")

    @property
    def _switches(self) -> tuple[bool, ...]:
        return self.fc_norm, self.norm_before_fc, self.norm_before_residual

    @property
    def max_depth(self) -> float:
        return math.inf

    @property
    def usual_depth(self) -> int:
        return 5

    @property
    def summary(self) -> str:
        layers = plural(self.decoder.num_layers, "layer")
        return f"an MTP head of {layers}" if self.pair_norms else f"an EAGLE-{self.version} head of {layers}"

    @property
    def num_taps(self) -> int:
        return len(self.taps_of(1))

    def taps_of(self, depth: int) -> tuple[int, ...]:
        """Returns the taps of a target of `depth` layers that the head reads; none with EAGLE-1."""
        if self.version == 1:
            return ()
        return default_eagle_taps(depth) if self.taps is None else self.taps

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a layer's parameters: `ModelConfig.layer_shapes`, except in the first layer."""
        shapes = self.decoder.layer_shapes(layer)
        if layer == 0 and self.version == 1:
            if not self.pair_norms:
                del shapes["attn_norm"]
        elif layer == 0:
            rows, columns = shapes["qkv"]
            shapes["qkv"] = (2 * rows, columns)
        return shapes

    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every parameter by name, such as `layers.0.qkv`; see `ModelConfig.param_shapes`."""
        e, f = self.hidden_size, self.feature_size
        reads = 2 * e if self.version == 1 else self.num_taps * f
        shapes: dict[str, tuple[int, ...]] = {"fc": (reads, e)}
        if self.fc_bias:
            shapes["fc_bias"] = (e,)
        shapes |= {f"fc_norms.{i}": (f,) for i in range(self.num_taps * self.fc_norm)}
        if self.norm_before_fc:
            shapes["input_norm"] = (reads,)
        for layer in range(self.decoder.num_layers):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in self.layer_shapes(layer).items()}
        if self.pair_norms:
            shapes["embed_norm"] = (e,)
        if self.version == 3 or self.pair_norms:
            shapes |= {"hidden_norm": (e,), "norm": (e,)}
        return shapes | self.table_shapes()
