"""Tests that wrong command lines are refused in one line, before any weight is read, in the words of the shell."""

import argparse
import importlib
import os
import re

import pytest

import jaxspec
from helpers.checkpoints import random_params, tiny_config, write_bytes
from helpers.toys import transformer
from jaxspec.cli import COMMANDS, drafting, main, show
from jaxspec.cli.flags import as_flags
from jaxspec.cli.options import Parser, UsageError
from jaxspec.cli.tree import parse_tree
from jaxspec.generation.drafting import Drafting
from jaxspec.registry import RULES, SCHEDULES

pytestmark = pytest.mark.quick

CONFIG = tiny_config(vocab_size=264, max_position=4096)
DECODING = ("generate", "chat", "tune", "bench", "acceptance")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and files of all kinds beside it."""
    place = tmp_path_factory.mktemp("refused")
    write_bytes(place / "model", CONFIG, random_params(CONFIG, 3))
    (place / "file.txt").write_text("a prompt\n")
    (place / "empty.txt").write_text("\n \n")
    (place / "empty.jsonl").write_text("")
    (place / "odd.jsonl").write_text('{"colour": "x"}\n')
    (place / "broken.jsonl").write_text('{"prompt": "x"\n')
    (place / "broken.json").write_text("{")
    (place / "picture.png").write_bytes(b"\x89PNG")
    (place / "folder").mkdir()
    return place


@pytest.fixture
def refused(folder, capsys, monkeypatch):
    """Runs a command in that folder, checks that it is refused before a weight is read, and returns the line."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(show, "load_model", lambda *_, **__: pytest.fail("the weights are loaded"))

    def call(command, *words, plain=True):
        needed = {
            "generate": ["x"] * plain,
            "tune": ["--drafter", "prompt-lookup", "--out", "tuned.json"] + ["x"] * plain,
            "bench": ["--tasks", "copy"] * plain,
            "acceptance": ["--drafter", "early-exit", "--prompt", "x"],
        }
        assert main([command, "--target", "model", *needed.get(command, []), *words]) in (1, 2), words
        out, err = capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1, err
        assert err.startswith("jaxspec: error: ")
        assert "Traceback" not in err
        return err

    return call


BAD_SETTINGS = {
    "--temperature": {"-1": "at least 0", "nan": "at least 0", "inf": "finite", "hot": "a number", "": "a number"},
    "--top-p": {"95": "did you mean 0.95?", "0": "above 0", "-0.1": "above 0", "nan": "above 0", "x": "a number"},
    "--min-p": {"-0.1": "between 0 and 1", "5": "did you mean 0.05?", "nan": "between 0 and 1", "": "a number"},
    "--top-k": {"-1": "from 0", "1.5": "from 0", "99999999999": "from 0 to 2147483647"},
    "--max-new-tokens": {"0": "from 1", "-5": "from 1", "4096": "model's context of 4096", "9" * 30: "from 1"},
}


