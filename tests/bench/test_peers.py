"""Tests the comparison with other systems: a peer in a process of its own, and peers that fail."""

import dataclasses
import json
import pathlib
import sys
from typing import cast

import jax
import pytest
from rich.console import Console

import jaxspec
from helpers.bench_runs import METHODS, SETTINGS, TARGET, TASKS
from helpers.narrow import not_none
from jaxspec.bench import peers, report, run, worker
from jaxspec.bench.records import PLAIN_METHOD
from jaxspec.bench.summary import compare_methods
from jaxspec.cli import main
from jaxspec.errors import InvalidConfig, UnknownName

FAKE = '''
import json, time

class Peer:
    """Knows texts by heart; one of them wrongly."""

    def __init__(self, told):
        print("noise of a library")
        if told["method"] == "broken":
            raise OSError("no such weights")
        self.method, self.texts = told["method"], json.load(open(told["target"]))
        self.versions = {"fake": str(told["threads"] > 0)}

    def decode(self, tokens, count, ignore_eos):
        print("more noise")
        if self.method == "dying":
            import os
            os._exit(3)
        if self.method == "killed":
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
        text = self.texts[json.dumps(tokens)][:count]
        time.sleep(0.02)
        return {"tokens": text[:-1] if text[-1] == 7 else text, "stopped": text[-1] == 7, "first": 1,
                "first_s": 0.004, "total_s": 0.02}
'''
METHOD_NAMES = ("plain", "broken", "dying", "killed")
GREEDY = {**SETTINGS, "sampling": jaxspec.Sampling()}


@pytest.fixture
def models(tmp_path, monkeypatch):
    """The fake peer is registered, runs in this Python, and knows the plain texts but for one token."""
    (tmp_path / "fake_peer.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(peers.PEERS, "fake", peers.PeerSystem(("none",), METHOD_NAMES))
    monkeypatch.setattr(worker, "prepare_environment", lambda *_: pathlib.Path(sys.executable))
    texts = {}
    for question in (q for task in TASKS for q in task.questions):
        ids = cast("list[int]", question.turns[0])
        out = jaxspec.generate(TARGET, ids, drafter="none", max_new_tokens=12, key=jax.random.key(0))
        texts[json.dumps(ids)] = out[0].tokens
    wrong = texts["[6]"]
    wrong[1] = (wrong[1] + 1) % 7
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    return worker.Models({"hf": str(tmp_path / "texts.json")}, None, 64, TARGET.stop_ids)


def test_a_peer_takes_its_turns_and_its_texts_are_compared(models, tmp_path):
    (fake,), missing = worker.start_workers([("fake", "plain")], models, tmp_path, lambda line: None)
    assert missing == {}
    try:
        measured = run.measure_methods(TARGET, METHODS[:1], TASKS, repeats=2, peers=[fake], **GREEDY)
    finally:
        fake.close()
    assert measured.methods == (PLAIN_METHOD, METHODS[0].label, "fake plain")
    assert measured.peers == {"fake plain": {"fake": "True"}}
    rows = [row for row in measured.rows if row.method == "fake plain"]
    assert [row.difference is None for row in rows] == [True, True, False]
    difference = not_none(rows[2].difference)
    assert (difference.certificate, difference.place) == ("peer", 1)
    assert measured.wrong == []
    for row in rows:
        assert row.decode_s[0] == pytest.approx(0.016 * len(row.tokens) / (len(row.tokens) - 1))
        assert row.prefill_s[0] == pytest.approx(max(0.02 - row.decode_s[0], 0))
    console = Console(width=200, record=True, file=(tmp_path / "said").open("w"))
    tables = report.overall_table(measured), report.group_table(measured), report.peer_table(measured)
    for part in (*tables, report.format_versions(measured)):
        console.print(part)
    console.file.close()
    said = console.export_text()
    assert "fake True" in said
    assert f"{compare_methods(measured, PLAIN_METHOD, 'fake plain').median:.2f}x" in said
    assert "All 3 texts are those of plain decoding" in report.format_conclusion([measured])
    (line,) = report.describe_differences(measured)
    assert line.endswith("the text is another system's")
    json.dumps(report.as_record([measured], {}, {}, {}), allow_nan=False)


def test_peers_decode_greedily(models, tmp_path):
    (fake,), _ = worker.start_workers([("fake", "plain")], models, tmp_path, lambda line: None)
    with pytest.raises(InvalidConfig, match=r"only measured at temperature 0, got 0\.9"):
        run.measure_methods(TARGET, [], TASKS, peers=[fake], **SETTINGS)
    fake.close()


def test_what_does_not_start_is_said_and_left_out(models, tmp_path, monkeypatch):
    """An error in its process, a format it does not read, packages that are not there; and one that dies at work."""
    wanted = [("fake", method) for method in ("broken", "dying", "killed")]
    workers, missing = worker.start_workers(wanted, models, tmp_path, lambda line: None)
    assert list(missing) == ["fake broken"]
    assert "fake broken: OSError: no such weights (log: " in missing["fake broken"]
    for one, said in zip(workers, ("fake dying: more noise", "fake killed: ended by SIGKILL, .* memory"), strict=True):
        with pytest.raises(peers.PeerError, match=said):
            one.decode(run.BenchPrompt("t", "c", "i", 1, [6], jax.random.key(0)), 4, False)
    gguf = dataclasses.replace(models, target={"gguf": "x"})
    _, missing = worker.start_workers([("fake", "plain")], gguf, tmp_path, lambda line: None)
    assert "fake reads hf, but the target is in another format" in missing["fake plain"]


@pytest.mark.slow
def test_an_environment_that_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "absent", peers.PeerSystem(("jaxspec-no-such-package==1",), ("plain",)))
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(tmp_path)), ("PIP_CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(name, value)
    with pytest.raises(peers.PeerError, match=r"absent could not be installed: .*jaxspec-no-such-package"):
        peers.prepare_environment("absent", tmp_path, lambda line: None)
    assert not (tmp_path / "absent" / "installed.txt").exists()


def test_names():
    assert peers.parse_peers("llama.cpp:n-gram,transformers", False) == [
        ("llama.cpp", "n-gram"),
        ("transformers", "plain"),
        ("transformers", "prompt-lookup"),
    ]
    assert ("transformers", "assisted") in peers.parse_peers("transformers", True)
    with pytest.raises(UnknownName, match="peer"):
        peers.parse_peers("nobody", False)
    with pytest.raises(UnknownName, match="prompt-lookup"):
        peers.parse_peers("transformers:n-gram", False)
    with pytest.raises(InvalidConfig, match="needs a draft model"):
        peers.parse_peers("vllm:draft", False)
    for peer in peers.PEERS.values():
        assert peer.methods[0] == "plain"
        assert set(peer.drafts) <= set(peer.methods)
    scripts = {path.stem for path in worker.WORKERS_FOLDER.glob("*_peer.py")}
    assert scripts == {name.replace(".", "_").replace("-", "_") + "_peer" for name in peers.PEERS}


def test_the_command_says_what_it_will_not_do(capsys):
    assert main(["bench", "--peers", "llama.cpp", "--temperature", "0.7"]) == 2
    assert "--peers always decode greedily; use --temperature 0" in capsys.readouterr().err
    assert main(["bench", "--peers", "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err
