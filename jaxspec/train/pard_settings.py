"""The kind "pard" of draft model to train. Nothing here imports JAX."""

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxspec.errors import InvalidConfig
from jaxspec.train.settings import Settings, check_fields, setting

if TYPE_CHECKING:
    from jaxspec.train.pard import PardTrainee


@dataclasses.dataclass(frozen=True)
class PardSettings:
    """The training of a draft model to name several tokens in one call, as masks behind the text (arXiv:2504.18583).

    All parameters of the draft model to start from are trained, by cross-entropy, which does not need the target: it
    only answers the prompts. Another loss compares with the target's distribution.

    From every position the model names its next token. Of these positions, drawn by the seed and the number of the
    step, the share max(`retention` ** i, `retention_min`) has an i-th mask behind it, for the token i further on; those
    of one mask are among those of the mask before it (conditional drop, section 3.2).

    Attributes:
        depth: number of tokens that the model names in one call.
        pard_token: the mask token, a row of the draft model's embedding; -1 for the draft model's own, or else its last
            row.
        retention: the share of positions with a mask that have one mask more.
        retention_min: the smallest share of positions that have any mask.

    Raises:
        InvalidConfig: a setting has an invalid value.
    """

    depth: int = setting(8, "number of tokens that the model names in one call")
    pard_token: int = setting(
        -1, "the mask token, a row of the draft model's embedding; -1 for the draft model's own, or else its last row",
        least=-1,
    )  # fmt: skip
    retention: float = setting(0.7, "the share of positions with a mask that have one mask more")
    retention_min: float = setting(0.2, "the smallest share of positions that have any mask", least=0)

    usual_loss, usual_rate = "ce", 3e-5
    trains_target, trains_model = False, True

    def __post_init__(self):
        check_fields(self)
        for name in ("retention", "retention_min"):
            if vars(self)[name] > 1:
                raise InvalidConfig(f"{name} must be at most 1, got {vars(self)[name]}")

    @property
    def drafted(self) -> int:
        """The number of tokens that the model names in one call."""
        return self.depth

    def check(self, settings: Settings) -> None:
        """Checks the settings that depend on both.

        Raises:
            InvalidConfig: they do not go together.
        """
        if not settings.start:
            raise InvalidConfig("a PARD model is trained from a draft model: set start (--start)")
        if settings.draft_vocab:
            raise InvalidConfig("a PARD model drafts from the whole vocabulary: leave draft_vocab at 0")
        if settings.decay != type(settings).decay:
            raise InvalidConfig("all tokens of a PARD model have one weight: set retention in place of decay")

    def trainee(self, target: Any, draft_vocab: int = 0, start: Any = None) -> "PardTrainee":
        """Returns the draft model to train for a target; see `jaxspec.train.trainee.TraineeSettings`."""
        from jaxspec.train.pard import make_trainee  # JAX takes a second to import, and help needs none

        return make_trainee(self, target, start)

    @staticmethod
    def trainee_of(heads: Any) -> None:
        """Returns None: no heads are of this kind."""
