"""The kinds "eagle1" and "eagle3" of heads to train, and their sizes. Nothing here imports JAX."""

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxspec.errors import InvalidConfig, shown
from jaxspec.train.settings import OfHeads, Settings, check_fields, setting

if TYPE_CHECKING:
    from jaxspec.heads.network import DraftHeads
    from jaxspec.models.model import Model
    from jaxspec.train.eagle import EagleTrainee


@dataclasses.dataclass(frozen=True)
class Eagle3Settings(OfHeads):
    """The sizes of an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840), by default with the norms of EAGLE-3.1.

    In training, the head reads its own states as it does when it drafts: the training-time test of section 3.1. Its
    layers are like the target's.

    Attributes:
        depth: number of tokens that are guessed from each position; 1 for no training-time test.
        layers: decoder layers of the head.
        taps: the layers of the target after which the head reads the residual stream, such as "2,15,27"; empty for
            those of EAGLE-3: 2, half the layers, and all but 3.
        fc_norm: whether each tap is normed before the input projection (EAGLE-3.1).
        norm_output: whether a drafted token reads the normed state of the one before it (EAGLE-3.1).
        norm_before_fc: whether all taps are normed as one vector, in place of `fc_norm`.
        norm_before_residual: whether the first layer adds to its normed state.
        qk_norm: whether queries and keys are normed, as in Qwen3.
        own_projection: whether the head trains a projection onto the vocabulary of its own, which starts as the
            target's.

    Raises:
        InvalidConfig: a setting has an invalid value.
    """

    depth: int = setting(5, "number of tokens that are guessed from each position; 1 for no training-time test")
    layers: int = setting(1, "decoder layers of the head")
    taps: str = setting(
        "", "layers of the target after which the head reads the residual stream, such as 2,15,27; empty for EAGLE-3's"
    )
    fc_norm: bool = setting(True, "whether each tap is normed before the input projection (EAGLE-3.1)")
    norm_output: bool = setting(True, "whether a drafted token reads the normed state of the one before it (EAGLE-3.1)")
    norm_before_fc: bool = setting(False, "whether all taps are normed as one vector, in place of fc_norm")
    norm_before_residual: bool = setting(False, "whether the first layer adds to its normed state")
    qk_norm: bool = setting(False, "whether queries and keys are normed, as in Qwen3")
    own_projection: bool = setting(
        False, "whether the head trains a projection onto the vocabulary of its own, which starts as the target's"
    )

    version = 3
    usual_loss = "kl"
    trains_target = False

    def __post_init__(self):
        check_fields(self)
        if self.taps and not all(part.strip().isdecimal() for part in self.taps.split(",")):
            raise InvalidConfig(f"taps must be layers of the target such as '2,15,27', got {shown(self.taps)}")

    @property
    def drafted(self) -> int:
        """The number of tokens after a position that are guessed from it."""
        return self.depth

    def check(self, settings: Settings) -> None:
        """Accepts all shared settings."""

    def trainee(self, target: "Model", draft_vocab: int = 0, start: "DraftHeads | None" = None) -> "EagleTrainee":
        """Returns the head to train for a target; see `jaxspec.train.trainee.TraineeSettings`."""
        from jaxspec.train.eagle import make_trainee  # JAX takes a second to import, and help needs none

        switches: dict[str, Any] = {
            name: vars(self)[name]
            for name in ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "own_projection")
        }
        taps = tuple(int(part) for part in self.taps.split(",")) if self.taps else None
        return make_trainee(self, target, draft_vocab, start, taps=taps, qk_norm=self.qk_norm, **switches)

    @staticmethod
    def trainee_of(heads: "DraftHeads") -> "EagleTrainee | None":
        """Returns the trainee that an EAGLE head comes from; None for heads of another kind."""
        from jaxspec.train.eagle import trainee_of

        return trainee_of(heads)


@dataclasses.dataclass(frozen=True)
class Eagle1Settings(OfHeads):
    """The sizes of an EAGLE-1 head (Li et al. 2024, arXiv:2401.15077), which EAGLE-2 drafts with, too.

    The head predicts the target's next feature: the loss is that of the next token's distribution plus the smooth L1
    distance of the features (section 4.2). Its layers are like the target's.

    Attributes:
        layers: decoder layers of the head.
        fc_bias: whether the input projection has a bias, which vLLM cannot read.
        feature_loss: weight of the features' distance, relative to the loss of the distribution.
        noise: width of the uniform noise on the features in a text of 512 tokens; in proportion less in longer texts.

    Raises:
        InvalidConfig: a setting has an invalid value.
    """

    layers: int = setting(1, "decoder layers of the head")
    fc_bias: bool = setting(False, "whether the input projection has a bias, which vLLM cannot read")
    feature_loss: float = setting(
        10.0, "weight of the distance of the features, relative to the loss of the distribution", least=0
    )
    noise: float = setting(
        0.2, "width of the uniform noise on the features in a text of 512 tokens; in proportion less in longer texts",
        least=0,
    )  # fmt: skip

    version = 1
    usual_loss = "kl"
    trains_target = False
    drafted = 1

    def __post_init__(self):
        check_fields(self)

    def check(self, settings: Settings) -> None:
        """Checks the settings that depend on both.

        Raises:
            InvalidConfig: they do not go together.
        """
        if settings.draft_vocab:
            raise InvalidConfig("an EAGLE-1 head drafts from the whole vocabulary: leave draft_vocab at 0")

    def trainee(self, target: "Model", draft_vocab: int = 0, start: "DraftHeads | None" = None) -> "EagleTrainee":
        """Returns the head to train for a target; see `jaxspec.train.trainee.TraineeSettings`."""
        from jaxspec.train.eagle import make_trainee

        return make_trainee(self, target, draft_vocab, start, fc_bias=self.fc_bias)

    @staticmethod
    def trainee_of(heads: "DraftHeads") -> "EagleTrainee | None":
        """Returns the trainee that an EAGLE head comes from; None for heads of another kind."""
        from jaxspec.train.eagle import trainee_of

        return trainee_of(heads)
