"""Tests whether two checkouts decode alike: every drafter, rule, kind of tree, schedule and type, on small models.

    python scripts/prove/programs.py before.json                       # in one checkout
    python scripts/prove/programs.py after.json --against before.json  # in the other; exit status 1 if they differ
    python scripts/prove/programs.py before.json --run --smollm2       # in one checkout, with PYTHONPATH set to another

Without `--run`, it compares the programs that JAX lowers, without compiling them: equal programs give equal bits. With
`--run`, it decodes and compares tokens, log-probabilities, statistics and the drafter's final state bit by bit, so that
programs may differ. It then also runs in checkouts as old as 94152d5, where some modules and arguments had other names.
"""

import argparse
import dataclasses
import hashlib
import importlib
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec import DraftHeads, HeadsConfig, Sampling
from jaxspec.models.config import ModelConfig
from jaxspec.models.transformer import TransformerLM
from jaxspec.registry import DRAFTERS, RULES, SCHEDULES

try:
    from jaxspec.heads.network import init_params
    from jaxspec.models.quantized import quantize

    OPTIONS = "drafter_options"
except ImportError:  # an old checkout
    from jaxspec.models.by_output import quantize  # pyright: ignore
    from jaxspec.models.heads import init_params  # pyright: ignore

    OPTIONS = None

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
)  # fmt: skip
PROMPTS = [[1, 2, 3, 4, 5, 1, 2, 3], [7, 8, 9, 7, 8]]
CAPACITY, NEW_TOKENS, SEED = 128, 24, 1
TEMPERATURE = np.array([0.8, 0.0], np.float32)
TREES = {
    "default": None,
    "ragged": jaxspec.from_paths([(0, 0, 0), (0, 1), (1,), (2, 0, 0)]),
    "dynamic": jaxspec.dynamic(2, 3, 4),
}
HEADS = {
    "hidden": {"inputs": "hidden"},
    "hidden, own": {"inputs": "hidden", "projection": "own"},
    "hidden, single, 40 tokens": {"inputs": "hidden", "projection": "single", "draft_vocab_size": 40},
    "path": {"inputs": "path"},
    "path, own, 40 tokens": {"inputs": "path", "projection": "own", "draft_vocab_size": 40},
    "recurrent": {"inputs": "recurrent"},
    "recurrent, 40 tokens": {"inputs": "recurrent", "draft_vocab_size": 40},
}
SMOLLM2 = "smollm2-135m-instruct"
TEXTS = ["The quick brown fox jumps over the lazy dog. The quick brown fox", "List three colours:"]


