"""Tests `scripts/prove/hostile.py`: damaged files of every format end in a line or are read, and the run can fail."""

import jax
import pytest

from scripts.prove import hostile

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def _on_the_cpu():
    assert jax.default_backend() == "cpu"


def test_damaged_files_of_every_format(seed):
    done, wrong = hostile.run(240, seed)
    assert wrong == []
    assert sum(done.values()) == 240
    assert done.keys() >= hostile.FORMATS.keys() - {"saved", "results"}  # of which there are few


def test_the_run_finds_what_is_not_noticed(monkeypatch):
    """A format without checksums, of which checksums are expected."""
    unchecked = {"hf": hostile.FORMATS["hf"]._replace(checked=True)}
    monkeypatch.setattr(hostile, "FORMATS", unchecked)
    done, wrong = hostile.run(100, 0)
    assert done == {"hf": 100}
    assert any("model.safetensors: flip" in line and "with 1 other weights" in line for line in wrong)


def test_the_run_finds_raw_errors(monkeypatch):
    def read(place):
        return hostile.read_model(place) if (place / "config.json").is_file() else {}["config.json"]

    monkeypatch.setattr(hostile, "FORMATS", {"hf": hostile.FORMATS["hf"]._replace(read=read)})
    _, wrong = hostile.run(100, 0)
    assert wrong
    assert all("config.json: delete: raw KeyError" in line for line in wrong)
