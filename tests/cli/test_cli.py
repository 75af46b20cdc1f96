"""Tests the command line in-process, with a tiny model of bytes."""

import dataclasses
import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import cases
import jaxspec
from helpers.checkpoints import random_params, tiny_config, write_bytes, write_hf
from helpers.narrow import not_none
from helpers.tiers import with_slow
from jaxspec.bench import texts
from jaxspec.cli import COMMANDS, demo, main, show
from jaxspec.cli.generate import print_in_order
from jaxspec.cli.options import UsageError
from jaxspec.cli.tree import TREE_GRAMMAR, parse_tree
from jaxspec.decode.session import Session, clear_executables
from jaxspec.generation.output import Chunk
from jaxspec.kernels.library import describe_kernels
from jaxspec.registry import DRAFTERS

CONFIG = tiny_config(vocab_size=264, max_position=4096)
PARAMS = random_params(CONFIG, 3)
PROMPT = "abcabcabc"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A checkpoint whose tokens are bytes, after three special ones."""
    return write_bytes(tmp_path_factory.mktemp("tiny"), CONFIG, PARAMS)


@pytest.fixture
def generate(directory, capsys):
    """Runs `jaxspec generate` and gives (status, stdout, stderr)."""

    def call(*words, target=directory):
        status = main(["generate", "--target", str(target), "--max-new-tokens", "24", *words])
        return status, *capsys.readouterr()

    return call


def errors(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("jaxspec: error: ")]


# --- generating ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "drafter", with_slow(cases.DRAFTERS, cases.DRAFTERS.keys() - {"none", "prompt-lookup", "eagle"})
)
def test_every_drafter_writes_the_plain_text(generate, directory, drafter, tmp_path):
    drafting = cases.words(drafter, jaxspec.load(directory), tmp_path)
    for sampling in ([], ["--temperature", "0.8", "--top-p", "0.95", "--seed", "7"]):
        plain = json.loads(generate(PROMPT, "--json", "--drafter", "none", *sampling)[1])
        status, out, _ = generate(PROMPT, "--json", *drafting, *sampling)
        (record,) = json.loads(out)
        assert status == 0
        for name in ("tokens", "text", "finish_reason"):
            assert record[name] == plain[0][name]
        assert record["stats"]["committed"] == len(record["tokens"])
    assert (record["stats"]["drafted"] > 0) == (drafter != "none")


def test_json_holds_what_is_documented(generate):
    status, out, err = generate("one", "two", "--samples", "2", "--json", "--logprobs", "--ignore-eos",
                                "--temperature", "1", "--seed", "3")  # fmt: skip
    records = json.loads(out)
    assert status == 0
    assert not errors(err)
    assert [(r["prompt"], r["sample"]) for r in records] == [("one", 0), ("one", 1), ("two", 0), ("two", 1)]
    assert records[0]["tokens"] != records[1]["tokens"]
    for record in records:
        assert set(record) == {
            "prompt", "sample", "text", "tokens", "finish_reason", "logprobs", "sampled_logprobs", "stats", "timing",
            "noise_version", "key_seed",
        }  # fmt: skip
        assert record["finish_reason"] == "length"
        assert len(record["tokens"]) == len(record["logprobs"]) == 24
        assert all(np.isfinite(record["logprobs"]))
        assert max(record["logprobs"]) <= 0
        assert record["key_seed"] == 3
        timing = record["timing"]
        assert timing["rows"] == 4
        assert timing["tokens_per_s"] == pytest.approx(timing["tokens"] / timing["decode_s"])


@pytest.mark.parametrize("words", [["--logprobs", "2", PROMPT], [PROMPT, "--logprobs=2"], [PROMPT, "--logprobs", "2"]])
def test_logprobs_take_a_number_of_alternatives(generate, words):
    (record,) = json.loads(generate(*words, "--json", "--drafter", "none", "--max-new-tokens", "6", "--ignore-eos")[1])
    assert record["prompt"] == PROMPT
    assert record["sampled_logprobs"] == [0.0] * 6, "greedy"
    assert [len(top) for top in record["top_logprobs"]] == [2] * 6
    assert [top[0] for top in record["top_logprobs"]] == list(map(list, zip(record["tokens"], record["logprobs"])))


def test_a_prompt_after_logprobs_is_no_number_of_them(generate):
    plain = json.loads(generate(PROMPT, "--logprobs", "--json", "--drafter", "none")[1])
    (record,) = json.loads(generate("--json", "--drafter", "none", "--logprobs", PROMPT)[1])
    assert record["prompt"] == PROMPT
    assert "top_logprobs" not in record
    assert record["logprobs"] == plain[0]["logprobs"]


def test_streamed_text_is_the_text_of_the_json(generate):
    settings = ("--temperature", "1.5", "--ignore-eos", "--seed", "11")
    status, out, err = generate(PROMPT, *settings)
    (record,) = json.loads(generate(PROMPT, *settings, "--json")[1])
    assert status == 0
    assert out == record["text"] + "\n"
    assert re.search(r"24 tokens, [\d.]+ tokens/s of decoding alone, [\d.]+ tokens per round", err)


def test_many_prompts_into_a_file(generate, tmp_path):
    """Two at a time, and resumed after the file lost its end; the texts are those of each prompt's place."""
    asked, out = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    asked.write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo and a half\r\nthree\r\nfour\r\nfive")
    settings = ("--temperature", "1", "--ignore-eos", "--drafter", "none")
    command = ("--prompts", str(asked), "--out", str(out), "--batch", "2", *settings)
    status, printed, err = generate(*command)
    assert (status, printed) == (0, "")
    assert f"{asked}: 5 prompts\n" in err
    assert "5 texts, caches of" in err
    right = json.loads(generate("one", "two and a half", "three", "four", "five", *settings, "--json")[1])
    whole = out.read_bytes()
    records = [json.loads(line) for line in whole.splitlines()]
    assert [record["index"] for record in records] == [0, 1, 2, 3, 4]
    for record, expected in zip(records, right, strict=True):
        assert all(record[name] == expected[name] for name in ("prompt", "sample", "text", "tokens", "finish_reason"))
    lines = whole.splitlines(keepends=True)
    out.write_bytes(lines[4] + lines[1] + lines[0] + lines[2][:20])
    status, _, err = generate(*command)
    assert status == 0
    assert f"5 texts, 3 of them already in {out}, caches of" in err
    assert out.read_bytes() == whole
    status, _, err = generate(*command, "--seed", "1")
    assert status == 1
    assert "texts of another key; choose a new file" in err
    assert out.read_bytes() == whole


