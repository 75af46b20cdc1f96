"""Tests the compiled program: traced once, one loop, no callback, no copy of the cache, also under vmap."""

import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.narrow import not_none
from helpers.toys import decoder, request, texts, transformer
from jaxspec.core.topology import Topology, branching, chain, dynamic
from jaxspec.decode.loop import Decoder
from jaxspec.decode.session import Session
from jaxspec.decode.state import Weights
from jaxspec.drafters.model import ModelDraft
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.pard import Pard
from jaxspec.testing import ScriptedDrafter, TableLM

V = 8
LM = TableLM(V)
PARAMS = LM.init_params(jax.random.key(0))

# Sizes that occur nowhere else, so that arrays can be told by their shape.
REAL = transformer(vocab_size=263, hidden_size=76, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=38)
DRAFT = transformer(vocab_size=263, hidden_size=20, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=22)
CAPACITY, BATCH = 8192, 3
CACHE = (3, BATCH, 1, CAPACITY, 38)


@pytest.fixture(scope="module")
def real():
    weights = Weights(REAL.init_params(jax.random.key(0)), DRAFT.init_params(jax.random.key(1)))
    asked = request([[1, 2], [3], [4] * 5], 8, vocab=REAL.vocab, temperature=[0.0, 1.0, 0.5])
    return decoder(REAL, ModelDraft(DRAFT, branching(2, 1))), weights, asked


def test_equal_configurations_trace_once():
    """Equal but distinct decoders are one static argument; what is traced may change freely."""

    @functools.partial(jax.jit, static_argnums=(0, 3))
    @chex.assert_max_traces(n=1)
    def session(config, weights, asked, capacity, rounds):
        return config.run(weights, config.prefill(weights, config.init(weights, asked, capacity)), rounds)

    def config():
        return decoder(TableLM(8), ModelDraft(TableLM(8), Topology((-1, 0, 0, 1))))

    assert config() is not config()
    assert config() == config()
    assert hash(config()) == hash(config())
    seen = set()
    for i, rounds in enumerate((1, 2, 100)):
        asked = request(
            [[1] * (i + 1), [2]],
            [5 + i, 9],
            vocab=V,
            size=6,
            seed=i,
            stops=[[i]],
            temperature=[0.3 * i, 1.0],
            top_k=i,
            top_p=1.0 - 0.1 * i,
            min_p=0.01 * i,
        )
        weights = Weights(jax.tree.map(lambda a, i=i: a + i, PARAMS), PARAMS)
        seen.add(str(texts(session(config(), weights, asked, 128, rounds))))
    assert len(seen) == 3


def test_sessions_of_equal_configurations_share_executables():
    """The second compiles nothing, whatever its keys, lengths, stops and temperatures."""
    first, second = (
        Session(
            decoder(TableLM(8), NoDraft()),
            Weights(PARAMS),
            request([[1] * n, [2]], 4 + n, vocab=V, size=6, seed=n, temperature=0.5 * n, stops=[[n]]),
            128,
        )
        for n in (1, 2)
    )
    first.run()
    assert first.timing.compile_s > 0
    second.run(1)
    second.run(2)
    assert second.timing.compile_s == 0


# The program as traced.


def inner(eqn):
    """The programs inside an equation; of those that each platform has for one thing the last, which is everyone's."""
    own = eqn.params.get("branches_platforms") is not None
    for value in [eqn.params["branches"][-1]] if own else eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item


