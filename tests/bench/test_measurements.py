"""Tests that records of measurements are read as they were written, and name no host and no folder."""

import dataclasses
import json
import platform

import jax
import pytest

import jaxspec
from helpers.bench_runs import made_up
from jaxspec.bench import environment, measurements, report
from jaxspec.cli.options import Parser, UsageError
from jaxspec.errors import InvalidConfig
from scripts.figures.records import read_records

pytestmark = pytest.mark.quick

WORDS = ["jaxspec", "bench", "--limit", "3", "--record", "mine"]


def test_what_is_written_is_read_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = report.summarise_runs([made_up()])
    path = measurements.write_record("mine", "bench", WORDS, values, {"torch": "2.13"})
    (record,) = read_records(tmp_path / "measurements")
    assert path.name == record.file
    assert path.name.startswith("mine@")
    assert (record.id, record.kind, record.command) == ("mine", "bench", "jaxspec bench --limit 3")
    assert record.versions == {
        "python": platform.python_version(), "jaxspec": jaxspec.__version__, "jax": jax.__version__,
        "jaxlib": record.versions["jaxlib"], "torch": "2.13",
    }  # fmt: skip
    assert record.values == json.loads(json.dumps(values))
    text = path.read_text()
    assert str(tmp_path) not in text
    assert not platform.node() or platform.node() not in text
    measurements.write_record("mine", "bench", WORDS, values | {"more": 1})  # takes the place of the first
    assert [found.values["more"] for found in read_records(tmp_path / "measurements")] == [1]


def test_figures_of_a_benchmark_by_hand():
    (run,) = report.summarise_runs([made_up()])["runs"]
    plain, model = run["methods"]["none"], run["methods"]["model"]
    assert plain["tokens_per_s"] == pytest.approx(10 / 12, rel=1e-3)
    assert model["times_plain"] == pytest.approx(12 / 11, rel=1e-3)
    assert model["tasks"]["t"]["times_plain"] == model["times_plain"]
    assert (model["same_texts"], model["certified"], model["prompts"]) == (1, 1, 2)
    assert model["call_ms"] == 250


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/home/me/scripts/measure/speed.py", "widths", "--record", "w"], "python scripts/measure/speed.py widths"),
        (["jaxspec", "tune", "a b", "--record=w", "--out", "/tmp/x/tuned.json"], "jaxspec tune 'a b' --out tuned.json"),
        (["jaxspec", "bench", "--target=/models/llama/"], "jaxspec bench --target=llama"),
        (["jaxspec", "bench", "--target", "organization/name"], "jaxspec bench --target organization/name"),
    ],
)  # fmt: skip
def test_a_command_names_no_folder(words, shown):
    assert measurements.describe_command(words) == shown


def test_what_is_no_record_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = measurements.write_record("mine", "bench", WORDS, {"a": 1})
    fields = json.loads(path.read_text())
    for text, said in (
        ("{", "not JSON"),
        ("[]", "fields"),
        (json.dumps({**fields, "host": "x"}), "fields"),
        (json.dumps(fields | {"id": "other"}), "named other@"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidConfig, match=said):
            read_records(path.parent)
    with pytest.raises(InvalidConfig, match="hyphens"):
        measurements.write_record("../mine", "bench", WORDS, {"a": 1})


def test_the_option(capsys):
    parser = Parser(prog="jaxspec bench")
    measurements.add_record(parser.add_argument)
    args = parser.parse_options(["--record", "mine"])
    assert (args.record, args.words) == ("mine", ["jaxspec", "bench", "--record", "mine"])
    with pytest.raises(UsageError, match="lower-case"):
        parser.parse_options(["--record", "a/b"])


def test_machines_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    measurements.write_record("mine", "bench", WORDS, {"a": 1})
    (record,) = read_records(tmp_path / "measurements")
    gpu = dict(record.machine) | {
        "cpu": "A (R) CPU @ 2.6GHz",
        "cores": 16,
        "platform": "gpu",
        "kind": "NVIDIA H100 80GB",
    }
    assert dataclasses.replace(record, machine=gpu).file == "mine@a-r-cpu-2-6ghz-16-nvidia-h100-80gb.json"
    cpu = gpu | {"platform": "cpu", "kind": "cpu", "cores": 2}
    for flags, name in (([], "2"), (["avx2"], "2-avx2"), (["avx2", "avx512f"], "2-avx-512")):
        own = dataclasses.replace(record, machine=cpu | {"flags": flags})
        assert own.file == f"mine@a-r-cpu-2-6ghz-{name}.json"


def test_machine_and_commit():
    found = environment.describe_machine()
    assert found["cores"] >= 1
    assert found["memory_gib"] is None or found["memory_gib"] >= 1
    assert set(found["flags"]) <= set(environment.INSTRUCTION_FLAGS)
    commit, _ = environment.find_commit()
    assert commit is None or len(commit) == 40


def test_rounding():
    assert measurements.quartiles([1, 2, 3, 4, 5]) == [2, 3, 4]
    assert measurements.round_significant(123456.0) == 123500
    assert measurements.round_significant(0.00012345, 2) == 0.00012
