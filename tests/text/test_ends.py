"""End tokens: an answer ends where the chat template ends it, wherever the checkpoint names the token."""

import itertools
import sys
from typing import Any

import pytest

from helpers.chat_templates import FAMILIES, byte_tokenizer
from helpers.checkpoints import random_params, tiny_config, write_gguf, write_hf
from jaxspec.checkpoints.source import open_checkpoint
from jaxspec.confined.process import CONFINED
from jaxspec.errors import LimitError, ProcessError
from jaxspec.text import ChatTemplate, Tokenizer
from jaxspec.text.bridge import Side
from jaxspec.text.ends import END_NAMES, end_ids, turn_end

pytestmark = pytest.mark.quick

CONFIG = tiny_config(vocab_size=288)
PARAMS = random_params(CONFIG)


def names_of(checkpoint) -> set[str]:
    """The names of the tokens that end a text of this checkpoint."""
    tokenizer = Tokenizer.from_source(checkpoint.tokenizer, CONFIG.vocab_size)
    source = checkpoint.chat_template
    template = None if source is None else ChatTemplate(source, checkpoint.special_tokens)
    return {tokenizer.token_bytes(i).decode() for i in checkpoint.end_ids(tokenizer, template)}


def hf(tmp_path, family: str, *, template: bool = True, generation: Any = None, eos: Any = None, named: bool = True):
    """A Hugging Face directory of a family; `generation` and `eos` are its eos_token_id there and in config.json."""
    one = FAMILIES[family]
    inner = byte_tokenizer([name for name in one.special if name])
    text: dict[str, Any] = {"bos_token": "<s>"}
    text |= {"eos_token": one.eos} if named else {}
    text |= {"chat_template": one.source} if template else {}
    files: dict[str, Any] = {"tokenizer.json": inner, "tokenizer_config.json": text}
    files |= {} if generation is None else {"generation_config.json": generation}
    config = {} if eos is None else eos
    place = write_hf(tmp_path / "hf", CONFIG, PARAMS, settings={"eos_token_id": None} | config, files=files)
    return open_checkpoint(place)


def ids(family: str, *names: str) -> list[int]:
    """The ids of tokens of a family."""
    special = [name for name in FAMILIES[family].special if name]
    return [special.index(name) for name in names]


def right(family: str) -> set[str]:
    """The tokens that end an answer of a family, whatever its checkpoint lists."""
    one = FAMILIES[family]
    return ({one.end, one.eos} | {name for name in one.special if name in END_NAMES}) - {""}


NO_LIST = {"none": {}, "null": {"eos_token_id": None}, "empty": {"eos_token_id": []}}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_template_says_what_ends_a_turn(family):
    one = FAMILIES[family]
    tokenizer = Tokenizer(byte_tokenizer([name for name in one.special if name]))
    found = turn_end(tokenizer, one.template)
    assert ("" if found is None else tokenizer.token_bytes(found).decode()) == one.end


@pytest.mark.parametrize("family", ["chatml", "llama-3", "gemma", "phi-3", "phi-4", "glm-4", "mistral-tekken"])
@pytest.mark.parametrize(("generation", "config"), [*itertools.product(NO_LIST, NO_LIST)])
def test_an_answer_ends_where_no_list_says_so(tmp_path, family, generation, config):
    """Absent, null and empty lists in both files."""
    found = hf(tmp_path, family, generation=NO_LIST[generation], eos=NO_LIST[config], named=False)
    assert names_of(found) == right(family) - ({FAMILIES[family].eos} - {FAMILIES[family].end, *END_NAMES})


@pytest.mark.parametrize("family", ["yi", "llama-3", "gemma", "phi-3", "glm-4", "falcon"])
@pytest.mark.parametrize("place", ["generation", "generation list", "config", "config list", "both", "text_config"])
def test_what_a_checkpoint_lists_stays(tmp_path, family, place):
    """A list of the end of a text alone, in one file or the other, and of a token that only this checkpoint names."""
    odd = "<s>"  # no other rule names it
    one, several = ids(family, odd)[0], ids(family, odd, FAMILIES[family].eos)
    generation = {"generation": {"eos_token_id": one}, "generation list": {"eos_token_id": several}}
    config = {"config": {"eos_token_id": one}, "config list": {"eos_token_id": several}}
    config |= {"text_config": {"text_config": {"eos_token_id": several}}}
    both = {"generation": {"eos_token_id": ids(family, FAMILIES[family].eos)[0]}, "config": {"eos_token_id": [one]}}
    given = both if place == "both" else {"generation": generation.get(place), "config": config.get(place)}
    found = hf(tmp_path, family, generation=given["generation"], eos=given["config"])
    assert names_of(found) == right(family) | {odd}


