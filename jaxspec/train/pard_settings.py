"""The settings of PARD models, the kind "pard" of draft model. Nothing here imports JAX."""

from jaxspec.core.settings import setting, settings_class
from jaxspec.errors import InvalidConfig
from jaxspec.train.settings import TrainSettings


@settings_class
class PardSettings(TrainSettings):
    """The training of a draft model to name several tokens in one call, as masks behind the text (arXiv:2504.18583).

    All parameters of the draft model to start from are trained. The default loss is cross-entropy, for which the target
    only answers the prompts. Every other loss compares the draft model with the target's distribution.

    The model predicts the next token at every position. The share max(`retention` ** i, `retention_min`) of these
    positions also has an i-th mask, which predicts the token i positions further on. The seed and the number of the
    step decide which positions have it. The positions with mask i are among the positions with mask i - 1 (conditional
    drop, section 3.2).

    Attributes:
        depth: number of tokens that the model predicts in one call.
        pard_token: the mask token, a row of the draft model's embedding; -1 for the draft model's own mask token,
            or for its last row if it has none.
        retention: the share of the positions with an i-th mask that also have mask i + 1.
        retention_min: lower limit of the share of positions that have an i-th mask.
    """

    depth: int = 8
    pard_token: int = setting(-1, least=-1)
    retention: float = setting(0.7, most=1)
    retention_min: float = setting(0.2, least=0, most=1)
    learning_rate: float = 3e-05

    drafter, trainee_class, trains_model = "pard", "jaxspec.train.pard:PardTrainee", True

    @property
    def drafted(self) -> int:
        """The number of tokens that the model predicts in one call."""
        return self.depth

    def check(self) -> None:
        """Refuses settings that a draft model does not have; see `TrainSettings.check`."""
        if not self.start:
            raise InvalidConfig("a PARD model is trained from a draft model: set start (--start)")
        if self.draft_vocab:
            raise InvalidConfig("a PARD model drafts from the whole vocabulary: leave draft_vocab at 0")
        if self.decay != TrainSettings.decay:
            raise InvalidConfig("all tokens of a PARD model have the same weight: set retention instead of decay")