@pytest.mark.parametrize(("split", "count"), with_slow([("line", 3), ("blank", 2), ("file", 1)], ("line", "file")))
def test_a_text_file_is_split_as_wanted(generate, tmp_path, split, count):
    asked = tmp_path / "prompts.txt"
    asked.write_text("ab\ncd\n\nef\n")
    status, out, err = generate(
        "--prompts", str(asked), "--split", split, "--json", "--drafter", "none", "--max-new-tokens", "1"
    )
    assert status == 0
    assert f"{asked}: {count} prompt" in err
    prompts = {"line": ["ab", "cd", "ef"], "blank": ["ab\ncd", "ef"], "file": ["ab\ncd\n\nef"]}[split]
    assert [record["prompt"] for record in json.loads(out)] == prompts


def test_seeds_differ_and_repeat(generate):
    texts = [generate(PROMPT, "--temperature", "1", "--seed", seed)[1] for seed in ("1", "2", "1")]
    assert texts[0] == texts[2] != texts[1]


def test_stop_strings(generate):
    settings = ("--temperature", "1", "--ignore-eos")
    whole = generate(PROMPT, *settings)[1].removesuffix("\n")
    stop = next(c for c in whole[5:] if c not in whole[:5] and c != "\ufffd")
    (record,) = json.loads(generate(PROMPT, *settings, "--json", "--stop", "never there", "--stop", stop)[1])
    assert record["text"] == whole[: whole.index(stop)]
    assert record["finish_reason"] == "stop"


