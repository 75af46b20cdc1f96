"""Compares tasks of lm-evaluation-harness with and without a draft, and log-likelihoods with its transformers backend.

    pip install '.[lm-eval]' torch transformers
    python -m scripts.prove.harness --record harness

Runs three tasks that need no network on SmolLM2-135M-Instruct: sums in words (a text until a line break), the same sums
with four answers to choose from (log-likelihoods), and short texts (rolling log-likelihoods). The transformers backend
runs with the same weights in float32 and in float64. Exit status 1 if a drafter changes the answer to any sample, or if
a log-likelihood differs by more than 1e-4 from that of float64, and by more than that of transformers in float32 does.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import random
import sys
import tempfile
from typing import Any

from jaxspec.bench.measurements import add_record, round_significant, write_record
from jaxspec.checkpoints.presets import fetch_preset

TARGET = "smollm2-135m-instruct"
DRAFTERS = ("none", "prompt-lookup", "eagle")
TOLERANCE = 1e-4
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal")
THINGS = ("apples", "books", "coins", "dice", "eggs", "flutes", "gloves", "hats")
TASKS = {
    "jaxspec_sums": {
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 32, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "jaxspec_choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{choices.index(answer)}}",
        "metric_list": [{"metric": "acc"}],
    },
    "jaxspec_texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} The answer is {{answer}}.",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}
SCORED = ["jaxspec_choices", "jaxspec_texts"]
"""The tasks with log-likelihoods."""


def questions(count: int) -> list[dict[str, Any]]:
    """Returns sums in words, each with its answer and three others."""
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        name, thing, first, second = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 60), rng.randint(2, 60)
        answers = [str(first + second + more) for more in (0, 1, 10, 11)]
        question = f"{name} has {first} {thing} and gets {second} more. How many {thing} does {name} have now?"
        rows.append({"question": question, "answer": answers[0], "choices": rng.sample(answers, 4)})
    return rows


def write_tasks(folder: pathlib.Path, count: int) -> None:
    """Writes the tasks and their samples into a folder."""
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in questions(count)))
    for name, task in TASKS.items():
        where = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name} | where | task))  # JSON is YAML


def run(folder: pathlib.Path, model: str, arguments: dict[str, Any], tasks: list[str]) -> dict[str, list[Any]]:
    """Returns the answers to the samples of each task, and its score as the last entry."""
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = simple_evaluate(
        model=model, model_args=arguments, tasks=tasks, task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    answers = {}
    for task in tasks:
        samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
        metrics = {name: value for name, value in results["results"][task].items() if isinstance(value, float)}
        answers[task] = [*(sample["resps"] for sample in samples), metrics]
    return answers


def log_likelihoods(answers: dict[str, list[Any]]) -> list[float]:
    """Returns all log-likelihoods of the tasks that have them."""

    def numbers(value: Any) -> list[float]:
        if isinstance(value, (list, tuple)):
            return [number for each in value for number in numbers(each)]
        return [float(value)] if isinstance(value, float) and not isinstance(value, bool) else []

    return [number for task in SCORED for number in numbers(answers[task][:-1])]


def gap(ours: dict[str, list[Any]], theirs: dict[str, list[Any]]) -> float:
    """Returns the largest difference of two runs' log-likelihoods."""
    return max(abs(a - b) for a, b in zip(log_likelihoods(ours), log_likelihoods(theirs), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100, help="the number of samples of each task")
    add_record(parser.add_argument)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    from jaxspec.evaluation import harness  # noqa: F401 - registers the model

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_tasks(folder, args.samples)
        runs = {}
        for drafter in DRAFTERS:
            print(f"{drafter} ...", flush=True)
            arguments = {"target": TARGET, "drafter": drafter, "batch_size": 8}
            tasks = list(TASKS) if drafter == DRAFTERS[0] else ["jaxspec_sums"]
            runs[drafter] = run(folder, "jaxspec", arguments, tasks)
        file = pathlib.Path(fetch_preset(TARGET))
        arguments = {"pretrained": str(file.parent), "gguf_file": file.name, "batch_size": 8, "device": "cpu"}
        print("transformers ...", flush=True)
        theirs = run(folder, "hf", arguments | {"dtype": "float32"}, list(TASKS))
        exact = run(folder, "hf", arguments | {"dtype": "float64"}, SCORED)
    plain = runs[DRAFTERS[0]]
    different = {
        drafter: sum(a != b for a, b in zip(plain["jaxspec_sums"][:-1], other["jaxspec_sums"][:-1], strict=True))
        for drafter, other in runs.items()
        if drafter != DRAFTERS[0]
    }
    errors = {"jaxspec": gap(plain, exact), "transformers": gap(theirs, exact)}
    same_text = sum(a == b for a, b in zip(plain["jaxspec_sums"][:-1], theirs["jaxspec_sums"][:-1], strict=True))
    rows = {
        "samples": args.samples,
        "texts that a drafter changed": different,
        "log-likelihoods": len(log_likelihoods(plain)),
        "largest difference from transformers": round_significant(gap(plain, theirs)),
        "largest difference from float64": {name: round_significant(error) for name, error in errors.items()},
        "texts equal to those of transformers": same_text,
        "scores": {task: plain[task][-1] for task in TASKS},
        "scores of transformers": {task: theirs[task][-1] for task in TASKS},
    }
    print(json.dumps(rows, indent=2))
    if args.record:
        versions = {name: importlib.metadata.version(name) for name in ("lm-eval", "transformers", "torch")}
        print(write_record(args.record, "harness", sys.argv, rows, versions))
    return int(any(different.values()) or errors["jaxspec"] > max(TOLERANCE, errors["transformers"]))


if __name__ == "__main__":
    sys.exit(main())
