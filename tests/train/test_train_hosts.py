"""Tests runs of several processes: one folder, one end, and the losses of one process."""

import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
from train.test_train_mesh import KINDS

import jaxspec
from helpers import trainees
from helpers.compiling import simulated
from helpers.paths import TESTS
from jaxspec.backend.processes import parse_hosts
from jaxspec.errors import InvalidConfig
from jaxspec.train.manifest import LOG_FILE

pytestmark = pytest.mark.mesh

QUICK = """
import json, os, pathlib, sys
sys.path.insert(0, sys.argv[1])
from jaxspec.backend import processes
from jaxspec.errors import TrainingError


def run():
    import jax
    import jaxspec
    from helpers.narrow import not_none
    from train.test_training_checkpoints import state
    from jaxspec.train import placement
    from jaxspec.train.checkpoints import Checkpoints, DamagedCheckpoint, TrainCheckpoint
    from jaxspec.train.files import fingerprint

    folder, found = pathlib.Path(sys.argv[2]), {}
    number = found["number"] = processes.process_number()
    found["values"] = [processes.alone(lambda: [number, i]) for i in range(2)]

    def fail():
        raise DamagedCheckpoint("a message")

    try:
        processes.alone(fail)
    except DamagedCheckpoint as error:
        found["error"] = str(error)
    run = processes.number_run()
    found["ends"] = []
    for step in range(1, 6):  # each process waits for the step before, as it does for a collective
        found["ends"].append(processes.ends_after(step, number == 1 and step == 2, run))
        processes.wait_for_all()
    processes._ends_with_others = False

    placement.MIN_SPLIT_ELEMENTS = 4
    place = placement.Placement(jaxspec.make_mesh(2, 2))
    store = Checkpoints(folder)
    store.save(TrainCheckpoint(place.put(state(3), place.split(state(3))), {"at": 3}, None, place.devices))
    loaded = not_none(store.load_newest(place.describe(state(0)))[0])
    found["split"] = sum(not leaf.is_fully_replicated for leaf in jax.tree.leaves(loaded.state))
    found["sha256"] = [fingerprint(tree) for tree in (loaded.state, state(3))]
    found["devices"] = loaded.devices
    print(json.dumps(found), flush=True)
    if number:
        raise TrainingError("the reason of process 1")
    processes._wait_for("never")


try:
    with processes.joined(sys.argv[3]):
        run()
except TrainingError:
    os._exit(1)  # as the command does
"""

