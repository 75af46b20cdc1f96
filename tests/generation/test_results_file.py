"""Tests files of results: plain JSON lines, resumed after a kill at any byte, and checked before they are used."""

import dataclasses
import errno
import functools
import json
import math
import pathlib
import resource
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jaxspec
from helpers.checkpoints import tiny_config
from helpers.narrow import instance
from helpers.networks import digests, made, module
from helpers.paths import TESTS
from helpers.toy_text import TINY
from helpers.toys import noisy, transformer
from jaxspec import registry
from jaxspec.core.sampling import Sampling
from jaxspec.errors import InvalidConfig, JaxspecError, StorageError
from jaxspec.generation import fingerprint, results_file
from jaxspec.generation.output import Generation
from jaxspec.generation.results_file import ResultsFile
from jaxspec.models.packed import pack_param
from jaxspec.models.rope import Rope
from jaxspec.models.transformer import TransformerLM
from jaxspec.storage import writing
from jaxspec.storage.plain import plain, typed
from jaxspec.testing import TableLM
from jaxspec.text import ChatTemplate, Tokenizer

V = 24
LM = TableLM(V)
PARAMS = LM.init_params(jax.random.key(0))
TARGET, DRAFT = jaxspec.Model(LM, PARAMS), jaxspec.Model(LM, noisy(PARAMS, 1, 0.4))
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, V, RNG.integers(1, 40)).tolist() for _ in range(23)]
SETTINGS: dict[str, Any] = {
    "stop_ids": [3],
    "max_new_tokens": 30,
    "key": jax.random.key(5),
    "batch": 3,
}  # a third stops early
PLAIN: dict[str, Any] = {"drafter": "none"}
TREE: dict[str, Any] = {"drafter": "model", "draft": DRAFT, "tree": jaxspec.branching(2, 2, 1)}
OPTIONS = TREE | SETTINGS | {"sampling": Sampling(temperature=1.0), "logprobs": True}
FIELDS = ["index", "sample", "prompt", "tokens", "text", "finish_reason", "stats", "logprobs"]


def tokenizer(first: str = "A") -> Tokenizer:
    """Letters from `first` on."""
    letters = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [chr(ord(first) + i) for i in range(V)],
        "tokenizer.ggml.token_type": [1] * V,
        "tokenizer.ggml.merges": [],
    }
    return Tokenizer.from_gguf(letters)


def tokens(output) -> list[list[int]]:
    return [row.tokens for row in output]


def beside(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + ".job.json")


class Killed(Exception):
    pass


def until(n, counts):
    def progress(ended, rows):
        counts.append((ended, rows))
        if ended == n:
            raise Killed

    return progress


def test_a_job_that_is_killed_resumes(tmp_path):
    """After every few texts, within a line too: the same texts, each decoded once."""
    path, counts = tmp_path / "texts.jsonl", []
    right = jaxspec.generate(TARGET, PROMPTS, **{**OPTIONS, "batch": None})
    for n in (2, 9, 10):
        with pytest.raises(Killed):
            jaxspec.generate(TARGET, PROMPTS, out=path, progress=until(n, counts), **OPTIONS)
        with path.open("ab") as file:
            file.write(b'{"index": 5, "sam')
    got = jaxspec.generate(TARGET, PROMPTS, out=path, progress=until(None, counts), **OPTIONS)
    assert counts == [(n, 23) for n in range(1, 24)]
    assert tokens(got) == tokens(right)
    assert [row.stats for row in got] == [row.stats for row in right]
    np.testing.assert_allclose(np.concatenate([row.logprobs for row in got]),
                               np.concatenate([row.logprobs for row in right]), atol=1e-5)  # fmt: skip
    before = path.read_bytes()
    again = jaxspec.generate(TARGET, PROMPTS, out=path, **OPTIONS)
    assert tokens(again) == tokens(right)
    assert again.timing.tokens == 0, "nothing was left to decode"
    other = jaxspec.generate(
        TARGET, PROMPTS, out=path, **PLAIN, **SETTINGS, sampling=OPTIONS["sampling"], logprobs=True
    )
    assert tokens(other) == tokens(right), "with the coupled rule any drafter may continue"
    assert path.read_bytes() == before
    assert {file.name for file in tmp_path.iterdir()} == {"texts.jsonl", "texts.jsonl.job.json"}


