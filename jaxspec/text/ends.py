"""End tokens: the tokens at which an answer or a text ends.

A checkpoint names them in several places, and seldom all of them in one. `end_ids` collects those that it lists, the
EOS token of its tokenizer and, for a model with a chat template, the token that ends the assistant's turn and the
control tokens whose names say that a turn or a text ends. A model without a chat template continues raw text, so only
what its checkpoint names ends a text.
"""

from collections.abc import Iterable

from jaxspec.errors import ignored_refusals
from jaxspec.text.chat import ChatTemplate
from jaxspec.text.messages import MARK
from jaxspec.text.tokenizer import Tokenizer

NAMES = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<|return|>", "<|call|>",
    "<end_of_turn>", "<eos>", "</s>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<EOT>",
    "_<EOT>", "[EOT]", "[EOS]",
)  # fmt: skip
"""Names of control tokens that end a turn or a text: those that llama.cpp knows, DeepSeek's and Cohere's."""
RETURN, MESSAGE_END = "<|return|>", "<|end|>"
"""In a vocabulary with the first, which ends a turn, the second ends one message of several (gpt-oss)."""


def end_ids(
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    listed: Iterable[int],
    others: Iterable[int] = (),
    vocab: int | None = None,
) -> tuple[int, ...]:
    """Returns the ids of all end tokens of a model, those that its checkpoint lists first.

    Args:
        tokenizer: its tokenizer, or None.
        template: its chat template, or None.
        listed: the ids that the checkpoint lists.
        others: ids of a list that another one replaces. They end a text only if they are control tokens: some files
            repeat the default of another vocabulary, where the id is an ordinary token.
        vocab: the number of the model's logits; ids beyond it are left out. None for no limit.

    Raises:
        LimitError: the template or the tokenizer exceeds its limits in a short conversation.
        ProcessError: the process in which they run cannot be started.
    """
    found = list(listed)
    if tokenizer is not None:
        found += [i for i in others if type(i) is int and i in tokenizer.special_ids]
        found += [tokenizer.eos_id]
        if template is not None:
            with ignored_refusals():  # the template or the tokenizer may refuse the conversation
                found.append(turn_end(tokenizer, template))
            found += _named(tokenizer)
    return tuple(dict.fromkeys(i for i in found if i is not None and (vocab is None or i < vocab)))


def turn_end(tokenizer: Tokenizer, template: ChatTemplate) -> int | None:
    """Returns the token that a chat template writes behind an answer; None if that is not one token.

    If the template writes nothing behind the last answer, it is the token that begins the user's next message.

    Raises:
        JaxspecError: the template or the tokenizer refuses a short conversation.
    """
    if template.source is None:
        template = template.choose(next(iter(template.named)))
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}]
    for messages in (talk, [*talk, {"role": "user", "content": "b"}]):
        _, answer, after = template.render(messages, add_generation_prompt=False).rpartition(MARK)
        for token in tokenizer.encode(after, begins=False) if answer else ():
            written = tokenizer.token_bytes(token).strip(b" \n\r\t")
            if written and token in tokenizer.added_ids:
                return token
            if written:
                break
    return None


def _named(tokenizer: Tokenizer) -> list[int]:
    """Returns the control tokens whose names say that a turn or a text ends."""
    ids = {name: tokenizer.id_of(name) for name in NAMES}
    if ids[RETURN] is not None:
        del ids[MESSAGE_END]
    return [i for i in ids.values() if i is not None and i in tokenizer.special_ids]
