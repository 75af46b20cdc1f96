"""Every error jaxspec raises on purpose. Each message says what was got, what was expected and what to do.

All of them are raised on the host, before anything compiles. What can only be seen while decoding (logits
that are not finite) ends the row with a status instead; see `jaxspec.core.records.Status`.
"""

import difflib
from collections.abc import Iterable


class JaxspecError(ValueError):
    """The base of all of them: `except JaxspecError` catches what a user can mend."""


class InvalidConfig(JaxspecError):
    """A setting has a value it cannot have."""


class EmptyPrompt(JaxspecError):
    """A prompt has no token, so there is nothing to continue."""


class TokenOutOfRange(JaxspecError):
    """A token id is not in the target's vocabulary."""


class VocabMismatch(JaxspecError):
    """Draft and target do not share one vocabulary."""


class ShapeMismatch(JaxspecError):
    """An array, a tensor of a checkpoint or a tree has the wrong shape."""


class CapacityError(JaxspecError):
    """Prompt, new tokens and window do not fit the cache, or the model's context."""


class UnknownName(JaxspecError):
    """No member of a registry, preset or option has this name."""

    def __init__(self, kind: str, name: object, known: Iterable[str]):
        known = sorted(known)
        near = difflib.get_close_matches(str(name).lower(), [k.lower() for k in known], n=1, cutoff=0.5)
        hint = f" Did you mean {next(k for k in known if k.lower() == near[0])!r}?" if near else ""
        super().__init__(f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}.")


class MissingDraft(JaxspecError):
    """The drafter needs a draft model and got none."""


class MissingTokenizer(JaxspecError):
    """Text was asked for, or given, and the model has no tokenizer (or no chat template)."""


class CheckpointError(JaxspecError):
    """A checkpoint is malformed, incomplete, or of a kind that is not read."""


class FetchError(JaxspecError):
    """A preset's weights, or a task's prompts, could not be fetched or failed their checksum."""


class TaskError(JaxspecError):
    """A file of a benchmark's questions cannot be read, or a line of it is no question."""


class TuningError(JaxspecError):
    """A file of `jaxspec tune` cannot be read, or the measurement found nothing to go by."""


class TrainingError(JaxspecError):
    """Training data cannot be read or are too few, a run cannot go on, or goes on with other settings."""


class MissingPackage(JaxspecError):
    """A package that only some commands use is not installed."""
