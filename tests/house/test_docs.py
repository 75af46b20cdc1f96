"""Every command and every Python block of the documentation runs as it is written, in an empty working directory.

What the words name is there, small: TARGET, SOURCE, DRAFT and PARD are models of bytes, HEADS and EAGLE heads, a
preset's weights and a task's prompts come from here instead of the network. Options are added, none taken away, to make
a command short. What cannot run is listed with its reason; a command that is neither run nor listed fails.
"""

import dataclasses
import importlib
import io
import pathlib
import re
import shlex
import sys
import tomllib
import types

import jax
import pytest

import jaxspec
from cases import RANDOM
from helpers.checkpoints import random_params, tiny_config, write_gguf
from helpers.pages import Block, blocks
from helpers.paths import ROOT
from jaxspec.cli import COMMANDS, main
from jaxspec.cli.options import Parser
from jaxspec.heads import find
from jaxspec.heads.network import init_params
from jaxspec.storage import download
from jaxspec.train import evaluate

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
GUIDES = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/reports").glob("*.md"))]
PAGES = ["README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in GUIDES)]

NOT_RUN = {
    r"jaxspec bench .*--peers ": "other systems are gigabytes of packages in environments of their own; test_peers.py",
    r"python scripts/measure/keep_answers.py ": "minutes with a real model, whose answers it writes",
    r"python -m scripts.measure.replay ": "reads what the command before it wrote",
    r"python scripts/measure/pair.py ": "hours with two models of gigabytes",
    r"python scripts/measure/compare_rules.py ": "reads what the commands before it wrote, two of which are not run",
    r"python -m jaxspec\.evaluation ": "needs lm-eval and the data of a task; scripts/prove/harness.py runs it",
    r"(vllm|text-generation-launcher) ": "another system; test_head_files.py reads its layout by its tensors' names",
    r"jaxspec train .*--on ": "needs compilers for other devices; test_dry_run.py plans for the devices at hand",
    r"jaxspec train .*--hosts ": "needs several hosts; test_train_hosts.py runs it in two processes",
    r"mesh = jaxspec.make_mesh\(": "needs eight devices; test_mesh.py makes these calls on simulated ones",
    r"\w+ = jaxspec\.\w+\(.*mesh=mesh": "needs eight devices; test_mesh.py makes these calls on simulated ones",
}
"""Lines that no test runs, by their beginning, and why."""

SHORT = {
    "generate": "--max-new-tokens 8",
    "chat": "--max-new-tokens 8 --length 256",
    "bench": "--limit 1 --repeats 1 --max-new-tokens 4",
    "tune": "--limit 1 --max-new-tokens 8",
    "acceptance": "--limit 1 --max-new-tokens 8 --draws 2",
    "train": "--steps 4 --batch 2 --answer-tokens 12 --row-tokens 128 --held-out 0.1",
    "train medusa": "--heads 2",
    "train eagle3": "--depth 2",
    "train dspark": "--block 3 --layers 1 --markov-rank 8",
    "train jetspec": "--block 4 --layers 1",
    "train pard": "--depth 3",
}
"""Options that make a command short, and nothing else."""


def lines(block: Block) -> list[str]:
    """The commands of a block of a shell, without comments; a line that ends with a backslash goes on."""
    joined = re.sub(r"\s*\\\n\s*", " ", block.text)
    return [re.sub(r"\s{2,}# .*", "", line) for line in joined.splitlines() if line.strip()]


def reason(line: str) -> str | None:
    """The pattern by which a line is not run, if there is one."""
    return next((pattern for pattern in NOT_RUN if re.match(pattern, line)), None)


EVERY = [block for page in PAGES for block in blocks(page)]
LONG = ("jaxspec bench ", "jaxspec tune ", "jaxspec acceptance ")
LONG_PAGES = tuple(
    f"docs/{name}.md"
    for name in (
        "batches",
        "benchmarks",
        "coupled-trees",
        "drafters",
        "functional",
        "heads",
        "own-model",
        "rollouts",
        "train-export-serve",
    )
)
"""What compiles five programs and more is in the slow tier."""


def marks(long: bool) -> list:
    return [pytest.mark.slow] if long else []


ALONE = [
    pytest.param(block, id=str(block), marks=marks(block.text.startswith(LONG)))
    for block in EVERY
    if not block.page.startswith("docs/")
]
"""Those of README.md and CONTRIBUTING.md stand alone; the blocks of a page of docs/ follow one another."""


# What the words name.

SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [*SPECIAL, *(chr(n) for n in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))), "ab"]
CONFIG = tiny_config(
    vocab_size=len(BYTES), hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, max_position=8192
)
METADATA = {
    "tokenizer.ggml.tokens": BYTES,
    "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(BYTES) - len(SPECIAL)),
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
}
QUESTIONS = '{"question_id": 1, "category": "writing", "turns": ["What is a tree?"]}\n'
PROMPTS = "".join(f'{{"prompt": "question {i}"}}\n' for i in range(24))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> pathlib.Path:
    """A model, another one, and heads of each kind for the first."""
    place = tmp_path_factory.mktemp("shelf")
    for seed, name in enumerate(("TARGET", "DRAFT")):
        path = write_gguf(place / f"{name}.gguf", CONFIG, random_params(CONFIG, seed, 0.3), metadata=METADATA)
        jaxspec.save(jaxspec.load(path), place / name)
    jaxspec.save(dataclasses.replace(jaxspec.load(place / "DRAFT"), settings={"pard_token": 0}), place / "PARD")
    sizes = jaxspec.HeadsConfig(CONFIG.hidden_size, len(BYTES), 4, projection="own")
    table = jaxspec.load(place / "TARGET").params["embed"]
    jaxspec.save_heads(jaxspec.DraftHeads(sizes, init_params(sizes, table), jaxspec.chain(2)), place / "HEADS")
    eagle = jaxspec.EagleConfig(dataclasses.replace(CONFIG, num_layers=1))
    jaxspec.save_heads(jaxspec.DraftHeads(eagle, init_params(eagle, key=jax.random.key(0))), place / "EAGLE")
    jaxspec.save_heads(RANDOM["dflash"](jaxspec.load(place / "TARGET")), place / "BLOCKS")
    (shipped := place / "shipped" / "smollm2-135m-instruct").mkdir(parents=True)
    for drafter, heads in (("medusa", "HEADS"), ("eagle", "EAGLE")):
        (shipped / drafter).symlink_to(place / heads)
    return place


