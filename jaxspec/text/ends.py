"""End tokens: the tokens at which an answer or a text ends.

A checkpoint names end tokens in several places, and rarely all of them in one place. `end_ids` collects the ids that
the checkpoint lists and the EOS token of its tokenizer. For a model with a chat template, it adds the token that ends
the assistant's turn, and the control tokens whose names say that a turn or a text ends. A model without a chat template
continues raw text, so only the tokens that its checkpoint names end a text.
"""

from collections.abc import Iterable

from jaxspec.errors import ignored_refusals
from jaxspec.text.chat import ChatTemplate
from jaxspec.text.messages import MARK
from jaxspec.text.tokenizer import Tokenizer

END_NAMES = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<|return|>", "<|call|>",
    "<end_of_turn>", "<eos>", "</s>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<EOT>",
    "_<EOT>", "[EOT]", "[EOS]",
)  # fmt: skip
"""Names of control tokens that end a turn or a text, from llama.cpp, DeepSeek and Cohere."""
RETURN_TOKEN, MESSAGE_END_TOKEN = "<|return|>", "<|end|>"
"""In a vocabulary with the first token, which ends a turn, the second token ends a message of the turn (gpt-oss)."""


def end_ids(
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    listed: Iterable[int],
    others: Iterable[int] = (),
    vocab: int | None = None,
) -> tuple[int, ...]:
    """Returns the ids of all end tokens of a model; the ids that its checkpoint lists come first.

    Args:
        tokenizer: its tokenizer, or None.
        template: its chat template, or None.
        listed: the ids that the checkpoint lists.
        others: ids of a list that another list overrides. They end a text only if they are control tokens, because some
            files repeat the default of another vocabulary, and the id is an ordinary token in their own.
        vocab: the number of the model's logits; larger ids are left out. None for no limit.

    Raises:
        LimitError: the template or the tokenizer exceeds its limits in a short conversation.
        ProcessError: the process in which they run cannot be started.
    """
    ids = list(listed)
    if tokenizer is not None:
        ids += [i for i in others if type(i) is int and i in tokenizer.special_ids]
        ids += [tokenizer.eos_id]
        if template is not None:
            with ignored_refusals():  # the template or the tokenizer may refuse the conversation
                ids.append(turn_end(tokenizer, template))
            ids += _named(tokenizer)
    return tuple(dict.fromkeys(i for i in ids if i is not None and (vocab is None or i < vocab)))


def turn_end(tokenizer: Tokenizer, template: ChatTemplate) -> int | None:
    """Returns the token that a chat template writes after an answer; None if it does not write a single token.

    If the template writes nothing after the last answer, returns the token that begins the user's next message.

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
    ids = {name: tokenizer.id_of(name) for name in END_NAMES}
    if ids[RETURN_TOKEN] is not None:
        del ids[MESSAGE_END_TOKEN]
    return [i for i in ids.values() if i is not None and i in tokenizer.special_ids]