COMMAND = """
from jaxspec.cli import run_process
from jaxspec.train import placement
placement.MIN_SPLIT_ELEMENTS = 64
run_process()
"""
CHANGES = {"batch": 16, "accumulate": 2, "row_tokens": 40, "log_every": 1, "save_every": 4, "eval_every": 10}
STEPS = 80
MESSAGE = ("has ended", "another process", "another task died")
"""What the others say if a process was killed: jaxspec's words, or those of JAX."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def hosts(count: int = 2) -> list[str]:
    port = free_port()
    return [f"127.0.0.1:{port},{count},{number}" for number in range(count)]


def test_two_processes_agree_and_end_together(tmp_path):
    """Values, errors and ends are the same in both; a checkpoint has the parts of both; the end of one ends both."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", QUICK, str(TESTS), str(tmp_path), host],
            env=simulated(2), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for host in hosts()
    ]  # fmt: skip
    outs = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [1, 1], outs
    zero, one = (json.loads(out.splitlines()[-1]) for out, _ in outs)
    assert (zero.pop("number"), one.pop("number")) == (0, 1)
    assert zero == one
    assert (zero["values"], zero["error"]) == ([[0, 0], [0, 1]], "a message")
    assert zero["ends"] == [False, False, False, True, True]
    assert zero["split"] == 1
    assert len(set(zero["sha256"])) == 1
    assert zero["devices"].endswith("data=2, model=2, in 2 processes")
    assert "process 1 of 2 has ended: the reason of process 1; so this process ends as well" in outs[0][1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("text", ["", "host", "host:1", "host:1,2", "host:1,2,2", "host:1,2,-1", "host:a,2,0"])
def test_hosts_that_are_none_are_refused(text):
    with pytest.raises(InvalidConfig, match="hosts must be 'auto' or HOST:PORT,N,I"):
        parse_hosts(text)
    assert parse_hosts("auto") == (None, None, None)
    assert parse_hosts("[::1]:80,3,2") == ("[::1]:80", 3, 2)


class Runs:
    """Runs of one target and one file of prompts, each in a folder of its own."""

    def __init__(self, root: pathlib.Path, kind: str = "eagle3", **changes: Any):
        self.root, self.kind = root, kind
        target = jaxspec.save(trainees.target(num_kv_heads=4), root / "target")
        settings = trainees.TINY | CHANGES | changes
        self.words = ["train", kind.replace("medusa2", "medusa"), "--target", str(target), "--fit-prompts", "0"]
        self.words += ["--prompts", trainees.write_prompts(root / "prompts.jsonl")]
        of = KINDS[kind]
        if of.trains_model:
            settings["start"] = str(target)
        own = {f: getattr(of, f) for f in vars(of) if getattr(of, f) != getattr(type(of), f) and f != "start"}
        for name, value in (own | settings).items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                self.words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                self.words += [f"--{flag}", str(value)]
        self.env = {
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(root / "cache")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

    def start(self, name: str, processes: int, devices: int, mesh: str) -> list[subprocess.Popen]:
        """Starts the processes of a run, with this number of devices together."""
        started = []
        for number, host in enumerate(hosts(processes)):
            words = [*self.words, "--out", str(self.root / name), "--mesh", mesh]
            words += ["--hosts", host] if processes > 1 else []
            with self.said(name, number).open("w") as file:
                environment = simulated(devices // processes) | self.env
                command = [sys.executable, "-c", COMMAND, *words]
                started.append(subprocess.Popen(command, env=environment, stderr=file, stdout=subprocess.DEVNULL))
        return started

    def said(self, name: str, number: int) -> pathlib.Path:
        return self.root / f"{name}-{number}.txt"

    def run(self, name: str, processes: int, devices: int, mesh: str) -> None:
        """Runs to the end."""
        for number, process in enumerate(self.start(name, processes, devices, mesh)):
            assert process.wait(timeout=900) == 0, self.said(name, number).read_text()[-3000:]

    def found(self, name: str) -> dict[str, Any]:
        """The log, and of the last checkpoint the order of the rows and the checksum."""
        lines = [json.loads(line) for line in (self.root / name / LOG_FILE).read_text().splitlines()]
        about = json.loads(max((self.root / name).glob("checkpoints/step-*/about.json")).read_text())
        losses = [line["loss"] for line in lines if "loss" in line]
        steps = [line["step"] for line in lines if "loss" in line]
        return {"losses": losses, "steps": steps, "order": about["order"], "sha256": about["sha256"]}


def assert_rounded(found: dict[str, Any], whole: dict[str, Any]) -> None:
    """The same rows in the same order, and losses that differ by rounding."""
    assert (found["order"], found["steps"]) == (whole["order"], whole["steps"])
    assert found["losses"] == pytest.approx(whole["losses"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_have_the_losses_of_one(tmp_path, kind):
    """With one folder, in which every file and every line of the log is written once."""
    more = {"cache_features": False} if kind == "eagle1" else {}  # computed in every step, by both processes
    runs = Runs(tmp_path, kind, steps=8, **more)
    runs.run("one", 1, 1, "data=1")
    runs.run("two", 2, 8, "data=4,model=2")
    runs.run("again", 2, 8, "data=4,model=2")
    one, two, again = map(runs.found, ("one", "two", "again"))
    assert two["steps"] == list(range(1, 9))
    assert (two["losses"], two["sha256"]) == (again["losses"], again["sha256"])
    assert_rounded(two, one)
    names = {path.name for path in (tmp_path / "two" / "answers").glob("*.jsonl")}
    assert names == {"00000-of-00002.jsonl", "00001-of-00002.jsonl"}
    assert not [path for path in (tmp_path / "two").rglob("*") if ".part" in path.name]


def wait_for(condition: Any, started: list[subprocess.Popen], seconds: float = 600) -> bool:
    """Waits for a condition; returns False if a process has ended before."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        if any(process.poll() is not None for process in started):
            return False
        time.sleep(0.002)
    raise AssertionError("nothing happened")


def end_all(started: list[subprocess.Popen], name: str, runs: Runs, killed: list[int]) -> None:
    """Kills some processes; the others end with a message."""
    for number in killed:
        started[number].kill()
    for number, process in enumerate(started):
        status = process.wait(timeout=240)
        if number not in killed and status:  # it may have ended its run before
            text = runs.said(name, number).read_text()
            assert any(words in text for words in MESSAGE), (status, text[-2000:])


@pytest.mark.slow
def test_ten_kills_of_two_processes_change_nothing(tmp_path):
    """One or both are killed at random points, in a save or elsewhere; the run goes on here and on other meshes."""
    runs, rng, name = Runs(tmp_path, "medusa", steps=STEPS), random.Random(0), "parts"
    runs.run("whole", 2, 4, "data=2,model=2")
    folder, whole, inside = tmp_path / name, runs.found("whole"), 0

    def lines() -> int:
        path = folder / LOG_FILE
        return path.read_bytes().count(b"\n") if path.exists() else 0

    for kill in range(10):
        started = runs.start(name, 2, 4, "data=2,model=2")
        if kill == 0:  # while the target answers
            happened = wait_for(lambda: any(folder.glob("answers/*-of-*.jsonl")), started)
        else:
            first = rng.randrange(3)
            time.sleep(rng.uniform(0, 2))
            before = lines()
            happened = wait_for(lambda before=before, first=first: lines() > before + first, started)
            if kill % 2 and happened:
                happened = wait_for(lambda: any((folder / "checkpoints").glob(".part-*")), started)
                inside += happened
        killed = [[0, 1], [0], [1]][kill % 3]
        assert happened, [runs.said(name, number).read_text()[-2000:] for number in range(2)]
        end_all(started, name, runs, killed)
        print(f"kill {kill} of processes {killed} after {lines()} lines", flush=True)
    assert inside >= 4
    assert max(runs.found(name)["steps"]) < STEPS
    for copy in ("mesh", "device"):
        shutil.copytree(folder, tmp_path / copy)
    runs.run(name, 2, 4, "data=2,model=2")
    runs.run("mesh", 2, 4, "data=4")
    runs.run("device", 1, 1, "data=1")
    assert runs.found(name) == whole
    for copy in ("mesh", "device"):
        assert_rounded(runs.found(copy), whole)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_or_a_preemption_of_one_ends_both_after_a_step(tmp_path, number):
    """Both save the same step, and the run goes on to the same bits. While the target answers, both end at once."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # else processes in the background ignore it
    try:
        runs = Runs(tmp_path, "medusa", steps=24, save_every=100)
        runs.run("whole", 2, 4, "data=2,model=2")
        started = runs.start("parts", 2, 4, "data=2,model=2")
        assert wait_for(lambda: any((tmp_path / "parts").glob("answers/*-of-*.jsonl")), started)
        started[1].send_signal(number)
        assert started[1].wait(timeout=100) == 130
        assert started[0].wait(timeout=100) == 1
        assert "process 1 of 2 has ended: it was interrupted" in runs.said("parts", 0).read_text()
        started = runs.start("parts", 2, 4, "data=2,model=2")
        log = tmp_path / "parts" / LOG_FILE
        assert wait_for(lambda: log.exists() and log.read_bytes().count(b"\n") > 3, started)
        started[1].send_signal(number)
        assert [process.wait(timeout=100) for process in started] == [130, 130]
        assert len(list((tmp_path / "parts" / "checkpoints").glob("step-*-interrupted"))) == 1
        runs.run("parts", 2, 4, "data=2,model=2")
        assert runs.found("parts") == runs.found("whole")
    finally:
        signal.signal(signal.SIGINT, before)
