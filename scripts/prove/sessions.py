"""Continues conversations in sessions over published chat templates, and compares with the whole conversation.

    python -m scripts.prove.sessions FOLDER

FOLDER contains `.jinja` files. For each template there is a tokenizer of bytes with the special tokens that the
template names. Several conversations get answers of several kinds (ended, cut by their length, with reasoning, with
white space) and another message. The tokens of the session must then be those of the template's text of the whole
conversation. No model is decoded.
"""

import collections
import itertools
import json
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import tokenizers

from jaxspec import Model
from jaxspec.errors import JaxspecError
from jaxspec.generation.inputs import read_turns
from jaxspec.generation.output import Generation
from jaxspec.generation.turns import RowRecord
from jaxspec.testing import TableLM
from jaxspec.text import ChatTemplate, Tokenizer
from jaxspec.text.ends import turn_end
from scripts.prove.templates import report

SPECIAL = re.compile(r"<[|｜][^<>|｜]{1,40}[|｜]>|</?(?:start|end)_of_\w+>|\[/?[A-Z_]{3,30}\]|</?s>|<bos>|<eos>")
ASK, REPLY, AGAIN = (
    {"role": "user", "content": "What is 1 + 2?"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "And 2 + 2?"},
)
CONVERSATIONS = {
    "question": [ASK],
    "turns": [ASK, REPLY, AGAIN],
    "system": [{"role": "system", "content": "Be kind."}, ASK],
}
ANSWERS = {
    "ended": ("Four", True),
    "cut": ("Fou", False),
    "with white space": (" Four. \n", True),
    "with reasoning": ("<think>\nIt is easy.\n</think>\n\nFour", True),
    "with half a character": ("Four", False),
    "empty": ("", True),
}
VARIABLES: list[dict[str, Any]] = [{}, {"enable_thinking": False}]


def model_of(source: str) -> tuple[Model, int | None]:
    """Returns a model with a template, and the token that ends a turn."""
    names = list(dict.fromkeys(["<s>", "</s>", *SPECIAL.findall(source)]))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({name: i for i, name in enumerate([*names, *alphabet])}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer = Tokenizer(json.loads(inner.to_str()), eos_id=1)
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    model = Model(TableLM(tokenizer.vocab_size, order=0), {}, tokenizer, template, name="published")
    try:
        return model, turn_end(tokenizer, template)
    except JaxspecError:
        return model, None


def compare(path: pathlib.Path, counts: collections.Counter[str]) -> Iterator[str]:
    """Continues conversations with one template; yields a line for each difference."""
    try:
        model, end = model_of(path.read_text("utf-8"))
    except JaxspecError as error:
        counts[f"templates that cannot be compiled ({str(error)[:40]} ...)"] += 1
        return
    tokenizer = model.tokenizer
    assert tokenizer is not None
    counts["templates"] += 1
    counts["templates whose end of a turn is one token"] += end is not None
    for (name, asked), (kind, (text, ends)), variables in itertools.product(
        CONVERSATIONS.items(), ANSWERS.items(), VARIABLES
    ):
        try:
            (turn,) = read_turns(model, [asked], True, None, variables)
        except JaxspecError:
            counts["conversations that the template refuses"] += 1
            continue
        tokens = tokenizer.encode(text, special=False)
        if kind == "with half a character":
            tokens += tokenizer.encode("é", special=False)[:1]
        tokens += [1 if end is None else end] if ends else []  # 1: </s>
        answer = Generation(0, 0, turn.ids, tokens, tokenizer.decode(tokens), "stop")
        new = {"role": "user", "content": "Why?"}
        whole = [*asked, {"role": "assistant", "content": answer.text}, new]
        try:
            expected = model.encode_chat(whole, None, variables)
        except JaxspecError:
            counts["conversations that the template refuses"] += 1
            continue
        (second,) = read_turns(model, [[new]], True, None, variables, [RowRecord(turn, answer)])
        counts["sessions"] += 1
        counts["sessions of which nothing is read again"] += len(second.prefix) == len(turn.ids) + len(tokens)
        counts[f"of answers {kind}, nothing is read again"] += len(second.prefix) == len(turn.ids) + len(tokens)
        if second.prefix + second.ids != expected:
            yield f"{path.name}: {name}, {kind}, {variables}"


if __name__ == "__main__":
    sys.exit(report(compare, __doc__, "sessions"))
