"""Measures trained heads of any kind on MT-bench, which they were not trained on.

    python -m scripts.heads.evaluate HEADS [HEADS ...] [--target T] [--limit 80] [--tokens N ...]
        [--trees TREE ...] [--temperatures T ...] [--rules RULE ...] [--workers N] [--json KEPT] [--record ID]

The target answers the first turn of every question greedily. The script prints how often each drafted token is right on
these answers, and then tokens per round of every combination: at temperature 0 the texts are compared with plain
decoding. Heads that lie in a folder are named after it, too.

TREE is K for a chain, best-N for the best static tree of N nodes by the acceptance that was measured after training on
other texts, `own` for the tree of the heads, or what `jaxspec generate --tree` takes, such as dynamic-8x6-64. Trees
that heads cannot draft are left out.

What is measured is kept in KEPT, where a repeated command continues. It measures no time, so that several trees may be
compiled and decoded together (`--workers`); `jaxspec bench --drafters medusa,eagle` measures time.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import pathlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jaxspec
from jaxspec.analysis.bootstrap import ratio_interval
from jaxspec.bench import tasks
from jaxspec.bench.measurements import add_record, round_significant, write_record
from jaxspec.cli.tree import parse_tree
from jaxspec.core.topology import Dynamic, Topology
from jaxspec.heads.headers import open_heads
from jaxspec.train.card import FIGURES_FILE
from jaxspec.train.evaluate import rank_tokens, trainee_of
from jaxspec.train.files import fingerprint
from jaxspec.train.log import SPEED_FILE
from jaxspec.train.packing import Text

PUBLISHED = {"top1": (0.560, 0.316, 0.201, 0.147), "top5": (0.780, 0.562, 0.417, 0.340)}
"""The accuracy of Medusa's heads on Vicuna 7B (assets/medusa_acc.csv in Medusa's repository)."""
TIES = 0.1
"""The most texts that may differ from plain decoding's: they may be ties, see scripts/prove/identity.py."""


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="+")
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--limit", type=int, default=80)
    parser.add_argument("--longest", type=int, default=384)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128])
    parser.add_argument("--trees", nargs="+", default=["own"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--rules", nargs="+", default=["coupled"], help="those above temperature 0; there all are one")
    parser.add_argument("--workers", type=int, default=1, help="trees that are measured together")
    parser.add_argument("--json", type=pathlib.Path, metavar="KEPT")
    add_record(parser.add_argument)
    return parser


def tree_of(spec: str, heads: jaxspec.DraftHeads, source: str) -> Topology | Dynamic:
    """Returns the tree that a value of `--trees` stands for with these heads."""
    if spec == "own":
        return heads.tree or jaxspec.chain(4)
    if spec.isdecimal():
        return jaxspec.chain(int(spec))
    if spec.startswith("best-"):
        figures = open_heads(source).path / FIGURES_FILE
        if not figures.exists():
            raise SystemExit(f"{spec} needs {figures}, which training writes; give another tree")
        measured = json.loads(figures.read_text())["acceptance_by_rank"]
        return jaxspec.best_tree(measured, int(spec.removeprefix("best-")), len(measured))
    return parse_tree(spec)


class Kept:
    """What is measured, by name; written to a file after every entry."""

    def __init__(self, path: pathlib.Path | None):
        self._path, self._lock = path, threading.Lock()
        self._found: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}

    def get(self, name: str, measure: Callable, *settings: Any) -> Any:
        """Returns an entry, which is measured if it is missing."""
        if name not in self._found:
            found = measure(*settings)
            with self._lock:
                self._found[name] = found
                if self._path:
                    self._path.write_text(json.dumps(self._found))
        return self._found[name]


class Evaluation:
    """The target, the questions and the settings that all heads share."""

    def __init__(self, given: argparse.Namespace):
        self.given, self.kept = given, Kept(given.json)
        settings = [given.target, given.limit, given.longest, given.dtype]
        if (before := self.kept.get("settings", lambda: settings)) != settings:
            raise SystemExit(f"{given.json} holds what was measured with {before}; give another file")
        self.target = jaxspec.load(given.target, dtype=given.dtype)
        questions = [str(q.turns[0]) for q in tasks.load_task("mt-bench", given.limit).questions]
        prompts = (self.target.encode_chat([{"role": "user", "content": q}]) for q in questions)
        self.prompts = sorted((prompt for prompt in prompts if len(prompt) <= given.longest), key=len)

    def decode(self, tokens: int, temperature: float, **drafting: Any) -> jaxspec.Output:
        """Answers all questions."""
        return jaxspec.generate(
            self.target, self.prompts, max_new_tokens=tokens, sampling=jaxspec.Sampling(temperature=temperature),
            key=jax.random.split(jax.random.key(0), len(self.prompts)), batch=self.given.batch, verbose=False,
            capacity=-(-(len(self.prompts[-1]) + max(self.given.tokens) + 160) // 128) * 128, **drafting,
        )  # fmt: skip

    def plain(self, tokens: int) -> list[list[int]]:
        """Returns the answers of plain decoding, greedily."""
        return self.kept.get(f"plain {tokens}", lambda: [r.tokens for r in self.decode(tokens, 0.0, drafter="none")])

    def accuracy(self, heads: jaxspec.DraftHeads) -> dict[str, Any]:
        """Returns how often each drafted token is right on the shortest answers."""
        texts = [
            Text(np.array(prompt + answer, np.int32), np.arange(len(prompt) + len(answer)) >= len(prompt))
            for prompt, answer in zip(self.prompts, self.plain(min(self.given.tokens)))
        ]
        found = rank_tokens(self.target, heads, texts, 512)
        shares = {
            name: [round_significant(share, 3) for share in getattr(found, name)]
            for name in ("top1", "top5", "accepted")
        }
        return {"positions": found.positions, **shares}

    def rounds(
        self, heads: jaxspec.DraftHeads, tree: Any, tokens: int, temperature: float, rule: str
    ) -> dict[str, Any]:
        """Returns tokens per round of one combination."""
        drafting = {"drafter": heads.config.drafter, "heads": heads, "tree": tree, "rule": rule}
        output = self.decode(tokens, temperature, **drafting)
        ends = ratio_interval([(row.stats.committed, row.stats.rounds) for row in output])
        found = {
            "tokens_per_round": round_significant(output.stats.tokens_per_round),
            "interval": [round_significant(end) for end in ends],
            "accepted": [round_significant(share, 3) for share in output.stats.acceptance_by_position],
        }
        if temperature == 0:
            found["same_texts"] = sum(row.tokens == text for row, text in zip(output, self.plain(tokens)))
        return found


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Heads to measure.

    Attributes:
        source: what `load_heads` was given.
        heads: the heads.
    """

    source: str
    heads: jaxspec.DraftHeads

    @property
    def label(self) -> str:
        """What they are called in the record."""
        folder = pathlib.Path(self.source)
        name = folder.parent.name if folder.name == "heads" else folder.name  # of the run, where training wrote them
        return trainee_of(self.heads).about.title + f" ({name})" * folder.exists()

    @property
    def training(self) -> dict[str, float] | None:
        """The steps and minutes of its training, by the log of its run; None if there is none.

        Minutes are those of the median step, so that a run which was interrupted counts as one that was not.
        """
        log = open_heads(self.source).path.parent / SPEED_FILE
        if not log.exists():
            return None
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        every = np.diff([0, *(line["step"] for line in lines)])
        steps = lines[-1]["step"]
        minutes = steps * float(np.median([line["s"] for line in lines] / every)) / 60
        return {"steps": steps, "minutes": round_significant(minutes)}

    @functools.cached_property
    def own(self) -> str:
        """What names them among that which is kept."""
        return fingerprint(self.heads.params)[:12]


def measure_tree(evaluation: Evaluation, candidate: Candidate, spec: str) -> list[dict[str, Any]]:
    """Returns the row of every combination with a tree, one after the other: they share compiled programs."""
    given, heads, rows = evaluation.given, candidate.heads, []
    tree = tree_of(spec, heads, candidate.source)
    by_temperature = [(t, rule) for t in given.temperatures for rule in (given.rules if t else given.rules[:1])]
    for tokens, (temperature, rule) in itertools.product(given.tokens, by_temperature):
        row = {"heads": candidate.label, "tree": spec, "nodes": tree.shape.nodes, "depth": tree.shape.depth}
        row |= {"tokens": tokens, "temperature": temperature, "rule": rule}
        name = f"{candidate.own}, {tree.shape.nodes} nodes of {spec}, {tokens}, {temperature}, {rule}"
        try:
            row |= evaluation.kept.get(name, evaluation.rounds, heads, tree, tokens, temperature, rule)
        except jaxspec.errors.InvalidConfig as error:  # too deep, or not with this rule
            print(f"{name}: {error}", flush=True)
            continue
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def main() -> int:
    given = options().parse_args()
    evaluation = Evaluation(given)
    count = len(evaluation.prompts)
    print(f"jax {jax.__version__}, {jax.default_backend()}, {given.dtype}, {count} questions", flush=True)
    candidates = [Candidate(source, jaxspec.load_heads(source, target=evaluation.target)) for source in given.heads]
    for tokens in given.tokens if 0.0 in given.temperatures else ():
        evaluation.plain(tokens)  # once, before it is needed by many
    accuracy = {}
    training = {candidate.label: found for candidate in candidates if (found := candidate.training)}
    for candidate in candidates:
        accuracy[candidate.label] = evaluation.kept.get(
            f"{candidate.own}, accuracy", evaluation.accuracy, candidate.heads
        )
        print(json.dumps({"heads": candidate.label} | accuracy[candidate.label]), flush=True)
    with concurrent.futures.ThreadPoolExecutor(given.workers) as pool:
        pairs = itertools.product(candidates, given.trees)
        rounds: list[dict[str, Any]] = []
        for part in pool.map(lambda pair: measure_tree(evaluation, *pair), pairs):
            rounds += part
            if given.record:  # after every tree: a run that is ended keeps those before
                values = {"questions": count, "dtype": given.dtype, "accuracy": accuracy, "rounds": rounds}
                values |= {"training": training} if training else {}
                write_record(given.record, "heads", sys.argv, values)
    print(f"of Medusa's heads for Vicuna 7B, as published: {json.dumps(PUBLISHED)}")
    return int(any(row.get("same_texts", count) < (1 - TIES) * count for row in rounds))


if __name__ == "__main__":
    sys.exit(main())
