"""The decode loop as XLA compiles it for TPUs: scripts/tpu.py on two layers; and that its checks can fail."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent.parent / "scripts" / "tpu.py"

MODULE = """
HloModule m
body.1 {
  copy.3 = bf16[2,1,8,2048,128]{4,3,2,1,0} copy(p.0)
  select.4 = bf16[2,1,8,256,128]{4,3,2,1,0} select(p.1, p.2, p.3)
  o.1 = token[] outfeed(p.0, p.1)
}

ENTRY main.9 {
  copy.1 = bf16[2,1,8,2048,128]{4,3,2,1,0} copy(p.0)
  while.1 = (s32[]) while(t.1), condition=c, body=body.1
  while.2 = (s32[]) while(t.2), condition=c, body=body.1
}
"""


@pytest.fixture(scope="module")
def tpu():
    spec = importlib.util.spec_from_file_location("tpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    before = dict(os.environ)
    spec.loader.exec_module(module)
    os.environ.clear()
    os.environ.update(before)
    return module


def test_what_must_not_be_there_is_found(tpu):
    import jax

    lm = tpu.llama(2)
    cache = jax.eval_shape(lambda: lm.init_cache(1, 2048))
    state = type("State", (), {"cache": cache})
    wrong = tpu.findings(MODULE, state)
    said = ["2 loops at the top", "it speaks to the host: outfeed", "a copy of the whole cache"]
    assert len(wrong) == 3
    assert all(line.startswith(start) for line, start in zip(wrong, said))
    fine = MODULE.replace("  copy.3", "  other.3").replace(" copy(p.0)", " add(p.0)", 1)
    fine = fine.replace(" outfeed(", " tuple(").replace("  while.2", "  tuple.2").replace(" while(t.2)", " tuple(t.2)")
    assert tpu.findings(fine, state) == []


@pytest.mark.tpu
@pytest.mark.parametrize("chip", ["v5e", "v6e", "v5p"])
def test_the_loop_of_every_drafter(chip, tmp_path):
    """One loop, no host, no copy of a cache, caches updated in place; on one device and on 2 x 2."""
    pytest.importorskip("libtpu")
    words = [sys.executable, str(SCRIPT), "--chips", chip, "--json", str(tmp_path / "out.json")]
    words += ["--layers", "2", "--capacity", "32768"]  # few layers, but more cache than fits into VMEM
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(rows) == 12
    for row in rows:
        assert row["fits"]
        assert not row["wrong"]
        assert row["temporary_mb"] < row["cache_mb"]
