"""The sizes of a set of draft heads. Nothing here imports JAX."""

import dataclasses
import math

from jaxspec.errors import InvalidConfig

INPUTS, PROJECTIONS = ("hidden", "path", "recurrent"), ("shared", "own", "single")
INNER = 4
"""Width of a recurrent block's inside, in widths of the features: as of a transformer's own blocks."""


@dataclasses.dataclass(frozen=True)
class HeadsConfig:
    """The sizes of a set of heads; static and hashable.

    Attributes:
        hidden_size: E, of the target's features.
        vocab_size: V, of the target.
        num_heads: how many tokens are guessed, in training at least (`max_depth`).
        num_layers: residual blocks of each head, or of the one network of recurrent heads; 0: the projection alone.
        inputs: "hidden", the target's feature alone (Medusa); "path", also the embeddings of the tokens between it and
            the guess (Hydra); or "recurrent", what the head before made of them and the last such token (ReDrafter):
            then all heads are one network, run once more for each.
        projection: onto the vocabulary: "shared", the target's; "own", one for each head; or "single", one for all
            heads that is not the target's.
        bias: the blocks' linear maps have one.
        draft_vocab_size: guesses come from so many tokens, listed in the parameters; None: from all.

    Raises:
        InvalidConfig: a value that cannot be.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    inputs: str = "hidden"
    projection: str = "shared"
    bias: bool = True
    draft_vocab_size: int | None = None

    def __post_init__(self):
        least = {"hidden_size": 1, "vocab_size": 1, "num_heads": 1, "num_layers": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise InvalidConfig(f"{name} of heads is a whole number from {low}, got {value!r}")
        if not isinstance(self.bias, bool):
            raise InvalidConfig(f"bias of heads is true or false, got {self.bias!r:.80}")
        for name, known in (("inputs", INPUTS), ("projection", PROJECTIONS)):
            if getattr(self, name) not in known:
                raise InvalidConfig(f"{name} of heads is {' or '.join(known)}, got {getattr(self, name)!r}")
        if self.reads_words and not self.num_layers:
            raise InvalidConfig("heads that read the path need a block to read it with; set num_layers to 1 or more")
        rows = self.draft_vocab_size
        if rows is not None and (
            isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= self.vocab_size
        ):
            raise InvalidConfig(f"draft_vocab_size is a whole number from 1 to {self.vocab_size}, got {rows!r}")

    @property
    def rows(self) -> int:
        """Tokens that are guessed from: rows of a projection."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def num_projections(self) -> int:
        """Projections among the parameters."""
        return {"shared": 0, "single": 1, "own": self.num_heads}[self.projection]

    @property
    def has_single_projection(self) -> bool:
        """Tells whether one projection of their own serves all heads."""
        return self.projection == "single"

    @property
    def max_depth(self) -> float:
        """Of a tree that they draft; one network with one projection is run on past the depth it was trained to."""
        again = self.inputs == "recurrent" and self.projection != "own"
        return math.inf if again else self.num_heads

    @property
    def reads_words(self) -> bool:
        """Heads depend on the tokens between the feature and the guess, and so on one another."""
        return self.inputs != "hidden"

    def block_inputs(self, head: int, layer: int) -> int:
        """Width of what a block reads: the first one also takes the embeddings, of head + 1 tokens or of the last."""
        words = {"hidden": 0, "path": 1 + head, "recurrent": 1}[self.inputs]
        return self.hidden_size * (1 + words if layer == 0 else 1)

    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter, under its path's name."""
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
