"""Tests the dry runs of large targets: which runs there are, and what is said of them. `make tpu` compiles programs."""

import pytest

from scripts.figures.tables import RENDERERS
from scripts.prove import training_scale

pytestmark = pytest.mark.quick

LINE = {
    "target": "8B", "kind": "EAGLE-3, 7 steps", "on": "v5e:2x4", "memory": 16e9, "unsplit": 21e9, "tflop": 50.0,
    "held": {"target": 2e9, "heads and trained target": 1e8, "moments": 2e8, "tables": 1e9, "batches": 3e8},
    "temporaries": {"step": 4.5e9, "features": 2.8e9, "features, all layers compiled": 2.9e9}, "share": 0.51,
    "ideal_ms": 250.0, "compile_s": {"step": 100.0},
}  # fmt: skip


def test_all_topologies_and_kinds_have_a_run():
    tpus, gpus = (list(training_scale.select(gpu, "", "")) for gpu in (False, True))
    assert {run[2] for run in tpus} == {"v5e:2x4", "v5e:4x4", "v5p:2x2x2"}
    assert {run[2] for run in gpus} == {"h100:8"}
    assert {run[1] for run in tpus if run[0] == "8B"} == set(training_scale.KINDS)
    assert ("70B", "EAGLE-3, 7 steps", "v5p:2x2x2", 8) in tpus
    assert training_scale.ALL_LAYERS in [run[:3] for run in tpus]
    assert list(training_scale.select(False, "v5e:4x4", "DSpark")) == [("8B", "DSpark", "v5e:4x4", 16)]


def test_bytes_of_all_layers_lie_on_a_line():
    assert training_scale.extrapolate(3.0, 5.0, 2) == 3.0
    assert training_scale.extrapolate(3.0, 5.0, 32) == 33.0


def test_what_does_not_fit_is_shown():
    refused = LINE | {"share": None, "temporaries": {"step": None, "features": 1e9}}
    assert "does not fit" in training_scale.describe(refused)
    shown = RENDERERS["training-scale"]({"lines": [LINE, refused]})
    rows = [row.split(" | ") for row in shown.splitlines() if row.startswith("| 8B")]
    assert rows[0][2:9] == ["2.00", "0.30", "1.30", "4.50", "51% of 16", "21.0", "50"]
    assert rows[1][5:7] == ["refused", "does not fit of 16"]
    assert "2.90 GB, extrapolated 2.80 GB" in shown
