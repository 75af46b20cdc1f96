"""Settings of training that all kinds of heads and draft models share. Nothing here imports JAX.

A kind is a class derived from `TrainSettings`, such as `jaxspec.train.medusa_settings.MedusaSettings`, with fields for
its sizes. The command line has an option for each field. The description of the field is the help of the option.
"""

import abc
import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.amounts import plural
from jaxspec.core.settings import check_fields, setting, settings_class
from jaxspec.errors import InvalidConfig, shown
from jaxspec.registry import locate
from jaxspec.storage.prompt_files import SPLITS

if TYPE_CHECKING:
    from jaxspec.models.model import Model
    from jaxspec.train.trainee import Trainee

LOSSES = ("ce", "kl", "tv", "lk-alpha", "lk-lambda", "ce-l1")
HEAD_WEIGHTS = ("decay", "acceptance")
BAD_ROWS = ("report", "refuse")
PRECISIONS = ("auto", "float32", "bfloat16")


@settings_class
class TrainSettings(abc.ABC):
    """The settings that all kinds share. Equal settings, prompts and targets give equal bits on one machine.

    A kind sets `drafter`, the registered name of its drafter, and `trainee_class`, the location "module:Class" of its
    `Trainee`, which is imported when it is needed: JAX takes a second to import, and help does not need it. The class
    has a class method `make(settings, target, start)`, and for heads also `of(config)`, the trainee of heads with these
    sizes. `trains_model` is True if a draft model is trained, and False for heads.

    Attributes:
        draft_vocab: number of tokens to draft from, which are the most frequent tokens of the answers (of all layouts,
            only vLLM's holds them); 0 for the whole vocabulary.
        distill: whether to train on the target's own answers instead of the answers in the files.
        answer_tokens: maximum number of tokens of each of the target's answers.
        answer_temperature: temperature of the target's answers.
        answer_batch: number of prompts that are answered at once.
        split: what a text of a .txt file is: a line, a part between blank lines (blank), or the whole file.
        bad_rows: what to do with invalid rows: report them and leave them out, or refuse the file.
        held_out: fraction of the texts that is held out for evaluation.
        row_tokens: number of tokens of each row that texts are packed into.
        cache_features: whether to compute the target's features once and keep them on disk, if they take at most half
            of its free space.
        start: what to start from, a directory or a repository: heads of the same kind, with their sizes and drafted
            tokens, or for pard the draft model.
        loss: cross-entropy (ce), KL divergence from the target's distribution (kl), total variation (tv), an LK loss
            (lk-alpha, lk-lambda), or a mix of cross-entropy and the sum of absolute differences of the distributions
            (ce-l1).
        ce_share: share of the cross-entropy in the loss ce-l1.
        head_weights: weight of head i in the loss: decay^i (decay), or the probability that a draft reaches it
            (acceptance).
        decay: base of the weights decay^i.
        steps: number of optimiser steps.
        batch: number of rows of each step.
        accumulate: number of parts of each batch whose gradients are added.
        learning_rate: peak learning rate of AdamW.
        matrix_rate: factor of the learning rate for the matrices of the heads.
        warmup: number of steps of linear warm-up, which a cosine decay to 0 follows.
        weight_decay: weight decay of AdamW.
        clip: maximum norm of the gradient; 0 for no clipping.
        precision: dtype of the matrix products, float32 or bfloat16; parameters and sums are in float32. auto is
            bfloat16 on a TPU or GPU, and float32 on a CPU.
        mesh: how the devices are arranged, such as data=8 or data=4,model=2: the rows of a batch are split over
            "data", the products of the target over "model", and parameters over all devices; empty for the mesh that
            the target is on, or else for as many devices as divide the rows.
        seed: seed of the order of the rows and of sampled answers.
        max_bad_steps: number of consecutive steps with a non-finite loss that ends the run.
        log_every: steps between lines of the log.
        eval_every: steps between evaluations on the held-out texts.
        save_every: steps between checkpoints.
    """

    drafter: ClassVar[str]
    trainee_class: ClassVar[str]
    trains_model: ClassVar[bool] = False

    draft_vocab: int = setting(0, least=0)

    distill: bool = True
    answer_tokens: int = 192
    answer_temperature: float = setting(0.0, least=0)
    answer_batch: int = 32
    split: str = setting("line", SPLITS)
    bad_rows: str = setting("report", BAD_ROWS)
    held_out: float = setting(0.03, least=0)
    row_tokens: int = 512
    cache_features: bool = True

    start: str = ""
    loss: str = setting("ce", LOSSES)
    ce_share: float = setting(0.1, least=0, most=1)
    head_weights: str = setting("decay", HEAD_WEIGHTS)
    decay: float = 0.8

    steps: int = 1000
    batch: int = 8
    accumulate: int = 1
    learning_rate: float = 0.001
    matrix_rate: float = 1.0
    warmup: int = setting(40, least=0)
    weight_decay: float = setting(0.0, least=0)
    clip: float = setting(1.0, least=0)
    precision: str = setting("auto", PRECISIONS)
    mesh: str = ""
    seed: int = setting(0, least=0)
    max_bad_steps: int = 10

    log_every: int = 10
    eval_every: int = 200
    save_every: int = 200

    def __post_init__(self):
        check_fields(self)
        if self.held_out >= 1:
            raise InvalidConfig(f"held_out must be below 1, got {self.held_out}")
        if self.batch % (self.accumulate * self.groups):
            raise InvalidConfig(
                f"batch must be a multiple of accumulate times the axis data of mesh, {self.accumulate} x "
                f"{self.groups}; got {self.batch}"
            )
        drafted = self.drafted
        if self.row_tokens < drafted + 3:
            raise InvalidConfig(
                f"row_tokens must be at least {drafted + 3} for {plural(drafted, 'drafted token')}, got "
                f"{self.row_tokens}"
            )
        self.check()
        if self.start and self.draft_vocab:
            raise InvalidConfig("training from heads keeps their drafted tokens: leave draft_vocab at 0")

    @property
    @abc.abstractmethod
    def drafted(self) -> int:
        """The number of tokens that are guessed from each position."""

    @property
    def groups(self) -> int:
        """The number of groups of devices with rows of their own."""
        return parse_mesh(self.mesh)[0]

    @property
    def trains_target(self) -> bool:
        """True if the target is trained as well."""
        return False

    def check(self) -> None:  # noqa: B027
        """Refuses settings that the kind does not allow; called when the settings are made.

        Raises:
            InvalidConfig: a setting does not fit the kind or another setting.
        """

    def trainee(self, target: "Model", start: Any = None) -> "Trainee":
        """Returns the heads or the draft model to train for a target.

        Args:
            target: the target.
            start: the `DraftHeads` to start from, whose sizes are taken; None for new heads. If `trains_model` is True,
                the draft `Model` to start from.

        Raises:
            InvalidConfig, ShapeMismatch, VocabMismatch: heads of this kind cannot be trained for this target.
        """
        return locate(self.trainee_class).make(self, target, start)


