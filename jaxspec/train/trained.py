"""The start and the result of a training run: draft heads, or a draft model."""

from typing import NamedTuple

from jaxspec.checkpoints.load import load
from jaxspec.errors import InvalidConfig
from jaxspec.heads.files import load_heads
from jaxspec.heads.network import DraftHeads
from jaxspec.models.model import Model
from jaxspec.train.dataset import Data
from jaxspec.train.settings import TrainSettings
from jaxspec.train.trainee import Trainee


class Trained(NamedTuple):
    """The result of a run.

    Attributes:
        result: the heads with the best held-out accuracy, without a tree, or the draft model.
        target: the target; the trained target if it was trained as well.
        data: the texts that were trained on and held out.
        log: the lines of the log.
        step: number of steps taken.
        skipped: steps whose loss or gradient was not finite.
        trainee: the trainee that was trained.
        settings: the settings.
    """

    result: DraftHeads | Model
    target: Model
    data: Data
    log: list[dict]
    step: int
    skipped: int
    trainee: Trainee
    settings: TrainSettings

    @property
    def heads(self) -> DraftHeads:
        """The result, if heads were trained.

        Raises:
            InvalidConfig: the run trained a draft model.
        """
        if not isinstance(self.result, DraftHeads):
            raise InvalidConfig("this run trained a draft model, not heads; read `.draft`")
        return self.result

    @property
    def draft(self) -> Model:
        """The result, if a draft model was trained.

        Raises:
            InvalidConfig: the run trained heads.
        """
        if not isinstance(self.result, Model):
            raise InvalidConfig("this run trained heads, not a draft model; read `.heads`")
        return self.result


def load_start(settings: TrainSettings, target: Model) -> DraftHeads | Model | None:
    """Loads what a run starts from, in float32; returns None for new heads."""
    if not settings.start:
        return None
    return load(settings.start, kernels=False) if settings.trains_model else load_heads(settings.start, target=target)