def walk(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for program in inner(eqn):
            yield from walk(program)


def has_head(eqns) -> bool:
    """A product with the target's head, which alone has this shape."""
    head = (REAL.vocab, REAL.config.hidden_size)
    return any(e.primitive.name == "dot_general" and e.invars[1].aval.shape == head for e in eqns)


def test_one_loop_holds_the_target_and_no_callback(real):
    config, weights, asked = real
    jaxpr = jax.make_jaxpr(lambda w, r: config.generate(w, r, CAPACITY))(weights, asked).jaxpr
    everything = list(walk(jaxpr))
    assert has_head(everything)
    loops = [e for e in everything if e.primitive.name in ("while", "scan") and has_head(walk_inner(e))]
    assert {e.primitive.name for e in loops} == {"while"}
    within = list(walk_inner(loops[0]))
    assert all(any(e is loop for e in within) for loop in loops[1:]), "one loop holds those of the calls"
    heads = [e for e in everything if has_head([e])]
    assert len(heads) == 2, "one wide and one narrow call"
    assert all(any(e is head for e in within) for head in heads)
    names = {e.primitive.name for e in everything}
    assert not [n for n in names if "callback" in n or "infeed" in n or "outfeed" in n or "device_put" in n]


def walk_inner(eqn):
    for program in inner(eqn):
        yield from walk(program)


# The program as compiled.


def computations(text) -> dict[str, list[str]]:
    """The instructions of every computation of an HLO module, by name."""
    found, name = {}, None
    for line in text.splitlines():
        if match := re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = match[1]
            found[name] = []
        elif name and line.startswith("  "):
            found[name].append(line)
    return found


def in_loops(text) -> list[str]:
    """All instructions that are run inside some while loop."""
    found = computations(text)
    bodies = [m for lines in found.values() for line in lines for m in re.findall(r"body=%?([\w.\-]+)", line)]
    assert bodies
    reached, todo = set(), bodies
    while todo:
        name = todo.pop()
        if name in reached or name not in found:
            continue
        reached.add(name)
        todo += [m for line in found[name] for m in re.findall(r"%([\w.\-]+)", line) if m in found]
    return [line for name in reached for line in found[name]]


def cache_sized(text, batch) -> list[str]:
    """Copies and selects in loops whose result is as large as the target's or the draft model's cache."""
    sizes = {math.prod((3, batch, 1, CAPACITY, 38)), math.prod((1, batch, 1, CAPACITY, 22))}
    bad = []
    for line in in_loops(text):
        match = re.search(r"= \w+\[([\d,]*)\]\S* (copy|copy-start|select|transpose|concatenate)\(", line)
        if match and math.prod(map(int, match[1].split(",") if match[1] else [])) in sizes:
            bad.append(line.strip())
    return bad


def nbytes(tree) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param(ModelDraft(DRAFT, branching(2, 1)), id="fixed"),
        pytest.param(ModelDraft(DRAFT, dynamic(3, 3, 8)), id="dynamic", marks=pytest.mark.slow),
        pytest.param(Pard(DRAFT, 0, 263, branching(2, 1)), id="pard", marks=pytest.mark.slow),
    ],
)
def test_a_round_copies_no_cache(real, drafter):
    """`run` on a donated state: no copy, no select, and beside the state less than a tenth of the cache."""
    _, weights, asked = real
    config = decoder(REAL, drafter)
    state = jax.eval_shape(lambda w, r: config.init(w, r, CAPACITY), weights, asked)
    assert state.cache.stores.keys.shape == CACHE
    compiled = jax.jit(config.run, donate_argnums=1).lower(weights, state, jnp.int32(5)).compile()
    assert cache_sized(compiled.as_text(), BATCH) == []
    memory = not_none(compiled.memory_analysis())
    assert memory.temp_size_in_bytes < nbytes(state.cache.stores) / 10
    assert memory.alias_size_in_bytes > nbytes(state.cache.stores)


@pytest.mark.slow
def test_vmapped_generate_copies_no_cache(real):
    """`jit(vmap(generate))` runs the batched program: one set of caches, never copied in the loop."""
    config, weights, asked = real
    state = jax.eval_shape(lambda w, r: config.init(w, r, CAPACITY), weights, asked)
    mapped = jax.jit(jax.vmap(lambda r: config.generate(weights, r, CAPACITY)))
    compiled = mapped.lower(asked).compile()
    assert cache_sized(compiled.as_text(), BATCH) == []
    caches = nbytes(state.cache.stores) + nbytes(state.draft.cache.stores)
    assert not_none(compiled.memory_analysis()).temp_size_in_bytes < 1.2 * caches