@pytest.mark.parametrize("command", DECODING)
@pytest.mark.parametrize("option", BAD_SETTINGS)
def test_settings(refused, command, option):
    for value, said in BAD_SETTINGS[option].items():
        if (command, value) == ("chat", "4096"):  # a chat lowers its budget to the room that is left
            continue
        line = refused(command, f"{option}={value}")
        assert option in line
        assert said in line
        assert re.search(r"\b(top_p|min_p|max_new_tokens)\b", line) is None


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        ("generate", ["--stop", ""], "--stop: the string is empty"),
        ("chat", ["--stop", "a", "--stop", ""], "--stop: the string is empty"),
        ("generate", [""], "the prompt is empty"),
        ("tune", [""], "the prompt is empty"),
        ("acceptance", ["--prompt", ""], "--prompt: the prompt is empty"),
        ("generate", ["--samples", "9999999"], "from 1 to 1048576"),
        ("generate", ["--context", "9999"], "context is 9999, but the model supports at most 4096"),
        ("generate", ["--chat"], "has no chat template; pass plain text (--no-chat) instead"),
        ("chat", [], "has no chat template"),
        (
            "generate",
            ["--rule", "block", "--tree", "4x2x1", "--drafter", "recycling"],
            "--rule block with --tree 4x2x1",
        ),
        ("generate", ["--rule", "block", "--drafter", "early-exit", "--tree", "2x2"], "--rule block with --tree 2x2"),
        ("generate", ["--draft-length", "0"], "--draft-length 0: the drafter prompt-lookup drafts at least"),
        ("generate", ["--draft-length", "0", "--drafter", "early-exit"], "for plain decoding, use --drafter none"),
        ("generate", ["--tree", "4x2x1"], "give --draft-length, or --tree dynamic-BEAMxDEPTH-NODES"),
        ("generate", ["--tree", "dynamic-4x2-12"], "nodes must be at most 9"),
        ("generate", ["--tree", "40x2", "--drafter", "recycling"], "recycling knows"),
        ("generate", ["--rule", "lossy-cascade"], "--rule lossy-cascade with --drafter prompt-lookup"),
        ("bench", ["--drafters", "prompt-lookup", "--rule", "lossy-cascade"], "--rule lossy-cascade with --drafters"),
        ("bench", ["--drafters", "recycling:2x2", "--rule", "block"], "--rule block with --drafters recycling:2x2"),
        ("bench", ["--drafters", "prompt-lookup,prompt-lookup"], "prompt-lookup is named twice"),
        ("bench", ["--drafters", "early-exit:0"], "drafts at least one token"),
        ("bench", ["--drafters", "recycling:4,2"], "did you mean 4x2?"),
        ("bench", ["--draft-dtype", "int8"], "--draft-dtype needs a draft model"),
        ("bench", ["--tasks", "mt-bnech"], "Did you mean 'mt-bench'?"),
        ("bench", ["--tasks", "nothing.jsonl"], "nothing.jsonl"),
        ("bench", ["--temperature", "0,-1"], "at least 0"),
        ("bench", ["--temperature", "1,,2"], "a number"),
        ("tune", ["--tree", "dynamic-8x5-32"], "a dynamic tree changes in every round"),
        ("tune", ["--tree", "2x2"], "prompt-lookup drafts a chain"),
        ("acceptance", ["--children", "0"], "from 1"),
        ("generate", ["--drafter", "model", "--draft-model", "./nothing.gguf"], "nothing.gguf: no such file"),
        ("generate", ["--drafter", "model", "--draft-model", "smollm2-135m-instrukt"], "smollm2-135m-instruct"),
        ("bench", ["--drafters", "model", "--draft-model", "./nothing"], "nothing: no such file"),
        ("generate", ["--drafter", "medusa", "--heads", "./nothing"], "nothing"),
        ("generate", ["--drafter", "eagle", "--heads", "smollm2-135m-instruct/medusa"], "for --drafter medusa"),
        ("bench", ["--heads", "./nothing"], "nothing"),
        ("generate", ["--tuned", "nothing.json"], "nothing.json"),
        ("generate", ["--tuned", "broken.json"], "broken.json"),
        ("generate", ["--target", "./nothing.gguf"], "nothing.gguf: no such file"),
        ("generate", ["--target", "file.txt"], "not a supported checkpoint"),
    ],
)
def test_before_any_weight_is_read(refused, command, words, said):
    assert said in refused(command, *words)


@pytest.mark.parametrize("name", ["nothing.txt", "folder", "empty.txt", "empty.jsonl", "odd.jsonl", "broken.jsonl",
                                  "broken.json", "picture.png", "folder/nothing.jsonl"])  # fmt: skip
def test_files_of_prompts(refused, name):
    assert name in refused("generate", "--prompts", name, plain=False)
    assert name in refused("bench", "--tasks", name, plain=False)


