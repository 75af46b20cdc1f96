"""The settings of DFlash, DSpark and JetSpec heads, which guess blocks of tokens. Nothing here imports JAX."""

from jaxspec.core.settings import setting, settings_class
from jaxspec.errors import InvalidConfig
from jaxspec.heads.dflash_config import MARKOV_KINDS
from jaxspec.train.settings import LOSSES, TrainSettings, parse_taps


@settings_class
class _BlockSettings(TrainSettings):
    """The settings that DFlash, DSpark and JetSpec heads share.

    Attributes:
        block: number of rows of a block: the last token of the text, and masks after it.
        gamma: the weight of token i of a block is exp(-i / gamma); 0 for equal weights.
        layers: number of decoder layers of the head.
        taps: layers of the target after which the head reads the residual stream, such as 2,15,27; empty for as many
            evenly spaced taps as the head has layers.
        anchors: number of positions of a row that a step draws blocks from.
        mask_token: token whose embedding stands for the tokens to come; -1 for the target's last token.
    """

    block: int = 16
    gamma: float = setting(7.0, least=0)
    layers: int = 5
    taps: str = ""
    anchors: int = 64
    mask_token: int = setting(-1, least=-1)

    drafter, trainee_class = "dflash", "jaxspec.train.dflash:DFlashTrainee"
    causal = False

    def check(self) -> None:
        """Refuses taps that are not layers, and settings that blocks do not have; see `TrainSettings.check`."""
        parse_taps(self.taps)
        if not self.drafted:
            raise InvalidConfig("block must be at least 2, because the first row of a block does not predict a token")
        if self.decay != TrainSettings.decay:
            raise InvalidConfig("the tokens of a block have the weights exp(-i / gamma): set gamma instead of decay")


@settings_class
class DFlashSettings(_BlockSettings):
    """The training of a DFlash head (2026, arXiv:2602.06036), which names all tokens of a block in one call.

    Its layers have the sizes of the target's layers, with norms of queries and keys as in Qwen3.

    Attributes:
        from_anchor: whether each row predicts the token after its own position, so that the first row also predicts a
            token.
    """

    from_anchor: bool = False

    markov, markov_rank, confidence = None, 0, 0.0

    @property
    def drafted(self) -> int:
        """The number of tokens that a block predicts."""
        return self.block - (not self.from_anchor)


@settings_class
class JetSpecSettings(DFlashSettings):
    """The training of a JetSpec head (2026, arXiv:2606.18394), a DFlash head whose blocks are causal.

    A row of a block sees only the rows before it (section 2.2), so a shallow tree needs fewer rows. The loss is the
    Kullback-Leibler divergence from the target's distribution, with equal weights for all tokens of a block (section
    2.3).
    """

    gamma: float = setting(0.0, least=0)
    loss: str = setting("kl", LOSSES)

    causal = True


@settings_class
class DSparkSettings(_BlockSettings):
    """The training of a DSpark head (2026, arXiv:2607.05147): a DFlash head with a Markov head and a confidence head.

    All rows predict the token after their own position. The loss mixes cross-entropy and the sum of absolute
    differences ("ce-l1"), and adds the cross-entropy of the confidence. The defaults are the settings of DeepSpec for
    Qwen3. DeepSpec draws 512 positions from texts of 4096 tokens.

    Attributes:
        block: number of rows of a block: the last token of the text, and masks after it. Each row predicts a token.
        markov: what the Markov head reads: the previous token (vanilla), the previous token and the row's state
            (gated), or all tokens of the block so far (rnn).
        markov_rank: width of the Markov head.
        confidence: weight of the loss of the confidence head, which estimates the acceptance of each token; 0 for no
            confidence head.
    """

    block: int = 7
    gamma: float = setting(4.0, least=0)
    markov: str = setting("vanilla", MARKOV_KINDS)
    markov_rank: int = 256
    confidence: float = setting(1.0, least=0)
    loss: str = setting("ce-l1", LOSSES)

    from_anchor = True

    @property
    def drafted(self) -> int:
        """The number of tokens that a block predicts."""
        return self.block
