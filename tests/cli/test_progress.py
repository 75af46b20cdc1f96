"""Tests progress without a terminal: a few lines, none of them twice."""

import subprocess

import pytest

from helpers.paths import ROOT
from jaxspec.cli import show
from jaxspec.decode.session import Timing
from jaxspec.decode.stats import Stats
from jaxspec.train.monitor import Monitor

pytestmark = pytest.mark.quick


def test_a_bar_is_a_few_lines(capsys):
    """However often it is called, and whatever it leaps over."""
    with show.Bar("decoding", parts=show.PROGRESS_LINES) as bar:
        for done in (*range(1000), 999, 1000, 1000):
            bar(done, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["decoding ...", *(f"decoding: {done} of 1000" for done in (250, 500, 750, 1000))]
    with show.Bar("decoding", parts=show.PROGRESS_LINES) as bar:
        for done in (3, 90, 95, 100):
            bar(done, 100)
    assert capsys.readouterr().err.splitlines() == ["decoding ...", "decoding: 90 of 100", "decoding: 100 of 100"]
    with show.Bar("loading") as bar:
        bar(1, 1)
    assert capsys.readouterr().err == "loading ...\n"


def test_a_bar_speaks_in_a_long_step(capsys, monkeypatch):
    """However little is done after half a minute; a bar that is quick says nothing more."""
    now = [100.0]
    monkeypatch.setattr(show.time, "monotonic", lambda: now[0])
    with show.Bar("measuring trees", parts=show.PROGRESS_LINES) as bar:
        for done, at in ((1, 101), (2, 131), (3, 132), (4, 150), (5, 162), (25, 163)):
            now[0] = float(at)
            bar(done, 100)
    said = capsys.readouterr().err.splitlines()
    assert said == ["measuring trees ...", *(f"measuring trees: {done} of 100" for done in (2, 5, 25))]


@pytest.mark.parametrize("accepted", [0, 1, 6, 7])
@pytest.mark.parametrize("drafted", [7, 1, 0])
def test_the_summary_cannot_be_misread(accepted, drafted):
    """A share would not say of what: of drafted tokens or of tested ones."""
    stats = Stats(rounds=3, drafted=drafted, tested=2, accepted=min(accepted, drafted), committed=4)
    said = show.format_summary(Timing(decode_s=2.0, tokens=4), stats)
    assert "%" not in said
    assert "4 tokens, 2.0 tokens/s of decoding alone, 1.33 tokens per round, " in said
    tokens = f"{stats.accepted} of {drafted} drafted token{'s' * (drafted != 1)} accepted"
    assert (tokens if drafted else "nothing drafted") in said


def test_nothing_that_was_there_has_a_speed():
    assert (
        show.format_summary(Timing(), Stats(rounds=9, committed=26))
        == "26 tokens, all from earlier; this command decoded nothing"
    )


def test_training_is_a_few_lines(tmp_path, capsys):
    record = {
        "loss": 1.0,
        "loss_by_token": [1.0],
        "top1": [0.5],
        "top5": [0.6],
        "accepted": [0.5],
        "accepted_length": 1.5,
        "tokens_per_s": 10.0,
    }
    with Monitor(tmp_path, log_every=10) as monitor:
        for done in (*range(1, 101), 100, 100):
            monitor.watch.phase("answers", done, 100)
        for step in range(10, 1610, 10):
            monitor.watch.step(step, 1600, record | {"step": step})
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("answers")] == [
        f"answers: {done} of 100" for done in (25, 50, 75, 100)
    ]
    assert [line.split(":")[0] for line in lines if line.startswith("step")] == [
        f"step {step} of 1600" for step in range(80, 1601, 80)
    ]
    assert len(lines) == 24


def test_a_line_is_passed_once():
    lines = []
    say = show.skip_repeats(lines.append)
    for line in "aabab":
        say(line)
    assert lines == ["a", "b"]


def test_what_make_installs_is_silent_where_no_terminal_is():
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", "demo"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (install,) = [line for line in said.splitlines() if "pip install" in line]
    assert " --quiet " in install
