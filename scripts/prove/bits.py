"""Tests that a draft changes no bit: SmolLM2's tokens and log-probabilities on real prompts.

    python -m scripts.prove.bits                                    # with the CPU kernels
    python -m scripts.prove.bits --dtypes int8 --prompts 3
    python -m scripts.prove.bits --exact both --report-only --record text-bits       # on a GPU

Every prompt is decoded plainly and alone. Then all prompts are decoded with every drafter and tree, in batches of 1, 3
and 8, and a second question is asked in the session of the largest batch; the answer is compared with plain decoding of
the session's text in one call. Every second prompt is sampled at temperature 0.8 with top-p 0.95, the others are
greedy. The exit status is 1 if a token or a log-probability differs in a bit.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import jaxspec
from jaxspec.bench import tasks
from jaxspec.bench.equality import first_difference
from jaxspec.bench.measurements import add_record, round_significant, write_record
from scripts.library import exact

MODEL = "smollm2-135m-instruct"
CAPACITY = 640
QUESTION = "Why?"
"""The second question of a session."""
DRAFTERS: dict[str, dict[str, Any]] = {
    "prompt-lookup": {"drafter": "prompt-lookup"},
    "recycling": {"drafter": "recycling"},
    "early-exit of 10 layers, tree 2x2": {
        "drafter": "early-exit", "tree": jaxspec.branching(2, 2), "drafter_options": {"exit_layers": 10}
    },
    "model, chain 4": {"drafter": "model", "tree": 4},
    "model, dynamic tree of 64 nodes": {"drafter": "model", "tree": jaxspec.dynamic(8, 5, 64)},
    "medusa, the heads' own tree": {"drafter": "medusa"},
    "medusa, tree of 64 nodes": {"drafter": "medusa", "tree": jaxspec.named_tree("mc_sim_7b_63")},
    "eagle, chain 5": {"drafter": "eagle", "tree": 5},
    "eagle, dynamic tree of 64 nodes": {"drafter": "eagle", "tree": jaxspec.dynamic(8, 6, 64)},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Text:
    """An answer, and everything whose bits are compared.

    Attributes:
        tokens: the tokens.
        numbers: their log-probabilities, with and without sampling settings, and the alternatives.
        before: the token ids before the answer, of a session.
    """

    tokens: list[int]
    numbers: tuple[Any, ...]
    before: list[int] = dataclasses.field(default_factory=list, compare=False)


class Bench:
    """A target, its draft model, and the prompts."""

    def __init__(self, dtype: str, exactly: bool, layers: int | None, prompts: Sequence[str], tokens: int):
        self.target = shorten(exact.load(MODEL, exactly, dtype=dtype), layers)
        self.draft = shorten(jaxspec.load(MODEL, dtype="bfloat16" if dtype == "int8" else "int8"), layers)
        self.prompts, self.tokens = prompts, tokens
        self.keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), np.arange(len(prompts)))
        self.sampled = np.arange(len(prompts)) % 2 == 1

    def generate(self, rows: np.ndarray, prompts: Any, **options: Any) -> jaxspec.Output:
        sampled = self.sampled[rows]
        sampling = jaxspec.Sampling(np.where(sampled, 0.8, 0.0), top_p=np.where(sampled, 0.95, 1.0))
        return jaxspec.generate(
            self.target, prompts, key=self.keys[rows], max_new_tokens=self.tokens, sampling=sampling, logprobs=2,
            capacity=CAPACITY, verbose=False, **options,
        )  # fmt: skip

    def plain(self, rows: np.ndarray, texts: Sequence[list[int]] | None = None) -> list[Text]:
        """Decodes rows plainly and alone, after their prompts or after texts of token ids."""
        found = []
        for place, row in enumerate(rows):
            prompt, chat = (self.prompts[row], True) if texts is None else (texts[place], False)
            out = self.generate(np.array([row]), [prompt], drafter="none", chat=chat)
            found += texts_of(out)
        return found

    def drafted(self, name: str, batch: int) -> list[Text]:
        """Decodes all rows in batches."""
        every = np.arange(len(self.prompts))
        return texts_of(self.generate(every, self.prompts, chat=True, batch=batch, **self.drafting(name)))

    def continued(self, name: str, rows: np.ndarray) -> list[Text]:
        """Answers a second question in a session of these rows."""
        first = self.generate(rows, [self.prompts[row] for row in rows], chat=True, **self.drafting(name))
        out = self.generate(rows, [QUESTION] * len(rows), session=first.session, **self.drafting(name))
        session = out.session
        assert session is not None
        return [
            dataclasses.replace(text, before=session.row_tokens(row)[: -len(text.tokens)])
            for row, text in enumerate(texts_of(out))
        ]

    def drafting(self, name: str) -> dict[str, Any]:
        own = dict(DRAFTERS[name])
        if own["drafter"] == "model":
            own["draft"] = self.draft
        return own


def shorten(model: jaxspec.Model, layers: int | None) -> jaxspec.Model:
    """Returns a model that ends after some layers; its texts mean less, and its programs compile sooner."""
    lm: Any = model.lm
    return model if layers is None else dataclasses.replace(model, lm=dataclasses.replace(lm, layers=layers))


def texts_of(out: Iterable[jaxspec.Generation]) -> list[Text]:
    return [Text(row.tokens, (row.logprobs, row.sampled_logprobs, row.top_logprobs)) for row in out]


def compare(plain: Sequence[Text], drafted: Sequence[Text]) -> dict[str, Any]:
    """Returns how many texts have the same tokens and the same bits, and the largest gap of a log-probability."""
    gaps = [0.0]
    for one, other in zip(plain, drafted, strict=True):
        differs = first_difference(one.tokens, other.tokens)
        gaps += [abs(a - b) for a, b in zip(one.numbers[0][:differs], other.numbers[0][:differs])]
    return {
        "texts": len(plain),
        "same_tokens": sum(one.tokens == other.tokens for one, other in zip(plain, drafted)),
        "same_bits": sum(one == other for one, other in zip(plain, drafted)),
        "largest_gap": round_significant(max(gaps), 2),
    }


def measure(bench: Bench, names: Sequence[str], batches: Sequence[int], threads: int) -> Iterable[dict[str, Any]]:
    """Compares all drafters and batches with plain decoding; yields a line for each."""
    plain = bench.plain(np.arange(len(bench.prompts)))
    rows = np.arange(min(max(batches), len(bench.prompts)))

    def one(name: str, batch: int | None) -> dict[str, Any]:
        line = {"drafter": name, "batch": len(rows) if batch is None else batch, "session": batch is None}
        try:
            if batch is not None:
                return line | compare(plain, bench.drafted(name, batch))
            drafted = bench.continued(name, rows)
            return line | compare(bench.plain(rows, [text.before for text in drafted]), drafted)
        except Exception as error:  # the other drafters are compared
            return line | {"failed": exact.describe(error)}

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        yield from pool.map(one, *zip(*itertools.product(names, [*batches, None])))


def shown(line: Mapping[str, Any]) -> str:
    """Returns a line for people."""
    kind = "exact" if line["exact"] else ""
    if why := line.get("unavailable"):
        return f"{line['dtype']:8} {kind}: not available: {why}"
    what = f"{'session' if line['session'] else 'batch'} {line['batch']}"
    start = f"{line['dtype']:8} {kind:5} {line['drafter']:34} {what}: "
    if why := line.get("failed"):
        return start + why
    return start + (
        f"{line['same_bits']} of {line['texts']} texts equal to the bit, {line['same_tokens']} with the same tokens, "
        f"log-probabilities differ by {line['largest_gap']:.2g} at most"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 3, 8])
    parser.add_argument("--prompts", type=int, default=8, help="of MT-bench and HumanEval, in turns")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS), metavar="DRAFTER")
    parser.add_argument("--layers", type=int, help="end the models after so many layers, which compile sooner")
    parser.add_argument("--exact", choices=exact.FORMS, default="off", help="load the target with exact=True")
    parser.add_argument("--threads", type=int, default=1, help="drafters that are compiled together")
    parser.add_argument("--report-only", action="store_true", help="exit with 0 even if bits differ")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    start = time.perf_counter()
    chosen = [tasks.load_task(name, -(-arguments.prompts // 2), 0).questions for name in ("mt-bench", "humaneval")]
    prompts = [str(question.turns[0]) for pair in zip(*chosen) for question in pair][: arguments.prompts]
    lines: list[dict[str, Any]] = []
    values = {"layers": arguments.layers, "tokens": arguments.tokens, "lines": lines}

    def keep(line: dict[str, Any]) -> None:
        lines.append(line)
        print(f"{time.perf_counter() - start:5.0f} s {shown(line)}", flush=True)
        if arguments.record:
            write_record(arguments.record, "text-bits", sys.argv, values)

    for dtype, exactly in itertools.product(arguments.dtypes, sorted(exact.FORMS[arguments.exact], reverse=True)):
        about = {"dtype": dtype, "exact": exactly}
        try:
            bench = Bench(dtype, exactly, arguments.layers, prompts, arguments.tokens)
        except jaxspec.JaxspecError as error:
            if not exactly:
                raise
            keep(about | {"unavailable": exact.describe(error)})
            continue
        for line in measure(bench, arguments.drafters, arguments.batches, arguments.threads):
            keep(about | line)
    compared = [line for line in lines if "texts" in line]
    wrong = sum(line["texts"] - line["same_bits"] for line in compared) + sum("failed" in line for line in lines)
    print(f"{sum(line['texts'] for line in compared)} texts compared, {wrong} differ")
    return wrong > 0 and not arguments.report_only


if __name__ == "__main__":
    sys.exit(main())