def test_prompt_from_standard_input(generate, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
    status, out, _ = generate("--json")
    assert status == 0
    assert json.loads(out)[0]["prompt"] == PROMPT
    assert out == out.encode("ascii").decode()


def test_rows_are_printed_in_order(capsys):
    chunks = [("b1", 1, None), ("a1", 0, None), ("b2", 1, "stop"), ("a2", 0, "stop"), ("c", 2, "stop")]
    seen = []

    def arrive():
        for text, row, reason in chunks:
            yield Chunk(row, text, [], reason)
            seen.append(capsys.readouterr().out)

    print_in_order(arrive(), ["A", "B", "C"])
    assert seen == ["A\n", "a1", "", "a2\n\nB\nb1b2\n\nC\n", "c\n"]


# --- failing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no command given"),
        (["genrate", "x"], "Did you mean 'generate'?"),
        (["--verison"], "did you mean '--version'?"),
        (["generate", "--drafter", "promt-lookup", "x"], "Did you mean 'prompt-lookup'?"),
        (["generate", "--rule", "copuled", "x"], "Did you mean 'coupled'?"),
        (["generate", "--dtype", "float16", "x"], "Did you mean"),
        (["generate", "--drafter", "none", "--draft-dtype", "int8", "x"], "--draft-dtype needs a draft model"),
        (["generate", "--temprature", "1", "x"], "did you mean '--temperature'?"),
        (["generate", "--samples", "0", "x"], "--samples: expected a whole number from 1 to 1048576, got '0'"),
        (["generate", "--temperature", "hot", "x"], "--temperature"),
        (["generate", "--tree", "4x2", "--draft-length", "3", "x"], "give only one of them"),
        (["generate", "--tree", "4,x", "x"], TREE_GRAMMAR),
        (["generate", "--drafter-option", "exit_layers=1", "x"], "the drafter prompt-lookup has no such option"),
        (["generate", "--drafter-option", "exit_layers", "x"], "expected NAME=VALUE"),
        (["generate", "--draft-model", "a", "x"], "is for the drafter model"),
        (["generate", "--drafter", "model", "x"], "needs --draft-model"),
        (["generate", "--logprobs", "x"], "add --json"),
        (["generate", "--logprobs", "0", "x"], "add --json"),
        (["generate", "--logprobs", "2.5", "x"], "expected a whole number from 0"),
        (["generate", "--json", "--logprobs", "9999", "x"], "expected a whole number from 0 to 1024"),
        (["generate", "--prompts", "a.txt", "x"], "PROMPT and --prompts"),
        (["generate", "--prompts", "a.txt", "--split", "lines"], "Did you mean 'line'?"),
        (["generate", "--prompts", "a.jsonl", "--split", "line"], "--split is for .txt files"),
        (["generate", "--split", "line", "x"], "--split is for .txt files"),
        (["bench", "--split", "line"], "--split is for .txt files"),
        (["generate", "--out", "a.jsonl", "--json", "x"], "give only one of them"),
        (["generate", "--out", "no/such/place.jsonl", "x"], "there is no folder"),
        (["generate", "--batch", "0", "x"], "--batch: expected a whole number from 1"),
        (["generate"], "standard input is empty"),
        (["chat", "--drafter", "model"], "needs --draft-model"),
        (["chat", "--colr"], "did you mean '--color'?"),
    ],
)
def test_usage_errors(capsys, monkeypatch, words, said):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert errors(err) == err.splitlines()
    assert len(errors(err)) == 1
    assert said in err


def test_a_terminal_is_not_waited_for(capsys, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert main(["generate"]) == 2
    assert "no PROMPT given" in capsys.readouterr().err


def test_trees():
    assert parse_tree("4x2x1") == jaxspec.branching(4, 2, 1)
    assert parse_tree("3") == jaxspec.branching(3)
    assert parse_tree("0-0-0,0-1,1") == jaxspec.from_paths([(0, 0, 0), (0, 1), (1,)])
    assert parse_tree("0,1") == jaxspec.branching(2)
    for spec in ("", "0", "4x0", "4x", "0-", "-1", "a", "999x999x999", "0 x 2", "٣"):
        with pytest.raises(UsageError, match="Write the number of children"):
            parse_tree(spec)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--drafter", "early-exit", "--tree", "300x1"], "children, but the draft has a vocabulary of only 259"),
        (["--chat"], "has no chat template; pass plain text (--no-chat)"),
        (["--max-new-tokens", "100000"], "model's context of 4096"),
        (["--drafter", "early-exit", "--drafter-option", "exit_layers=9"], "the target has 2"),
        (["--target", "smollm2-135m-instrukt"], "Did you mean 'smollm2-135m-instruct'?"),
        (["--target", "./nowhere.gguf"], "no such file"),
    ],
)
def test_failures_are_one_line(generate, words, said):
    status, out, err = generate(PROMPT, *words)
    assert status == 1
    assert out == ""
    assert errors(err) == err.splitlines()[-1:]
    assert said in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback(generate):
    status, _, err = generate(PROMPT, "--max-new-tokens", "100000", "--debug")
    assert status == 1
    assert err.index("Traceback") < err.index("CapacityError: max_new_tokens")