def test_a_careless_loop_is_seen():
    """The search above finds what it looks for: a select over a cache, as a vmapped loop makes it."""
    shape = (3, BATCH, 1, CAPACITY, 38)

    def one(cache, n):
        def body(carry):
            cache, i = carry
            cache = jax.lax.dynamic_update_slice(cache, jnp.ones((3, 1, 1, 38)) * i, (0, 0, i, 0))
            return jnp.where(cache.sum() > 0, cache, 2 * cache), i + 1

        return jax.lax.while_loop(lambda carry: carry[1] < n, body, (cache, 0))[0]

    mapped = jax.jit(jax.vmap(one, (1, 0), 1))
    text = mapped.lower(jnp.zeros(shape), jnp.arange(BATCH)).compile().as_text()
    assert cache_sized(text, BATCH)


def test_every_vmap_of_generate_gives_the_batched_tokens():
    """Over prompts, nested, over keys alone, over parameters, and unbatched: always the same text."""
    config = decoder(LM, ScriptedDrafter(chain(2)), width_matched=True)
    weights = Weights(PARAMS, jnp.asarray(np.random.default_rng(0).integers(0, V, (V, 3))))
    asked = request([[1], [2, 3], [4], [5, 6, 7]], 10, vocab=V, temperature=[0.0, 1.0, 0.6, 1.2])

    def one(weights, asked):
        result = config.generate(weights, asked, 128)
        text = jnp.arange(result.tokens.shape[-1]) < result.length[..., None]
        return jnp.where(text, result.tokens, -1), result.length, result.log

    batched = jax.jit(one)(weights, asked)
    assert (np.asarray(batched[1]) == [11, 12, 11, 13]).all()
    chex.assert_trees_all_equal(jax.jit(jax.vmap(one, (None, 0)))(weights, asked), batched)
    pairs = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), asked)
    nested = jax.jit(jax.vmap(jax.vmap(one, (None, 0)), (None, 0)))(weights, pairs)
    chex.assert_trees_all_equal(jax.tree.map(lambda a: a.reshape(4, *a.shape[2:]), nested), batched)
    half = jax.jit(jax.vmap(one, (None, 0)))(weights, pairs)
    chex.assert_trees_all_equal(jax.tree.map(lambda a: a.reshape(4, *a.shape[2:]), half), batched)

    prompt = jax.tree.map(lambda a: a[3], asked)
    axes = jax.tree.map(lambda _: None, prompt)._replace(key=0)
    keyed = jax.jit(jax.vmap(one, (None, axes)))(weights, prompt._replace(key=asked.key))
    chex.assert_trees_all_equal(jax.tree.map(lambda a: a[3], keyed), jax.tree.map(lambda a: a[3], batched))
    assert len({str(tokens[:13]) for tokens in np.asarray(keyed[0])}) == 4

    other = weights._replace(target=jax.tree.map(lambda a: -a, PARAMS))
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), weights, other)
    mapped = jax.jit(jax.vmap(one, (0, None)))(both, asked)
    chex.assert_trees_all_equal(jax.tree.map(lambda a: a[0], mapped), batched)
    chex.assert_trees_all_equal(jax.tree.map(lambda a: a[1], mapped), jax.jit(one)(other, asked))


def test_a_decoder_is_a_static_argument():
    """Its options are part of what it is."""
    config = decoder(LM, NoDraft())
    assert len({config, decoder(LM, NoDraft()), decoder(LM, NoDraft(), width_matched=True)}) == 2
    assert config != Decoder(LM, NoDraft(chain(1)), config.rule, chunk=4)
