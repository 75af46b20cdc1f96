"""Tests SmolLM2's tokenizer and chat template against golden files from other implementations."""

import json

import gguf
import pytest

from helpers.paths import GOLDEN_DIR
from jaxspec.text import ChatTemplate, IncrementalDecoder, Tokenizer

pytestmark = pytest.mark.smollm2

GOLDEN = json.loads((GOLDEN_DIR / "smollm2_text.json").read_text())


@pytest.fixture(scope="module")
def metadata(smollm2_path):
    fields = gguf.GGUFReader(smollm2_path).fields
    return {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}


@pytest.fixture(scope="module")
def tokenizer(metadata):
    return Tokenizer.from_gguf(metadata)


def test_vocabulary(tokenizer):
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_id, tokenizer.eos_id) == (
        tokenizer.id_of("<|im_start|>"),
        tokenizer.id_of("<|im_end|>"),
    )


@pytest.mark.parametrize("record", GOLDEN["encodings"], ids=lambda record: ascii(record["text"][:12]))
def test_encoding(tokenizer, record):
    text, ids = record["text"], record["ids"]
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids, skip_special=False) == text
    decoder = IncrementalDecoder(tokenizer)
    assert "".join(decoder.push([i]) for i in ids) + decoder.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize("record", GOLDEN["chats"], ids=range(len(GOLDEN["chats"])))
def test_chat(tokenizer, metadata, record):
    chat = ChatTemplate(metadata["tokenizer.chat_template"])
    text = chat.render(record["messages"], record["add_generation_prompt"])
    assert text == record["text"]
    assert tokenizer.encode(text) == record["ids"]