@pytest.fixture
def world(shelf, tmp_path, monkeypatch):
    """An empty working directory with what the words name; nothing comes from the network."""
    monkeypatch.chdir(tmp_path)
    for word in ("TARGET", "SOURCE", "DRAFT", "PARD", "HEADS", "EAGLE", "BLOCKS"):
        (tmp_path / word).symlink_to(shelf / word.replace("SOURCE", "TARGET"))
    for name in ("questions.jsonl", "prompts.jsonl"):
        (tmp_path / name).write_text(PROMPTS)
    (tmp_path / "mine.jsonl").write_text(QUESTIONS)
    (tmp_path / "task.jsonl").write_text(QUESTIONS)

    def fetch(file, *_, **__):
        return shelf / "TARGET.gguf" if file.member.endswith(".gguf") else tmp_path / "task.jsonl"

    monkeypatch.setattr(download, "fetch_file", fetch)
    monkeypatch.setattr(find, "SHIPPED_FOLDER", shelf / "shipped")
    words = types.SimpleNamespace(create_dataset=lambda name, size, seed: [{"question": "How many?"}] * size)
    monkeypatch.setitem(sys.modules, "reasoning_gym", words)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    monkeypatch.setattr(evaluate, "TREE_SIZES", (1, 3))
    return tmp_path


# Running.


def command(line: str, capsys) -> None:
    """Runs a command as it is written, with what makes it short."""
    words = shlex.split(line)[1:]
    shortened = " ".join(SHORT.get(name, "") for name in (words[0], " ".join(words[:2])))
    short = [] if "--help" in words else shlex.split(shortened)
    status = main([*words, *short])
    out, err = capsys.readouterr()
    assert status == 0, f"{line}\n{err}"
    assert "Traceback" not in err
    assert out or err, line


def python(block: Block, names: dict) -> None:
    """Runs a block, its lines numbered as in its page."""
    exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), names)


def run(block: Block, names: dict, capsys, fit: int = 0) -> None:
    """Runs a block; heads that it trains are fitted a tree to on `fit` prompts."""
    if block.language == "python":
        python(block, names)
        return
    for line in lines(block) if not block.language else ():
        if line.startswith("jaxspec ") and not reason(line):
            command(line + f" --fit-prompts {fit}" * bool(re.match(r"jaxspec train \w+ --target", line)), capsys)


@pytest.mark.parametrize("block", ALONE)
def test_a_block_runs_as_it_is_written(block, world, capsys):
    run(block, {"__name__": "documentation"}, capsys)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=marks(page in LONG_PAGES)) for page in PAGES if page.startswith("docs/")]
)
def test_a_page_runs_from_top_to_bottom(page, world, capsys):
    names = {"__name__": "documentation"}
    for block in blocks(page):
        run(block, names, capsys, fit=1)


def test_every_line_is_run_or_listed_with_its_reason():
    """A line of a block of a shell is a command that runs, one of `make` or `pip` that can, or listed."""
    makefile = (ROOT / "Makefile").read_text()
    extras = PROJECT["optional-dependencies"]
    unused = set(NOT_RUN)
    for block in EVERY:
        assert block.language in ("", "python", "toml"), f"{block}: what to do with a block of {block.language}?"
        assert block.language != "toml" or tomllib.loads(block.text)
        for line in lines(block) if not block.language else ():
            if listed := reason(line):
                unused.discard(listed)
            elif line.startswith("make "):
                assert re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE), f"{block}: {line}"
            elif line.startswith("pip install "):
                own = set() if '"jax[' in line else set(re.findall(r"\[(\w+)\]", line))
                assert own <= extras.keys(), f"{block}: {line}"
            elif line.startswith(("git clone ", "cd ")):
                assert line in (f"git clone {REPOSITORY}", f"cd {REPOSITORY.rsplit('/', 1)[1]}"), f"{block}: {line}"
            else:
                assert line.startswith("jaxspec "), f"{block}: neither run nor listed: {line}"
    assert not unused, "listed, and in no page"


def test_commands_in_sentences_are_taken_by_the_command_line():
    """Their options exist and have values that can be; what they would do is not done."""
    seen = 0
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
        for span in re.findall(r"`(jaxspec\s[^`]+)`", text):
            _, name, *words = shlex.split(" ".join(span.split()))
            if name == "--version":
                continue
            assert name in COMMANDS, f"{page}: {span}"
            if not words or "--help" in words:
                continue
            parser = Parser(prog=f"jaxspec {name}")
            importlib.import_module(f"jaxspec.cli.{name}").add_options(parser)
            known = set(parser._option_string_actions)
            if {word for word in words if word.startswith("--")} <= known and name == "train":
                continue  # mentioned with an option or two
            parser.parse_options(words)
            seen += 1
    assert seen


def test_the_own_model_is_as_short_as_it_says():
    first = next(block for block in EVERY if block.page == "docs/own-model.md")
    assert len([line for line in first.text.splitlines() if line.strip()]) < 50
