"""The protocol of what is trained: a kind of draft heads, or a draft model.

A kind is two classes. Its settings (`jaxspec.train.settings.TrainSettings`) hold what a user chooses, and are
registered in `jaxspec.registry.TRAINEES`. They make a `Trainee` for a target, which is all that training knows of the
kind: data, losses, optimiser, checkpoints, evaluation and the card are shared. What is said of heads holds for a draft
model as well.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Int

from jaxspec.core.networks import LanguageModel
from jaxspec.core.records import Params
from jaxspec.heads.network import DraftHeads
from jaxspec.models.model import Model
from jaxspec.train.batch import Batch, Frozen, Guess


class Joint(NamedTuple):
    """The settings of the target's training together with the heads.

    Attributes:
        warmup: steps before the target is trained, too.
        heads_weight: weight of the loss of the heads relative to the loss of the target.
        rate: learning rate of the target relative to that of the heads.
    """

    warmup: int
    heads_weight: float
    rate: float


class Blocks(NamedTuple):
    """The settings of heads that guess the tokens after a position as one block.

    A step of training guesses from some positions of each row (`Batch.places`), and evaluation from all. A token of a
    block counts if all before it count, and the loss is one mean over all tokens.

    Attributes:
        anchors: the most positions of a row that a step guesses from; None for all.
        gamma: the weight of token i of a block is exp(-i / gamma).
        confidence: weight of the loss of the estimates `Guess.certainty`.
        shares: of each token, the share of these positions that it is guessed from in training, not increasing; empty
            for all.
    """

    anchors: int | None
    gamma: float
    confidence: float = 0.0
    shares: tuple[float, ...] = ()


@runtime_checkable
class Trainee(Protocol):
    """Heads that are trained for a target: static and hashable, without arrays.

    Step i of `unroll` predicts token t + 2 + i from the position t: the target itself predicts token t + 1.
    """

    @property
    def drafter(self) -> str:
        """The registered name of the drafter that the heads are for."""
        ...

    @property
    def drafted(self) -> int:
        """The number of steps of `unroll`, which is the number of tokens that are guessed from each position."""
        ...

    @property
    def vocab_size(self) -> int:
        """V, the rows of the target's projection that are drafted from."""
        ...

    @property
    def reads_features(self) -> bool:
        """True if `unroll` reads features of the target; if not, only losses that need its law do."""
        ...

    @property
    def reads_tokens(self) -> bool:
        """True if `unroll` reads embeddings of tokens, so that `Frozen.embed` is needed."""
        ...

    @property
    def reads_context(self) -> bool:
        """True if logits depend on earlier positions of the text; if not, only supervised spans are kept."""
        ...

    @property
    def feature_settings(self) -> Mapping[str, Any]:
        """The settings that features on disk depend on, as JSON; empty for the features of the target itself."""
        ...

    @property
    def joint(self) -> Joint | None:
        """The settings of the target's training; None if the target is frozen."""
        ...

    @property
    def blocks(self) -> Blocks | None:
        """The settings of blocks; None for heads that guess from every position, each token by itself."""
        ...

    @property
    def title(self) -> str:
        """The kind of heads, for titles, such as "Medusa heads"."""
        ...

    @property
    def description(self) -> str:
        """The sizes, for the card."""
        ...

    @property
    def served_by(self) -> str:
        """A sentence that says which systems can serve the heads."""
        ...

    def network(self, lm: LanguageModel) -> Any:
        """Returns the network whose features are read: the target's, or one whose features hold more."""
        ...

    def init_params(self, target: Model, ids: Int[Array | np.ndarray, "R"] | None) -> Params:
        """Returns the parameters before training, float32.

        Args:
            target: the target.
            ids: the drafted tokens, ascending; None for the whole vocabulary.
        """
        ...

    def unroll(self, params: Params, frozen: Frozen, batch: Batch) -> Iterator[Guess]:
        """Yields the guesses of each step at every position, with the text's own tokens as the drafted ones.

        If `batch.places` is not None, the guesses are those of its positions, or of the first of them
        (`Blocks.shares`).
        """
        ...

    def result(
        self, params: Params, ids: Int[Array | np.ndarray, "R"] | None, name: str, start: Any = None
    ) -> DraftHeads | Model:
        """Returns trained parameters as heads or a model that draft.

        Args:
            params: the parameters.
            ids: the drafted tokens, ascending; None for the whole vocabulary.
            name: of the heads or the model.
            start: what the training started from, see `TrainSettings.trainee`.
        """
        ...
