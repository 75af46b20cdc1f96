"""Times rounds with each processor beside rounds without, by vocabulary and number of nodes.

    python -m scripts.measure.processors --record processors
    python -m scripts.measure.processors --vocab 49152 --nodes 8 --members repetition --repeats 3

The target has the layers of SmolLM2-135M and random weights. A round drafts a chain of tokens, verifies it with the
rule "coupled" at temperature 0.7, and commits, after a text of 200 tokens. Every round starts from the same state.
Rounds with and without the processor take turns, and a ratio is the median over turns of two times that were measured
one after the other. The grammar is that of a JSON object of twelve fields, over the vocabulary of SmolLM2, which is
repeated where the vocabulary is larger.
"""

import argparse
import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec.bench.measurements import add_record, quartiles, write_record
from jaxspec.checkpoints.presets import fetch_preset
from jaxspec.core.automaton import read_vocabulary
from jaxspec.core.processor import Beginning, read_text
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import chain
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Request, Weights
from jaxspec.grammar.compilation import token_pieces
from jaxspec.grammar.expressions import compile_expression
from jaxspec.grammar.schema import write_schema
from jaxspec.kernels.library import describe_kernels, kernels_available
from jaxspec.models.config import ModelConfig
from jaxspec.models.execution import Execution
from jaxspec.models.packed import pack_param
from jaxspec.models.transformer import TransformerLM
from jaxspec.rules.coupled import Coupled
from jaxspec.testing import ScriptedDrafter

TEXT = 200
FIELDS = ({"type": "string", "maxLength": 12}, {"type": "integer"}, {"enum": ["red", "green", "blue"]})
SCHEMA = {"type": "object", "properties": {f"field_{i}": FIELDS[i % len(FIELDS)] for i in range(12)}}


@functools.cache
def make_grammar(vocab: int) -> jaxspec.Grammar:
    """Returns a grammar over the vocabulary of SmolLM2, repeated up to a size."""
    tokenizer = jaxspec.load(fetch_preset("smollm2-135m-instruct")).tokenizer
    assert tokenizer is not None
    pieces = token_pieces(tokenizer)
    automaton = compile_expression(write_schema(SCHEMA | {"required": [*SCHEMA["properties"]]}))
    return jaxspec.Grammar(read_vocabulary(automaton, [pieces[token % len(pieces)] for token in range(vocab)]))


MEMBERS: dict[str, Any] = {
    "logit-bias": jaxspec.LogitBias({5: -1.0}),
    "repetition": jaxspec.RepetitionPenalty(1.1),
    "presence": jaxspec.PresencePenalty(0.5),
    "frequency": jaxspec.FrequencyPenalty(0.5),
    "no-repeat-ngram": jaxspec.NoRepeatNgram(3),
    "bad-words": jaxspec.BadWords([[5], [7, 8], [1, 2, 3]]),
    "min-new-tokens": jaxspec.MinNewTokens(1000),
    "allowed-tokens": jaxspec.AllowedTokens(list(range(1000))),
    "suppress-tokens": jaxspec.SuppressTokens([5, 6]),
    "thinking-budget": jaxspec.ThinkingBudget(10_000, [5, 6, 7]),
    "grammar": make_grammar,
}


def make_network(vocab: int) -> tuple[TransformerLM, Any]:
    """Returns a network with the layers of SmolLM2-135M, and random parameters in bfloat16."""
    config = ModelConfig(
        vocab_size=vocab, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64, tie_embeddings=True,
    )  # fmt: skip
    lm = TransformerLM(config, "bfloat16", execution=Execution(kernels=kernels_available()))
    params = lm.init_params(jax.random.key(0))
    if not kernels_available():
        return lm, params
    pack = jax.tree_util.tree_map_with_path(lambda path, leaf: pack_param(path[-1].key, leaf), params)
    return lm, pack


def measure(vocab: int, nodes: int, members: list[str], repeats: int, rounds: int) -> list[dict[str, Any]]:
    """Returns the times of rounds with each member, and with none."""
    lm, params = make_network(vocab)
    drafter = ScriptedDrafter(chain(nodes - 1))
    decoder, rng = Decoder(lm, drafter, Coupled()), np.random.default_rng(0)
    weights = Weights(params, jnp.asarray(rng.integers(0, vocab, (vocab, nodes)), jnp.int32))
    tokens = jnp.asarray(rng.integers(0, vocab, (1, TEXT)), jnp.int32)
    stops = jnp.full((1, 8), -1).at[0, 0].set(2)
    step = jax.jit(decoder.step)

    slots = decoder.slots(TEXT + 256)
    request = Request(tokens, jnp.full(1, TEXT), jnp.full(1, 256), jax.random.split(jax.random.key(0), 1), stops,
                      Sampling(temperature=0.7).rows(1, vocab))  # fmt: skip
    prefill = jax.jit(lambda weights, request: decoder.prefill(weights, decoder.init(weights, request, slots)))
    prompt = jax.block_until_ready(prefill(weights, request))
    beginning = Beginning(vocab, prompt.tokens.shape[1], stops)

    def prepare(name: str | None) -> Any:
        """Returns a state inside the text; the round is compiled."""
        chosen = [] if name is None else [make_grammar(vocab) if name == "grammar" else MEMBERS[name]]
        sampling = Sampling(temperature=0.7, processors=chosen).rows(1, vocab)
        read = read_text(sampling.processors, beginning, prompt.tokens[:, :TEXT], prompt.length, prompt.length)
        return jax.block_until_ready(step(weights, prompt._replace(sampling=sampling, processed=read)))

    def seconds(state: Any) -> float:
        start = time.perf_counter()
        for _ in range(rounds):
            jax.block_until_ready(step(weights, state).length)
        return (time.perf_counter() - start) / rounds

    plain, rows = prepare(None), []
    for name in members:
        begin = time.perf_counter()
        state = prepare(name)
        print(f"{name}: compiled in {time.perf_counter() - begin:.0f} s", flush=True)
        times = np.array([(seconds(plain), seconds(state)) for _ in range(repeats)])
        rows.append({
            "processor": name, "ms": quartiles(times[:, 1] * 1e3), "ms_without": quartiles(times[:, 0] * 1e3),
            "ratio": quartiles(times[:, 1] / times[:, 0]),
        })  # fmt: skip
        print(f"V = {vocab}, {nodes} nodes: {rows[-1]}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", nargs="+", type=int, default=[49_152, 151_936])
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--members", nargs="+", choices=MEMBERS, default=list(MEMBERS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=8, help="rounds that are timed together")
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, {describe_kernels()}")
    values = {
        f"V = {vocab}, {nodes} nodes": measure(vocab, nodes, arguments.members, arguments.repeats, arguments.rounds)
        for vocab in arguments.vocab
        for nodes in arguments.nodes
    }
    if arguments.record:
        print(f"written: {write_record(arguments.record, 'processors', sys.argv, values)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
