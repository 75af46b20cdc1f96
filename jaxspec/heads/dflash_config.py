"""The sizes of DFlash, DSpark, JetSpec and DFlash 2 heads. Nothing here imports JAX."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from jaxspec.amounts import plural
from jaxspec.core.checks import whole
from jaxspec.core.settings import setting
from jaxspec.errors import InvalidConfig
from jaxspec.heads.sizes import TappedSizes
from jaxspec.models.config import ModelConfig

MARKOV_KINDS = ("vanilla", "gated", "rnn")
"""The kinds of Markov heads."""


def default_dflash_taps(depth: int, count: int) -> tuple[int, ...]:
    """Returns the `count` taps that DFlash heads read by default from a target of `depth` layers.

    The taps are evenly spaced from the state after layer 2 to the state after layer `depth - 2`. A single tap is in the
    middle.
    """
    spaced = [round(1 + i * (depth - 4) / max(count - 1, 1)) + 1 for i in range(count)]
    taps = spaced if count > 1 else [depth // 2 + 1]
    return tuple(min(max(tap, 1), depth) for tap in taps)


@dataclasses.dataclass(frozen=True)
class DFlashConfig(TappedSizes):
    """The sizes of a DFlash head; static and hashable.

    A head with a Markov head or a confidence head is a DSpark head. A head with convolutions or a selector is a DFlash
    2 head. Any other head whose layers are all causal is a JetSpec head.

    Attributes:
        decoder: the sizes and constants of the head's own layers. `hidden_size` is E, and `vocab_size` is the target's
            V.
        block_size: the number of rows of a whole block: the last token of the text, and masks after it.
        mask_token: the token whose embedding the masks have.
        from_anchor: if True, a row guesses the token after its own position, so the first row, which has the last token
            of the text, guesses the first drafted token. If False, a row guesses the token at its own position, and the
            first row guesses no token.
        causal: for each layer, whether a row of the block sees only itself and the rows before it; empty if all layers
            see all rows.
        target_size: the width of the target's features; None for `hidden_size`.
        taps: the taps of the target that the head reads (`jaxspec.core.networks.TappedTarget`); None for the
            `default_dflash_taps` of the target, one for each layer of the head.
        markov: the kind of Markov head, which corrects the logits of a row depending on the tokens before the row. A
            "vanilla" head reads the token before the row, a "gated" head also reads the state of the row, and a "rnn"
            head reads all tokens of the block before the row. None for no Markov head.
        markov_rank: r, the width of the Markov head; 0 without a Markov head.
        confidence: whether a confidence head estimates the overlap of a row's distribution with the target's.
        confidence_reads_token: whether the confidence head reads the Markov head's embedding of the token before the
            row.
        draft_vocab_size: the number of tokens that can be guessed; their ids are among the parameters. None: all
            tokens of the vocabulary.
        own_embedding: whether the head has its own embedding instead of the target's.
        own_projection: whether the head has its own projection to logits instead of the target's.
        conv_size: the number of rows that a convolution reads, which are the row itself and the rows before it. The
            attention and the MLP of every layer have a convolution before and after them. 0 without convolutions.
        conv_group: the number of channels that have the same dynamic kernel; 0 without convolutions.
        selector_rank: the width of the selector, which corrects the logits of the most likely tokens of a row, given
            the state of the row and the token before the row; 0 without a selector.
        selector_top: the number of most likely tokens of a row that can be drafted; 0 without a selector.

    Raises:
        InvalidConfig: a value is out of range or of another type, or two values cannot be used together.
    """

    decoder: ModelConfig
    block_size: int
    mask_token: int = setting(least=0)
    from_anchor: bool = False
    causal: tuple[bool, ...] = ()
    target_size: int | None = None
    taps: tuple[int, ...] | None = None
    markov: str | None = setting(None, MARKOV_KINDS)
    markov_rank: int = setting(0, least=0)
    confidence: bool = False
    confidence_reads_token: bool = False
    draft_vocab_size: int | None = None
    own_embedding: bool = False
    own_projection: bool = False
    conv_size: int = setting(0, least=0, most=1 << 10)
    conv_group: int = setting(0, least=0)
    selector_rank: int = setting(0, least=0)
    selector_top: int = setting(0, least=0)

    drafter: ClassVar[str] = "dflash"
    copies: ClassVar[Mapping[str, tuple[str, str]]] = {
        **TappedSizes.copies, "head": ("own_projection", "unembedding"),
    }  # fmt: skip

    def _check_combinations(self) -> None:
        whole("block_size", self.block_size, 1 if self.from_anchor else 2, 1 << 10)
        whole("mask_token", self.mask_token, 0, self.vocab_size - 1)
        whole("conv_group", self.conv_group, 0, self.hidden_size)
        whole("selector_top", self.selector_top, 0, self.vocab_size)
        if self.taps == ():
            raise InvalidConfig("taps is empty, but a DFlash head reads at least one tap of the target")
        layers = self.decoder.num_layers
        if not isinstance(self.causal, tuple) or not all(isinstance(flag, bool) for flag in self.causal):
            raise InvalidConfig(f"causal must be true or false for each layer, got {self.causal!r:.80}")
        if len(self.causal) not in (0, layers):
            raise InvalidConfig(f"causal must have {layers} entries, one for each layer, or none")
        if (self.markov is None) != (self.markov_rank == 0):
            raise InvalidConfig(
                f"set both markov and markov_rank, or neither; got {self.markov!r} and {self.markov_rank}"
            )
        if self.confidence_reads_token and not (self.confidence and self.markov):
            raise InvalidConfig("confidence_reads_token needs a confidence head and a Markov head")
        if not self.conv_size == self.conv_group == 0 and not (
            self.conv_size and self.conv_group and self.hidden_size % self.conv_group == 0
        ):
            raise InvalidConfig(
                f"conv_size {self.conv_size} and conv_group {self.conv_group} must both be 0 or both be positive, and "
                f"conv_group must divide the width {self.hidden_size}"
            )
        if (self.selector_rank == 0) != (self.selector_top == 0):
            raise InvalidConfig(
                f"selector_rank {self.selector_rank} and selector_top {self.selector_top} must both be 0 or positive"
            )
        if self.selector_rank and (self.markov or self.confidence or self.draft_vocab_size is not None):
            raise InvalidConfig("a head with a selector has no Markov head, confidence head or reduced vocabulary")
        if self.decoder.window_rope is not None:
            raise InvalidConfig(
                "decoder has a window_rope, but all layers of a DFlash head have the same rotary positions"
            )

    @property
    def max_depth(self) -> int:
        # The number of tokens that a block guesses.
        return self.block_size - self.skipped

    @property
    def skipped(self) -> int:
        """The number of rows at the start of a block that guess no token: 0 or 1."""
        return int(not self.from_anchor)

    @property
    def memory(self) -> int:
        """The width of the Markov head's state: r for the kind "rnn", else 0."""
        return self.markov_rank if self.markov == "rnn" else 0

    @property
    def summary(self) -> str:
        return f"a {self.kind} head of {plural(self.decoder.num_layers, 'layer')}, blocks of {self.block_size}"

    @property
    def kind(self) -> str:
        """The kind of the head, for people: "DFlash", "DFlash 2", "DSpark" or "JetSpec"."""
        if self.is_second:
            return "DFlash 2"
        if self.markov or self.confidence:
            return "DSpark"
        return "JetSpec" if self.is_all_causal else "DFlash"

    @property
    def is_second(self) -> bool:
        """Whether the head is a DFlash 2 head."""
        return self.conv_size > 0 or self.selector_rank > 0

    @property
    def has_laws(self) -> bool:
        return not self.is_second

    @property
    def num_taps(self) -> int:
        return self.decoder.num_layers if self.taps is None else len(self.taps)

    def taps_of(self, depth: int) -> tuple[int, ...]:
        """Returns the taps of a target of `depth` layers that the head reads."""
        return default_dflash_taps(depth, self.decoder.num_layers) if self.taps is None else self.taps

    def is_causal(self, layer: int) -> bool:
        """Returns whether the rows of a block see only themselves and the rows before them in this layer."""
        return bool(self.causal) and self.causal[layer]

    @property
    def is_all_causal(self) -> bool:
        """Whether no row of a block sees the rows after it."""
        return bool(self.causal) and all(self.causal)

    def rows_for(self, depth: int) -> int:
        """Returns the number of rows of a block that guesses `depth` tokens.

        If all layers are causal, no row sees the rows after it, and the block ends with the last row that is needed.
        Otherwise the block is whole, as in training.
        """
        return depth + self.skipped if self.is_all_causal else self.block_size

    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every parameter by name, such as `layers.0.qkv`; see `ModelConfig.param_shapes`.

        The tables `markov_in`, `selector_in` and `selector_out` have a row for each token of the vocabulary, and
        `markov_out` has a row for each token that can be guessed. The static kernels of a layer are
        `[2, conv_size, E]`: one convolution before the sublayer, and one after it.
        """
        e, r = self.hidden_size, self.markov_rank
        shapes: dict[str, tuple[int, ...]] = {"fc": (self.num_taps * self.feature_size, e), "hidden_norm": (e,)}
        for layer in range(self.decoder.num_layers):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in self.decoder.layer_shapes(layer).items()}
            for part in ("attention", "mlp") if self.conv_size else ():
                shapes[f"convs.{layer}.{part}_base"] = (2, self.conv_size, e)
                shapes[f"convs.{layer}.{part}_mix"] = (e, 2 * self.conv_size * e // self.conv_group)
        shapes["norm"] = (e,)
        if self.markov is not None:
            shapes |= {"markov_in": (self.vocab_size, r), "markov_out": (self.rows, r)}
        if self.markov in ("gated", "rnn"):
            reads, writes = (e + r, r) if self.markov == "gated" else (2 * r + e, 3 * r)
            shapes |= {"markov_mix": (reads, writes), "markov_mix_bias": (writes,)}
        if self.confidence:
            shapes |= {"confidence": (e + r * self.confidence_reads_token, 1), "confidence_bias": (1,)}
        if self.selector_rank:
            tables = dict.fromkeys(("selector_in", "selector_out"), (self.vocab_size, self.selector_rank))
            shapes |= {"selector_mix": (e, self.selector_rank)} | tables
        return shapes | self.table_shapes()
