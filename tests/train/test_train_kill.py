"""Tests that a run interrupted twenty times, by kills and Ctrl-C, resumes to the same bits."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

import jaxspec
from helpers import trainees

STEPS, KILLS = 400, 20
CHANGES = {"steps": STEPS, "eval_every": 40, "save_every": 10, "log_every": 5, "batch": 2}


SIZES = {"medusa": trainees.SIZES, "eagle3": {"depth": 3}}


def command(folder: pathlib.Path, target: pathlib.Path, prompts: str, kind: str) -> list[str]:
    words = [sys.executable, "-m", "jaxspec", "train", kind, "--target", str(target), "--prompts", prompts]
    words += ["--out", str(folder), "--fit-prompts", "0"]
    for name, value in (trainees.TINY | SIZES[kind] | CHANGES).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def prints(folder: pathlib.Path) -> str:
    """What `jaxspec fingerprint` says."""
    words = [sys.executable, "-m", "jaxspec", "fingerprint", str(folder)]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.replace(folder.name, "RUN")


@pytest.fixture
def ctrl_c():
    """Processes that are started take Ctrl-C, even if these tests run in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("kind", SIZES)
def test_twenty_kills_change_nothing(tmp_path, kind):
    target = jaxspec.save(trainees.target(), tmp_path / "target")
    prompts = trainees.write_prompts(tmp_path / "prompts.jsonl")
    # Twenty starts would else be twenty compilations.
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    whole, parts, said = tmp_path / "whole", [tmp_path / "parts-0"], tmp_path / "stderr"
    began = time.monotonic()
    subprocess.run(command(whole, target, prompts, kind), check=True, env=environment, capture_output=True)
    rng, kills, inside = random.Random(0), 0, 0
    while kills < KILLS:
        words = command(parts[-1], target, prompts, kind)
        with said.open("w") as errors:
            process = subprocess.Popen(words, env=environment, stderr=errors)
        wait_for_save = kills % 2 == 0
        end = time.monotonic() + (60 if wait_for_save else rng.uniform(0.5, 20))
        saves = 0
        while process.poll() is None and time.monotonic() < end:
            if any((parts[-1] / "checkpoints").glob(".part-*")):
                saves += 1
                if wait_for_save and saves > rng.randrange(4):
                    inside += 1
                    break
            time.sleep(0.002)
        with_ctrl_c = kills % 4 == 3
        process.send_signal(signal.SIGINT if with_ctrl_c else signal.SIGKILL)  # nothing, if it has ended
        if process.wait() == 0:  # it came to its end before the signal; the next ones meet another run
            assert (parts[-1] / "heads" / "README.md").exists(), said.read_text()
            parts.append(tmp_path / f"parts-{len(parts)}")
            continue
        killed = (130, -signal.SIGINT) if with_ctrl_c else (-signal.SIGKILL,)
        assert process.returncode in killed, f"status {process.returncode}: {said.read_text()}"
        kills += 1
    subprocess.run(command(parts[-1], target, prompts, kind), check=True, env=environment, capture_output=True)
    print(f"{kills} kills of {len(parts)} runs, {inside} inside a save, {time.monotonic() - began:.0f} s")
    assert inside >= 5
    for folder in parts:
        assert prints(folder) == prints(whole)
