"""Measures the time and the memory of training steps on one device, beside another checkout of this repository.

    python -m scripts.measure.training_memory [--beside CHECKOUT] [--sizes small,smollm] [--untimed] [--record ID]

Each case is a process of its own: a kind of heads, or the features of four layers of the target, at the shapes of
SmolLM2-135M or of a small model, with random weights and features, in float32 on the whole vocabulary. With `--beside`,
each case is also measured with the package of the other checkout, such as the one before a change. Figures are the
shortest time of a step, the temporary memory that the compiler plans for it, and the largest memory of the process.
With `--untimed`, nothing is run, and only the temporary memory is measured, which does not depend on other programs of
the machine.
"""

import argparse
import functools
import json
import os
import pathlib
import resource
import subprocess
import sys
import time
from typing import Any

from jaxspec.bench.measurements import add_record, round_significant, write_record

SHAPES: dict[str, tuple[int, ...]] = {"small": (4096, 128, 384, 2, 2), "smollm": (49152, 576, 1536, 9, 3)}
"""Vocabulary, width, units of the MLP, heads and key heads."""
ROWS = {"small": (4, 256), "smollm": (4, 512)}
"""Rows of a batch, and tokens of each row."""
KINDS = ("features", "medusa", "eagle3", "dspark")
SECONDS, STEPS = 12.0, 3
"""A case is repeated for so many seconds, and at least for so many steps."""


def measure(size: str, kind: str, timed: bool) -> dict[str, Any]:
    """Measures a case in this process, with the package that is imported here."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxspec
    from jaxspec.models.config import ModelConfig
    from jaxspec.models.transformer import TransformerLM
    from jaxspec.train import losses
    from jaxspec.train.step import Trainable, compute_features, init_state, train_step

    vocab, hidden, inner, heads, kv_heads = SHAPES[size]
    config = ModelConfig(vocab, hidden, inner, 4, heads, kv_heads, hidden // heads, tie_embeddings=True)
    lm = TransformerLM(config)
    target = jaxspec.Model(lm, lm.init_params(jax.random.key(0)))
    shape, rng = ROWS[size], np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, vocab, shape), jnp.int32)
    ones = jnp.ones(shape, jnp.int32)
    if kind == "features":
        compiled = jax.jit(functools.partial(compute_features, lm)).lower(target.params, tokens, ones).compile()
        if not timed:
            return _plan(compiled)
        found, seconds = _time(lambda: jax.block_until_ready(compiled(target.params, tokens, ones)))
        return _figures(compiled, seconds, float(jnp.square(found).mean()))
    common: dict[str, Any] = {"batch": shape[0], "row_tokens": shape[1], "warmup": 0, "precision": "float32"}
    settings = {
        "medusa": lambda: jaxspec.MedusaSettings(heads=4, inputs="hidden", **common),
        "eagle3": lambda: jaxspec.Eagle3Settings(depth=5, taps="1,2,3", **common),
        "dspark": lambda: jaxspec.DSparkSettings(layers=2, taps="1,2,3", **common),
    }[kind]()
    trainee: Any = settings.trainee(target)
    frozen = losses.freeze(trainee, lm, target.params, None, losses.needs_laws(settings, trainee))
    network = trainee.network(lm)
    width = jax.eval_shape(functools.partial(compute_features, network), target.params, tokens, ones).shape[-1]
    features = jnp.asarray(rng.normal(size=(*shape, width)), jnp.float32)
    batch = losses.Batch(*(a[None] for a in (tokens, ones, ones.astype(bool), features)))
    state = init_state(settings, trainee, Trainable(trainee.init_params(target, None)))
    state = jax.tree.map(jnp.copy, state)
    step = jax.jit(functools.partial(train_step, settings, trainee, network), donate_argnums=1)
    compiled = step.lower(frozen, state, batch).compile()
    if not timed:
        return _plan(compiled)

    def take() -> Any:
        nonlocal state
        state, report = jax.block_until_ready(compiled(frozen, state, batch))
        return report

    report, seconds = _time(take)
    return _figures(compiled, seconds, float(report.loss))


def _time(function: Any) -> tuple[Any, list[float]]:
    """Calls a function several times; returns the result of the first call, and the seconds of the others."""
    first, seconds = function(), []
    while len(seconds) < STEPS or sum(seconds) < SECONDS:
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return first, seconds


def _plan(compiled: Any) -> dict[str, Any]:
    return {"temporaries_mb": round_significant(compiled.memory_analysis().temp_size_in_bytes / 1e6)}


def _figures(compiled: Any, seconds: list[float], value: float) -> dict[str, Any]:
    return _plan(compiled) | {
        "ms": round_significant(min(seconds) * 1e3),
        "largest_mb": round_significant(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
        "value": value,
    }


def run(checkout: pathlib.Path, size: str, kind: str, timed: bool) -> dict[str, Any]:
    """Measures a case in a new process with the package of a checkout."""
    program = [sys.executable, __file__, "--case", size, kind, *([] if timed else ["--untimed"])]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, cwd=checkout)
    if done.returncode:
        raise RuntimeError(f"{size}, {kind}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=pathlib.Path, metavar="CHECKOUT", help="another checkout to measure as well")
    parser.add_argument("--sizes", default=",".join(SHAPES), help="which shapes (default: all)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="which cases (default: all)")
    parser.add_argument("--untimed", action="store_true", help="measure temporary memory alone")
    parser.add_argument("--case", nargs=2, metavar=("SIZE", "KIND"), help=argparse.SUPPRESS)
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    if arguments.case:
        size, kind = arguments.case
        print(json.dumps(measure(size, kind, not arguments.untimed)))
        return 0
    here = pathlib.Path(__file__).resolve().parents[2]
    checkouts = {"now": here} if arguments.beside is None else {"before": arguments.beside.resolve(), "now": here}
    lines: list[dict[str, Any]] = []
    for size in arguments.sizes.split(","):
        for kind in arguments.kinds.split(","):
            found = {name: run(checkout, size, kind, not arguments.untimed) for name, checkout in checkouts.items()}
            values = [each.pop("value", 0.0) for each in found.values()]
            if max(values) - min(values) > 1e-4 * abs(values[0]):
                raise RuntimeError(f"{size}, {kind}: the losses differ: {values}")
            rows, tokens = ROWS[size]
            lines.append({"size": size, "kind": kind, "rows": rows, "row_tokens": tokens} | found)
            print(json.dumps(lines[-1]), flush=True)
    if arguments.record:
        print(f"written: {write_record(arguments.record, 'training-memory', sys.argv, {'lines': lines})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
