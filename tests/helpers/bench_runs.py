"""Two models to measure, and a run of the benchmark whose figures were chosen by hand."""

from typing import Any

import jax
import numpy as np

import jaxspec
from helpers.toys import noisy
from jaxspec.bench.records import Difference, Method, Row, Run
from jaxspec.bench.tasks import Question, Task
from jaxspec.decode.state import RoundLog
from jaxspec.decode.stats import Stats
from jaxspec.generation.drafting import Drafting
from jaxspec.testing import TableLM

LM = TableLM(vocab=8)
TARGET = jaxspec.Model(LM, LM.init_params(jax.random.key(0)), stop_ids=(7,))
DRAFT = jaxspec.Model(LM, noisy(TARGET.params, 1, 0.4))
SAMPLING = jaxspec.Sampling(temperature=0.9)
METHODS = [
    Method("model:2", Drafting("model", tree=2, draft=DRAFT)),
    Method("model:2x1", Drafting("model", tree=jaxspec.branching(2, 1), draft=DRAFT)),
]
TASKS = [
    Task("one", (Question("a", "x", ((1, 2),)), Question("b", "y", ((3, 4, 5),)))),
    Task("two", (Question("a", "z", ((6,), (2, 3))),)),
]
SETTINGS: dict[str, Any] = {"sampling": SAMPLING, "max_new_tokens": 12, "seed": 5}


def row(method, id, tokens, log, decode_s, prefill_s=(1.0,), category="c", calls=1, difference=None) -> Row:
    return Row(
        task="t", category=category, id=id, turn=1, method=method, prompt_tokens=3, tokens=list(range(tokens)),
        text=None, finish_reason="length", prefill_s=list(prefill_s), decode_s=list(decode_s),
        stats=Stats.from_log(RoundLog(np.array(log)), calls), difference=difference,
    )  # fmt: skip


def made_up(**changes) -> Run:
    """Two prompts. The log of a round: emitted, accepted, drafted, children tested at depth 1 and 2."""
    plain, fast = [[1, 0, 0]] * 6, [[3, 2, 2, 1, 1], [2, 1, 2, 1, 1], [1, 0, 2, 1, 0]]
    rows = (
        row("none", "1", 6, plain, [8.0, 7.0, 50.0]),
        row("model", "1", 6, fast, [3.0, 2.0, 4.0], prefill_s=[2.0]),
        row("none", "2", 4, plain[:4], [4.0, 4.0, 4.0], category="d"),
        row("model", "2", 4, [[1, 0, 2, 1, 0]] * 4, [8.0, 8.0, 8.0], prefill_s=[2.0], category="d",
            difference=Difference(0, 1, 1, 2, 1e-5, "tie")),
    )  # fmt: skip
    given = {
        "sampling": jaxspec.Sampling(), "rule": "coupled", "lossless": True, "methods": ("none", "model"),
        "rows": rows, "capacity": 512, "compile_s": {"none": 1.0, "model": 2.0},
        "call_s": {"none": 1.0, "model": 0.25},
    }  # fmt: skip
    return Run(**given | changes)
