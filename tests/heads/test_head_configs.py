"""Tests config.json of heads with values of every wrong type, and the names of heads."""

import copy
import json
from typing import Any

import pytest

import jaxspec
from helpers import dflash_heads, eagle_heads, medusa_files
from jaxspec.checkpoints import presets
from jaxspec.cli import main
from jaxspec.errors import CheckpointError, FetchError, JaxspecError, UnknownName
from jaxspec.heads.eagle_layouts import LAYER_IDS_KEY
from jaxspec.heads.find import find_heads, find_named_heads, list_shipped_heads
from jaxspec.heads.headers import HeadFile, open_heads

pytestmark = pytest.mark.quick

WRONG: list[Any] = [{}, [[]], "x", None, True, -1, 1.5, 2**70]
HEADS = {
    "eagle1": lambda place: eagle_heads.write(place, "eagle1"),
    "eagle3": lambda place: eagle_heads.write(place, "eagle3"),
    "dflash": lambda place: dflash_heads.zlab().write(place),
    "dflash 2": lambda place: dflash_heads.second().write(place),
    "dspark": lambda place: dflash_heads.deepspec("gated").write(place),
    "dspark, speculators": lambda place: dflash_heads.speculators("rnn").write(place),
    "medusa": lambda place: medusa_files.write(place, "v0.1"),
    "vllm": lambda place: medusa_files.write(place, "vllm-single"),
}


def paths(value: Any, at: tuple = ()) -> list[tuple]:
    """The keys of all entries of nested objects."""
    inner = [path for key, one in value.items() for path in paths(one, (*at, key))] if isinstance(value, dict) else []
    return [*([at] if at else []), *inner]


def changed(settings: dict, path: tuple, value: Any) -> dict:
    settings = copy.deepcopy(settings)
    inner = settings
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return settings


@pytest.mark.parametrize("kind", HEADS)
def test_every_entry_of_every_wrong_type_ends_in_a_line(kind, tmp_path):
    """Some 1,300 configs: heads open with what the tensors say, or an error of ours says what is wrong."""
    place = HEADS[kind](tmp_path / "heads")
    settings = json.loads((place / "config.json").read_text())
    assert isinstance(open_heads(place), HeadFile)
    more = ["speculators_model_type", "rope_scaling", "rope_theta", "head_dim", "hidden_act", "layer_types",
            "transformer_layer_config", "dflash_config", "eagle_config", LAYER_IDS_KEY]  # fmt: skip
    every = dict.fromkeys([*paths(settings), *((key,) for key in more)])
    count, refused = 0, []
    for path in every:
        for value in WRONG:
            (place / "config.json").write_text(json.dumps(changed(settings, path, value)))
            count += 1
            try:
                assert isinstance(open_heads(place), HeadFile)
            except JaxspecError as error:
                refused.append(str(error))
    assert count >= len(WRONG) * len(more)
    assert all("\n" not in line and str(place) in line for line in refused)
    assert (len(refused) > 30) == (kind not in ("medusa", "vllm")), "sizes of Medusa heads are those of the tensors"


def test_the_kind_of_speculators_is_named(tmp_path):
    place = dflash_heads.speculators("rnn").changed(told={"speculators_model_type": {"a": 1}}).write(tmp_path / "heads")
    with pytest.raises(CheckpointError, match=r"speculators_model_type is {'a': 1}, expected dflash or dspark"):
        open_heads(place)


# --- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_shipped_heads())
def test_every_command_knows_the_heads_that_come_with_jaxspec(name, capsys):
    place = find_named_heads(name)
    assert find_heads(name) == place
    assert open_heads(name).path == place
    assert main(["inspect", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(place)


def test_heads_of_other_presets_are_listed():
    for name in ("qwen3-8b/medusa", "smollm2-135m-instruct/nothing", "qwen3-8b"):
        with pytest.raises(CheckpointError, match=f"does not come with heads {name}, only with .*medusa"):
            open_heads(name)
    assert main(["inspect", "qwen3-8b/medusa"]) == 1


@pytest.mark.parametrize("call", [open_heads, jaxspec.load_heads])
def test_names_of_nothing_list_heads(call):
    with pytest.raises(
        UnknownName, match=r"unknown heads .* 'nothing'.* Known: .*smollm2-135m-instruct/medusa"
    ) as error:
        call("nothing")
    assert "gemma" not in str(error.value)


def test_errors_of_the_hub_are_words(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FetchError) as error:
        open_heads("some-organization/no-such-heads")
    assert "Error" not in str(error.value).replace("FetchError", "")
    assert "not in the cache" in str(error.value)


def test_inspect_without_a_source_lists_the_presets(capsys):
    assert main(["inspect"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["preset", *presets.PRESETS]
    shown = next(line for line in lines if line.startswith("smollm2-135m-instruct"))
    assert "135 M" in shown
    assert "medusa" in shown
    assert "smollm2-135m-instruct" in next(line for line in lines if line.startswith("smollm2-1.7b"))
