"""Encodes conversations as token ids with a mask of the assistant's tokens."""

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from jaxspec.errors import CheckpointError, InvalidConfig, MissingTokenizer, TrainingError
from jaxspec.models.model import Model
from jaxspec.text.conversations import BadRow, Conversation
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.train.packing import Text


def encode_training_prompts(
    model: Model, conversations: Sequence[Conversation], most: int
) -> tuple[list[list[int]], list[BadRow]]:
    """Encodes the prompts: a conversation up to its first answer, or a plain text.

    A plain text is a message of the user, as in `generate`, or raw text if the target has no chat template.

    Args:
        model: the target.
        conversations: the conversations.
        most: maximum number of tokens of a prompt.

    Returns:
        The prompts, and the rows that cannot be used.
    """
    _need_tokenizer(model, conversations)
    found, bad = [], []
    for conversation in conversations:
        try:
            ids = _prompt_ids(model, conversation)
        except (InvalidConfig, CheckpointError) as error:
            bad.append(BadRow(conversation.where, str(error)))
            continue
        if not 0 < len(ids) <= most:
            bad.append(BadRow(conversation.where, f"the prompt has {len(ids)} tokens, expected 1 to {most}"))
            continue
        found.append(ids)
    return found, bad


def _prompt_ids(model: Model, conversation: Conversation) -> list[int]:
    """Encodes a prompt as `generate` does; without a chat template the only message of a user is raw text."""
    if conversation.ids:
        return _check_ids(model, conversation.ids[0])
    prompt = conversation.prompt
    messages, tools = (prompt["messages"], prompt["tools"]) if isinstance(prompt, dict) else (prompt, None)
    if conversation.text is not None:
        messages = [{"role": "user", "content": conversation.text}]
    if model.chat_template is None and len(messages) == 1:
        return model.encode(messages[0]["content"])
    return model.encode_chat(messages, tools)


def encode_texts(model: Model, conversations: Sequence[Conversation]) -> tuple[list[Text], list[BadRow]]:
    """Encodes conversations with the answers they have. All tokens of a plain text are trained on.

    Args:
        model: the target.
        conversations: the conversations.

    Returns:
        The texts, and the rows that cannot be used.
    """
    _need_tokenizer(model, conversations)
    found, bad = [], []
    for conversation in conversations:
        try:
            if conversation.ids:
                ids = np.asarray([i for part in conversation.ids for i in _check_ids(model, part)], np.int32)
                text = Text(ids, np.arange(ids.size) >= len(conversation.ids[0]))
            elif conversation.text is not None:
                ids = np.asarray(model.encode(conversation.text), np.int32)
                text = Text(ids, np.ones(ids.size, bool))
            else:
                text = _encode_messages(model, conversation)
        except (InvalidConfig, CheckpointError) as error:
            bad.append(BadRow(conversation.where, str(error)))
            continue
        if not text.mask.any():
            bad.append(BadRow(conversation.where, "the assistant has no answer; set distill to let the target answer"))
            continue
        found.append(text)
    return found, bad


def _need_tokenizer(model: Model, conversations: Sequence[Conversation]) -> None:
    if model.tokenizer is None and (text := next((row for row in conversations if not row.ids), None)):
        raise MissingTokenizer(
            f"{text.where}: is text, but {model.name} has no tokenizer; use token ids, as in "
            '{"prompt": [1, 2, 3]}, or a Model with a tokenizer'
        )


def _check_ids(model: Model, ids: Sequence[int]) -> list[int]:
    """Returns the ids, all of which must be in the model's vocabulary."""
    if (largest := max(ids)) >= model.lm.vocab:
        raise InvalidConfig(f"token id {largest} is not in the vocabulary, whose ids go from 0 to {model.lm.vocab - 1}")
    return list(ids)


def _encode_messages(model: Model, conversation: Conversation) -> Text:
    """Encodes messages. Each answer is encoded as if it was decoded after its prompt, whose tokens do not change."""
    template, tokenizer, messages = model.chat_template, model.tokenizer, conversation.messages
    if template is None or tokenizer is None:
        raise InvalidConfig(f"{model.name} has no chat template for these messages; use plain text (.txt files)")
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return Text(np.zeros(0, np.int32), np.zeros(0, bool))
    parts = [messages[:end] for i in answers for end in (i, i + 1)]  # up to each prompt and each answer
    texts = template.render_all(parts, [True, False] * len(answers), tools=list(conversation.tools) or None)
    if not all(after.startswith(before) for before, after in itertools.pairwise(texts)):
        raise InvalidConfig(
            "the chat template changes earlier messages when a message is added; use conversations of one turn"
        )
    learnt = [own and (conversation.asked is None or i >= conversation.asked) for i in answers for own in (False, True)]
    added = _encode_parts(tokenizer, texts)
    mask = np.repeat(learnt, [len(ids) for ids in added])
    return Text(np.asarray([*itertools.chain(*added)], np.int32), mask)


def _encode_parts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Encodes what each text adds to the previous text, with which it begins.

    The parts are encoded one by one. The whole texts are encoded only if the ids of the parts differ from the ids of
    the last text.
    """
    parts = [after.removeprefix(before) for before, after in itertools.pairwise(["", *texts])]
    first, whole = tokenizer.encode_all([texts[0], texts[-1]])
    alone = tokenizer.encode_all(parts[1:], begins=False)
    # Some encoders put a space of their own after a special token, as at the beginning of a text.
    spaced = tokenizer.encode_all(parts[1:], special=False) if tokenizer.strips_space else alone
    ids, added = list(first), [first]
    for one, other in zip(alone, spaced):
        added.append(other if whole[len(ids) : len(ids) + len(other)] == other else one)
        ids += added[-1]
    if ids == whole:
        return added
    ids, added = [], []  # a token of the whole text crosses the end of a part
    for part, known in zip(parts, tokenizer.encode_all(texts)):
        added.append(known[len(ids) :] if known[: len(ids)] == ids else tokenizer.encode(part, begins=False))
        ids += added[-1]
    return added


def split_held_out(count: int, held_out: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of the texts to train on, and of the held-out texts, which are evenly spread.

    Args:
        count: number of texts.
        held_out: fraction that is held out.

    Raises:
        TrainingError: there are too few texts to hold one out.
    """
    every = np.arange(count)
    apart = np.floor((every + 1) * held_out) > np.floor(every * held_out)
    if held_out > 0 and not apart.any():
        share = f" or set held_out (--held-out) to at least {math.ceil(1000 / count) / 1000}" if count > 1 else ""
        raise TrainingError(
            f"{count} usable {'prompt is' if count == 1 else 'prompts are'} too few to hold out a fraction of "
            f"{held_out}; use at least {max(2, math.ceil(1 / held_out))}{share}"
        )
    return every[~apart], every[apart]


def find_frequent_tokens(texts: Iterable[Text], vocab: int, count: int) -> np.ndarray:
    """Returns the `count` most frequent tokens of answers, ascending; the lowest ids among equally frequent ones."""
    used = np.zeros(vocab, np.int64)
    for text in texts:
        np.add.at(used, text.ids[text.mask], 1)
    return np.sort(np.argsort(-used, kind="stable")[:count]).astype(np.int32)
