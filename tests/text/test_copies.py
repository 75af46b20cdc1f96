"""Tokenizers, chat templates and models are copied and pickled, so that other processes can use them."""

import concurrent.futures
import copy
import multiprocessing
import pickle

import pytest

import jaxspec
from helpers.chat_templates import FAMILIES, byte_tokenizer
from helpers.checkpoints import random_params, tiny_config, write_hf
from jaxspec.text import ChatTemplate, Tokenizer

pytestmark = pytest.mark.quick

WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda value: pickle.loads(pickle.dumps(value))}
TALK = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["chatml", "llama-3", "gemma"])
def test_a_copy_gives_the_same(family, way, used):
    """Before and after its first use, and after the original has gone."""
    one = FAMILIES[family]
    template = ChatTemplate(one.source, {"bos_token": "<s>"}, {"tool_use": "{{ tools }}", "other": "{{ bos_token }}"})
    tokenizer = Tokenizer(byte_tokenizer([name for name in one.special if name]), bos_id=0)
    if used:
        template.render(TALK)
        template.choose("other").render(TALK)
        tokenizer.encode("a")
    copies = WAYS[way](template), WAYS[way](tokenizer)
    text, chosen = template.render(TALK), template.choose("other").render(TALK)
    ids = tokenizer.encode(text)
    known = tokenizer.special_ids, tokenizer.vocab_size, tokenizer.text, tokenizer.bos_id
    del template, tokenizer
    template, tokenizer = copies
    assert (template.render(TALK), template.choose("other").render(TALK)) == (text, chosen)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids, skip_special=False) == text
    assert (tokenizer.special_ids, tokenizer.vocab_size, tokenizer.text, tokenizer.bos_id) == known


def test_a_new_process_can_use_them():
    """As multiprocessing starts it on macOS and on Windows."""
    template = FAMILIES["chatml"].template
    tokenizer = Tokenizer(byte_tokenizer([name for name in FAMILIES["chatml"].special if name]))
    text = template.render(TALK)
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(template.render, TALK).result(120) == text
        assert pool.submit(tokenizer.encode, text).result(120) == tokenizer.encode(text)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_model_gives_the_same(tmp_path, way):
    one = FAMILIES["chatml"]
    config = tiny_config(vocab_size=288)
    files = {"tokenizer.json": byte_tokenizer([name for name in one.special if name])}
    files["tokenizer_config.json"] = {"chat_template": one.source, "bos_token": "<s>"}
    model = jaxspec.load(write_hf(tmp_path / "hf", config, random_params(config), files=files))
    other = WAYS[way](model)
    assert other.lm == model.lm
    assert other.stop_ids == model.stop_ids
    ours, theirs = (jaxspec.generate(one, [TALK[:1]], max_new_tokens=4, draft=None) for one in (model, other))
    assert [row.tokens for row in ours] == [row.tokens for row in theirs]
