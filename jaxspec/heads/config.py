"""The sizes of a set of draft heads. Nothing here imports JAX."""

import dataclasses
import math
from typing import ClassVar

from jaxspec.errors import InvalidConfig

INPUTS, PROJECTIONS = ("hidden", "path", "recurrent"), ("shared", "own", "single")
INNER = 4
"""The inner width of a recurrent block, as a multiple of E; 4 is usual in the feed-forward blocks of transformers."""


@dataclasses.dataclass(frozen=True)
class HeadsConfig:
    """The sizes of a set of heads; static and hashable.

    Attributes:
        hidden_size: E, the width of the target's features.
        vocab_size: V, the size of the target's vocabulary.
        num_heads: the number of tokens that are guessed in training; `max_depth` limits drafting.
        num_layers: residual blocks of each head, or of the one network of recurrent heads; 0: only the projection.
        inputs: the input of a head: "hidden", the target's feature (Medusa); "path", also the embeddings of the tokens
            between the feature and the guess (Hydra); or "recurrent", the output of the previous head and the embedding
            of the last such token (ReDrafter). Recurrent heads are one network, which runs once for each head.
        projection: the matrix that turns features into logits: "shared", the target's; "own", one for each head; or
            "single", one for all heads, which is not the target's.
        bias: True if the linear maps of the blocks have a bias.
        draft_vocab_size: the number of tokens that can be guessed; their ids are among the parameters. None: all
            tokens of the vocabulary.

    Raises:
        InvalidConfig: a value is out of range or of another type, or two values exclude one another.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    inputs: str = "hidden"
    projection: str = "shared"
    bias: bool = True
    draft_vocab_size: int | None = None

    drafter: ClassVar[str] = "medusa"

    def __post_init__(self):
        least = {"hidden_size": 1, "vocab_size": 1, "num_heads": 1, "num_layers": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise InvalidConfig(f"{name} of heads must be a whole number from {low}, got {value!r}")
        if not isinstance(self.bias, bool):
            raise InvalidConfig(f"bias of heads must be true or false, got {self.bias!r:.80}")
        for name, known in (("inputs", INPUTS), ("projection", PROJECTIONS)):
            if getattr(self, name) not in known:
                raise InvalidConfig(f"{name} of heads must be {' or '.join(known)}, got {getattr(self, name)!r}")
        if self.reads_words and not self.num_layers:
            raise InvalidConfig("heads that read the path need a block to read it with; set num_layers to 1 or more")
        rows = self.draft_vocab_size
        if rows is not None and (
            isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= self.vocab_size
        ):
            raise InvalidConfig(f"draft_vocab_size must be a whole number from 1 to {self.vocab_size}, got {rows!r}")

    @property
    def feature_size(self) -> int:
        """The width of the target's features."""
        return self.hidden_size

    @property
    def tables(self) -> tuple[str, ...]:
        """The methods of the target that return tables which the heads read, besides its `head`."""
        rows = self.draft_vocab_size is not None and self.projection == "shared"
        return ("embedding",) * self.reads_words + ("unembedding",) * rows

    @property
    def summary(self) -> str:
        """The kind of heads in a few words."""
        return f"{self.num_heads} heads, inputs={self.inputs!r}"

    @property
    def rows(self) -> int:
        """The number of rows of a projection, one for each token that can be guessed."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def num_projections(self) -> int:
        """The number of projections among the parameters."""
        return {"shared": 0, "single": 1, "own": self.num_heads}[self.projection]

    @property
    def has_single_projection(self) -> bool:
        """True if all heads share one projection that is not the target's."""
        return self.projection == "single"

    @property
    def num_blocks(self) -> int:
        """The number of blocks of all heads, at least one for each."""
        return self.num_heads * max(self.num_layers, 1)

    @property
    def max_depth(self) -> float:
        """The greatest depth of a tree; infinite for recurrent heads with one projection."""
        again = self.inputs == "recurrent" and self.projection != "own"
        return math.inf if again else self.num_heads

    @property
    def reads_words(self) -> bool:
        """True if a head reads the tokens between the feature and its guess, and so depends on the heads before it."""
        return self.inputs != "hidden"

    def block_inputs(self, head: int, layer: int) -> int:
        """Returns the width of a block's input.

        The first block of a head also reads embeddings: of head + 1 tokens, or of the last token if recurrent.
        """
        words = {"hidden": 0, "path": 1 + head, "recurrent": 1}[self.inputs]
        return self.hidden_size * (1 + words if layer == 0 else 1)

    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every parameter by name, such as `blocks.0.0.kernel`."""
        shapes: dict[str, tuple[int, ...]] = {}
        recurrent = self.inputs == "recurrent"
        for layer in range(self.num_layers if recurrent else 0):
            inner = INNER * self.hidden_size
            shapes[f"network.{layer}.up"] = (self.block_inputs(0, layer), inner)
            if self.bias:
                shapes[f"network.{layer}.bias"] = (inner,)
            shapes[f"network.{layer}.down"] = (inner, self.hidden_size)
        for head in range(self.num_heads):
            for layer in range(0 if recurrent else self.num_layers):
                shapes[f"blocks.{head}.{layer}.kernel"] = (self.block_inputs(head, layer), self.hidden_size)
                if self.bias:
                    shapes[f"blocks.{head}.{layer}.bias"] = (self.hidden_size,)
            if head < self.num_projections:
                shapes[f"projections.{head}"] = (self.rows, self.hidden_size)
        if self.draft_vocab_size is not None:
            shapes["tokens"] = (self.draft_vocab_size,)
        return shapes
