"""The sizes of a set of Medusa heads. Nothing here imports JAX."""

import dataclasses
import math
from typing import ClassVar

from jaxspec.core.settings import setting
from jaxspec.errors import InvalidConfig
from jaxspec.heads.sizes import HeadSizes

INPUT_KINDS, PROJECTION_KINDS = ("hidden", "path", "recurrent"), ("shared", "own", "single")
INNER_FACTOR = 4
"""The inner width of a recurrent block, as a multiple of E; 4 is usual in the feed-forward blocks of transformers."""


@dataclasses.dataclass(frozen=True)
class HeadsConfig(HeadSizes):
    """The sizes of a set of Medusa heads; static and hashable.

    Attributes:
        hidden_size: E, the width of the target's features.
        vocab_size: V, the size of the target's vocabulary.
        num_heads: the number of tokens that are guessed in training; `max_depth` limits drafting.
        num_layers: the number of residual blocks of each head, or of the one network of recurrent heads; 0 for only the
            projection.
        inputs: the input of a head: "hidden", the target's feature (Medusa); "path", also the embeddings of the tokens
            between the feature and the guess (Hydra); or "recurrent", the output of the previous head and the embedding
            of the last such token (ReDrafter). Recurrent heads are one network, which runs once for each head.
        projection: the matrix that turns features into logits: "shared", the target's matrix; "own", one matrix for
            each head; or "single", one matrix for all heads, which is not the target's.
        bias: True if the linear maps of the blocks have a bias.
        draft_vocab_size: the number of tokens that can be guessed; their ids are among the parameters. None: all
            tokens of the vocabulary.

    Raises:
        InvalidConfig: a value is out of range or of another type, or two values cannot be used together.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = setting(1, least=0)
    inputs: str = setting("hidden", INPUT_KINDS)
    projection: str = setting("shared", PROJECTION_KINDS)
    bias: bool = True
    draft_vocab_size: int | None = None

    drafter: ClassVar[str] = "medusa"

    def _check(self) -> None:
        if self.reads_words and not self.num_layers:
            raise InvalidConfig(f"inputs {self.inputs!r} needs at least one block; set num_layers to 1 or more")

    @property
    def tables(self) -> tuple[str, ...]:
        rows = self.draft_vocab_size is not None and self.projection == "shared"
        return ("embedding",) * self.reads_words + ("unembedding",) * rows

    @property
    def summary(self) -> str:
        return f"{self.num_heads} heads, inputs={self.inputs!r}"

    @property
    def num_projections(self) -> int:
        """The number of projections among the parameters."""
        return {"shared": 0, "single": 1, "own": self.num_heads}[self.projection]

    @property
    def projections(self) -> tuple[str, ...]:
        return tuple(f"projections.{i}" for i in range(self.num_projections))

    @property
    def has_single_projection(self) -> bool:
        """True if all heads share one projection that is not the target's."""
        return self.projection == "single"

    @property
    def num_blocks(self) -> int:
        return self.num_heads * max(self.num_layers, 1)

    @property
    def max_depth(self) -> float:
        # Recurrent heads with one projection continue their own states.
        again = self.inputs == "recurrent" and self.projection != "own"
        return math.inf if again else self.num_heads

    @property
    def usual_depth(self) -> int:
        return self.num_heads

    @property
    def reads_words(self) -> bool:
        """True if a head reads the tokens between the feature and its guess, and so depends on the heads before it."""
        return self.inputs != "hidden"

    def block_inputs(self, head: int, layer: int) -> int:
        """Returns the width of a block's input.

        The first block of a head also reads embeddings: the embeddings of head + 1 tokens, or of the last token if the
        heads are recurrent.
        """
        words = {"hidden": 0, "path": 1 + head, "recurrent": 1}[self.inputs]
        return self.hidden_size * (1 + words if layer == 0 else 1)

    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every parameter by name, such as `blocks.0.0.kernel`."""
        shapes: dict[str, tuple[int, ...]] = {}
        recurrent = self.inputs == "recurrent"
        for layer in range(self.num_layers if recurrent else 0):
            inner = INNER_FACTOR * self.hidden_size
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
