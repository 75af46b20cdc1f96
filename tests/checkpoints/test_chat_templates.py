"""Chat templates of checkpoints: found wherever transformers looks, and chosen by name as it chooses them."""

import dataclasses
from typing import Any

import pytest

import jaxspec
from helpers.chat_templates import byte_tokenizer
from helpers.checkpoints import random_params, tiny_config, write_gguf, write_hf
from helpers.narrow import not_none
from jaxspec.checkpoints.source import open_checkpoint
from jaxspec.errors import InvalidConfig, UnknownName

pytestmark = pytest.mark.quick

CONFIG = tiny_config(vocab_size=288)
PARAMS = random_params(CONFIG)
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def source(name: str) -> str:
    return f"{name}:{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"


DEFAULT, USE, RAG, OTHER = map(source, ("default", "use", "rag", "other"))
LISTED = [
    {"name": "default", "template": DEFAULT},
    {"name": "tool_use", "template": USE},
    {"name": "rag", "template": RAG},
]
MORE = {"tool_use": USE, "rag": RAG}
# The files of a checkpoint, its default template and the others.
PLACES: dict[str, tuple[dict[str, Any], str | None, dict[str, str]]] = {
    "none": ({}, None, {}),
    "config": ({"tokenizer_config.json": {"chat_template": DEFAULT}}, DEFAULT, {}),
    "a list": ({"tokenizer_config.json": {"chat_template": LISTED}}, DEFAULT, MORE),
    "a list without default": ({"tokenizer_config.json": {"chat_template": LISTED[1:]}}, None, MORE),
    "a dict": ({"tokenizer_config.json": {"chat_template": {"default": DEFAULT, "rag": RAG}}}, DEFAULT, {"rag": RAG}),
    "an empty list": ({"tokenizer_config.json": {"chat_template": []}}, None, {}),
    "a file": ({"chat_template.jinja": DEFAULT}, DEFAULT, {}),
    "a file before the config": (
        {"chat_template.jinja": DEFAULT, "tokenizer_config.json": {"chat_template": OTHER}},
        DEFAULT,
        {},
    ),
    "of a processor": ({"chat_template.json": {"chat_template": DEFAULT}}, DEFAULT, {}),
    "the config before that of a processor": (
        {"chat_template.json": {"chat_template": OTHER}, "tokenizer_config.json": {"chat_template": DEFAULT}},
        DEFAULT,
        {},
    ),
    "files": (
        {
            "chat_template.jinja": DEFAULT,
            "additional_chat_templates/tool_use.jinja": USE,
            "additional_chat_templates/rag.jinja": RAG,
        },
        DEFAULT,
        MORE,
    ),
    "files without default": ({"additional_chat_templates/tool_use.jinja": USE}, None, {"tool_use": USE}),
}


def directory(path, files: dict[str, Any]):
    """A checkpoint with these files."""
    (path / "model" / "additional_chat_templates").mkdir(parents=True)
    settings = {"eos_token_id": None}
    files = {"tokenizer.json": byte_tokenizer(["<s>", "</s>"])} | files
    return write_hf(path / "model", CONFIG, PARAMS, settings=settings, files=files)


@pytest.mark.parametrize("place", PLACES)
def test_templates_are_found(tmp_path, place):
    files, default, named = PLACES[place]
    checkpoint = open_checkpoint(directory(tmp_path, files))
    assert (checkpoint.chat_template, dict(checkpoint.named_templates)) == (default, named)
    template = checkpoint.open_template()
    if template is None:
        assert (default, named) == (None, {})
        return
    if default is not None:
        assert template.render(HI) == "default:hi"
    else:
        with pytest.raises(InvalidConfig, match=r"has no default chat template, only 'tool_use'.*choose"):
            template.render(HI)
    if named or default:
        text = "use:hi" if "tool_use" in named else "default:hi"
        assert template.render(HI, tools=TOOLS) == text
    for name in named:
        assert template.choose(name).render(HI).endswith(":hi")
    with pytest.raises(UnknownName, match=r"unknown chat template 'tools'"):
        template.choose("tools")


@pytest.mark.parametrize("place", ["a list", "a list without default"])
def test_they_are_saved_exported_and_used(tmp_path, place):
    files, default, named = PLACES[place]
    model = jaxspec.load(directory(tmp_path, files), kernels=False)
    jaxspec.save(model, tmp_path / "saved")
    back = jaxspec.load(tmp_path / "saved", kernels=False)
    for one in (model, back):
        template = not_none(one.chat_template)
        assert (template.source, template.named) == (default, named)
        assert one.decode(one.encode_chat(HI, TOOLS)) == "use:hi"
        chosen = dataclasses.replace(one, chat_template=template.choose("rag"))
        assert chosen.decode(chosen.encode_chat(HI)) == "rag:hi"
        if default is None:  # text is not continued raw in silence
            with pytest.raises(InvalidConfig, match="has no default chat template"):
                jaxspec.generate(one, "hi")
    assert back.stop_ids == model.stop_ids


def test_the_stop_tokens_of_a_saved_model_are_as_they_were(tmp_path):
    """Also those that were changed: nothing is added when it is loaded again."""
    model = jaxspec.load(directory(tmp_path, {"chat_template.jinja": DEFAULT}), kernels=False)
    assert model.stop_ids == (1,)  # </s>, by its name
    jaxspec.save(dataclasses.replace(model, stop_ids=(5,)), tmp_path / "saved")
    assert jaxspec.load(tmp_path / "saved", kernels=False).stop_ids == (5,)


def test_a_gguf_file_has_templates_with_names(tmp_path):
    metadata = {
        "tokenizer.chat_template": DEFAULT,
        "tokenizer.chat_template.tool_use": USE,
        "tokenizer.chat_templates": ["tool_use"],
    }
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", CONFIG, PARAMS, metadata=metadata))
    assert (checkpoint.chat_template, dict(checkpoint.named_templates)) == (DEFAULT, {"tool_use": USE})


def test_a_template_outside_the_directory_is_refused(tmp_path):
    place = directory(tmp_path, {"chat_template.jinja": DEFAULT})
    (tmp_path / "out.jinja").write_text(USE)
    (place / "additional_chat_templates" / "tool_use.jinja").symlink_to(tmp_path / "out.jinja")
    with pytest.raises(jaxspec.errors.CheckpointError, match="leads to"):
        open_checkpoint(place)
