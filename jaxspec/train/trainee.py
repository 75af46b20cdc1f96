"""What is trained for a target: draft heads, or a draft model.

A kind consists of two classes. Its settings (`jaxspec.train.settings.TrainSettings`) hold what a user chooses, and are
registered in `jaxspec.registry.TRAINEES`. The settings make a `Trainee` for a target, which is all that training knows
of the kind: data, losses, optimiser, checkpoints, evaluation and the card are shared. Documentation that says "heads"
applies to a draft model as well.
"""

import abc
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.core.networks import LanguageModel
from jaxspec.core.records import Params
from jaxspec.heads.network import DraftHeads
from jaxspec.models.layers import matmul
from jaxspec.models.model import Model
from jaxspec.train.batch import Batch, FrozenTarget, Guess

BLOCKS_AT_ONCE = 64
"""Number of blocks of a row that are read at once in evaluation, which reads a block at every position."""


class About(NamedTuple):
    """The descriptions of heads for people.

    Attributes:
        title: the kind of heads, such as "Medusa heads".
        sizes: the sizes, for the card.
        serving: a sentence that says which systems can serve the heads.
    """

    title: str
    sizes: str
    serving: str


class Joint(NamedTuple):
    """The settings of the target's training together with the heads.

    Attributes:
        warmup: steps before the target is trained as well.
        heads_weight: weight of the loss of the heads relative to the loss of the target.
        rate: learning rate of the target relative to the learning rate of the heads.
    """

    warmup: int
    heads_weight: float
    rate: float


class BlockTraining(NamedTuple):
    """The settings of heads that guess the tokens after a position as one block.

    A step of training guesses from some positions of each row (`Batch.anchors`), and evaluation from all. A token of a
    block counts if all tokens before it count. The loss is one mean over all tokens.

    Attributes:
        anchors: the largest number of positions of a row that a step guesses from; None for all positions.
        gamma: the weight of token i of a block is exp(-i / gamma).
        confidence: weight of the loss of the estimates `Guess.certainty`.
        shares: for each token of a block, the share of these positions that it is guessed from in training. The shares
            do not increase. Empty if every token is guessed from all of these positions.
    """

    anchors: int | None
    gamma: float
    confidence: float = 0.0
    shares: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainee(abc.ABC):
    """Heads that are trained for a target: static and hashable, without arrays.

    Attributes:
        about: descriptions of the heads.
        drafter: the registered name of the drafter that the heads are for.
        drafted: the number of tokens that are guessed from each position, which is the number of steps of `unroll`.
        vocab_size: V, the rows of the target's projection that are drafted from.
        reads_features: True if `unroll` reads features of the target. If False, only losses that need the target's
            distribution read them.
        reads_tokens: True if `unroll` reads embeddings of tokens, so that `FrozenTarget.embed` is needed.
        reads_context: True if logits depend on earlier positions of the text. If False, only supervised spans are kept.
        joint: the settings of the target's training; None if the target is frozen.
        blocks: the settings of blocks; None for heads that guess from every position, each token by itself.
    """

    about: About
    drafter: str
    drafted: int
    vocab_size: int
    reads_features: bool = True
    reads_tokens: bool = False
    reads_context: bool = True
    joint: Joint | None = None
    blocks: BlockTraining | None = None

    @abc.abstractmethod
    def unroll(self, params: Params, frozen: FrozenTarget, batch: Batch) -> Iterator[Guess]:
        """Yields the guesses of each step at every position, with the text's own tokens as the drafted tokens.

        Step i predicts token t + 2 + i from the position t: the target itself predicts token t + 1. If `batch.anchors`
        is not None, only these positions have guesses. A step may have guesses for only the first of them
        (`BlockTraining.shares`).
        """

    def projection(self, params: Params) -> Any:
        """Returns the parameters that `logits` reads, such as a projection of the heads' own; by default, none.

        The loss computes their gradients, and holds a sum of them in float32.
        """
        return ()

    def logits(self, projection: Any, rows: Float[Array, "R E"], step: int, states: Any) -> Float[Array, "B A R"]:
        """Returns the logits of a step. By default, they are the states times the target's projection.

        Training calls this function for a few positions at a time, so that the logits of all positions never exist at
        once. The logits of a position must not depend on other positions.

        Args:
            projection: what `projection` returned.
            rows: the rows of the target's projection, `FrozenTarget.rows`.
            step: the step of `unroll`.
            states: the states of some positions.
        """
        return matmul(states, rows, transposed=True)

    def unroll_logits(self, params: Params, frozen: FrozenTarget, batch: Batch) -> Iterator[Float[Array, "B A R"]]:
        """Yields the logits of each step at every position, or at `batch.anchors`."""
        projection = self.projection(params)
        for step, guess in enumerate(self.unroll(params, frozen, batch)):
            yield self.logits(projection, frozen.rows, step, guess.states)

    @abc.abstractmethod
    def result(
        self, params: Params, ids: Int[Array | np.ndarray, "R"] | None, name: str, start: Any = None
    ) -> DraftHeads | Model:
        """Returns the trained parameters as draft heads or as a draft model.

        Args:
            params: the parameters.
            ids: the drafted tokens, ascending; None for the whole vocabulary.
            name: the name of the heads or the model.
            start: what the training started from, see `TrainSettings.trainee`.
        """

    def network(self, lm: LanguageModel) -> LanguageModel:
        """Returns the network whose features are read: the target's, or one whose features hold more."""
        return lm

    @property
    def feature_settings(self) -> Mapping[str, Any]:
        """The settings that features on disk depend on, as JSON; empty for the features of the target itself."""
        return {}
