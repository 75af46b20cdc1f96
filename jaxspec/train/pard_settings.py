"""The settings of PARD models, the kind "pard" of draft model. Nothing here imports JAX."""

from jaxspec.core.settings import setting, settings_class
from jaxspec.errors import InvalidConfig
from jaxspec.train.settings import TrainSettings


@settings_class
class PardSettings(TrainSettings):
    """The training of a draft model to name several tokens in one call, as masks behind the text (arXiv:2504.18583).

    All parameters of the draft model to start from are trained, by cross-entropy, which does not need the target: it
    only answers the prompts. Another loss compares with the target's distribution.

    From every position the model names its next token. Of these positions, drawn by the seed and the number of the
    step, the share max(`retention` ** i, `retention_min`) has an i-th mask behind it, for the token i further on. The
    positions with mask i are among the positions with mask i - 1 (conditional drop, section 3.2).

    Attributes:
        depth: number of tokens that the model names in one call.
        pard_token: the mask token, a row of the draft model's embedding; -1 for the draft model's own, or else its last
            row.
        retention: the share of positions with a mask that have one mask more.
        retention_min: the smallest share of positions that have any mask.
    """

    depth: int = 8
    pard_token: int = setting(-1, least=-1)
    retention: float = setting(0.7, most=1)
    retention_min: float = setting(0.2, least=0, most=1)
    learning_rate: float = 3e-05

    drafter, trainee_class, trains_model = "pard", "jaxspec.train.pard:PardTrainee", True

    @property
    def drafted(self) -> int:
        """The number of tokens that the model names in one call."""
        return self.depth

    def check(self) -> None:
        """Refuses settings that a draft model does not have; see `TrainSettings.check`."""
        if not self.start:
            raise InvalidConfig("a PARD model is trained from a draft model: set start (--start)")
        if self.draft_vocab:
            raise InvalidConfig("a PARD model drafts from the whole vocabulary: leave draft_vocab at 0")
        if self.decay != TrainSettings.decay:
            raise InvalidConfig("all tokens of a PARD model have one weight: set retention in place of decay")