def test_lines_are_plain_json_in_the_order_of_the_prompts(tmp_path):
    """Every line an object with the same keys, as `pandas.read_json(lines=True)` needs; prompts as they were given."""
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}B")
    target = dataclasses.replace(TARGET, tokenizer=tokenizer(), chat_template=template)
    chat = [{"role": "user", "content": "AB", "at": math.nan}]
    prompts = ["ABC", chat, [1, 2, 3], np.asarray([4]), [{"role": "user", "content": "C", "name": "x"}]]
    path = tmp_path / "texts.jsonl"
    options = SETTINGS | {"sampling": Sampling(temperature=1.0), "samples": 2, "batch": 2}
    got = jaxspec.generate(target, prompts, out=path, **PLAIN, **options)
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [set(record) for record in records] == [set(records[0])] * 10
    assert set(records[0]) >= {*FIELDS, "checksum"}
    assert [(record["index"], record["sample"]) for record in records] == [(i, s) for i in range(5) for s in range(2)]
    shown = ["ABC", [{"role": "user", "content": "AB"}], [1, 2, 3], [4], prompts[4]]
    assert [record["prompt"] for record in records[::2]] == shown
    for record, row in zip(records, got, strict=True):
        for name in ("text", "tokens", "finish_reason", "logprobs"):
            assert record[name] == getattr(row, name)
        assert record["stats"] == json.loads(json.dumps(row.stats.as_dict()))
    assert path.read_bytes().isascii()


def test_a_job_begins_with_whatever_file_is_left(tmp_path):
    """One of the two files, or its beginning, may be missing: no text is lost, and none decoded twice."""
    path, options = tmp_path / "texts.jsonl", {**OPTIONS, "batch": None}
    right = jaxspec.generate(TARGET, PROMPTS[:4], out=path, **options)
    whole, about = path.read_bytes(), beside(path).read_bytes()
    cases = [
        (whole, None, 4),  # the job's file is lost
        (whole, about[:100], 4),  # or cut short
        (whole, about.replace(b'"samples": 1', b'"samples": 2'), 4),
        (whole[:20], None, 0),  # the first line is cut short
        (whole[:20], about[:5], 0),
        (whole[:-1], about, 4),  # only the end of the line is missing
        (b"", b"", 0),
        (None, about, 0),
        (None, about.replace(b"1", b"2"), 0),
        (None, about[:11], 0),
    ]
    for texts, what, kept in cases:
        for file, content in ((path, texts), (beside(path), what)):
            file.unlink(missing_ok=True)
            if content is not None:
                file.write_bytes(content)
        counts = []
        got = jaxspec.generate(TARGET, PROMPTS[:4], out=path, progress=until(None, counts), **options)
        assert len(counts) == 4 - kept
        assert tokens(got) == tokens(right)
        assert (path.read_bytes(), beside(path).read_bytes()) == (whole, about)


@functools.cache
def model(rope: float = 1e4, epsilon: float = 1e-5, known: int | None = None, context: int = 128) -> jaxspec.Model:
    config = tiny_config(
        vocab_size=V, num_layers=1, hidden_size=32, rope=Rope(rope), norm_eps=epsilon, max_position=context
    )
    lm = TransformerLM(config, known=known)
    return jaxspec.Model(lm, TransformerLM(config).init_params(jax.random.key(0)), tokenizer())


def same_but(**changes):
    return lambda: dataclasses.replace(model(), **{name: make() for name, make in changes.items()})


JOB = PLAIN | SETTINGS | {"prompts": [[1, 2, 3], [4, 5]], "logprobs": True, "sampling": Sampling(temperature=1.0)}


