"""The kind of Medusa heads to train, and their sizes. Nothing here imports JAX."""

import dataclasses
from typing import TYPE_CHECKING

from jaxspec.errors import InvalidConfig
from jaxspec.heads.config import INPUTS, PROJECTIONS
from jaxspec.train.settings import OfHeads, Settings, check_fields, setting

if TYPE_CHECKING:
    from jaxspec.heads.network import DraftHeads
    from jaxspec.models.model import Model
    from jaxspec.train.medusa import MedusaTrainee


@dataclasses.dataclass(frozen=True)
class MedusaSettings(OfHeads):
    """The sizes of Medusa heads (Cai et al. 2024, arXiv:2401.10774), and the training of the target with them.

    Attributes:
        heads: number of heads, one per drafted token.
        layers: residual blocks of each head, or of the one network of recurrent heads.
        inputs: "hidden", the target's feature (Medusa); "path", also the tokens after it (Hydra); or "recurrent", both,
            read by one network for all heads (ReDrafter).
        projection: the projection onto the vocabulary: "shared", the target's; "own", one per head; or "single", one
            for all heads.
        medusa2: whether to train the target, too (Medusa-2). Text is then lossless against the trained target only.
        medusa2_warmup: steps before the target is trained, too.
        medusa2_heads: weight of the loss of the heads relative to the loss of the target.
        medusa2_rate: learning rate of the target relative to that of the heads.

    Raises:
        InvalidConfig: a setting has an invalid value.
    """

    heads: int = setting(4, "number of heads, one per drafted token")
    layers: int = setting(1, "residual blocks of each head, or of the one network of recurrent heads")
    inputs: str = setting(
        "path",
        "what the heads read. hidden: the target's feature (Medusa; can be exported to vLLM, TGI and TensorRT-LLM). "
        "path: also the tokens after it (Hydra; served by jaxspec only). recurrent: both, by one network for all heads "
        "(ReDrafter; served by jaxspec only)",
        INPUTS,
    )
    projection: str = setting(
        "shared", "projection onto the vocabulary: the target's, one per head, or one for all heads", PROJECTIONS
    )
    medusa2: bool = setting(
        False, "whether to train the target, too (Medusa-2): text is then lossless against the trained target only"
    )
    medusa2_warmup: int = setting(100, "steps before the target is trained, too", least=0)
    medusa2_heads: float = setting(0.2, "weight of the loss of the heads relative to the loss of the target")
    medusa2_rate: float = setting(0.1, "learning rate of the target relative to that of the heads")

    usual_loss = "ce"

    def __post_init__(self):
        check_fields(self)

    @property
    def drafted(self) -> int:
        """The number of tokens after a position that are guessed from it."""
        return self.heads

    @property
    def trains_target(self) -> bool:
        """True if the target is trained, too."""
        return self.medusa2

    def check(self, settings: Settings) -> None:
        """Checks the settings that depend on both.

        Raises:
            InvalidConfig: they do not go together.
        """
        if self.medusa2 and (settings.cache_features or settings.loss not in ("auto", "ce")):
            raise InvalidConfig("medusa2 changes the target: its features cannot be cached, and its loss is ce")
        if self.medusa2 and settings.draft_vocab:
            raise InvalidConfig("medusa2 trains the target's own projection: leave draft_vocab at 0")

    def trainee(self, target: "Model", draft_vocab: int = 0, start: "DraftHeads | None" = None) -> "MedusaTrainee":
        """Returns the heads to train for a target; see `jaxspec.train.trainee.TraineeSettings`."""
        from jaxspec.train.medusa import make_trainee  # JAX takes a second to import, and help needs none
        from jaxspec.train.trainee import Joint

        joint = Joint(self.medusa2_warmup, self.medusa2_heads, self.medusa2_rate) if self.medusa2 else None
        return make_trainee(self, target, draft_vocab, start, joint)

    @staticmethod
    def trainee_of(heads: "DraftHeads") -> "MedusaTrainee | None":
        """Returns the trainee that heads of this kind come from; None for heads of another kind."""
        from jaxspec.heads.network import HeadsConfig
        from jaxspec.train.medusa import MedusaTrainee

        return MedusaTrainee(heads.config) if isinstance(heads.config, HeadsConfig) else None