def test_unforeseen_failures_name_their_kind(generate, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(show, "load_model", fail)
    assert errors(generate(PROMPT)[2]) == ["jaxspec: error: RuntimeError: two lines"]


def test_logits_that_are_not_finite(generate, directory, tmp_path):
    broken = PARAMS | {"norm": np.full_like(PARAMS["norm"], 3e38)}
    files = {"tokenizer.json": (directory / "tokenizer.json").read_text()}
    target = write_hf(tmp_path / "broken", CONFIG, broken, files=files)
    status, out, err = generate(PROMPT, "--json", target=target)
    assert status == 1
    assert json.loads(out)[0]["finish_reason"] == "error"
    assert "not finite" in errors(err)[0]


def test_interrupt_keeps_the_text_so_far(generate, monkeypatch):
    settings = (PROMPT, "--temperature", "1", "--ignore-eos", "--drafter", "none")
    whole, steps, run = generate(*settings)[1], iter(range(9)), Session.run

    def interrupted(session, *rounds):
        if next(steps) == 2:
            raise KeyboardInterrupt
        run(session, *rounds)

    monkeypatch.setattr(Session, "run", interrupted)
    status, out, err = generate(*settings)
    assert status == 130
    assert out
    assert whole.startswith(out)
    assert err.endswith("\njaxspec: interrupted\n")


def test_an_interrupted_import_is_an_interrupt(directory, capsys, monkeypatch):
    """Python 3.11 raises a RuntimeError if Ctrl-C comes while a class names its members."""

    def interrupted(*_):
        raise KeyboardInterrupt

    def load(*_, **__):
        type("Imported", (), {"member": type("Member", (), {"__set_name__": interrupted})()})

    monkeypatch.setattr(show, "load_model", load)
    assert main(["generate", "x", "--target", str(directory)]) == 130
    assert capsys.readouterr().err.endswith("\njaxspec: interrupted\n")


def test_an_interrupt_that_python_drops_comes_again(directory, capsys, monkeypatch):
    """In a callback of the garbage collector no exception leaves; JAX has one, so this happens."""
    dropped = []

    def interrupted(phase, _):
        if phase == "start" and not dropped:
            dropped.append(phase)
            raise KeyboardInterrupt

    def load(*_, **__):
        gc.callbacks.append(interrupted)  # not before: a collection outside the command would take the only interrupt
        gc.collect()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            time.sleep(0.01)

    monkeypatch.setattr(show, "load_model", load)
    hook, handler = sys.unraisablehook, signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["generate", "x", "--target", str(directory)]) == 130
    finally:
        gc.callbacks.remove(interrupted)
        signal.signal(signal.SIGINT, handler)
    assert dropped
    assert sys.unraisablehook is hook
    assert capsys.readouterr().err.endswith("\njaxspec: interrupted\n")


# --- the program --------------------------------------------------------------------------------------------


def test_help_comes_at_once():
    took = []
    for words in [["--help"], *([name, "--help"] for name in COMMANDS)]:
        code = f"import sys, jaxspec.cli; print(jaxspec.cli.main({words}), 'jax' in sys.modules)"
        start = time.perf_counter()
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        took.append(time.perf_counter() - start)
        assert ran.stdout.startswith("usage: jaxspec")
        assert ran.stdout.endswith("0 False\n")
        assert not ran.stderr
    assert min(took) < 1  # the quickest, as the others may have had to wait for the machine


def test_module_and_closed_pipe():
    command = [sys.executable, "-m", "jaxspec", "--version"]
    ran = subprocess.run(command, capture_output=True, text=True)
    lines = ran.stdout.splitlines()
    assert (ran.returncode, lines[0], lines[1].split()[0]) == (0, f"jaxspec {jaxspec.__version__}", "JAX")
    assert lines[2] == f"CPU kernels: {describe_kernels()}"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    left = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered)
    not_none(left.stdout).close()  # nobody reads
    assert left.wait() == 141
    with not_none(left.stderr) as errors:
        assert errors.read() == b""


