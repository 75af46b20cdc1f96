"""The base classes of the sizes of all kinds of draft heads, with checks of their fields. Nothing here imports JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxspec.checkpoints.base import parse_config
from jaxspec.core.checks import whole
from jaxspec.core.settings import check_fields
from jaxspec.errors import CheckpointError, InvalidConfig
from jaxspec.models.config import ModelConfig


class HeadSizes:
    """The base of the frozen dataclasses that hold the sizes of one kind of heads; static and hashable.

    The types and ranges of fields are declared with `jaxspec.core.settings.setting`. The method `_check` of a subclass
    checks everything else.

    Attributes:
        drafter: the name of the kind in `jaxspec.registry.HEADS`, and of the drafter that uses the heads.
        copies: for each parameter that may be a copy of a table of the target, the field that says whether the heads
            have a table of their own, and the target's method that returns its table.
    """

    drafter: ClassVar[str]
    copies: ClassVar[Mapping[str, tuple[str, str]]] = {}

    hidden_size: Any  # E, the width of the heads' states
    vocab_size: Any  # V, the size of the target's vocabulary
    draft_vocab_size: int | None

    def __post_init__(self):
        check_fields(self)
        self._check()
        if self.draft_vocab_size is not None:
            whole("draft_vocab_size", self.draft_vocab_size, 1, self.vocab_size)

    def _check(self) -> None:
        """Checks the fields of other types, and checks for values that cannot be used together.

        Raises:
            InvalidConfig: the values cannot be used together.
        """

    @classmethod
    def from_json(cls, where: str, values: Any) -> Self:
        """Makes sizes from the JSON of their fields, as in `heads.json`.

        Raises:
            CheckpointError: a field is missing, unknown, or invalid; the message begins with `where`.
        """
        fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        known = {field.name for field in fields}
        required = {field.name for field in fields if field.default is dataclasses.MISSING}
        if not isinstance(values, dict) or not required <= values.keys() <= known:
            raise CheckpointError(
                f"{where}: config is {values!r:.80}, expected an object with the keys {', '.join(sorted(required))}, "
                f"and no keys but {', '.join(sorted(known))}"
            )
        read: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        try:
            return cls(**read | ({"decoder": parse_config(where, read["decoder"])} if "decoder" in known else {}))
        except InvalidConfig as error:
            raise CheckpointError(f"{where}: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise CheckpointError(f"{where}: config is not valid: {type(error).__name__}: {error}") from None

    @property
    def feature_size(self) -> int:
        """The width of the target's features, and of each tap."""
        return self.hidden_size

    @property
    def rows(self) -> int:
        """R, the number of tokens that can be guessed."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def tables(self) -> tuple[str, ...]:
        """The methods of the target that return tables which the heads read, besides its `head`."""
        return ()

    @property
    def projections(self) -> tuple[str, ...]:
        """The names of the parameters that project states to logits; each is `[R, E]`, like the target's projection."""
        return ()

    @property
    def num_blocks(self) -> int:
        """The number of blocks, layers and taps, which is at most the number of tensors."""
        raise NotImplementedError

    @property
    def max_depth(self) -> float:
        """The greatest depth of a tree; infinite for heads that continue their own states."""
        raise NotImplementedError

    @property
    def usual_depth(self) -> int:
        """The number of tokens in the chain with which heads of these sizes are tried."""
        return int(self.max_depth)

    @property
    def has_laws(self) -> bool:
        """Whether the distributions of guesses along a text can be computed from the logits of each row alone."""
        return True

    @property
    def summary(self) -> str:
        """The kind of heads in a few words."""
        raise NotImplementedError

    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every parameter by name; `tokens` are the ids of a reduced vocabulary, ascending."""
        raise NotImplementedError


class TappedSizes(HeadSizes):
    """The base of sizes of heads with transformer layers of their own, which read taps of the target.

    The dataclass of a kind of heads has these fields; a tap is the target's residual stream at one layer.
    """

    decoder: ModelConfig
    target_size: int | None
    taps: tuple[int, ...] | None
    own_embedding: bool
    own_projection: bool

    copies: ClassVar[Mapping[str, tuple[str, str]]] = {"embed": ("own_embedding", "embedding")}

    def _check(self) -> None:
        if not isinstance(self.decoder, ModelConfig):
            raise InvalidConfig(f"decoder must be a ModelConfig, got {self.decoder!r:.80}")
        if self.decoder.recurrent:
            raise InvalidConfig("decoder has recurrent layers, which draft heads do not have")
        taps = self.taps
        if taps is not None and not (isinstance(taps, tuple) and all(type(tap) is int and tap > 0 for tap in taps)):
            raise InvalidConfig(f"taps must be whole numbers from 1, got {taps!r:.80}")
        self._check_combinations()
        if self.feature_size != self.hidden_size and not (self.own_embedding and self.own_projection):
            raise InvalidConfig(
                f"a head of width {self.hidden_size} for features of width {self.feature_size} needs an embedding and "
                "a projection of its own"
            )

    def _check_combinations(self) -> None:
        """Checks for fields of this kind of heads that cannot be used together.

        Raises:
            InvalidConfig: the values cannot be used together.
        """

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
        return self.hidden_size if self.target_size is None else self.target_size

    @property
    def tables(self) -> tuple[str, ...]:
        rows = self.draft_vocab_size is not None and not self.own_projection
        return ("embedding",) * (not self.own_embedding) + ("unembedding",) * rows

    @property
    def projections(self) -> tuple[str, ...]:
        return ("head",) * self.own_projection

    @property
    def num_taps(self) -> int:
        """The number of taps that the head reads."""
        raise NotImplementedError

    @property
    def num_blocks(self) -> int:
        return self.decoder.num_layers + self.num_taps

    def taps_of(self, depth: int) -> tuple[int, ...]:
        """Returns the taps of a target of `depth` layers that the head reads."""
        raise NotImplementedError

    def table_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the head's own embedding and projection, and of the ids of a reduced vocabulary."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.own_embedding:
            shapes["embed"] = (self.vocab_size, self.hidden_size)
        if self.own_projection:
            shapes["head"] = (self.rows, self.hidden_size)
        if self.draft_vocab_size is not None:
            shapes["tokens"] = (self.draft_vocab_size,)
        return shapes