@dataclasses.dataclass(frozen=True)
class Case:
    """What one program decodes with.

    Attributes:
        target: the target.
        drafting: options of drafting, as `generate` takes them.
        options: other arguments of `generate`.
    """

    target: jaxspec.Model
    drafting: Mapping[str, Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def model(dtype: str, noise: float = 0.0) -> jaxspec.Model:
    """Returns a random transformer whose matrices have this type, with noise added to its parameters."""
    lm = TransformerLM(CONFIG, "float32" if dtype == "int8" else dtype)
    leaves, structure = jax.tree.flatten(lm.init_params(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    added = [noise * a.std() * jax.random.normal(key, a.shape, a.dtype) for key, a in zip(keys, leaves)]
    params = jax.tree.unflatten(structure, [a + b for a, b in zip(leaves, added)] if noise else leaves)
    return jaxspec.Model(lm, quantize(params) if dtype == "int8" else params)


def heads(target: jaxspec.Model, **sizes: Any) -> DraftHeads:
    """Returns three random heads."""
    config, rng = HeadsConfig(CONFIG.hidden_size, CONFIG.vocab_size, 3, **sizes), np.random.default_rng(0)
    rows = config.draft_vocab_size
    tokens = None if rows is None else np.sort(rng.permutation(CONFIG.vocab_size)[:rows])
    params = init_params(config, model("float32").params["embed"] if config.num_projections else None, tokens)
    random = jax.tree.map(lambda a: a + jnp.asarray(0.1 * rng.normal(size=a.shape), a.dtype), params)
    return DraftHeads(config, random if tokens is None else random | {"tokens": params["tokens"]})


def random_params(config: Any) -> Any:
    """Returns random parameters of an EAGLE or DFlash head."""
    key = jax.random.key(2)
    try:
        return init_params(config, key=key)
    except TypeError:  # an old checkout, in which the module of each kind of heads has such a function
        return importlib.import_module(f"jaxspec.heads.{config.drafter}").init_params(config, key)


def eagle(version: int) -> DraftHeads:
    """Returns a random EAGLE head."""
    from jaxspec.heads.eagle_config import EagleConfig  # not in old checkouts

    layer = dataclasses.replace(CONFIG, num_layers=1)
    config = EagleConfig(layer, version, taps=(1, 2) if version == 3 else None, fc_norm=version == 3)
    return DraftHeads(config, random_params(config))


def dflash(markov: str | None) -> DraftHeads:
    """Returns a random DFlash head, or a DSpark head with a Markov head of this kind."""
    from jaxspec.heads.dflash_config import DFlashConfig  # not in old checkouts

    layer = dataclasses.replace(CONFIG, num_layers=1)
    config = DFlashConfig(layer, 9, 0, taps=(1, 2), markov=markov, markov_rank=4 if markov else 0)
    return DraftHeads(config, random_params(config))


def toys() -> Iterator[tuple[str, Case]]:
    """Yields every configuration of the small models, with a name."""
    target = model("float32")
    own: dict[str, dict] = {
        "early-exit": {"drafter_options": {"exit_layers": 1}},
        "model": {"draft": model("float32", 0.3)},
    }
    if "pard" in DRAFTERS:
        own["pard"] = own["model"] | {"drafter_options": {"pard_token": 3}}
    drafters = {name: own.get(name, {}) for name in DRAFTERS if name not in ("medusa", "eagle", "dflash")}
    drafters |= {f"medusa {kind}": {"heads": heads(target, **sizes)} for kind, sizes in HEADS.items()}
    if "eagle" in DRAFTERS:
        drafters |= {f"eagle {version}": {"heads": eagle(version)} for version in (1, 3)}
    if "dflash" in DRAFTERS:
        drafters |= {f"dflash {markov}": {"heads": dflash(markov)} for markov in (None, "rnn")}
    for (name, inputs), rule, (shape, tree) in itertools.product(drafters.items(), RULES, TREES.items()):
        if name == "model" or rule in ("coupled", "rejection", "deterministic")[: 1 if "," in name else 3]:
            drafting = {"drafter": name.partition(" ")[0], "rule": rule, "tree": tree, **inputs}
            yield f"{name}, {rule}, {shape}", Case(target, drafting)
    for name, schedule in itertools.product(("model", "early-exit", "medusa path"), SCHEDULES):
        tree = TREES["dynamic" if name == "early-exit" else "ragged"]
        drafting = {"drafter": name.partition(" ")[0], "tree": tree, "schedule": schedule, **drafters[name]}
        yield f"schedule {schedule}, {name}", Case(target, drafting)
    drafting = {"drafter": "model", "tree": 4, **own["model"]}
    yield "width-matched", Case(target, drafting, {"width_matched": True})
    yield "log-probabilities", Case(target, drafting, {"logprobs": 5})
    for dtype in ("bfloat16", "int8"):
        other = model(dtype)
        for name in (*own, "none", "prompt-lookup", "medusa hidden, own", "medusa recurrent"):
            drafting = {"drafter": name.partition(" ")[0], **drafters[name]}
            yield f"{dtype}, {name}", Case(other, drafting)


def smollm2() -> Iterator[tuple[str, Case]]:
    """Yields configurations of SmolLM2, with a name."""
    for dtype in ("float32", "bfloat16", "int8"):
        target = jaxspec.load(SMOLLM2, dtype=dtype)
        lm: Any = target.lm
        shallow = dataclasses.replace(lm, layers=4)
        own: dict[str, dict] = {
            "early-exit": {"drafter_options": {"exit_layers": 10}},
            "model": {"draft": jaxspec.Model(shallow, target.params, target.tokenizer)},
            "medusa": {"heads": jaxspec.load_heads(SMOLLM2, target=target)},
        }
        own["pard"] = own["model"] | {"drafter_options": {"pard_token": 3}}
        for name in (name for name in DRAFTERS if name not in ("eagle", "dflash")):
            drafting = {"drafter": name, **own.get(name, {})}
            for rule in RULES if name == "medusa" and dtype == "float32" else ("coupled", "rejection"):
                yield f"SmolLM2, {dtype}, {name}, {rule}", Case(target, {**drafting, "rule": rule})
            if name in own and dtype == "float32":
                dynamic = {**drafting, "rule": "coupled", "tree": jaxspec.dynamic(3, 3, 8)}
                yield f"SmolLM2, {dtype}, {name}, dynamic", Case(target, dynamic)


def digest(*values: Any) -> str:
    """Returns a digest of arrays' bytes, and of the text of other values."""
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(values):
        array = leaf if isinstance(leaf, (jax.Array, np.ndarray)) else None
        total.update(repr(leaf).encode() if array is None else np.asarray(array).tobytes())
    return total.hexdigest()[:16]


def lowered(case: Case) -> str:
    """Returns the digest of the program that `generate` would compile."""
    from jaxspec.generation.drafting import Drafting  # not in old checkouts
    from jaxspec.generation.job import make_job

    given = {"key": jax.random.key(SEED), "sampling": Sampling(temperature=TEMPERATURE, top_p=0.9, top_k=20)}
    try:
        from jaxspec.generation.options import CompileOptions

        job = make_job(case.target, PROMPTS, CompileOptions(**case.drafting, **given, **case.options))
    except ImportError:  # an old checkout
        old = {"options" if name == "drafter_options" else name: value for name, value in case.drafting.items()}
        job = make_job(case.target, PROMPTS, Drafting(**old), **given, **case.options)  # pyright: ignore
    decode = jax.jit(lambda weights, request: job.decoder.generate(weights, request, CAPACITY))
    return hashlib.sha256(decode.lower(job.weights, job.request([0, 1], 64)).as_text().encode()).hexdigest()


def decoded(case: Case) -> str:
    """Returns digests of all that `generate` computes."""
    inputs = dict(case.drafting)
    own = inputs.pop("drafter_options", {})
    inputs |= own if OPTIONS is None else {OPTIONS: own}
    out = jaxspec.generate(
        case.target,
        PROMPTS if case.target.tokenizer is None else TEXTS,
        key=jax.random.key(SEED),
        sampling=Sampling(temperature=TEMPERATURE, top_p=0.9, top_k=20),
        max_new_tokens=NEW_TOKENS,
        chat=False,
        ignore_eos=True,
        verbose=False,
        **inputs,
        **{"logprobs": 2, **case.options},
    )
    session = out.session
    assert session is not None, "all rows fit into one batch"
    laws = [(row.logprobs, row.sampled_logprobs, row.top_logprobs) for row in out]
    parts = {
        "tokens": digest([row.tokens for row in out], out.text),
        "log-probabilities": digest(jax.tree.map(lambda value: float(value).hex(), laws)),
        "statistics": digest([dataclasses.astuple(row.stats) for row in out]),
        "drafter": digest(jax.tree.map(np.asarray, session.state.draft)),
    }
    rounds = "+".join(str(row.stats.rounds) for row in out)
    return f"{rounds} rounds, " + ", ".join(f"{name} {value}" for name, value in parts.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--against", type=pathlib.Path)
    parser.add_argument("--run", action="store_true", help="decode, instead of lowering the programs")
    parser.add_argument("--smollm2", action="store_true", help="decode with SmolLM2 instead of small random models")
    parser.add_argument("--only", default="", help="only configurations whose names contain this text")
    arguments = parser.parse_args()
    found: dict[str, str] = {}
    for name, case in smollm2() if arguments.smollm2 else toys():
        if arguments.only in name:
            try:
                found[name] = decoded(case) if arguments.run else lowered(case)
            except jaxspec.JaxspecError as error:
                found[name] = f"refused: {type(error).__name__}"
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    refused = sum(value.startswith("refused") for value in found.values())
    print(f"{len(found)} configurations: {len(found) - refused} programs, {refused} refused")
    if arguments.against is None:
        return 0
    before = {
        name: value for name, value in json.loads(arguments.against.read_text()).items() if arguments.only in name
    }
    differ = [name for name in sorted(before.keys() | found.keys()) if before.get(name) != found.get(name)]
    for name in differ:
        print(f"differs: {name}:\n  {before.get(name)}\n  {found.get(name)}")
    print(f"{len(found) - len(differ)} are equal")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