@pytest.mark.parametrize(
    ("command", "option", "is_folder"),
    [
        ("generate", "--out", False),
        ("tune", "--out", False),
        ("bench", "--json", False),
        ("acceptance", "--json", False),
        ("bench", "--plots", True),
        ("bench", "--peers-folder", True),
    ],
)
def test_outputs_that_cannot_be_written(refused, folder, command, option, is_folder):
    kinds = {"file.txt/inside": "is a file", "": "is empty", "a\0b": "NUL", "x" * 300: "too long"}
    kinds |= {"file.txt": "expected a folder"} if is_folder else {"folder": "is a folder, expected a file"}
    kinds |= {} if is_folder else {"no/such/file": f"there is no folder {folder}/no/such; create it first"}
    for name, said in kinds.items():
        line = refused(command, option, name)
        assert option in line
        assert said in line, line
    if os.geteuid():  # root may write everywhere
        (folder / "folder").chmod(0o500)
        try:
            name = "folder/inside"
            assert "no permission to write" in refused(command, option, name)
        finally:
            (folder / "folder").chmod(0o700)


def error_of(kind: type[Exception], call, *args) -> str | None:
    """The message of the error that a call raises; None if it raises none."""
    try:
        call(*args)
    except kind as error:
        return str(error)
    return None


TREES = {None: None, "1": 1, "3": 3, "2x2": jaxspec.branching(2, 2), "dynamic-4x3-8": jaxspec.dynamic(4, 3, 8)}


@pytest.mark.parametrize("drafter", ["none", "prompt-lookup", "recycling"])
@pytest.mark.parametrize("rule", RULES)
def test_members_are_refused_as_the_decoder_refuses_them(drafter, rule):
    """What needs no model is known before one is loaded: neither more nor less than what building refuses."""
    lm = transformer()
    model = jaxspec.Model(lm, {})
    for name, tree in TREES.items():
        early = error_of(UsageError, drafting.check_members, drafter, rule, tree, f"--tree {name}" * bool(name))
        late = error_of(Exception, Drafting(drafter, rule=rule, tree=tree).build, model)
        assert (early is None) == (late is None), (name, early, late)
        assert early is None or f"--drafter {drafter}" in early or f"--rule {rule}" in early


# --- trees ----------------------------------------------------------------------------------------------------------

SIZES = ["4x2x1", "2x2", "8", "16x4x2x1", "1x1x1", "3x1"]


@pytest.mark.parametrize("meant", SIZES)
def test_a_tree_in_another_notation_is_recognised(meant):
    counts = meant.split("x")
    written = [", ".join(counts), " x ".join(counts), "X".join(counts), "*".join(counts), "×".join(counts)]
    written += [f"[{','.join(counts)}]", f"({', '.join(counts)})", f" {meant}", f"{meant} ", ";".join(counts)]
    checked = 0
    for spec in written:
        if spec == meant or (len(counts) == 1 and spec.strip("[]() ") == meant and spec == spec.strip("[]() ")):
            continue
        with pytest.raises(UsageError, match=f"did you mean {re.escape(meant)}\\?$"):
            parse_tree(spec)
        checked += 1
    assert checked >= 4


@pytest.mark.parametrize(
    "spec", ["dynamic-8-5-32", "dynamic-8x5x32", "dynamic(8, 5, 32)", "dyn-8x5-32", "Dynamic-8x5-32"]
)
def test_a_dynamic_tree_in_another_notation_is_recognised(spec):
    with pytest.raises(UsageError, match=r"did you mean dynamic-8x5-32\?$"):
        parse_tree(spec)


def test_a_name_of_a_tree_is_recognised():
    with pytest.raises(UsageError, match=r"did you mean mc_sim_7b_63\?$"):
        parse_tree("mc_sim_7b")
    assert parse_tree("0-0-0,0-1,1").shape.nodes == 6, "paths are no sizes in another notation"


# --- the words of the command line ------------------------------------------------------------------------------------


