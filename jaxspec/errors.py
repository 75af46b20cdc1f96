"""The exceptions that jaxspec raises. Each message says what was passed, what was expected, and what to do.

The exceptions are raised on the host, before anything compiles. A failure during decoding (non-finite logits) ends the
row with a status instead; see `jaxspec.core.records.Status`.
"""

import contextlib
import difflib
from collections.abc import Iterable, Iterator

SYNONYMS = {
    "max_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "num_tokens": "max_new_tokens",
    "temperature": "sampling=jaxspec.Sampling(temperature=...)",
    "top_k": "sampling=jaxspec.Sampling(top_k=...)",
    "top_p": "sampling=jaxspec.Sampling(top_p=...)",
    "min_p": "sampling=jaxspec.Sampling(min_p=...)",
    "logit_bias": "sampling=jaxspec.Sampling(logit_bias=...)",
    "repetition_penalty": "sampling=jaxspec.Sampling(processors=[jaxspec.RepetitionPenalty(...)])",
    "presence_penalty": "sampling=jaxspec.Sampling(processors=[jaxspec.PresencePenalty(...)])",
    "frequency_penalty": "sampling=jaxspec.Sampling(processors=[jaxspec.FrequencyPenalty(...)])",
    "no_repeat_ngram_size": "sampling=jaxspec.Sampling(processors=[jaxspec.NoRepeatNgram(...)])",
    "bad_words_ids": "sampling=jaxspec.Sampling(processors=[jaxspec.BadWords(...)])",
    "min_new_tokens": "sampling=jaxspec.Sampling(processors=[jaxspec.MinNewTokens(...)])",
    "min_tokens": "sampling=jaxspec.Sampling(processors=[jaxspec.MinNewTokens(...)])",
    "suppress_tokens": "sampling=jaxspec.Sampling(processors=[jaxspec.SuppressTokens(...)])",
    "allowed_token_ids": "sampling=jaxspec.Sampling(processors=[jaxspec.AllowedTokens(...)])",
    "processors": "sampling=jaxspec.Sampling(processors=...)",
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
"""The argument of jaxspec for each name that other libraries, or jaxspec's commands, use for it."""


LONGEST = 2000
"""Maximum length of a message, in characters."""


def shown(value: object, width: int = 80) -> str:
    """Returns the `repr` of a value as one line of at most `width` characters."""
    try:
        text = repr(value[: 2 * width] if isinstance(value, (str, bytes)) else value)
    except Exception:  # integers of more than 4,300 digits, deleted arrays
        text = f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 3]}..."


class JaxspecError(ValueError):
    """The base class of all errors that a user can correct.

    Messages are converted to one line of printable characters, because they can quote names and texts from files.
    """

    def __init__(self, message: object = ""):
        line = " ".join(part.strip() for part in str(message).splitlines())
        if len(line) > LONGEST:
            line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 4 :]}"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))


class InvalidConfig(JaxspecError):
    """A setting has an invalid value."""


class EmptyPrompt(JaxspecError):
    """A prompt is empty, so there is no text to continue."""


class TokenOutOfRange(JaxspecError):
    """A token id is not in the target's vocabulary."""


class VocabMismatch(JaxspecError):
    """The draft and the target have vocabularies that cannot be used together."""


class ShapeMismatch(JaxspecError):
    """An array, a tensor of a checkpoint or a tree has the wrong shape."""


class CapacityError(JaxspecError):
    """The prompt, the new tokens and the window do not fit into the cache or the model's context."""


class UnknownName(JaxspecError):
    """A name is not the name of a registered member, a preset or an option."""

    def __init__(self, kind: str, name: object, known: Iterable[str]):
        known = sorted(known)
        near = nearest(name if isinstance(name, str) else shown(name), known)
        hint = f" Did you mean {near!r}?" if near else ""
        super().__init__(f"unknown {kind} {shown(name)}.{hint} Known: {', '.join(known)}.")


class WrongArguments(JaxspecError, TypeError):
    """A function was called with an unknown argument or without a required one."""

    @classmethod
    def unknown(cls, function: str, name: str, known: Iterable[str]) -> "WrongArguments":
        """Returns the error for an unknown argument; the message suggests the most similar known argument."""
        known = list(known)
        meant = SYNONYMS.get(name, "")
        near = meant if meant.partition("=")[0] in known else nearest(name, known)
        hint = f"did you mean {near if '=' in near else f'{near}='}?" if near else f"it has {', '.join(known)}"
        return cls(f"{function}() has no argument {shown(name)}; {hint}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that is most similar to this one, or None."""
    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name[:80].lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[near[0]] if near else None


class MissingDraft(JaxspecError):
    """The drafter needs a draft model, but none was passed."""


class MissingTokenizer(JaxspecError):
    """Text or chat messages need a tokenizer or a chat template, which the model does not have."""


class CheckpointError(JaxspecError):
    """A checkpoint is malformed, incomplete, or of an unsupported kind."""


class LimitError(CheckpointError):
    """A part of a checkpoint, such as its chat template, exceeds its limits of time or memory."""


class FetchError(JaxspecError):
    """A preset's weights or a task's prompts could not be downloaded, or do not match their checksum."""


class TaskError(JaxspecError):
    """A file of benchmark questions cannot be read, or contains an invalid line."""


class TuningError(JaxspecError):
    """A file of `jaxspec tune` cannot be read, or its measurement has no result."""


class TrainingError(JaxspecError):
    """Training data cannot be read or are too few, or a run cannot be resumed, for example because settings changed."""


class ProcessError(JaxspecError):
    """The process in which chat templates and tokenizers run cannot be started."""


class LostProcess(JaxspecError):
    """Another process of a run on several hosts has ended, or cannot be reached."""


class MissingPackage(JaxspecError):
    """An optional package is not installed."""


class StorageError(JaxspecError):
    """A file cannot be written: the disk is full, or write permission is missing."""


@contextlib.contextmanager
def ignored_refusals(*others: type[Exception]) -> Iterator[None]:
    """Ignores errors of a checkpoint's tokenizer or chat template that refuses an input, and the exceptions in
    `others`.

    `LimitError` and `ProcessError` are not ignored: they can depend on the machine, and results must not depend on it.
    """
    try:
        yield
    except (LimitError, ProcessError):
        raise
    except (JaxspecError, *others):
        pass


@contextlib.contextmanager
def in_source(where: str) -> Iterator[None]:
    """Adds the name of the checkpoint to errors of readers that do not know the name (tokenizer, chat template)."""
    try:
        yield
    except CheckpointError as error:
        raise error if where in str(error) else CheckpointError(f"{where}: {error}") from None
