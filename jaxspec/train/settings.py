"""Every setting of a training run of Medusa heads; the command line has a flag for each."""

import dataclasses
import json
import math
from typing import Any

from jaxspec.errors import InvalidConfig
from jaxspec.heads.config import INPUTS, PROJECTIONS
from jaxspec.storage.prompt_files import SPLITS

LOSSES = ("ce", "kl", "tv", "lk-alpha", "lk-lambda")
WEIGHTS = ("decay", "acceptance")
BAD_ROWS = ("report", "refuse")


def _setting(default: Any, about: str, choices: tuple[str, ...] = ()) -> Any:
    return dataclasses.field(default=default, metadata={"about": about, "choices": choices})


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is trained, on what, and how. Equal settings, prompts and target give equal bits on one machine.

    Raises:
        InvalidConfig: a value that cannot be.
    """

    heads: int = _setting(4, "heads, one per drafted token")
    layers: int = _setting(1, "residual blocks per head, or of the network that recurrent heads are")
    inputs: str = _setting(
        "path",
        "what heads read. hidden: the target's feature alone (Medusa's kind; can be exported to vLLM, TGI and "
        "TensorRT-LLM). path: also the tokens after it (Hydra's kind; only jaxspec serves it). recurrent: both, by one "
        "network (ReDrafter's kind; only jaxspec serves it)",
        INPUTS,
    )
    projection: str = _setting("shared", "onto the vocabulary: the target's, or one per head", PROJECTIONS)
    draft_vocab: int = _setting(
        0, "draft only the N tokens most frequent in the answers (of layouts vLLM's alone); 0: all"
    )

    distill: bool = _setting(True, "train on the target's own answers to the prompts instead of on those given")
    answer_tokens: int = _setting(192, "tokens of the target's answer, at most")
    answer_temperature: float = _setting(0.0, "temperature of the target's answers")
    answer_batch: int = _setting(32, "prompts answered together")
    split: str = _setting("line", "what is a text in a .txt file: a line, what blank lines part, or the file", SPLITS)
    bad_rows: str = _setting("report", "of the prompts' files: count and report them, or refuse the file", BAD_ROWS)
    held_out: float = _setting(0.03, "share of the texts that is kept for evaluation")
    row_tokens: int = _setting(512, "tokens of a row, into which texts are packed")
    cache_features: bool = _setting(True, "read every row with the target once, and keep its features on disk")

    loss: str = _setting("ce", "cross-entropy, KL to the target's law, total variation, or the LK losses", LOSSES)
    head_weights: str = _setting("decay", "of the heads in the loss: decay^i, or the chance to come that far", WEIGHTS)
    decay: float = _setting(0.8, "for the head weights")
    medusa2: bool = _setting(False, "train the target, too: no longer lossless against the original (Medusa-2)")
    medusa2_warmup: int = _setting(100, "steps of the heads alone before the target joins")
    medusa2_heads: float = _setting(0.2, "weight of the heads' loss beside the target's own")
    medusa2_rate: float = _setting(0.1, "of the target, in learning rates of the heads")

    steps: int = _setting(1000, "optimizer steps")
    batch: int = _setting(8, "rows per step")
    accumulate: int = _setting(1, "parts a batch is read in, their gradients added")
    learning_rate: float = _setting(1e-3, "of AdamW at its height")
    matrix_rate: float = _setting(1.0, "of the heads' matrices, in learning rates")
    warmup: int = _setting(40, "steps to the full learning rate; then a cosine to 0")
    weight_decay: float = _setting(0.0, "of AdamW")
    clip: float = _setting(1.0, "of the gradient's norm; 0: none")
    precision: str = _setting("float32", "of the matmuls; parameters and sums are float32", ("float32", "bfloat16"))
    devices: int = _setting(1, "over which the rows of a batch are spread")
    seed: int = _setting(0, "of the order of the rows and of sampled answers")
    max_bad_steps: int = _setting(10, "steps in a row with a loss that is not finite, after which the run ends")

    log_every: int = _setting(10, "steps between two lines of the log")
    eval_every: int = _setting(200, "steps between two evaluations on the held-out texts")
    save_every: int = _setting(200, "steps between two checkpoints")

    def __post_init__(self):
        least = {"held_out": 0.0, "answer_temperature": 0.0, "weight_decay": 0.0, "clip": 0.0}
        may_be_0 = {"draft_vocab", "warmup", "medusa2_warmup", "seed"}
        for field in dataclasses.fields(self):
            value, choices = getattr(self, field.name), field.metadata["choices"]
            say = f"{field.name} must be"
            if field.type in ("str", str):
                if value not in choices:
                    raise InvalidConfig(f"{say} one of {', '.join(choices)}, got {value!r:.40}")
            elif field.type in ("bool", bool):
                if not isinstance(value, bool):
                    raise InvalidConfig(f"{say} true or false, got {value!r:.40}")
            elif isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InvalidConfig(f"{say} a number, got {value!r:.40}")
            elif field.type in ("int", int):
                low = 0 if field.name in may_be_0 else 1
                if not isinstance(value, int) or value < low:
                    raise InvalidConfig(f"{say} a whole number from {low}, got {value!r}")
            elif not math.isfinite(value) or value < 0 or (value == 0 and field.name not in least):
                raise InvalidConfig(
                    f"{say} finite and {'at least' if field.name in least else 'above'} 0, got {value!r}"
                )
        if self.held_out >= 1:
            raise InvalidConfig(f"held_out is a share below 1, got {self.held_out}")
        if self.batch % (self.accumulate * self.devices):
            raise InvalidConfig(
                f"a batch of {self.batch} rows cannot be read in {self.accumulate} parts over {self.devices} devices"
            )
        if self.medusa2 and (self.cache_features or self.loss != "ce"):
            raise InvalidConfig("medusa2 changes the target: its features cannot be cached, and its loss is ce")
        if self.row_tokens < self.heads + 3:
            raise InvalidConfig(f"rows of {self.row_tokens} tokens have no place for {self.heads} heads' guesses")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"