def parser(command: str) -> Parser:
    made = Parser(prog=f"jaxspec {command}")
    importlib.import_module(f"jaxspec.cli.{command}").add_options(made)
    return made


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_named_as_it_is_written(command):
    """An error of the API names `max_new_tokens`; a user of the command line has written `--max-new-tokens`."""
    made = parser(command)
    count, first = 0, {}
    for action in made._actions:
        if not action.option_strings or action.dest == "help":
            continue
        name = action.dest
        flag = first.setdefault(name, action.option_strings[0])  # two options may set one argument
        if "_" in name:
            assert as_flags(f"lower {name}, or not", made) == f"lower {flag}, or not"
            assert as_flags(f"{name} must be above 0", made) == f"{flag} must be above 0"
        assert as_flags(f"pass {name}=", made) == f"pass {flag}"
        assert as_flags(f"set {name}=True to do it", made) == f"set {flag} to do it"
        assert as_flags(f"give it ({name}=..., or {flag})", made) == f"give it ({flag})"
        assert as_flags(f"see /a/{name}/b and my{name}", made) == f"see /a/{name}/b and my{name}"
        if name.isalpha():
            assert as_flags(f"the {name} of it", made) == f"the {name} of it", "an English word stays"
        count += 1
    assert count or command == "fingerprint"


@pytest.mark.parametrize(
    ("python", "shell"),
    [
        ("set a draft length, or jaxspec.dynamic(positions, depth, nodes), instead of a static tree",
         "give --draft-length, or --tree dynamic-BEAMxDEPTH-NODES, instead of a static tree"),
        ("a tree such as jaxspec.branching(4, 2)", "a tree such as --tree 4x2"),
        ("shorten the prompt or lower max_new_tokens (the cache would take 4.61 GB)",
         "shorten the prompt or lower --max-new-tokens (the cache would take 4.61 GB)"),
        ("lower max_new_tokens, samples or capacity, or pass batch=",
         "lower --max-new-tokens, samples or capacity, or pass --batch"),
        ("pass plain text (chat=False, --no-chat) instead", "pass plain text (--no-chat) instead"),
        ("load(..., context=131072) would do", "--context 131072 would do"),
        ("the drafter 'model' needs a draft model (draft=..., or --draft-model)",
         "the drafter 'model' needs a draft model (--draft-model)"),
        ("allow_pickle=True (--allow-pickle) reads its tensors", "--allow-pickle reads its tensors"),
        ("sampling needs a key: pass key=jax.random.key(seed)", "sampling needs a key: pass --seed"),
        ("out='x.jsonl': there is no folder /y", "--out 'x.jsonl': there is no folder /y"),
    ],
)  # fmt: skip
def test_messages_of_the_api_are_translated(python, shell):
    assert as_flags(python, parser("generate")) == shell


def test_what_is_quoted_from_a_user_stays():
    made = argparse.ArgumentParser()
    made.add_argument("--top-p")
    for text in ("no file 'top_p'", "no file ./top_p", "no tensor a.top_p", 'no file "top_p"', "no file my-top_p"):
        assert as_flags(text, made) == text


# --- costs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_assumed_costs_are_mentioned(capsys, schedule):
    made = parser("generate")
    args = made.parse_options(["x", *([] if schedule is None else ["--schedule", schedule])])
    drafting.read_drafting(args)
    said = capsys.readouterr().err
    assert ("not measured" in said and "jaxspec tune" in said) == (schedule == "adaptive")


def test_the_rule_is_not_among_what_leaves_the_text():
    for command in ("generate", "chat"):
        text = parser(command).format_help()
        group = text[text.index("drafting, which changes the speed but not the text") :]
        assert "--rule" not in group[: group.index("\n\n")]
        assert "verification, which decides whether the text stays the same" in text


def test_help_names_what_is_trained_and_has_the_words_of_the_documentation(capsys):
    """The documentation calls a law a distribution."""
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if line.strip().startswith("train ")]
    for kind in ("Medusa", "EAGLE", "DFlash", "DSpark", "PARD"):
        assert kind in line
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        shown += capsys.readouterr().out
    shown = " ".join(shown.split())
    assert not re.findall(r"\blaws?\b", shown)
    assert "--record ID for maintainers: " in shown
