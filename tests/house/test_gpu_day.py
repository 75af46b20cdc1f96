"""Tests the GPU day without a GPU: its plan, its limits and deadline, its journal, and what is carried to a machine."""

import json
import pathlib
import subprocess
import sys
import time

import pytest

from helpers.paths import ROOT
from scripts.figures.tables import RENDERERS
from scripts.library import carrying, day
from scripts.library.day import Day, Part
from scripts.library.exact import describe
from scripts.measure import gpu_day, rounds

quick = pytest.mark.quick

RECORD = """
import json, pathlib, time
folder = pathlib.Path("measurements")
folder.mkdir(exist_ok=True)
(folder / "{name}.json").write_text(json.dumps({{"name": "{name}"}}))
"""


@pytest.fixture
def part(tmp_path, monkeypatch):
    """Makes a part that runs some Python."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(day, "GRACE_S", 1.0)
    monkeypatch.setattr(day, "SAVE_S", 0.2)

    def make(name: str, code: str = "", limit_s: float = 20.0, **more) -> Part:
        (tmp_path / f"part_{name}.py").write_text(RECORD.format(name=name) + code)
        return Part(name, "does it run?", (f"part_{name}",), limit_s, **more)

    return make


def journal(out: pathlib.Path) -> dict:
    return json.loads((out / day.JOURNAL).read_text())


def statuses(run: Day) -> dict[str, str]:
    return {line["part"]: line["status"] for line in run.lines}


@quick
def test_a_part_that_fails_or_hangs_loses_no_other_and_no_record(tmp_path, part):
    parts = [
        part("first", "print('fine')"),
        part("fails", "raise RuntimeError('no such kernel')"),
        part("hangs", "print('measuring', flush=True); time.sleep(60)", limit_s=2.0),
        part("last"),
    ]
    run = Day(tmp_path / "out", parts, 100.0, {"small": True})
    start = time.monotonic()
    assert not run.run()
    assert time.monotonic() - start < 30
    assert statuses(run) == {"first": "done", "fails": "failed", "hangs": "cut", "last": "done"}
    kept = journal(run.out)
    assert kept["parts"] == run.lines
    assert [line["part"] for line in kept["plan"]] == [line["part"] for line in kept["parts"]]
    assert (kept["small"], kept["ended"]) == (True, True)
    reasons = {line["part"]: line.get("reason", "") for line in run.lines}
    assert "no such kernel" in reasons["fails"]
    assert "exit status 1" in reasons["fails"]
    assert "out of time" in reasons["hangs"]
    assert "measuring" in reasons["hangs"]
    records = json.loads((run.out / day.RECORDS).read_text())
    assert set(records) == {f"{name}.json" for name in ("first", "fails", "hangs", "last")}
    assert "fine" in (run.out / day.LOG).read_text()
    assert sorted(path.name for path in run.out.iterdir()) == sorted([day.JOURNAL, day.RECORDS, day.LOG])
    with pytest.raises(ValueError, match="another run"):
        Day(run.out, parts, 100.0, {})


@quick
def test_children_of_a_part_end_with_it_even_if_they_ignore_the_first_signal(tmp_path, part):
    mark = tmp_path / "mark"
    child = f"import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(4); " \
            f"pathlib.Path({str(mark)!r}).touch()"  # fmt: skip
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    run = Day(tmp_path / "out", [part("parent", code, limit_s=2.0)], 100.0, {})
    run.run()
    assert statuses(run) == {"parent": "cut"}
    time.sleep(4)
    assert not mark.exists()


@quick
def test_records_are_on_disk_while_a_part_runs(tmp_path, part):
    out = tmp_path / "out"
    watch = f"time.sleep(1.5); print(pathlib.Path({str(out / day.RECORDS)!r}).read_text())"
    run = Day(out, [part("watched", watch)], 100.0, {})
    assert run.run()
    assert '"name": "watched"' in (out / day.LOG).read_text()


@quick
def test_near_the_deadline_parts_are_shortened_and_skipped_with_a_reason(tmp_path, part, monkeypatch):
    ran = []
    now = [0.0]

    def pretend(self, own, work, limit):
        ran.append((own.name, limit))
        now[0] += limit
        self._end(own, "cut", limit, "out of time")

    monkeypatch.setattr(Day, "_run", pretend)
    parts = [part(name, limit_s=100.0) for name in ("a", "b", "c", "d")]
    run = Day(tmp_path / "out", parts, 250.0, {}, clock=lambda: now[0])
    now[0] += 20.0  # an installation
    assert not run.run()
    assert ran == [("a", 100.0), ("b", 100.0), ("c", 250.0 - 220.0 - day.GRACE_S)]
    assert statuses(run) == {"a": "cut", "b": "cut", "c": "cut", "d": "skipped"}
    assert run.lines[-1]["reason"] == "0 s were left"


@quick
def test_time_that_a_part_leaves_goes_to_the_next_parts(tmp_path, part, monkeypatch):
    limits, now = [], [0.0]

    def pretend(self, own, work, limit):
        limits.append(limit)
        now[0] += 10.0
        self._end(own, "done", 10.0)

    monkeypatch.setattr(Day, "_run", pretend)
    parts = [part(name, limit_s=100.0) for name in ("a", "b", "c")]
    assert Day(tmp_path / "out", parts, 1000.0, {}, clock=lambda: now[0]).run()
    assert limits == [100.0, 150.0, 150.0]


@quick
def test_a_part_without_its_files_is_skipped(tmp_path, part):
    missing = {"the weights": tmp_path / "none"}
    run = Day(tmp_path / "out", [part("needy", needs=missing), part("other")], 100.0, {})
    assert not run.run()
    assert run.lines[0] == {"part": "needy", "status": "skipped", "seconds": 0.0, "reason": "missing: the weights"}
    assert statuses(run)["other"] == "done"


@quick
def test_the_plan_fits_into_the_day_and_its_commands_exist():
    full, small = gpu_day.parts(False, {}), gpu_day.parts(True, {})
    assert sum(part.limit_s for part in full) <= gpu_day.MINUTES * 60
    assert [part.name for part in full] == [part.name for part in small]
    readme = (ROOT / "scripts/README.md").read_text()
    for part in full:
        module, record, name, *_ = part.command
        assert (ROOT / f"{module.replace('.', '/')}.py").exists()
        assert (record, name) == ("--record", part.name)
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{part.name}` |"))
        assert row.endswith(f"| {part.limit_s:.0f} |"), row
    assert {"products", "text-bits", "rounds", "training-steps", "train-minutes", "texts"} <= RENDERERS.keys()


@quick
def test_weights_are_carried_in_pieces_and_joined(tmp_path, monkeypatch):
    weights, content = tmp_path / "model.gguf", bytes(range(256)) * 20_000
    weights.write_bytes(content)
    monkeypatch.setattr(carrying.presets, "fetch_preset", lambda name, report: weights)
    monkeypatch.setattr(carrying, "download_wheels", lambda folder: (folder / "gguf-1-py3-none-any.whl").write_text(""))
    monkeypatch.setattr(carrying, "tracked_bytes", lambda: 1 << 20)
    packed = carrying.pack(tmp_path / "carried", 4 << 20)
    assert [path.name for path in packed] == ["1", "2", "3"]
    assert all(sum(path.stat().st_size for path in own.iterdir()) + (1 << 20) <= 4 << 20 for own in packed)
    assert [path.name for path in carrying.wheels_of(tmp_path / "carried")] == ["gguf-1-py3-none-any.whl"]
    cache = tmp_path / "cache"
    moved = packed[1].rename(tmp_path / "later")
    assert carrying.join_weights(tmp_path / "carried", cache) == "the weights are incomplete: folder 2 of 3 is missing"
    assert not carrying.weights_path(cache).exists()
    moved.rename(packed[1])
    assert carrying.join_weights(tmp_path / "carried", cache) == "the weights are complete"
    assert carrying.weights_path(cache).read_bytes() == content
    assert carrying.read_manifest(tmp_path / "carried")["pieces"] == 3
    with pytest.raises(ValueError, match="leaves no room"):
        carrying.pack(tmp_path / "carried", 2 << 20)
    with pytest.raises(ValueError, match="holds other files"):
        carrying.pack(tmp_path / "cache", 4 << 20)


def test_carried_weights_are_where_the_library_looks(smollm2_path, tmp_path):
    place = carrying.weights_path(tmp_path)
    place.parent.mkdir(parents=True)
    place.symlink_to(smollm2_path)
    assert carrying.presets.fetch_preset(carrying.MODEL, tmp_path, report=pytest.fail) == place


@quick
def test_wheels_that_are_installed_stay_and_a_broken_one_is_reported(tmp_path):
    kept, broken = tmp_path / "numpy-1.0-py3-none-any.whl", tmp_path / "no_such_package-1.0-py3-none-any.whl"
    kept.write_text("")
    broken.write_text("")
    done = carrying.install_wheels([kept, broken], tmp_path / "site")
    assert done[kept.name] == "is installed"
    assert done[broken.name].startswith("pip failed: ")
    assert carrying.missing_packages() == []


@quick
def test_records_are_unpacked_with_the_commit_that_was_carried(tmp_path, monkeypatch, capsys):
    record = next(ROOT.glob("measurements/rounds@*.json"))
    fields = json.loads(record.read_text()) | {"commit": None, "dirty": False}
    out = tmp_path / "out"
    out.mkdir()
    day.write_json(out / day.RECORDS, {record.name: fields})
    lines = [{"part": "texts", "status": "skipped", "reason": "3 s were left"}]
    told = {"small": False, "carried": {"commit": "0123abc", "dirty": False}, "parts": lines}
    day.write_json(out / day.JOURNAL, told)
    monkeypatch.chdir(tmp_path)
    assert gpu_day.unpack(out) == 0
    assert json.loads((tmp_path / "measurements" / record.name).read_text())["commit"] == "0123abc"
    assert "texts: skipped: 3 s were left" in capsys.readouterr().out
    day.write_json(out / day.JOURNAL, told | {"small": True})
    with pytest.raises(ValueError, match="--small"):
        gpu_day.unpack(out)


@quick
def test_rounds_are_measured_exact_beside_the_kernels_of_xla():
    both, one, exact = (rounds.parts([rounds.CHAIN], (2, 8), forms) for forms in ((False, True), (False,), (True,)))
    assert tuple(both) == rounds.PARTS
    for name, cases in both.items():
        assert [case for case in cases if not case.exact] == one[name]
        assert [case for case in cases if case.exact] == exact[name]
        assert len({case.name for case in cases}) == len(cases)
        assert not any(case.exact for case in one[name])
        assert all(case.exact and case.attention == "xla" for case in exact[name])
    assert [case.name for case in both["widths"]][:4] == ["plain", "plain, exact", "width 2", "width 2, exact"]
    assert [case.name for case in exact["widths"]] == ["plain, exact", "width 2, exact", "width 8, exact"]


@quick
def test_what_could_not_be_measured_stands_in_the_tables():
    line = {"product": "down", "form": "Pallas", "same": [], "other": [], "bits_of": [], "failed": "no module"}
    assert "not measured: no module" in RENDERERS["products"]({"rows": [1, 2], "lines": [line]})
    lines = [
        {"dtype": "bfloat16", "exact": True, "unavailable": "no argument"},
        {"dtype": "bfloat16", "exact": False, "drafter": "medusa", "batch": 3, "session": True, "failed": "too deep"},
    ]
    shown = RENDERERS["text-bits"]({"layers": 8, "lines": lines})
    assert "not measured: no argument" in shown
    assert "`medusa` | 3, in a session | not measured: too deep" in shown
    lines = [{"kind": "eagle3", "too_large": [8, 4], "failed": "x"}, {"kind": "medusa", "too_large": [8, 4, 2, 1]}]
    shown = RENDERERS["training-steps"]({"target": "8B", "layers": 2, "drafted": 9, "lines": lines})
    assert "not measured: x" in shown
    assert "no batch fits" in shown
    values = {"layers": 2, "weights_gb": 1.0, "parts": {}, "not_measured": {"plain, exact": "no kernels"}}
    assert "not measured: no kernels" in RENDERERS["rounds"](values)


@quick
def test_an_error_is_one_line_without_folders_of_the_machine():
    error = RuntimeError("cannot open /some/where/file.so:\n  no such file; see https://example.org/a/b")
    assert describe(error) == "RuntimeError: cannot open file.so: no such file; see https://example.org/a/b"


@pytest.mark.slow
def test_the_whole_day_runs_at_toy_sizes(tmp_path, smollm2_path):
    command = [sys.executable, "-m", "scripts.measure.gpu_day", str(tmp_path), "--small"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = journal(tmp_path)
    assert {line["part"]: line["status"] for line in found["parts"]} == {
        part.name: "done" for part in gpu_day.parts(True, {})
    }, ran.stdout + (tmp_path / day.LOG).read_text()[-3000:]
    assert ran.returncode == 0
    assert found["missing_packages"] == []
    records = json.loads((tmp_path / day.RECORDS).read_text())
    assert {record["id"] for record in records.values()} == {part.name for part in gpu_day.parts(True, {})}
    for record in records.values():
        assert RENDERERS[record["kind"]](record["values"]).count("\n") >= 3, record["id"]
    texts = next(record for record in records.values() if record["id"] == "text-bits")
    compared = [line for line in texts["values"]["lines"] if "unavailable" not in line]
    assert not all(line["exact"] for line in compared)
    assert all(line["same_bits"] == line["texts"] for line in compared)
