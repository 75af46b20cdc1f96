"""The kinds "dflash" and "dspark" of heads to train, and their sizes. Nothing here imports JAX."""

import dataclasses
from typing import TYPE_CHECKING

from jaxspec.errors import InvalidConfig, shown
from jaxspec.heads.dflash_config import MARKOV
from jaxspec.train.settings import OfHeads, Settings, check_fields, setting

if TYPE_CHECKING:
    from jaxspec.heads.network import DraftHeads
    from jaxspec.models.model import Model
    from jaxspec.train.dflash import DFlashTrainee

LAYERS, TAPS, ANCHORS, MASK, GAMMA = (
    "decoder layers of the head",
    "layers of the target after which the head reads the residual stream, such as 2,15,27; empty for as many as the "
    "head has layers, evenly spaced",
    "number of positions of a row that a step draws blocks from",
    "token whose embedding stands for the tokens to come; -1 for the target's last",
    "the weight of token i of a block is exp(-i / gamma)",
)


class _BlockSettings(OfHeads):
    """What both kinds share."""

    layers: int
    taps: str
    block: int
    from_anchor: bool
    trains_target = False

    def __post_init__(self):
        check_fields(self)
        if self.taps and not all(part.strip().isdecimal() for part in self.taps.split(",")):
            raise InvalidConfig(f"taps must be layers of the target such as '2,15,27', got {shown(self.taps)}")
        if not self.drafted:
            raise InvalidConfig("block must be at least 2: its first row names no token")

    @property
    def drafted(self) -> int:
        """The number of tokens that a block names."""
        return self.block - (not self.from_anchor)

    def check(self, settings: Settings) -> None:
        """Checks the settings that depend on both.

        Raises:
            InvalidConfig: they do not go together.
        """
        if settings.decay != type(settings).decay:
            raise InvalidConfig("the tokens of a block have the weights exp(-i / gamma): set gamma in place of decay")

    def trainee(self, target: "Model", draft_vocab: int = 0, start: "DraftHeads | None" = None) -> "DFlashTrainee":
        """Returns the head to train for a target; see `jaxspec.train.trainee.TraineeSettings`."""
        from jaxspec.train.dflash import make_trainee  # JAX takes a second to import, and help needs none

        return make_trainee(self, target, draft_vocab, start)

    @staticmethod
    def trainee_of(heads: "DraftHeads") -> "DFlashTrainee | None":
        """Returns the trainee that a DFlash or DSpark head comes from; None for heads of another kind."""
        from jaxspec.train.dflash import trainee_of

        return trainee_of(heads)


@dataclasses.dataclass(frozen=True)
class DFlashSettings(_BlockSettings):
    """The sizes of a DFlash head (2026, arXiv:2602.06036), which names all tokens of a block in one call.

    The sizes of its layers are those of the target's, with norms of queries and keys as in Qwen3.

    Attributes:
        block: rows of a block: the last token of the text, and masks after it.
        from_anchor: whether a row names the token after its own position, so that the first names one, too.
        layers: decoder layers of the head.
        taps: the layers of the target after which the head reads the residual stream, such as "2,15,27"; empty for as
            many as the head has layers, evenly spaced.
        anchors: number of positions of a row that a step draws blocks from.
        mask_token: the token whose embedding stands for the tokens to come; -1 for the target's last.
        gamma: the weight of token i of a block is exp(-i / gamma).

    Raises:
        InvalidConfig: a setting has an invalid value.
    """

    block: int = setting(16, "rows of a block: the last token of the text, and masks after it")
    from_anchor: bool = setting(
        False, "whether a row names the token after its own position, so that the first names one, too"
    )
    layers: int = setting(5, LAYERS)
    taps: str = setting("", TAPS)
    anchors: int = setting(64, ANCHORS)
    mask_token: int = setting(-1, MASK, least=-1)
    gamma: float = setting(7.0, GAMMA)

    usual_loss = "ce"
    markov, markov_rank, confidence = None, 0, 0.0


@dataclasses.dataclass(frozen=True)
class DSparkSettings(_BlockSettings):
    """The sizes of a DSpark head (2026, arXiv:2607.05147): a DFlash head with a Markov head and a confidence head.

    All rows name the token after their own position. The loss is cross-entropy and the sum of absolute differences
    ("ce-l1"), and the cross-entropy of the confidence. The defaults are those of DeepSpec for Qwen3; it draws 512
    positions of texts of 4096 tokens.

    Attributes:
        block: rows of a block: the last token of the text, and masks after it; each names a token.
        layers: decoder layers of the head.
        taps: the layers of the target after which the head reads the residual stream, such as "2,15,27"; empty for as
            many as the head has layers, evenly spaced.
        anchors: number of positions of a row that a step draws blocks from.
        mask_token: the token whose embedding stands for the tokens to come; -1 for the target's last.
        gamma: the weight of token i of a block is exp(-i / gamma).
        markov: the kind of Markov head: from the token before alone (vanilla), from the row's state, too (gated), or
            from all tokens of the block so far (rnn).
        markov_rank: width of the Markov head.
        confidence: weight of the loss of the confidence head, which estimates the acceptance of each token; 0 for no
            such head.

    Raises:
        InvalidConfig: a setting has an invalid value.
    """

    block: int = setting(7, "rows of a block: the last token of the text, and masks after it; each names a token")
    layers: int = setting(5, LAYERS)
    taps: str = setting("", TAPS)
    anchors: int = setting(64, ANCHORS)
    mask_token: int = setting(-1, MASK, least=-1)
    gamma: float = setting(4.0, GAMMA)
    markov: str = setting(
        "vanilla",
        "what the Markov head reads: the token before (vanilla), the row's state, too (gated), or all tokens of the "
        "block so far (rnn)",
        MARKOV,
    )
    markov_rank: int = setting(256, "width of the Markov head")
    confidence: float = setting(
        1.0, "weight of the loss of the confidence head, which estimates the acceptance of each token; 0 for no such "
        "head", least=0,
    )  # fmt: skip

    usual_loss = "ce-l1"
    from_anchor = True
