"""Broken and hostile checkpoints: every part dropped, renamed, reshaped and retyped in turn.

Whatever is done to a checkpoint, opening it gives either a model or a typed error that names the file, within
seconds and without taking memory for what is not there.
"""

import contextlib
import json
import pathlib
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from helpers.bounds import bounded
from helpers.checkpoints import gguf_tensors, hf_tensors, random_params, tiny_config, write_bytes, write_gguf, write_hf
from helpers.narrow import not_none
from jaxspec.checkpoints.load import load, read_params
from jaxspec.checkpoints.source import open_checkpoint
from jaxspec.errors import CheckpointError, JaxspecError
from jaxspec.text.chat import ChatTemplate
from jaxspec.text.tokenizer import Tokenizer

pytestmark = pytest.mark.quick

CONFIG = tiny_config(vocab_size=80, intermediate_size=64)
PARAMS = random_params(CONFIG)
ODD = (None, "x", "", -1, 0, 10**30, 1e308, True, False, [], [[1]], {}, {"a": 1}, 2.5)


def read(path) -> None:
    """All that `load` reads, but for putting it on a device."""
    checkpoint = open_checkpoint(path)
    read_params(checkpoint)
    if checkpoint.tokenizer:
        tokenizer = Tokenizer.from_source(checkpoint.tokenizer, checkpoint.config.vocab_size)
        tokenizer.decode(tokenizer.encode("ab 12"))
    if checkpoint.chat_template:
        template = ChatTemplate(checkpoint.chat_template, checkpoint.special_tokens)
        template.render([{"role": "user", "content": "hello"}])


def refused(path, *names: str) -> None:
    """Reading gives a typed error that says all of `names`."""
    with bounded(), pytest.raises(CheckpointError) as caught:
        read(path)
    for name in names:
        assert name in str(caught.value), (name, str(caught.value))


def survived(path) -> bool:
    """Reading gives a model (True) or a typed error, and nothing else."""
    with bounded():
        try:
            read(path)
        except JaxspecError:
            return False
    return True


