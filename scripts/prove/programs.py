"""Tells whether two checkouts decode with the same programs, by what JAX lowers: nothing compiles and nothing runs.

    python scripts/prove/programs.py before.json                     # in the one checkout
    python scripts/prove/programs.py after.json --against before.json  # in the other; exit status 1 where they differ

Every drafter, rule, kind of tree, schedule and type, on small random models: equal programs give equal bits, whatever
was renamed or moved.
"""

import argparse
import hashlib
import itertools
import json
import pathlib
import sys

import jax

import jaxspec
from jaxspec.generation.drafting import Drafting
from jaxspec.generation.job import make_job
from jaxspec.heads.network import DraftHeads, HeadsConfig, init_params
from jaxspec.models.config import ModelConfig
from jaxspec.models.out_major import quantize
from jaxspec.models.transformer import TransformerLM
from jaxspec.registry import DRAFTERS, RULES, SCHEDULES

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16,
)  # fmt: skip
PROMPTS, CAPACITY = [[1, 2, 3, 4, 5]] * 2, 128
SAMPLED = {"key": jax.random.key(1), "sampling": jaxspec.Sampling(temperature=0.8, top_p=0.9, top_k=20)}
TREES = {
    "default": None,
    "chain": 3,
    "tree": jaxspec.branching(2, 1, 1),
    "dynamic": jaxspec.dynamic(2, 3, 4),
}


def model(dtype: str, seed: int = 0) -> jaxspec.Model:
    """A random transformer whose matrices have this type."""
    lm = TransformerLM(CONFIG, "float32" if dtype == "int8" else dtype)
    params = lm.init_params(jax.random.key(seed))
    return jaxspec.Model(lm, quantize(params) if dtype == "int8" else params)


def heads(inputs: str) -> DraftHeads:
    """Three random heads."""
    config = HeadsConfig(CONFIG.hidden_size, CONFIG.vocab_size, 3, inputs=inputs)
    return DraftHeads(config, init_params(config, model("float32").params["embed"] if inputs == "path" else None))


def lowered(target: jaxspec.Model, drafting: Drafting, **options) -> str:
    """The digest of the program that `generate` would compile, or why it refuses."""
    try:
        job = make_job(target, PROMPTS, drafting, **SAMPLED | options)
        decode = jax.jit(lambda weights, request: job.decoder.generate(weights, request, CAPACITY))
        text = decode.lower(job.weights, job.request([0, 1], 64)).as_text()
    except jaxspec.JaxspecError as error:
        return f"refused: {error}"
    return hashlib.sha256(text.encode()).hexdigest()


def programs() -> dict[str, str]:
    """The digest of every program, by what it decodes with."""
    target, found = model("float32"), {}
    own = {"early-exit": {"options": {"exit_layers": 1}}, "model": {"draft": model("float32", 1)}}
    drafters = {name: own.get(name, {}) for name in DRAFTERS if name != "medusa"}
    drafters |= {f"medusa {inputs}": {"heads": heads(inputs)} for inputs in ("hidden", "path", "recurrent")}
    for (name, given), rule, (shape, tree) in itertools.product(drafters.items(), RULES, TREES.items()):
        if rule in ("coupled", "rejection") or name in ("model", "prompt-lookup"):
            drafting = Drafting(name.partition(" ")[0], rule, tree, **given)
            found[f"{name}, {rule}, {shape}"] = lowered(target, drafting)
    drafting = Drafting("model", tree=4, **own["model"])
    for schedule in SCHEDULES:
        found[f"schedule {schedule}"] = lowered(target, Drafting("model", "coupled", 4, schedule, **own["model"]))
    found["width-matched"] = lowered(target, drafting, width_matched=True)
    found["log-probabilities"] = lowered(target, drafting, logprobs=5)
    for dtype in ("bfloat16", "int8"):
        for name in ("none", "prompt-lookup", "model"):
            found[f"{dtype}, {name}"] = lowered(model(dtype), Drafting(name, **own.get(name, {})))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--against", type=pathlib.Path)
    arguments = parser.parse_args()
    found = programs()
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    refused = sum(digest.startswith("refused") for digest in found.values())
    print(f"{len(found)} configurations: {len(found) - refused} programs, {refused} refused")
    if arguments.against is None:
        return 0
    before = json.loads(arguments.against.read_text())
    for name in sorted(before.keys() | found.keys()):
        if before.get(name) != found.get(name):
            print(f"differs: {name}: {str(before.get(name))[:60]} and {str(found.get(name))[:60]}")
    return int(before != found)


if __name__ == "__main__":
    sys.exit(main())