def test_the_default_of_another_vocabulary_ends_nothing(tmp_path):
    """config.json of some models has the ids of Llama 2, where they are ordinary tokens of their own vocabulary."""
    ordinary = 77
    found = hf(tmp_path, "llama-3", generation={"eos_token_id": ids("llama-3", "<|eot_id|>")}, eos={"eos_token_id": 77})
    assert names_of(found) == right("llama-3")
    alone = hf(tmp_path / "alone", "llama-3", eos={"eos_token_id": ordinary})  # the only list there is
    assert ordinary in alone.stop_ids


@pytest.mark.parametrize("family", ["chatml", "llama-3", "gemma", "phi-3", "deepseek-r1"])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_a_model_without_a_template_ends_where_its_checkpoint_says(tmp_path, family, named, listed):
    """The tokens of a chat format that it happens to have are not ends."""
    eos = {"eos_token_id": ids(family, "<s>")} if listed else {}
    found = hf(tmp_path, family, template=False, eos=eos, named=named)
    assert names_of(found) == {"<s>" for _ in range(listed)} | {FAMILIES[family].eos for _ in range(named)}


@pytest.mark.parametrize("keys", [("eos",), ("eos", "eot"), ("eot",), ("eos", "eot", "eom"), ()])
@pytest.mark.parametrize("family", ["chatml", "yi", "llama-3", "llama-3.1", "phi-3", "gemma", "zephyr", "granite"])
def test_a_gguf_file_ends_where_the_directory_does(tmp_path, family, keys):
    """Whichever of the keys a converter wrote."""
    one = FAMILIES[family]
    special = [name for name in one.special if name]
    tokens = list(byte_tokenizer(special)["model"]["vocab"])
    tokens += [f"<pad{i}>" for i in range(CONFIG.vocab_size - len(tokens))]
    kinds = [3] * len(special) + [1] * 256 + [5] * (CONFIG.vocab_size - 256 - len(special))
    metadata: dict[str, Any] = {
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": None,
        "tokenizer.chat_template": one.source,
    }
    tokens[-1] = "ab"
    named = {"eos": one.eos, "eot": one.end, "eom": "<|eom_id|>" if "<|eom_id|>" in special else one.end}
    metadata |= {f"tokenizer.ggml.{key}_token_id": special.index(named[key]) for key in keys}
    kinds[-1] = 1
    path = write_gguf(tmp_path / "model.gguf", CONFIG, PARAMS, metadata=metadata)
    assert names_of(open_checkpoint(path)) == names_of(hf(tmp_path, family)) == right(family)


def test_a_token_that_ends_one_message_of_several_is_no_end():
    """gpt-oss ends its reasoning with a token that ends the turn in Phi-3."""
    tokenizer = Tokenizer(byte_tokenizer(["<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]))
    source = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    )
    found = end_ids(tokenizer, ChatTemplate(source), [])
    assert {tokenizer.token_bytes(i).decode() for i in found} == {"<|return|>", "<|call|>"}


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_end_tokens_do_not_depend_on_the_machine(monkeypatch):
    """A template may refuse a conversation. A limit, or a process that does not start, is an error."""
    one = FAMILIES["chatml"]
    tokenizer = Tokenizer(byte_tokenizer([name for name in one.special if name]))
    right = end_ids(tokenizer, one.template, [])
    assert end_ids(tokenizer, ChatTemplate("{{ raise_exception('no') }}"), []) == right  # by name
    with pytest.raises(LimitError, match="processor time"):
        end_ids(tokenizer, ChatTemplate(ENDLESS), [])
    template = ChatTemplate(one.source)
    side = Side(tokenizer, template, right, 288)
    CONFINED.close()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        for ask in (lambda: end_ids(tokenizer, template, []), lambda: side.roles, lambda: side.conversation([1])):
            with pytest.raises(ProcessError):
                ask()
    assert end_ids(tokenizer, template, []) == right
    assert side.roles == Side(tokenizer, ChatTemplate(one.source), right, 288).roles


def test_ids_beyond_the_model_are_no_ends():
    tokenizer = Tokenizer(byte_tokenizer(["<s>", "</s>"]), eos_id=1)
    assert end_ids(tokenizer, None, [0], vocab=1) == (0,)
    assert end_ids(None, None, [3, 3, 4]) == (3, 4)
