"""Measures SmolLM2-135M on this machine, alternating between the configurations that are compared.

    python scripts/measure/speed.py widths                 # time of a round by width, dtype and capacity
    python scripts/measure/speed.py lookup                 # prompt lookup against plain decoding
    python scripts/measure/speed.py compile                # import time; compile time by drafter and by layers
    python scripts/measure/speed.py memory --source S      # peak memory while a model is loaded
    python scripts/measure/speed.py rules --source S       # time of each rule, compared with the target's call
    python scripts/measure/speed.py overhead --source S    # time of a round outside the target's call
    python scripts/measure/speed.py batches                # tokens per second by batch size, plain and with drafters

Rates exclude compilation and prefill. They are printed as medians, with the quartiles in brackets. `--record ID` writes
them to measurements/.
"""

import argparse
import itertools
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec.bench.measurements import add_record, quartiles, round_significant, write_record
from jaxspec.bench.texts import COPY_PROMPT
from jaxspec.core.draw import Draw, Noise
from jaxspec.core.noise import RoundNoise
from jaxspec.core.records import Proposal, Window
from jaxspec.decode.session import Session, clear_executables
from jaxspec.decode.verify import Processing, apply_rule
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.generation.inputs import make_request, row_keys, stop_array
from jaxspec.models.config import ModelConfig
from jaxspec.models.transformer import TransformerLM
from jaxspec.registry import RULES, find
from jaxspec.rules.coupled import Coupled

MODEL = "smollm2-135m-instruct"
ORDINARY = [
    "What is gravity?",
    "Write a haiku about the sea.",
    "Explain how a bicycle stays upright.",
    "What should I pack for a week in Iceland?",
    "Write an email that asks for a day off.",
    "Why is the sky blue?",
    "What makes a good friend?",
    "Tell me a short story about a lighthouse keeper.",
    "What is the difference between weather and climate?",
    "Give me a recipe for pancakes.",
]


def spread(values) -> str:
    low, middle, high = np.percentile(values, (25, 50, 75))
    return f"{middle:8.2f} ({low:.2f} to {high:.2f})"


