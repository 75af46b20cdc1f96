"""The settings of EAGLE heads, the kinds "eagle1" and "eagle3". Nothing here imports JAX."""

from jaxspec.core.settings import setting, settings_class
from jaxspec.errors import InvalidConfig
from jaxspec.train.settings import LOSSES, TrainSettings, parse_taps


@settings_class
class Eagle3Settings(TrainSettings):
    """The training of an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840), by default with the norms of EAGLE-3.1.

    In training, the head reads its own states as it does when it drafts. This is the training-time test of section 3.1.
    Its layers are like the target's layers.

    Attributes:
        depth: number of tokens that are guessed from each position; 1 for no training-time test.
        layers: number of decoder layers of the head.
        taps: layers of the target after which the head reads the residual stream, such as 2,15,27; empty for the
            taps of EAGLE-3: after layer 2, after half of the layers, and after all but 3 layers.
        fc_norm: whether each tap is normed before the input projection (EAGLE-3.1).
        norm_output: whether a drafted token reads the normed state of the token before it (EAGLE-3.1).
        norm_before_fc: whether all taps are normed together as one vector, in place of fc_norm.
        norm_before_residual: whether the first layer's residual is its normed state instead of the state itself.
        qk_norm: whether queries and keys are normed, as in Qwen3.
        own_projection: whether the head trains its own projection onto the vocabulary, which starts as a copy of the
            target's projection.
    """

    depth: int = 5
    layers: int = 1
    taps: str = ""
    fc_norm: bool = True
    norm_output: bool = True
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    qk_norm: bool = False
    own_projection: bool = False
    loss: str = setting("kl", LOSSES)

    drafter, trainee_class = "eagle", "jaxspec.train.eagle:EagleTrainee"

    @property
    def drafted(self) -> int:
        """The number of tokens after a position that are guessed from it."""
        return self.depth

    def check(self) -> None:
        """Refuses taps that are not layers; see `TrainSettings.check`."""
        parse_taps(self.taps)


@settings_class
class Eagle1Settings(TrainSettings):
    """The training of an EAGLE-1 head (Li et al. 2024, arXiv:2401.15077), which EAGLE-2 drafts with as well.

    The head predicts the target's next feature. The loss is the loss of the next token's distribution plus the smooth
    L1 distance between the predicted feature and the target's feature (section 4.2). The layers of the head are like
    the target's layers.

    Attributes:
        layers: number of decoder layers of the head.
        fc_bias: whether the input projection has a bias, which vLLM cannot read.
        feature_loss: weight of the distance between the features, relative to the loss of the distribution.
        noise: width of the uniform noise on the features of a text of 512 tokens. The width is inversely proportional
            to the length of the text.
    """

    layers: int = 1
    fc_bias: bool = False
    feature_loss: float = setting(10.0, least=0)
    noise: float = setting(0.2, least=0)
    loss: str = setting("kl", LOSSES)

    drafter, trainee_class = "eagle", "jaxspec.train.eagle:EagleTrainee"

    @property
    def drafted(self) -> int:
        """Always 1: only token t + 2 is guessed from a position t."""
        return 1

    def check(self) -> None:
        """Refuses a reduced vocabulary; see `TrainSettings.check`."""
        if self.draft_vocab:
            raise InvalidConfig("an EAGLE-1 head drafts from the whole vocabulary: leave draft_vocab at 0")
