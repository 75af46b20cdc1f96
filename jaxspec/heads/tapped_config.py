"""What the sizes of heads have in common that have layers of their own and read taps of the target. Without JAX."""

from jaxspec.errors import InvalidConfig
from jaxspec.models.config import ModelConfig


class TappedSizes:
    """The base of the frozen dataclasses `EagleConfig` and `DFlashConfig`, which have these fields."""

    decoder: ModelConfig
    target_size: int | None
    taps: tuple[int, ...] | None
    draft_vocab_size: int | None
    own_embedding: bool
    own_projection: bool

    def _check_taps(self) -> None:
        taps = self.taps
        if taps is not None and not (isinstance(taps, tuple) and all(type(tap) is int and tap > 0 for tap in taps)):
            raise InvalidConfig(f"taps of a head must be whole numbers from 1, got {taps!r:.80}")

    def _check_width(self) -> None:
        if self.feature_size != self.hidden_size and not (self.own_embedding and self.own_projection):
            raise InvalidConfig(
                f"a head of width {self.hidden_size} for features of width {self.feature_size} needs an embedding and "
                "a projection of its own"
            )

    @property
    def hidden_size(self) -> int:
        """E, the width of the head's states."""
        return self.decoder.hidden_size

    @property
    def vocab_size(self) -> int:
        """V, the size of the target's vocabulary."""
        return self.decoder.vocab_size

    @property
    def feature_size(self) -> int:
        """The width of the target's features, and of each tap."""
        return self.hidden_size if self.target_size is None else self.target_size

    @property
    def tables(self) -> tuple[str, ...]:
        """The methods of the target that return tables which the head reads, besides its `head`."""
        rows = self.draft_vocab_size is not None and not self.own_projection
        return ("embedding",) * (not self.own_embedding) + ("unembedding",) * rows

    @property
    def rows(self) -> int:
        """R, the number of tokens that can be guessed."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def num_taps(self) -> int:
        """The number of taps that the head reads."""
        raise NotImplementedError

    @property
    def num_blocks(self) -> int:
        """The number of layers and taps."""
        return self.decoder.num_layers + self.num_taps