def reader(size: int) -> Callable[[], float]:
    """Returns a function that times a sum over so many bytes: a lower bound for a round that reads as many weights."""
    data = jnp.ones(size // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    total(data).block_until_ready()

    def read() -> float:
        start = time.perf_counter()
        total(data).block_until_ready()
        return time.perf_counter() - start

    return read


def widths(arguments) -> dict[str, Any]:
    """Times rounds of every width, capacity and temperature, ten at a time, at text lengths around 200."""
    figures = {}
    for dtype in arguments.dtypes:
        model = jaxspec.load(MODEL, dtype=dtype)
        sessions = {}
        greedy = [(w, 512, 0.0) for w in (1, 2, 4, 8, 12, 16)] + [(1, 8192, 0.0), (8, 8192, 0.0)]
        for width, capacity, temperature in greedy + [(w, 512, 0.8) for w in (1, 8, 16)]:
            decoder = jaxspec.Decoder(model.lm, NoDraft(jaxspec.chain(width - 1)), Coupled(), widths=())
            sampling = jaxspec.Sampling(temperature=temperature)
            keys = row_keys(jax.random.key(0) if temperature else None, 1, 1, sampling)
            request = make_request(
                [list(range(1000, 1150))], keys, sampling.rows(1, model.lm.vocab), 300,
                stop_array(model, (), True, 1), capacity,
            )  # fmt: skip
            session = Session(decoder, jaxspec.Weights(model.params), request, capacity)
            session.run(3)
            sessions[width, capacity, temperature] = session
        times = {key: [] for key in sessions}
        read, reads = reader(model.bytes), []
        for _ in range(arguments.repeats):
            reads.append(np.median([read() for _ in range(5)]) * 1e3)
            for key, session in sessions.items():
                session.timing.decode_s = 0.0
                session.run(10)
                times[key].append(session.timing.decode_s * 100)
        one, rounds = np.array(times[1, 512, 0.0]), []
        for (width, capacity, temperature), values in times.items():
            ratio = np.median(np.array(values) / np.array(times[1, 512, temperature]))
            print(f"{dtype} width {width:2} capacity {capacity:4} temperature {temperature}: {spread(values)} ms, "
                  f"{ratio:.2f} x width 1")  # fmt: skip
            rounds.append({"width": width, "capacity": capacity, "temperature": temperature, "ms": quartiles(values),
                           "times_width_1": round_significant(ratio)})  # fmt: skip
        rate = model.bytes / np.median(reads) / 1e6
        print(f"{dtype} weights {model.bytes / 1e9:.3f} GB: read in {spread(reads)} ms, {rate:.1f} GB/s, "
              f"width 1 takes {spread(one / reads)} times that")  # fmt: skip
        figures[dtype] = {"weights_gb": round_significant(model.bytes / 1e9), "read_ms": quartiles(reads),
                        "rounds": rounds, "width_1_times_read": quartiles(one / reads)}  # fmt: skip
    return figures


def lookup(arguments) -> dict[str, Any]:
    """Compares plain decoding with prompt lookup at its default settings, on one copying and ten ordinary prompts."""
    figures: dict[str, Any] = {}
    for dtype in arguments.dtypes:
        model = jaxspec.load(MODEL, dtype=dtype)
        tasks = [("copying", COPY_PROMPT, 256)] + [(text, text, 128) for text in ORDINARY]
        for name, prompt, tokens in tasks:
            rates: dict[str, list[float]] = {"none": [], "prompt-lookup": []}
            texts, tokens_per_round = {}, 0.0
            for repeat in range(arguments.repeats + 1):
                for drafter, values in rates.items():
                    out = jaxspec.generate(
                        model, prompt, drafter=drafter, chat=True, max_new_tokens=tokens, capacity=1280
                    )
                    texts[drafter] = out[0].tokens
                    tokens_per_round = out.stats.tokens_per_round
                    if repeat:
                        values.append(out.timing.tokens_per_s)
            ratio = np.array(rates["prompt-lookup"]) / np.array(rates["none"])
            figures.setdefault(dtype, []).append({
                "prompt": name, "tokens": len(texts["none"]), "tokens_per_round": round_significant(tokens_per_round),
                "plain_tokens_per_s": quartiles(rates["none"]),
                "lookup_tokens_per_s": quartiles(rates["prompt-lookup"]),
                "times_plain": quartiles(ratio), "same_text": texts["none"] == texts["prompt-lookup"],
            })  # fmt: skip
            print(
                f"{dtype} {name[:40]:40} plain {np.median(rates['none']):6.1f} lookup "
                f"{np.median(rates['prompt-lookup']):6.1f} tokens/s, ratio {spread(ratio)}, "
                f"{tokens_per_round:.2f} tokens per round, {len(texts['none'])} tokens, "
                f"same {texts['none'] == texts['prompt-lookup']}",
                flush=True,
            )
    return figures


def compile_times(arguments) -> dict[str, Any]:
    """Times imports and compilations without the persistent cache."""
    figures: dict[str, Any] = {"import_s": {}, "compile_s": {}, "by_layers": []}
    code = "import time; t = time.perf_counter(); import jaxspec; jaxspec.generate; print(time.perf_counter() - t)"
    bare = code.replace("jaxspec.generate; ", "")
    for name, source in (("import jaxspec", bare), ("with jaxspec.generate", code)):
        times = [float(subprocess.check_output([sys.executable, "-c", source])) for _ in range(5)]
        print(f"{name}: {spread(times)} s")
        figures["import_s"][name] = quartiles(times)
    jax.config.update("jax_enable_compilation_cache", False)  # or executables of earlier runs would only be loaded
    model = jaxspec.load(MODEL)
    draft = jaxspec.Model(TransformerLM(small(2)), TransformerLM(small(2)).init_params(jax.random.key(0)))
    for label, options in {
        "none": {},
        "prompt-lookup": {},
        "early-exit chain 4": {"tree": 4},
        "model (2 layers) chain 4": {"tree": 4, "draft": draft},
        "model (2 layers) tree 4x2x1": {"tree": jaxspec.branching(4, 2, 1), "draft": draft},
    }.items():
        clear_executables()
        jax.clear_caches()
        out = jaxspec.generate(model, "Hello", chat=False, drafter=label.split()[0], max_new_tokens=2, **options)
        print(f"SmolLM2, 30 layers, {label}: compile {out.timing.compile_s:.1f} s", flush=True)
        figures["compile_s"][label] = round_significant(out.timing.compile_s, 3)
    for layers in arguments.layers:
        lm = TransformerLM(small(layers))
        tiny = jaxspec.Model(lm, lm.init_params(jax.random.key(0)))
        seconds = []
        for drafter in ("none", "prompt-lookup"):
            clear_executables()
            jax.clear_caches()
            out = jaxspec.generate(tiny, [1, 2, 3], drafter=drafter, max_new_tokens=2)
            seconds.append(out.timing.compile_s)
        plain, drafted = (round_significant(value, 3) for value in seconds)
        figures["by_layers"].append({"layers": layers, "plain_s": plain, "lookup_s": drafted})
        print(
            f"{layers:2} layers: compile {seconds[0]:.1f} s plain, {seconds[1]:.1f} s prompt-lookup",
            flush=True,
        )
    return figures


MEMORY = """
import resource, sys, jax, jaxspec
from jaxspec.models import transformer
jax.numpy.zeros(1).block_until_ready()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
model = jaxspec.load(sys.argv[1], dtype=sys.argv[2])
print(before, peak(), model.bytes)
"""


def memory(arguments) -> dict[str, Any]:
    """Measures the peak memory of a process before and after loading; on a CPU the parameters count as well."""
    figures = {}
    for dtype in arguments.dtypes:
        answer = subprocess.check_output([sys.executable, "-c", MEMORY, arguments.source, dtype], text=True)
        before, after, size = map(int, answer.split()[-3:])
        taken = after - before
        print(
            f"{arguments.source} {dtype}: parameters {size / 2**20:.0f} MiB, loading takes {taken / 2**20:.0f} MiB at "
            f"its peak ({taken / size:.2f} times), besides {before / 2**20:.0f} MiB of Python and JAX"
        )
        figures[dtype] = {"source": pathlib.Path(arguments.source).name, "parameters_mib": round(size / 2**20),
                        "loading_mib": round(taken / 2**20), "before_mib": round(before / 2**20)}  # fmt: skip
    return figures


def rules(arguments) -> dict[str, Any]:
    """Compares the target's call with every rule's arithmetic and with drawing a node's children, on two trees."""
    figures: dict[str, Any] = {}
    model = jaxspec.load(arguments.source)
    vocab = model.lm.vocab
    rng = np.random.default_rng(0)
    noise = RoundNoise(jax.random.split(jax.random.key(0), 1), jnp.array([100]), jnp.array(True), vocab)
    for name, topology in {"chain 4": jaxspec.chain(4), "tree 2x2": jaxspec.branching(2, 2)}.items():
        nodes, tree = topology.shape.nodes, jax.tree.map(lambda a: jnp.asarray(a)[None], topology.tree)
        logits = jnp.asarray(20 + 2 * rng.normal(size=(1, nodes, vocab)), jnp.float32)
        other = logits + jnp.asarray(rng.normal(size=logits.shape), jnp.float32)
        cache = model.lm.init_cache(1, 256)._replace(length=jnp.full((1,), 100))
        window = Window(jnp.ones((1, nodes), jnp.int32), 100 + tree.depths, tree.ancestors)

        @jax.jit
        def call(params, cache, window=window):
            features, _ = model.lm.apply(params, window, cache)
            return model.lm.head(params, features)

        calls: dict[str, tuple[Callable[..., Any], tuple]] = {"target call": (call, (model.params, cache))}
        for label, sampling in {"T 1": {}, "top-p 0.9": {"top_p": 0.9}, "top-k 50": {"top_k": 50}}.items():
            rows = jaxspec.Sampling(temperature=1.0, **sampling).rows(1, vocab)

            def draw(kind, rows=rows, width=topology.shape.width):
                drawn = Draw(kind, noise, rows)
                return jax.jit(lambda scores: drawn(scores, jnp.arange(scores.shape[1]), 0, width))

            for kind in Noise:
                calls[f"{label}: children of one node, {kind.value} noise"] = (draw(kind), (other[:, :1],))
            for rule in RULES:
                member = find("rule", rule)()
                try:
                    member.check(topology.shape)
                except jaxspec.errors.InvalidConfig:
                    continue
                below, law = draw(member.noise)(other)
                tokens = below[:, jnp.maximum(tree.parents[0], 0), tree.ranks[0]]

                @jax.jit
                def verdict(logits, tokens, law, rows, member=member, tree=tree):
                    proposal = Proposal(tokens, tree, law)
                    return apply_rule(member, noise, Processing.of(rows, (), proposal), logits, proposal)[0]

                calls[f"{label}: {rule}"] = (verdict, (logits, tokens, law, rows))
        calls["a sort of the logits"] = (jax.jit(lambda logits: jnp.sort(logits, -1)), (logits,))
        times = {label: [] for label in calls}
        for repeat in range(arguments.repeats + 1):
            for label, (function, values) in calls.items():
                start = time.perf_counter()
                jax.block_until_ready(function(*values))
                if repeat:
                    times[label].append((time.perf_counter() - start) * 1e3)
        target = np.median(times["target call"])
        figures[name] = {
            "nodes": nodes,
            "vocab": vocab,
            "ms": {label: quartiles(each) for label, each in times.items()},
        }
        print(f"{name}, {nodes} nodes, V = {vocab}")
        for label, values in times.items():
            share = np.median(values) / (np.median(values) + target)
            print(f"  {label:52} {spread(values)} ms" + ("" if label == "target call" else f", {share:.0%} of both"))
    return figures


def target_calls(
    model: jaxspec.Model, rows: int, nodes: int, length: int, capacity: int, times: int
) -> Callable[[], float]:
    """Compiles a loop of target calls, of `rows` windows each; returns a function that times it, in ms per call."""
    cache = model.lm.init_cache(rows, capacity)._replace(length=jnp.full((rows,), length))

    @jax.jit
    def calls(params, cache):
        def call(_, token):  # each call waits for the one before
            window = Window(
                jnp.broadcast_to(token, (rows, nodes)),
                jnp.broadcast_to(length + jnp.arange(nodes), (rows, nodes)),
                jnp.broadcast_to(jnp.tri(nodes) > 0, (rows, nodes, nodes)),
            )
            features, _ = model.lm.apply(params, window, cache)
            return model.lm.head(params, features)[0, -1].argmax().astype(jnp.int32)

        return jax.lax.fori_loop(0, times, call, jnp.int32(1))

    def timed() -> float:
        start = time.perf_counter()
        calls(model.params, cache).block_until_ready()
        return (time.perf_counter() - start) / times * 1e3

    timed()
    return timed


def overhead(arguments) -> dict[str, Any]:
    """Compares whole rounds with the target's calls alone at the same width and length, ten at a time."""
    figures: dict[str, Any] = {"rows": []}
    model = jaxspec.load(arguments.source)
    vocab, capacity, length, times = model.lm.vocab, 512, 150, 10
    prompt = [int(token) for token in np.random.default_rng(0).integers(1000, 2000, length)]
    settings = {"T 0": jaxspec.Sampling(), "T 0.8, top-p 0.95": jaxspec.Sampling(temperature=0.8, top_p=0.95)}
    chain = jaxspec.chain(4)
    drafters = {"plain": (NoDraft(), Coupled()), "prompt lookup 4": (PromptLookup(chain), Coupled())}
    drafters["prompt lookup 4, deterministic"] = (PromptLookup(chain), find("rule", "deterministic")())

    for (name, (drafter, rule)), (label, sampling) in itertools.product(drafters.items(), settings.items()):
        decoder = jaxspec.Decoder(model.lm, drafter, rule, width_matched=True)
        nodes = drafter.shape.nodes
        call = target_calls(model, 1, nodes, length, capacity, times)
        rounds, alone = [], []
        for _ in range(arguments.repeats):
            request = make_request(
                [prompt], row_keys(jax.random.key(0), 1, 1, sampling), sampling.rows(1, vocab), 300,
                stop_array(model, (), True, 1), capacity,
            )  # fmt: skip
            session = Session(decoder, jaxspec.Weights(model.params), request, capacity)
            session.run(2)
            session.timing.decode_s = 0.0
            session.run(times)
            rounds.append(session.timing.decode_s / times * 1e3)
            alone.append(call())
        share = 1 - np.array(alone) / np.array(rounds)
        figures["vocab"] = vocab
        figures["rows"].append({"drafter": name, "sampling": label, "round_ms": quartiles(rounds),
                              "target_ms": quartiles(alone), "share": quartiles(share)})  # fmt: skip
        print(f"V = {vocab}, {name}, {label}: round {spread(rounds)} ms, target's call {spread(alone)} ms, "
              f"everything else {np.median(share):.1%} ({np.percentile(share, 25):.1%} to "
              f"{np.percentile(share, 75):.1%})", flush=True)  # fmt: skip
    return figures


def batches(arguments) -> dict[str, Any]:
    """Compares plain decoding with the drafters for every batch size, 48 tokens per prompt.

    A call ends with its slowest row. Therefore a second ratio describes the rounds in which all rows run: tokens per
    round, divided by the cost of a round in plain rounds. Speculation pays if a round commits more tokens than the
    target's call at the drafter's width costs, in calls at width 1; that cost is timed separately.
    """
    figures: dict[str, Any] = {}
    for dtype in arguments.dtypes:
        model = jaxspec.load(MODEL, dtype=dtype)
        heads = jaxspec.load_heads(MODEL, target=model)
        drafters: dict[str, dict[str, Any]] = {
            "none": {"drafter": "none"},
            "prompt-lookup": {"drafter": "prompt-lookup", "tree": 4},
            "medusa": {"drafter": "medusa", "heads": heads},
        }
        common: dict[str, Any] = {"max_new_tokens": 48, "ignore_eos": True, "capacity": 512, "chat": True}
        common["schedule"] = "constant"  # so that every round that drafts has the full width
        for rows in arguments.rows:
            more = "Answer briefly. "
            prompts = [ORDINARY[i % len(ORDINARY)] + more * (i // len(ORDINARY)) for i in range(rows)]
            rates, costs = ({name: [] for name in drafters} for _ in range(2))
            tokens, nodes = {}, {}
            for repeat in range(arguments.repeats + 1):
                for name, options in drafters.items():
                    out = jaxspec.generate(model, prompts, **common, **options)
                    tokens[name] = out.stats.tokens_per_round
                    assert out.session is not None
                    nodes[name] = out.session.decoder.drafter.shape.nodes
                    if repeat:
                        rates[name].append(out.timing.tokens_per_s)
                        costs[name].append(out.timing.decode_s / max(row.stats.rounds for row in out))
            clear_executables()
            calls = {width: target_calls(model, rows, width, 100, 512, 4) for width in sorted(set(nodes.values()))}
            alone = {width: [] for width in calls}
            for _ in range(arguments.repeats):
                for width, call in calls.items():
                    alone[width].append(call())
            for name in drafters:
                ratio, cost, wide = (
                    np.median(np.array(own) / np.array(plain))
                    for own, plain in (
                        (rates[name], rates["none"]),
                        (costs[name], costs["none"]),
                        (alone[nodes[name]], alone[nodes["none"]]),
                    )
                )
                figures.setdefault(dtype, []).append({
                    "rows": rows, "drafter": name, "tokens_per_s": quartiles(rates[name]),
                    "times_plain": round_significant(ratio), "tokens_per_round": round_significant(tokens[name]),
                    "round_cost": round_significant(cost), "target_cost": round_significant(wide), "nodes": nodes[name],
                })  # fmt: skip
                print(
                    f"{dtype} {rows:2} rows {name:14} {spread(rates[name])} tokens/s, {ratio:.2f} x plain, "
                    f"{tokens[name] / cost:.2f} x while all rows run: {tokens[name]:.2f} tokens per round, "
                    f"a round costs {cost:.2f} plain ones, the target alone {wide:.2f}",
                    flush=True,
                )
    return figures


def small(layers: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=49152, hidden_size=64, intermediate_size=128, num_layers=layers, num_heads=4, num_kv_heads=2,
        head_dim=16,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {
        "widths": widths,
        "lookup": lookup,
        "compile": compile_times,
        "memory": memory,
        "rules": rules,
        "overhead": overhead,
        "batches": batches,
    }
    parser.add_argument("part", choices=parts)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--source", default=MODEL)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="batch sizes of `batches`")
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 8, 16, 30], help="of small models for `compile`")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.default_backend()}, {platform.machine()}, {jax.local_device_count()} device")
    values = parts[arguments.part](arguments)
    if arguments.record:
        print(f"written: {write_record(arguments.record, arguments.part, sys.argv, values)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