@pytest.mark.slow
def test_what_was_compiled_is_kept(directory, tmp_path):
    """In our folder, by Python as by the command; later processes, with and without text, compile nothing anew."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    mine |= {"JAXSPEC_CACHE": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    words = [sys.executable, "-m", "jaxspec", "generate", "--target", str(directory), "--max-new-tokens", "4", PROMPT]
    python = f"""
import jax, jaxspec
target = jaxspec.load({str(directory)!r})
assert jax.config.jax_compilation_cache_dir is None
jaxspec.generate(target, {PROMPT!r}, max_new_tokens=4, rounds=jaxspec.api.STEP)
"""
    kept = []
    for command in ([sys.executable, "-c", python], [*words, "--compile-only"], words):
        ran = subprocess.run(command, env=mine, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        assert "Warning" not in ran.stderr
        assert bool(ran.stdout) == (command == words)
        every = (tmp_path / "xla").glob("*-cache")  # also of small operations, which may differ
        kept.append({path.name for path in every if path.stat().st_size > 50_000})
    assert kept[0]
    assert kept[0] == kept[1] == kept[2]


def test_quiet_says_nothing_of_progress(generate):
    clear_executables()
    status, out, err = generate(PROMPT, "--drafter", "none")
    assert status == 0
    assert re.search(r"^jaxspec: compiling \.\.\.\njaxspec: compiled in [\d.]+ s$", err, re.MULTILINE)
    assert "tokens/s" in err
    clear_executables()
    assert generate(PROMPT, "--drafter", "none", "-q") == (0, out, "")
    assert generate(PROMPT, "--drafter", "none", "--quiet", "--compile-only") == (0, "", "")
    assert "nothing had to be compiled" in generate(PROMPT, "--drafter", "none", "--compile-only")[2]
    assert errors(generate(PROMPT, "-q", "--max-new-tokens", "100000")[2])


# --- the demo -----------------------------------------------------------------------------------------------


def test_demo(directory, capsys, monkeypatch):
    drafters = {name: DRAFTERS[name] for name in ("prompt-lookup", "none")}
    monkeypatch.setattr(demo, "DRAFTERS", drafters)
    monkeypatch.setenv("COLUMNS", "60")
    for name in texts.DEMO_TASKS:  # as short as the other tests' prompts: nothing compiles anew
        monkeypatch.setitem(texts.DEMO_TASKS, name, (PROMPT, 12))
    assert main(["demo", "--target", str(directory)]) == 0
    out, err = capsys.readouterr()
    assert len(re.findall(r"^none \(plain\)  .* 1\.00 +1\.00 +1\.00 +yes$", out, re.MULTILINE)) == 2
    speeds = re.findall(r"^prompt-lookup +[\d.]+ +([\d.]+) .* yes$", out, re.MULTILINE)
    closing = " ".join(out[out.index("What this means") :].split())
    for task, times in zip(("An ordinary question", "Repeating code with one change"), speeds, strict=True):
        (verdict,) = re.findall(rf"{task}: drafting .*? ([\d.]+) times as fast", closing)
        assert verdict == times, "what is taken home is what was measured"
    assert "the same text as plain decoding" in " ".join(out.split())
    assert f"--target {directory}" in out
    lines = out[out.index("\nprompt-lookup:") :].splitlines()
    assert max(len(line) for line in lines if str(directory) not in line) <= 60, "but for a path, which stays whole"
    assert "compiling prompt-lookup" in err
    assert len(err.splitlines()) <= 6, "no bars and no repetitions where no terminal is"

    assert main(["demo", "--short", "--target", str(directory)]) == 0
    out, err = capsys.readouterr()
    assert "the same text as plain decoding" in " ".join(out.split())
    assert err.count("loading ") == 1, "no draft model"

    decode = demo.Bench.decode

    def wrong(bench, name, *rest, **options):
        output = decode(bench, name, *rest, **options)
        rows = [dataclasses.replace(row, tokens=[1]) if name == "prompt-lookup" else row for row in output]
        return dataclasses.replace(output, rows=rows)

    monkeypatch.setattr(demo.Bench, "decode", wrong)
    assert main(["demo", "--target", str(directory)]) == 1
    assert "A TEXT DIFFERS" in capsys.readouterr().out