@pytest.fixture(scope="module")
def transformed(tmp_path_factory):
    """The two files of a job of a transformer."""
    path = tmp_path_factory.mktemp("transformed") / "texts.jsonl"
    jaxspec.generate(model(), **JOB, out=path)
    return path.read_bytes(), beside(path).read_bytes()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"key": lambda: jax.random.key(6)}, "key"),
        ({"sampling": lambda: Sampling(temperature=0.3)}, "sampling"),
        ({"sampling": lambda: Sampling(temperature=1.0, logit_bias={2: 0.5})}, "sampling"),
        ({"max_new_tokens": lambda: 31}, r"max new tokens \(30 in the file, 31 now\)"),
        ({"stop_ids": lambda: [4]}, "stops"),
        ({"stop": lambda: "ABA"}, "stops"),
        ({"samples": lambda: 2}, "key"),
        ({"rule": lambda: "deterministic"}, "rule.kind"),
        ({"logprobs": lambda: False}, "logprobs"),
        ({"width_matched": lambda: True}, "drafter"),
        ({"prompts": lambda: [[1, 2, 3], [4, 6]]}, "prompts"),
        ({"target": lambda: model(rope=5e5)}, r"network.config.rope.theta \(10000.0 in the file, 500000.0 now\)"),
        ({"target": lambda: model(epsilon=1e-6)}, r"network.config.norm_eps \(1e-05 in the file, 1e-06 now\)"),
        ({"target": lambda: model(context=256)}, "network.config.max_position"),
        ({"target": lambda: model(known=V - 1)}, "network.known"),
        ({"target": same_but(params=lambda: noisy(model().params, 1, 1e-3))}, "weights"),
        ({"target": same_but(tokenizer=lambda: tokenizer("B"))}, "tokenizer"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_file_is_for_one_job(tmp_path, transformed, change, named):
    """Whatever decides a text is part of the job; the files are left as they are, and nothing is decoded."""
    path = tmp_path / "texts.jsonl"
    path.write_bytes(transformed[0])
    beside(path).write_bytes(transformed[1])
    changed = {**JOB, "target": model(), **{name: make() for name, make in change.items()}}
    with pytest.raises(InvalidConfig, match=f"texts of another {named}.*; choose a new file") as caught:
        jaxspec.generate(**changed, out=path)
    assert "\n" not in str(caught.value)
    assert (path.read_bytes(), beside(path).read_bytes()) == transformed


@pytest.mark.slow
def test_the_draft_is_part_of_the_job_where_it_decides_the_text(tmp_path):
    other = jaxspec.Model(LM, noisy(PARAMS, 2, 0.4))
    options = OPTIONS | {"batch": None, "rule": "rejection", "max_new_tokens": 2}
    jaxspec.generate(TARGET, PROMPTS[:2], out=tmp_path / "texts.jsonl", **options)
    with pytest.raises(InvalidConfig, match="texts of another drafter"):
        jaxspec.generate(TARGET, PROMPTS[:2], out=tmp_path / "texts.jsonl", **{**options, "draft": other})


DESCRIBED = {
    "dflash": "187f74eaedca53d6", "dynamic": "8144dc2f7b8011ae", "eagle": "834be09a152943c3",
    "early-exit": "c2d8697688756e4e", "medusa": "91d205aab697366c", "model": "53d1f2f8df9870fa",
    "none": "9c830e09e8b54c4a", "pard": "d825e9b9c5daaef9", "prompt-lookup": "78021c8771b43e38",
    "recycling": "1f1048ccf31a2625", "rule block": "ec235e7eb186d2a5", "rule coupled": "a366bac8b6c55a51",
    "rule deterministic": "fb97f6e714ce4e35", "rule lossy-cascade": "e4aa87ddb595a6c2",
    "rule lossy-lenient": "c2ca096857097ff5", "rule lossy-typical": "c1b3d9a00cbae76a",
    "rule rejection": "cb076dfeccd6dec9", "rule traversal": "0fc678726720255c",
    "schedule adaptive": "1f8148c055c4c12f", "schedule best-width": "e08802b9596b28a1",
    "schedule confidence": "f35e0f3c344d1744",
    "schedule constant": "e6a2cb415ea64d00", "schedule plus-minus": "0e4ac12fa6503f5f", "target": "34ee1230d05cd0ea",
}  # fmt: skip
"""Digests of descriptions that results files hold. Where a class has moved, `fingerprint` knows its earlier name."""


@pytest.mark.quick
def test_files_that_were_begun_before_a_class_moved_are_resumed():
    described: dict[str, Any] = {"target": TINY.lm, "dynamic": jaxspec.dynamic(2, 3, 4)}
    for name in cases.DRAFTERS:
        decoder, _ = cases.drafting(name, TINY).build(TINY)
        described[name] = (decoder.drafter, decoder.schedule, decoder.widths)
    described |= {f"rule {name}": registry.find("rule", name)() for name in registry.RULES}
    described |= {f"schedule {name}": registry.find("schedule", name)() for name in registry.SCHEDULES}
    assert {
        name: fingerprint.digest(fingerprint.describe_static(value)) for name, value in described.items()
    } == DESCRIBED


@pytest.mark.slow
def test_a_network_is_described_alike_in_every_process():
    """Neither by an address nor by the order of a set; functions by their code and what they hold."""
    assert (
        fingerprint.describe_static(made(1.0))
        == fingerprint.describe_static(made(1.0))
        != fingerprint.describe_static(made(2.0))
    )
    for change in ({"attention": "pallas"}, {"kernels": True}):  # how it is computed is not what is written
        assert fingerprint.describe_static(transformer()) == fingerprint.describe_static(
            dataclasses.replace(transformer(), **change)
        )
    assert "attention" not in fingerprint.describe_static(transformer()), "files of before it was a choice continue"
    assert fingerprint.describe_static(transformer()) == fingerprint.describe_static(
        dataclasses.replace(transformer(), known=61)
    ), "all of them"
    assert (
        fingerprint.describe_static(module(8))
        == fingerprint.describe_static(module(8))
        != fingerprint.describe_static(module(16))
    )
    code = "from helpers import networks; print(networks.digests())"
    ran = subprocess.run([sys.executable, "-c", code], cwd=TESTS, capture_output=True, text=True)
    assert ran.stdout.split() == digests().split(), ran.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64", "uint32"])
def test_one_number_among_many_is_seen(dtype):
    """Wherever it is, and the same however the matrix is stored."""
    array = jnp.asarray(RNG.normal(size=(7, 130)) * 50).astype(dtype)
    (one,) = fingerprint.describe_weights({"a": array})
    assert (one[0], one[1], one[2]) == ("['a']", [7, 130], dtype)
    for place in ((0, 0), (3, 77), (6, 129)):
        assert fingerprint.describe_weights({"a": array.at[place].set(array[place] == 0)}) != [one]
    assert dtype == "bool" or fingerprint.describe_weights({"a": array[::-1]}) != [one]
    if dtype in ("float32", "bfloat16"):
        assert fingerprint.describe_weights({"a": pack_param("a", array)}) == [one]
        assert fingerprint.describe_weights({"a": pack_param("a", array[::-1])}) != [one]


# Damage.


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A plan, and the two files of its texts."""
    path = tmp_path_factory.mktemp("journal") / "texts.jsonl"
    options = SETTINGS | PLAIN | {"sampling": Sampling(temperature=1.0), "samples": 2, "logprobs": True}
    running = jaxspec.stream(TARGET, PROMPTS[:4], out=path, **options)
    list(running)
    return running._job, path.read_bytes(), beside(path).read_bytes()


@pytest.fixture
def opened(finished, tmp_path, monkeypatch):
    """Opens two files of these bytes: the texts by row, or the error; and what is then in the file of texts."""
    about = fingerprint.describe_job(finished[0], ())
    monkeypatch.setattr(fingerprint, "describe_job", lambda plan, stops: about)  # which takes most of the time
    path = tmp_path / "texts.jsonl"

    def call(texts: bytes, beside_it: bytes):
        path.write_bytes(texts)
        beside(path).write_bytes(beside_it)
        try:
            found = ResultsFile(path, finished[0], ()).done
        except JaxspecError as error:
            found = error
        if isinstance(found, JaxspecError):
            assert (path.read_bytes(), beside(path).read_bytes()) == (texts, beside_it), "left as it was"
            assert "\n" not in str(found)
            assert len(str(found)) < 500
        return found, path.read_bytes()

    return call


def test_a_kill_at_any_byte_leaves_what_can_be_resumed(finished, opened):
    _, texts, about = finished
    ends = [i + 1 for i, byte in enumerate(texts) if byte == ord("\n")]
    assert len(ends) == 8
    cuts = {cut for end in ends for cut in range(end - 30, end + 12)} | set(range(0, len(texts), 17))
    for cut in sorted(cut for cut in cuts if cut <= len(texts)):
        found, after = opened(texts[:cut], about)
        kept = sum(end - 1 <= cut for end in ends)  # a line is whole without its end
        assert list(found) == list(range(kept)), cut
        assert after == texts[: ends[kept - 1] if kept else 0]


def mutants(rng: np.random.Generator, data: bytes, count: int):
    """Damage of every kind to a file of JSON lines."""
    odd = [b"[]", b"[[1]]", b"{}", b"null", b"true", b"-1", b"1e999", b"9" * 5000, b'"x"', b"2.5", b"NaN", b"99999"]
    for _ in range(count):
        lines = data.splitlines(keepends=True)
        at, line = int(rng.integers(len(data))), int(rng.integers(len(lines)))
        kind = rng.integers(9)
        if kind == 0:  # a bit
            yield data[:at] + bytes([data[at] ^ (1 << int(rng.integers(8)))]) + data[at + 1 :]
        elif kind == 1:  # a few bytes gone
            yield data[:at] + data[at + int(rng.integers(1, 60)) :]
        elif kind == 2:  # a few bytes more
            yield data[:at] + rng.bytes(int(rng.integers(1, 20))) + data[at:]
        elif kind == 3:  # a piece of it again
            yield data[:at] + data[max(0, at - int(rng.integers(1, 300))) :]
        elif kind == 4:  # a line twice
            yield data + lines[line]
        elif kind == 5:  # a line gone, or others in its place
            yield b"".join(rng.permutation(np.asarray(lines, object))[: len(lines) - int(rng.integers(2))])
        elif kind == 6:  # a value of another
            parts = lines[line].split(b'": ')
            place = int(rng.integers(1, len(parts))) if len(parts) > 1 else 0
            rest = parts[place].rpartition(b",")
            parts[place] = odd[int(rng.integers(len(odd)))] + rest[1] + rest[2]
            yield b"".join([*lines[:line], b'": '.join(parts), *lines[line + 1 :]])
        elif kind == 7:  # the number of another row
            yield b"".join([*lines[:line], lines[line].replace(b": 1", b": 2", 1), *lines[line + 1 :]])
        else:
            yield data[:at]


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", ["texts", "job"])
def test_a_changed_file_is_never_partly_believed(finished, opened, seed, which, count):
    """Either every line that is not whole is an error, or what is taken is what was written."""
    _, texts, about = finished
    right, _ = opened(texts, about)
    refused = 0
    for mutant in mutants(np.random.default_rng(seed), texts if which == "texts" else about, count):
        found, after = opened(*((mutant, about) if which == "texts" else (texts, mutant)))
        if isinstance(found, JaxspecError):
            refused += 1
            assert which == "texts", "the job's file is written again from lines that are right"
            assert "line " in str(found) or "not a results file" in str(found)
            continue
        assert all(found[row] == right[row] for row in found)
        whole = set(texts.splitlines())
        assert set(after.splitlines()) <= whole
        assert {line for line in mutant.splitlines() if which == "texts" and line in whole} <= set(after.splitlines())
        assert which == "texts" or len(found) == 8
    assert refused > count / 3 or which == "job"


def rewritten(texts: bytes, number: int, about: bytes, **changes) -> bytes:
    """The file with values of a line changed, and its checksum made right again."""
    lines = texts.splitlines()
    record = json.loads(lines[number - 1]) | changes
    record.pop("checksum")
    body = json.dumps(record)[:-1]
    checksum = results_file.hashlib.sha256((json.loads(about)["job"] + body).encode()).hexdigest()[:16]
    lines[number - 1] = f'{body}, "checksum": "{checksum}"}}'.encode()
    return b"\n".join(lines) + b"\n"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"index": 9}, "it belongs to prompt 9, sample 0; there are 4 prompts with 2 samples each"),
        ({"index": -1}, "it belongs to prompt -1"),
        ({"sample": 2}, "it belongs to prompt 1, sample 2"),
        ({"sample": 1}, None),
        ({"index": 0}, "it is a second text of prompt 0, sample 0"),
        ({"index": [1]}, r"index is \[1\], expected int"),
        ({"index": True}, "index is True, expected int"),
        ({"tokens": [[1]]}, r"tokens is \[1\], expected int"),
        ({"tokens": "ab"}, "tokens is 'ab', expected list"),
        ({"tokens": [1.0]}, "tokens is 1.0, expected int"),
        ({"text": 3}, "text is 3, expected str"),
        ({"finish_reason": []}, r"finish_reason is \[\], expected str"),
        ({"logprobs": {"a": 1}}, "logprobs is .*, expected list"),
        ({"logprobs": [10**400]}, "too large"),
        ({"stats": []}, r"stats is \[\], expected Stats"),
        ({"stats": {}}, "rounds"),
    ],
    ids=str,
)
def test_a_line_of_odd_values_is_refused(finished, opened, changes, why):
    """Even one whose checksum is right."""
    _, texts, about = finished
    found, _ = opened(rewritten(texts, 3, about, **changes), about)
    if why is None:
        why = "line 4: it is a second text of prompt 1, sample 1"
    assert isinstance(found, InvalidConfig)
    assert ("line 4" if "line 4" in why else "line 3") in str(found)
    assert results_file.re.search(why, str(found)), str(found)


def test_a_line_of_another_job_is_refused(tmp_path):
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    options = {**OPTIONS, **PLAIN, "draft": None, "tree": None, "batch": None}
    jaxspec.generate(TARGET, PROMPTS[:2], out=one, **options)
    jaxspec.generate(TARGET, PROMPTS[:2], out=other, **{**options, "key": jax.random.key(7)})
    lines = one.read_bytes().splitlines(keepends=True)
    one.write_bytes(lines[0] + other.read_bytes().splitlines(keepends=True)[1])
    with pytest.raises(InvalidConfig, match=r"one.jsonl, line 2: it does not match its checksum.*; remove that line"):
        jaxspec.generate(TARGET, PROMPTS[:2], out=one, **options)
    one.write_bytes(lines[0])
    jaxspec.generate(TARGET, PROMPTS[:2], out=one, **options)
    assert one.read_bytes() == b"".join(lines)


@pytest.mark.parametrize("text", ["hello\n", "hello", "[]\n", '{"texts": 1}\n', '{"index": 1}\n', "\x00\n", "\n"])
def test_other_files_are_left_alone(tmp_path, text):
    path = tmp_path / "mine.txt"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=r"not a results file of jaxspec|line 1: it is not a line"):
        jaxspec.generate(TARGET, PROMPTS[:2], out=path, **OPTIONS)
    assert path.read_text() == text
    assert not beside(path).exists()
    beside(tmp_path / "new.jsonl").write_text(text)
    with pytest.raises(InvalidConfig, match="exists and is not the description of a job"):
        jaxspec.generate(TARGET, PROMPTS[:2], out=tmp_path / "new.jsonl", **OPTIONS)


@pytest.mark.parametrize(
    ("out", "why"),
    [
        (5, "out must be a str or a pathlib.Path, got 5"),
        ("", "out is empty"),
        ("a\0b", "out .* contains a NUL"),
        (".", "is not a file"),
        ("no/such/place.jsonl", "there is no folder .*; create it first"),
        ("a" * 300, "cannot be used|cannot be read or written"),
    ],
    ids=str,
)
def test_places_where_no_file_can_be(monkeypatch, tmp_path, out, why):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JaxspecError, match=why) as caught:
        jaxspec.generate(TARGET, PROMPTS[:2], out=out, **OPTIONS)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


# Disks.


def test_a_line_that_cannot_be_written_leaves_the_whole_ones(finished, tmp_path):
    """Half of a line reaches the file, and is taken back; the same call resumes."""
    plan, texts, about = finished
    path, lines = tmp_path / "texts.jsonl", texts.splitlines(keepends=True)
    beside(path).write_bytes(about)
    path.write_bytes(b"".join(lines[:3]))
    right = ResultsFile(path, plan, ()).done | dict.fromkeys(range(3, 8))
    kept, limit = ResultsFile(path, plan, ()), resource.getrlimit(resource.RLIMIT_FSIZE)
    text = dataclasses.replace(instance(Generation, right[2]), prompt=1, sample=1)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, limit[1]))
        with pytest.raises(StorageError, match=r"texts.jsonl cannot be written: File too large; the same call resumes"):
            kept.append(3, text)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == b"".join(lines[:3])
    kept.append(3, text)
    assert list(ResultsFile(path, plan, ()).done) == [0, 1, 2, 3]


def test_a_full_disk_is_said(tmp_path):
    error = OSError(errno.ENOSPC, "No space left on device")
    said = writing.reason(error, tmp_path)
    assert said.startswith(f"no space is left on the disk of {tmp_path} (")
    assert said.endswith("B are free)")
    assert "about 98.4 MB are needed, " in writing.full(tmp_path, 98_400_000)
    wrapped = RuntimeError("while downloading")
    wrapped.__cause__ = error
    assert writing.is_full(wrapped)
    assert not writing.is_full(OSError(errno.EACCES, "Permission denied"))
    assert writing.reason(OSError(errno.EACCES, "Permission denied"), tmp_path) == "Permission denied"


def test_a_kill_while_lines_are_put_in_order_loses_none(finished, tmp_path, monkeypatch):
    plan, texts, about = finished
    path = tmp_path / "texts.jsonl"
    turned = b"".join(reversed(texts.splitlines(keepends=True)))
    path.write_bytes(turned)
    beside(path).write_bytes(about)
    writing.part_of(path).write_bytes(texts[:50])
    with monkeypatch.context() as patch:
        patch.setattr(writing.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(StorageError, match=r"all texts are written, but not sorted by prompt.* no space is left"):
            ResultsFile(path, plan, ())
    assert path.read_bytes() == turned
    assert list(ResultsFile(path, plan, ()).done) == list(range(7, -1, -1))
    assert path.read_bytes() == texts
    assert {file.name for file in tmp_path.iterdir()} == {path.name, beside(path).name}


def test_fields_that_are_added_are_written_and_read(finished, tmp_path, monkeypatch):
    """Whatever fields a `Generation` has."""

    @dataclasses.dataclass
    class More(Generation):
        top: list[list[tuple[int, float]] | None] | None = None
        pair: tuple[int, str] = (1, "a")

    plan, path = finished[0], tmp_path / "texts.jsonl"
    results_file._fields.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(results_file, "Generation", More)
        one = More(0, 0, plan.prompt(0), [3], None, "stop", top=[[(3, -0.25), (4, -math.inf)], None])
        ResultsFile(path, plan, ()).append(0, one)
        assert ResultsFile(path, plan, ()).done == {0: one}
        assert json.loads(path.read_text())["top"] == [[[3, -0.25], [4, None]], None]
    results_file._fields.cache_clear()


def test_values_keep_their_types():
    assert plain([np.float32(0.5), (1, -math.inf), "a", None]) == [0.5, [1, None], "a", None]
    assert typed([[1, 2.5], [3, 4]], list[tuple[int, float]], "x") == [(1, 2.5), (3, 4.0)]
    for value, hint in (([1], tuple[int, int]), (True, float), ({}, list[int]), (math.nan, float), (None, int)):
        with pytest.raises(ValueError, match=r"x is .*, expected"):
            typed(value, hint, "x")
