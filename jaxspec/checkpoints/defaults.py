"""The processors that a model's generation_config.json asks for, as in Hugging Face's transformers."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.core.processor import Processor
from jaxspec.errors import CheckpointError, InvalidConfig, TokenOutOfRange, shown

_OFF: dict[str, Callable[[Any], bool]] = {
    "repetition_penalty": lambda value: value == 1,
    "no_repeat_ngram_size": lambda value: value == 0,
    "bad_words_ids": lambda value: value == [],
    "min_new_tokens": lambda value: value == 0,
    "suppress_tokens": lambda value: value == [],
}
"""The settings that are applied, in the order of transformers, and the values that change nothing. None does not
either."""
IGNORED = ("forced_eos_token_id", "forced_bos_token_id", "begin_suppress_tokens", "sequence_bias")
"""Settings that change the logits, too, and are not applied."""


def default_processors(
    source: str, generation: Mapping[str, Any], vocab: int
) -> tuple[tuple[Processor, ...], str | None]:
    """Returns the processors that a generation_config.json asks for, and a sentence about them; None if it asks for
    none.

    Args:
        source: the name of the checkpoint, for messages.
        generation: the content of the file; empty if there is no file.
        vocab: the size of the vocabulary.

    Raises:
        CheckpointError: a setting is malformed; the message names it.
    """
    from jaxspec.processors.masks import SuppressTokens
    from jaxspec.processors.minimum import MinNewTokens
    from jaxspec.processors.penalties import RepetitionPenalty
    from jaxspec.processors.words import BadWords, NoRepeatNgram

    makers = dict(zip(_OFF, (RepetitionPenalty, NoRepeatNgram, BadWords, MinNewTokens, SuppressTokens), strict=True))
    processors, named = [], []
    for name, make in makers.items():
        value = generation.get(name)
        if value is None or _OFF[name](value):
            continue
        try:
            processor = make(value)
            processor.rows(1, vocab)
        except (InvalidConfig, TokenOutOfRange) as error:
            raise CheckpointError(f"{source}: {name} of generation_config.json: {error}") from None
        processors.append(processor)
        named.append(f"{name} {shown(value, 40)}")
    ignored = [name for name in IGNORED if generation.get(name)]
    parts = []
    if named:
        parts.append(f"{', '.join(named)}: used for every text; load(..., generation_config=False) turns this off")
    if ignored:
        parts.append(f"{', '.join(ignored)}: not used")
    return tuple(processors), f"{source}: generation_config.json sets {'; '.join(parts)}" if parts else None
