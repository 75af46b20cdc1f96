"""Trains an EAGLE-3 head of SmolLM2 on the model's own questions and answers for some minutes, and reports its speed.

    python -m scripts.measure.train_minutes --minutes 8 --record train-minutes     # on a GPU or TPU
    python -m scripts.measure.train_minutes --small                                # a tiny model, on any device

The time covers everything: questions, answers, features, steps and evaluation. The figures are the tokens per second of
the steps, the share of the time of a step that the products would take at the device's peak (MFU, the target's features
included), and the accepted length on held-out texts, by the time since the start.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time
from typing import Any

import jax

import jaxspec
from jaxspec.backend.chips import chip_of
from jaxspec.bench.measurements import add_record, round_significant, write_record
from jaxspec.models.config import ModelConfig
from jaxspec.models.transformer import TransformerLM
from jaxspec.train import dry_run
from jaxspec.train.log import SPEED_FILE, Watch, read_log
from scripts.heads import prompts

QUESTIONS, RESERVE_S = 4096, 20.0
"""Questions that the model writes, and the seconds that the last step and its checkpoint may take."""
MAX_EVALUATIONS = 12
"""Evaluations on held-out texts in the record, of which the last one is one."""
SETTINGS = jaxspec.Eagle3Settings(
    depth=7, batch=16, row_tokens=1024, steps=20_000, warmup=200, log_every=20, eval_every=200, save_every=10_000,
    answer_batch=256, answer_tokens=256, held_out=0.02,
)  # fmt: skip
SMALL = {
    "depth": 2,
    "batch": 2,
    "row_tokens": 32,
    "warmup": 2,
    "steps": 60,
    "log_every": 5,
    "eval_every": 20,
    "answer_batch": 8,
}
SMALL |= {"answer_tokens": 16, "held_out": 0.2}


def small_target() -> jaxspec.Model:
    """Returns a tiny model with random weights and without a tokenizer."""
    lm = TransformerLM(ModelConfig(64, 32, 48, 3, 2, 2, 16))
    return jaxspec.Model(lm, lm.init_params(jax.random.key(0)))


def write_questions(target: jaxspec.Model, folder: pathlib.Path, small: bool) -> pathlib.Path:
    """Writes the questions, which are token ids for a tiny model."""
    path = folder / "prompts.jsonl"
    questions: list[Any] = [[1 + i % 60, 1 + i // 60] for i in range(40)]
    if not small:
        questions = prompts.own_questions(QUESTIONS, folder / "questions.jsonl")
    path.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    return path


def flops_of_a_step(target: jaxspec.Model, settings: jaxspec.Eagle3Settings) -> float:
    """Returns the operations of the products of a step, the target's features included."""
    alone = dataclasses.replace(settings, mesh="data=1")
    return sum(program.flops for program in dry_run.plan_run(target, alone).traced)


def train(
    target: jaxspec.Model, settings: jaxspec.Eagle3Settings, folder: pathlib.Path, ends: float, small: bool
) -> dict[str, Any]:
    """Trains until the clock shows `ends`, and returns the figures."""
    begun = time.monotonic()
    questions, phases, held = write_questions(target, folder, small), {}, []

    def phase(name: str, done: int, total: int) -> None:
        phases[name] = round(time.monotonic() - begun, 1)  # the time of its last call

    def step(now: int, steps: int, line: dict[str, Any]) -> None:
        if "held_out" in line:
            seconds, length = round(time.monotonic() - begun, 1), line["held_out"]["accepted_length"]
            held.append({"s": seconds, "step": now, "accepted_length": round_significant(length)})
        if time.monotonic() >= ends:
            os.kill(os.getpid(), signal.SIGINT)  # saves the step, as Ctrl-C does

    out = folder / "run"
    try:
        jaxspec.train_heads(target, [questions], out, settings, watch=Watch(say=print, phase=phase, step=step))
    except KeyboardInterrupt:
        print("the time is over", flush=True)
    speeds = [line["tokens_per_s"] for line in read_log(out / SPEED_FILE)[0]][1:]  # the first line has the compilation
    if not speeds:
        raise RuntimeError("the time was over before the steps began")
    tokens_per_s, chip = statistics.median(speeds), chip_of(jax.devices()[0])
    seconds = settings.batch * settings.row_tokens / tokens_per_s
    flops = flops_of_a_step(target, settings)
    every = -(-len(held) // MAX_EVALUATIONS) or 1
    return {
        "questions": len(questions.read_text().splitlines()), "ended_s": phases, "held_out": held[::-1][::every][::-1],
        "steps": read_log(out / SPEED_FILE)[0][-1]["step"], "tokens_per_s": round_significant(tokens_per_s),
        "step_ms": round_significant(seconds * 1e3), "tflop": round_significant(flops / 1e12),
        "mfu": None if chip is None else round_significant(flops / seconds / chip.flops),
        "minutes": round((time.monotonic() - begun) / 60, 2),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="of the whole run")
    parser.add_argument("--small", action="store_true", help="a tiny model, for any device")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    reserve = 0.0 if arguments.small else RESERVE_S
    ends = time.monotonic() + 60 * arguments.minutes - reserve
    target = small_target() if arguments.small else jaxspec.load(prompts.TARGET, dtype="bfloat16")
    settings = dataclasses.replace(SETTINGS, **SMALL) if arguments.small else SETTINGS
    with tempfile.TemporaryDirectory() as folder:
        values = train(target, settings, pathlib.Path(folder), ends, arguments.small)
    print(json.dumps(values), flush=True)
    if arguments.record:
        print(f"written: {write_record(arguments.record, 'train-minutes', sys.argv, values)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
