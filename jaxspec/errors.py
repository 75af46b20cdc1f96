"""Every error jaxspec raises on purpose. Each message says what was got, what was expected and what to do.

All of them are raised on the host, before anything compiles. What can only be seen while decoding (logits
that are not finite) ends the row with a status instead; see `jaxspec.core.records.Status`.
"""

import contextlib
import difflib
from collections.abc import Iterable, Iterator

MEANT = {
    "max_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "num_tokens": "max_new_tokens",
    "temperature": "sampling=jaxspec.Sampling(temperature=...)",
    "top_k": "sampling=jaxspec.Sampling(top_k=...)",
    "top_p": "sampling=jaxspec.Sampling(top_p=...)",
    "min_p": "sampling=jaxspec.Sampling(min_p=...)",
    "logit_bias": "sampling=jaxspec.Sampling(logit_bias=...)",
    "do_sample": "sampling=jaxspec.Sampling(temperature=...)",
    "temp": "sampling=jaxspec.Sampling(temperature=...)",
    "n": "samples",
    "num_return_sequences": "samples",
    "num_samples": "samples",
    "best_of": "samples",
    "seed": "key=jax.random.key(seed)",
    "rng": "key",
    "prompt": "prompts",
    "inputs": "prompts",
    "messages": "prompts",
    "input_ids": "prompts",
    "model": "target",
    "draft_model": "draft",
    "assistant_model": "draft",
    "draft_length": "tree",
    "num_speculative_tokens": "tree",
    "num_assistant_tokens": "tree",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "stop_token_ids": "stop_ids",
    "eos_token_id": "stop_ids",
    "batch_size": "batch",
    "callback": "on_token",
    "streamer": "on_token",
    "max_model_len": "context",
    "torch_dtype": "dtype",
    "quiet": "verbose=False",
}
"""Names that other libraries, or this library's commands, have for an argument; counted where it is one."""


LONGEST = 2000
"""Characters of a message."""


def shown(value: object, width: int = 80) -> str:
    """Gives the `repr` of any value in one line of at most `width` characters."""
    try:
        text = repr(value[: 2 * width] if isinstance(value, (str, bytes)) else value)
    except Exception:  # integers of 4,300 digits, deleted arrays
        text = f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 3]}..."


class JaxspecError(ValueError):
    """The base of all of them: `except JaxspecError` catches what a user can mend.

    The message becomes one line that any terminal can print, whatever a file's names and texts put into it.
    """

    def __init__(self, message: object = ""):
        line = " ".join(part.strip() for part in str(message).splitlines())
        if len(line) > LONGEST:
            line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 4 :]}"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))


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
        near = nearest(name if isinstance(name, str) else shown(name), known)
        hint = f" Did you mean {near!r}?" if near else ""
        super().__init__(f"unknown {kind} {shown(name)}.{hint} Known: {', '.join(known)}.")


class WrongArguments(JaxspecError, TypeError):
    """A function was called with an argument it does not have, or without one it needs."""

    @classmethod
    def unknown(cls, function: str, name: str, known: Iterable[str]) -> "WrongArguments":
        """Names the function, and what was probably meant."""
        known = list(known)
        meant = MEANT.get(name, "")
        near = meant if meant.partition("=")[0] in known else nearest(name, known)
        hint = f"did you mean {near if '=' in near else f'{near}='}?" if near else f"it has {', '.join(known)}"
        return cls(f"{function}() has no argument {shown(name)}; {hint}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Gives the known name that is most like the given one, or None."""
    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name[:80].lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[near[0]] if near else None


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


class StorageError(JaxspecError):
    """A file cannot be written: the disk is full, or the folder may not be written to."""


@contextlib.contextmanager
def in_source(where: str) -> Iterator[None]:
    """Names the checkpoint in errors of readers that do not know it, those of its tokenizer and chat template."""
    try:
        yield
    except CheckpointError as error:
        raise error if where in str(error) else CheckpointError(f"{where}: {error}") from None
