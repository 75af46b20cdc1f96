"""The settings of Medusa heads. Nothing here imports JAX."""

from jaxspec.core.settings import setting, settings_class
from jaxspec.errors import InvalidConfig
from jaxspec.heads.medusa_config import INPUT_KINDS, PROJECTION_KINDS
from jaxspec.train.settings import TrainSettings


@settings_class
class MedusaSettings(TrainSettings):
    """The training of Medusa heads (Cai et al. 2024, arXiv:2401.10774), and of the target with them (Medusa-2).

    Attributes:
        heads: number of heads, one per drafted token.
        layers: residual blocks of each head, or of the one network of recurrent heads.
        inputs: what the heads read. hidden: the target's feature (Medusa; can be exported to vLLM, TGI and TensorRT-
            LLM). path: the feature and the tokens after it (Hydra; served by jaxspec only). recurrent: the same, with
            one network for all heads (ReDrafter; served by jaxspec only).
        projection: projection onto the vocabulary: the target's, one per head, or one for all heads.
        medusa2: whether to train the target as well (Medusa-2): text is then lossless against the trained target only.
        medusa2_warmup: steps before the target is trained as well.
        medusa2_heads: weight of the loss of the heads relative to the loss of the target.
        medusa2_rate: learning rate of the target relative to the learning rate of the heads.
    """

    heads: int = 4
    layers: int = 1
    inputs: str = setting("path", INPUT_KINDS)
    projection: str = setting("shared", PROJECTION_KINDS)
    medusa2: bool = False
    medusa2_warmup: int = setting(100, least=0)
    medusa2_heads: float = 0.2
    medusa2_rate: float = 0.1

    drafter, trainee_class = "medusa", "jaxspec.train.medusa:MedusaTrainee"

    @property
    def drafted(self) -> int:
        """The number of heads."""
        return self.heads

    @property
    def trains_target(self) -> bool:
        """True for Medusa-2."""
        return self.medusa2

    def check(self) -> None:
        """Refuses what Medusa-2 does not allow; see `TrainSettings.check`."""
        if self.medusa2 and (self.cache_features or self.loss != "ce"):
            raise InvalidConfig(
                "medusa2 changes the target: set cache_features to false (--no-cache-features), and loss to ce"
            )
        if self.medusa2 and self.draft_vocab:
            raise InvalidConfig("medusa2 trains the target's own projection: leave draft_vocab at 0")