@pytest.fixture
def hf(tmp_path):
    """A sharded Hugging Face directory with all its files, as a function that makes a fresh one."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({chr(33 + i): i for i in range(80)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    files = {
        "tokenizer.json": inner.to_str(),
        "tokenizer_config.json": {"bos_token": "!", "eos_token": {"content": '"'}, "add_bos_token": True},
        "generation_config.json": {"eos_token_id": [1, 2], "bos_token_id": 0},
        "chat_template.jinja": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }

    def make(shards=2, **options):
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
        return write_hf(tmp_path / "hf", CONFIG, PARAMS, shards=shards, files=files, **options)

    assert survived(make())
    return make


# --- tensors ------------------------------------------------------------------------------------------------


def damaged(tensors: dict[str, np.ndarray]):
    """(what, changes, words) for every tensor: `changes` are tensors to replace, None to drop."""
    for name, array in tensors.items():
        yield "dropped", {name: None}, (name,)
        yield "renamed", {name: None, name + "_": array}, (name,)
        yield "longer", {name: np.concatenate([array, array[:1]])}, (name, str(len(array) + 1))
        yield "deeper", {name: array[None]}, (name,)
        if array.ndim == 2 and array.shape[0] != array.shape[1]:
            yield "turned", {name: np.ascontiguousarray(array.T)}, (name,)
        spoilt = array.copy()
        spoilt.flat[-1] = np.nan
        yield "not a number", {name: spoilt}, (name, "finite")


def test_every_tensor_of_safetensors(hf):
    cases = list(damaged(hf_tensors(CONFIG, PARAMS)))
    cases += [("retyped", {n: a.astype(np.int32)}, (n, "I32")) for n, a in hf_tensors(CONFIG, PARAMS).items()]
    assert len(cases) > 100
    for _, changes, words in cases:
        refused(hf(tensors=changes), *words)


def test_every_tensor_of_gguf(tmp_path):
    cases = list(damaged(gguf_tensors(CONFIG, PARAMS)))
    for what, changes, words in cases:
        if what != "deeper":  # the format drops leading ones
            refused(write_gguf(tmp_path / "m.gguf", CONFIG, PARAMS, tensors=changes), "m.gguf", *words)


# --- settings -----------------------------------------------------------------------------------------------

REQUIRED = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def test_every_key_of_the_configs(hf):
    directory, read_any = hf(), 0
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        good = json.loads((directory / name).read_text())
        for key in good:
            for value in (*ODD, "drop"):
                changed = {k: v for k, v in good.items() if k != key} if value == "drop" else good | {key: value}
                (directory / name).write_text(json.dumps(changed))
                read_any += survived(directory)
            if key in REQUIRED:
                (directory / name).write_text(json.dumps({k: v for k, v in good.items() if k != key}))
                refused(directory, name, key)
        (directory / name).write_text(json.dumps(good))
    assert survived(directory)
    assert read_any > 10  # an optional key may be left out


def test_every_rotary_setting(hf):
    kinds = {
        "linear": {"factor": 2.0},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "mscale": 1.0},
        "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64},
    }
    directory = hf()
    good = json.loads((directory / "config.json").read_text())
    for kind, settings in kinds.items():
        (directory / "config.json").write_text(json.dumps(good | {"rope_scaling": {"rope_type": kind} | settings}))
        assert survived(directory), kind
        for key in settings:
            for value in ODD:
                rope = {"rope_type": kind} | settings | {key: value}
                (directory / "config.json").write_text(json.dumps(good | {"rope_scaling": rope}))
                survived(directory)


def test_every_key_of_the_tokenizer(hf):
    directory = hf()
    path = directory / "tokenizer.json"
    good = json.loads(path.read_text())
    places = [(key,) for key in good] + [("model", key) for key in good["model"]]
    for place in places:
        for value in (*ODD, "drop"):
            changed = json.loads(json.dumps(good))
            inner = changed if len(place) == 1 else changed[place[0]]
            if value == "drop":
                del inner[place[-1]]
            else:
                inner[place[-1]] = value
            path.write_text(json.dumps(changed))
            survived(directory)
    for raw in (b"", b"{", b"[]", b"\xff" * 100, b"[" * 100_000, path.read_bytes()[:-20]):
        path.write_bytes(raw)
        refused(directory, "tokenizer.json")


def test_every_key_of_the_metadata(tmp_path):
    keys = [
        "llama.context_length",
        "llama.embedding_length",
        "llama.block_count",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.head_count_kv",
        "llama.attention.key_length",
        "llama.attention.sliding_window",
        "llama.rope.freq_base",
        "llama.rope.scaling.type",
        "llama.rope.scaling.factor",
        "llama.rope.dimension_count",
        "llama.attention.layer_norm_rms_epsilon",
        "general.alignment",
        "tokenizer.ggml.model",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.scores",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.eos_token_id",
        "tokenizer.chat_template",
    ]
    values = (None, "x", -1.0, 0, 2**32 - 1, 3e38, float("nan"), True, ["x"], [1], [2.5] * 80, "yarn", "{{")
    for key in keys:
        for value in values:
            with contextlib.suppress(struct.error, ValueError, OverflowError, TypeError):  # gguf cannot write it
                path = write_gguf(tmp_path / "m.gguf", CONFIG, PARAMS, metadata={key: value})
                survived(path)


# --- files --------------------------------------------------------------------------------------------------


def test_every_shard(hf):
    names = sorted(file.name for file in hf().glob("*.safetensors"))
    assert len(names) == 2
    for name in names:
        directory = hf()
        (directory / name).unlink()
        refused(directory, name)
        directory = hf()
        (directory / name).rename(directory / "model-other.safetensors")
        refused(directory, name)
        directory = hf()
        (directory / name).write_bytes(b"no tensors here" * 9)
        refused(directory, name)
        directory = hf()
        held = load_file(directory / name)
        held.pop(next(iter(held)))
        save_file(held, directory / name)
        refused(directory, name)
        directory = hf()
        save_file(load_file(directory / name) | {"more": np.zeros(3, np.float32)}, directory / name)
        refused(directory, name, "more")


def borders(header_end: int, sizes) -> list[int]:
    at, found = header_end, []
    for size in sizes:
        found += [at - 1, at, at + 1]
        at += size
    return [*found, at - 1]


def test_truncation_at_every_border_of_safetensors(hf):
    directory = hf(shards=1)
    raw = (directory / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:start])
    ends = sorted(entry["data_offsets"][1] for entry in header.values())
    places = borders(start, np.diff([0, *ends]))
    assert len(places) > 40
    for size in places:
        (directory / "model.safetensors").write_bytes(raw[:size])
        refused(directory, "model.safetensors")


def test_truncation_at_every_border_of_gguf(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", CONFIG, PARAMS)
    raw = path.read_bytes()
    from jaxspec.checkpoints.gguf_header import parse_header

    tensors = sorted(tensor.start for tensor in parse_header(raw, "m")[1].values())
    last = max(tensor.stop for tensor in parse_header(raw, "m")[1].values())
    for size in [0, 1, 4, *(at + step for at in tensors for step in (-1, 0, 1)), last - 1]:
        path.write_bytes(raw[:size])
        refused(path, "m.gguf")


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**31, 2**62, 2**64 - 1])
def test_headers_that_claim_more_than_there_is(hf, length):
    directory = hf(shards=1)
    raw = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", length) + raw[8:])
    refused(directory, "model.safetensors")


def test_tensors_that_claim_more_than_there_is(hf):
    directory = hf(shards=1)
    raw = (directory / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:start])
    name = "model.embed_tokens.weight"
    for change in (
        {"shape": [2**40, 2**20]},
        {"shape": [80, 2**62]},
        {"data_offsets": [0, 2**60]},
        {"data_offsets": [2**63, 2**64 - 1]},
        {"data_offsets": [8, 0]},
        {"dtype": "F64"},
        {"dtype": "U8"},
        {"dtype": "pickle"},
    ):
        made = json.dumps(header | {name: header[name] | change}).encode()
        (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(made)) + made + raw[start:])
        refused(directory, "model.safetensors")


BAD_PATHS = [
    "../out.safetensors",
    "/etc/passwd",
    "a/../../b.safetensors",
    "..",
    "",
    "C:\\x.safetensors",
    "x\0.safetensors",
]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_shards_stay_in_their_directory(hf, path):
    directory = hf()
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], path)
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(directory, "model.safetensors.index.json")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors"])
def test_links_that_lead_out(hf, tmp_path, name):
    directory = hf()
    (directory / name).rename(tmp_path / "outside")
    (directory / name).symlink_to(tmp_path / "outside")
    refused(directory, name)


CYCLIC = [
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}{{ ns.t }}",
    "{{ 'x' * 10**10 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ range(10**9) | list }}",
    "{% include 'config.json' %}",
    "{% extends 'self' %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages[0].__init__.__globals__ }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ 'x'.center(10**10) }}",
    "{{ messages | map(attribute='__class__') | map(attribute='__mro__') | first | first | string + 1 }}",
    "{% for m in messages recursive %}{{ loop([m, m]) }}{% endfor %}",
]


@pytest.mark.parametrize("template", CYCLIC)
def test_templates_that_never_end_or_reach_out(hf, template):
    directory = hf()
    (directory / "chat_template.jinja").write_text(template)
    refused(directory, "template")


def test_a_weight_file_that_is_a_directory_or_a_pipe(hf):
    import os

    directory = hf(shards=1)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").mkdir()
    refused(directory, "model.safetensors")
    (directory / "model.safetensors").rmdir()
    os.mkfifo(directory / "model.safetensors")
    refused(directory, "model.safetensors")


# --- ids ----------------------------------------------------------------------------------------------------

ODD_IDS = (2**31, 2**32, 2**63, 10**30, 81, -1, True, 2.0, "2", None, [2])


def with_tokens(directory, change) -> None:
    """Changes tokenizer.json, which has the 80 tokens that the model has."""
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("token", ODD_IDS)
def test_ids_of_a_tokenizer_are_held_against_the_vocabulary(hf, token):
    """Before a table is made that reaches up to the largest of them: 8 GB for one of 2,147,483,648."""
    added = {"id": token, "content": "new", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}  # fmt: skip
    single = [{"SpecialToken": {"id": "new", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {"type": "TemplateProcessing", "single": single, "pair": single,
                 "special_tokens": {"new": {"id": "new", "ids": [token], "tokens": ["new"]}}}  # fmt: skip
    for change in (
        lambda content: content["model"]["vocab"].update(new=token),
        lambda content: content["added_tokens"].append(added),
        lambda content: content.update(post_processor=processor),
        lambda content: content.update(post_processor={"type": "Sequence", "processors": [processor]}),
    ):
        directory = hf()
        with_tokens(directory, change)
        refused(directory, "tokenizer.json", "token 'new' has id", "expected 0 .. ", "the model has 80 tokens")


def test_ids_may_have_gaps_within_the_vocabulary_and_none_beyond(tmp_path):
    """A few published files have a token more than their model has, which it never emits."""
    config = tiny_config(vocab_size=300)
    directory = write_bytes(tmp_path / "hf", config, random_params(config))
    path = directory / "tokenizer.json"
    good = json.loads(path.read_text())
    assert len(good["model"]["vocab"]) == 259

    def sizes(token: int) -> tuple[int, int]:
        path.write_text(
            json.dumps(good | {"model": good["model"] | {"vocab": good["model"]["vocab"] | {"new": token}}})
        )
        model = load(directory)
        return not_none(model.tokenizer).vocab_size, model.lm.vocab

    assert sizes(299) == (300, 300)
    for token in (300, 5000):
        with pytest.raises(CheckpointError, match="the model has 300 tokens, the file 260"):
            sizes(token)
    small = tiny_config(vocab_size=259)
    directory = write_bytes(tmp_path / "small", small, random_params(small))
    path = directory / "tokenizer.json"
    assert sizes(259) == (260, 259)


def test_ids_without_a_model_are_held_against_the_file(hf):
    directory = hf()
    with_tokens(directory, lambda content: content["model"]["vocab"].update(new=2**31))
    with bounded(), pytest.raises(CheckpointError, match="token 'new' has id 2147483648, expected 0"):
        Tokenizer.from_json(directory / "tokenizer.json")


@pytest.mark.parametrize("token", [*ODD_IDS[:-2], 80])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_special_ids_are_held_against_the_vocabulary(hf, name, token):
    for key, value in (("eos_token_id", token), ("eos_token_id", [1, token]), ("bos_token_id", token)):
        directory = hf()
        for file in ("generation_config.json", "config.json"):
            settings = json.loads((directory / file).read_text())
            settings.pop(key, None)
            (directory / file).write_text(json.dumps(settings | ({key: value} if file == name else {})))
        refused(directory, "special token id", "expected 0 .. 79")


IN_A_CHILD = """
import json, pathlib, resource, sys
import jaxspec, jaxspec.heads.files
from jaxspec.bench import tasks
from jaxspec.text.tokenizer import Tokenizer
readers = {"load": jaxspec.load, "heads": jaxspec.load_heads, "tuned": jaxspec.Drafting.load, "tasks": tasks.load_task,
           "tokenizer": Tokenizer.from_json}
held = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 30),) * 2)
for kind, path in json.loads(sys.argv[1]):
    try:
        readers[kind](path)
    except jaxspec.JaxspecError as error:
        print(error)
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/statm").exists(), reason="reads the size of the process from /proc")
def test_what_claims_memory_is_refused_in_a_process_that_has_little(tmp_path):
    """A gigabyte more than the imports take: what was taken for any of these did not fit."""
    heads = {"format": "jaxspec-heads", "version": 1, "config": {"hidden_size": 8, "vocab_size": 9}, "tree": None}
    star, digits = [-1] + [0] * 20_000, "9" * 4000
    cases = []

    def case(kind: str, name: str, content) -> None:
        place = tmp_path / str(len(cases))
        path = place / name
        if kind == "load":
            write_hf(place, CONFIG, PARAMS)
        place.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        cases.append((kind, str(path if kind in ("tuned", "tasks", "tokenizer") else place)))

    settings = json.loads((write_hf(tmp_path / "hf", CONFIG, PARAMS) / "config.json").read_text())
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    vocab = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 2**31}, "merges": []}, "added_tokens": []}
    case("tokenizer", "tokenizer.json", vocab)
    case("load", "tokenizer.json", vocab)
    case("load", "config.json", settings | {"head_dim": 10**9, "rope_scaling": scaling})
    case("load", "config.json", settings | {"num_hidden_layers": 10**9})
    case("load", "config.json", f'{{"vocab_size": {digits}}}')
    case("load", "config.json", "[" * 10**6)
    case("heads", "heads.json", heads | {"tree": star})
    case("heads", "heads.json", heads | {"config": {"hidden_size": 8, "vocab_size": 9, "num_heads": 10**9}})
    case("heads", "heads.json", json.dumps(heads).replace("9", digits))
    tuned = {"version": 1, "drafter": "medusa", "tree": star, "exit_layers": None, "schedule": {"name": "adaptive"}}
    case("tuned", "t.json", tuned | {"measured": {}})
    case("tuned", "t.json", json.dumps(tuned).replace("20", digits).replace("null", digits))
    case("tasks", "t.jsonl", f'{{"prompt": "x", "question_id": {digits}}}')
    child = subprocess.run(
        [sys.executable, "-c", IN_A_CHILD, json.dumps(cases)], capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr[-2000:]
    lines = child.stdout.splitlines()
    assert len(lines) == len(cases), (lines, child.stderr[-2000:])
    for (_, path), line in zip(cases, lines, strict=True):
        assert path in line