def parse_mesh(text: str) -> tuple[int, int]:
    """Returns the sizes of the axes "data" and "model" that a setting such as "data=4,model=2" names.

    Raises:
        InvalidConfig: the text is not a list of these axes and their sizes.
    """
    sizes = {"data": 1, "model": 1}
    for part in text.split(",") if text else []:
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in sizes or not size.isdecimal() or not int(size):
            raise InvalidConfig(f"mesh must be such as 'data=8' or 'data=4,model=2', got {shown(text)}")
        sizes[name] = int(size)
    return sizes["data"], sizes["model"]


def own_fields(kind: Any) -> list[dataclasses.Field]:
    """Returns the fields of a kind, or of its settings, that are not shared with other kinds."""
    shared = {field.name for field in dataclasses.fields(TrainSettings)}
    return [field for field in dataclasses.fields(kind) if field.name not in shared]


def parse_taps(text: str) -> tuple[int, ...] | None:
    """Returns the layers that a setting such as "2,15,27" names; None for an empty setting.

    Raises:
        InvalidConfig: the text is not a list of layers.
    """
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() for part in parts):
        raise InvalidConfig(f"taps must be numbers of layers such as '2,15,27', got {shown(text)}")
    return tuple(map(int, parts)) or None


def check_start(settings: TrainSettings, config: Any, free: Iterable[str]) -> None:
    """Refuses sizes that differ from the sizes of the heads to start from.

    Args:
        settings: the settings.
        config: the sizes of the heads to start from.
        free: names of settings that may change when training starts from heads.

    Raises:
        InvalidConfig: a setting is neither at its default nor equal to the size of the heads.
    """
    for field in own_fields(settings):
        given = getattr(settings, field.name)
        if field.name in free or given == field.default:
            continue
        size = _size_of(config, field.name)
        if size != given:
            raise InvalidConfig(
                f"{field.name} (--{field.name.replace('_', '-')}) is {given!r}, but the heads to start from have "
                f"{size!r}; leave it out"
            )


def _size_of(config: Any, name: str) -> Any:
    """Returns a size of heads by the name of its setting, as the setting holds it; None if they have no such size."""
    for holder in (config, getattr(config, "decoder", None)):
        for attribute in (name, f"num_{name}", f"{name}_size"):
            if hasattr(holder, attribute):
                value = getattr(holder, attribute)
                return ",".join(map(str, value)) if isinstance(value, tuple) else value
    return None
