"""Tests that public functions refuse wrong arguments with a typed error in one line, before anything compiles."""

import dataclasses
import inspect
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import jaxspec
from helpers.checkpoints import random_params, tiny_config, write_hf
from helpers.narrow import instance, not_none
from helpers.toy_text import HOT, KEY, TINY, TOY
from jaxspec import Sampling
from jaxspec.analysis import (
    acceptance_by_rule,
    chain_lengths,
    coupled_acceptance,
    deterministic_acceptance,
    expected_length,
    match_probability,
    optimal_acceptance,
    rejection_acceptance,
)
from jaxspec.core.descriptions import describe_fields, parse_section
from jaxspec.core.draw import Noise
from jaxspec.core.noise import seed_key
from jaxspec.core.schedule import Constant
from jaxspec.core.sizes import MAX_NODES
from jaxspec.decode.session import Session
from jaxspec.drafters.none import NoDraft
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.errors import InvalidConfig, JaxspecError, WrongArguments
from jaxspec.generation.inputs import check_logprobs
from jaxspec.heads.network import init_params
from jaxspec.models.kernels import with_kernels, without_kernels
from jaxspec.models.transformer import TransformerLM
from jaxspec.rules.cascade import Tolerant
from jaxspec.rules.lenient import Lenient
from jaxspec.rules.rejection import Rejection
from jaxspec.rules.typical import Typical
from jaxspec.schedules.adaptive import Adaptive
from jaxspec.schedules.confidence import Confidence
from jaxspec.schedules.plus_minus import PlusMinus
from jaxspec.testing import check_rule, random_laws

pytestmark = pytest.mark.quick

ODD = {
    "None": None,
    "True": True,
    "0": 0,
    "5": 5,
    "-1": -1,
    "2**31-1": 2**31 - 1,
    "2**63": 2**63,
    "10**30": 10**30,
    "10**5000": 10**5000,
    "0.5": 0.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "1j": 1j,
    "text": "x",
    "no text": "",
    "two lines": "a\nb",
    "NUL": "a\0b",
    "surrogate": "\ud800",
    "long text": "x" * 100_000,
    "bytes": b"x",
    "[]": [],
    "()": (),
    "{}": {},
    "set": {1},
    "[1]": [1],
    "[[1]]": [[1]],
    "[[1], [2, 3]]": [[1], [2, 3]],
    "[None]": [None],
    "['x']": ["x"],
    "[nan]": [float("nan")],
    "[10**30]": [10**30],
    "{'a': 1}": {"a": 1},
    "{1: 'a'}": {1: "a"},
    "{10**30: 10**30}": {10**30: 10**30},
    "int8": np.int8(3),
    "bool_": np.bool_(True),
    "float16": np.float16(0.5),
    "datetime64": np.datetime64("2020-01-01"),
    "numpy": np.arange(3),
    "numpy 0": np.zeros(0),
    "numpy 2": np.ones((2, 2)),
    "numpy text": np.asarray(["a"]),
    "numpy objects": np.asarray([None, 1], object),
    "jax": jnp.arange(3),
    "jax scalar": jnp.int32(3),
    "jax key": KEY,
    "object": object(),
    "class": int,
    "function": lambda *_: None,
    "range": range(3),
    "slice": slice(3),
    "model": TOY,
    "sampling": HOT,
    "path": pathlib.Path("nowhere"),
    "error": ValueError("a\nb"),
    "denormal": 1e-40,
    "-inf": float("-inf"),
    "a range without end": range(10**12),
}


class Compiles(BaseException):
    """Everything was accepted: what is next would compile."""


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """An empty working directory, where nothing compiles and nothing is fetched."""

    def compiles(*_, **__):
        raise Compiles

    monkeypatch.setattr(Session, "_compiled", compiles)
    monkeypatch.setattr("jaxspec.generation.rollout._draw", compiles)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def heads() -> jaxspec.DraftHeads:
    config = jaxspec.HeadsConfig(instance(TransformerLM, TINY.lm).config.hidden_size, TINY.lm.vocab, 2)
    return jaxspec.DraftHeads(config, init_params(config))


GENERATE: dict[str, Any] = {"target": TOY, "prompts": "ab", "key": KEY, "sampling": HOT, "max_new_tokens": 4}
NAMES = (
    "target", "prompts", "key", "drafter", "rule", "sampling", "max_new_tokens", "draft", "draft_params", "tree",
    "drafter_options", "heads", "schedule", "drafting", "samples", "chat", "stop", "stop_ids", "ignore_eos", "logprobs",
    "on_token", "width_matched", "capacity", "session", "mesh", "batch", "out", "progress", "rounds", "verbose",
)  # fmt: skip
TABLE = [0.5, 0.25]


def cases():
    """Every argument of every function, with what the others are."""
    for name in NAMES:
        yield jaxspec.stream, name, GENERATE
    for name in ("prompts", "heads", "rounds", "stop_ids", "logprobs", "verbose"):
        yield jaxspec.generate, name, GENERATE
    for name in ("prompts", "capacity", "batch", "out", "session", "verbose"):
        yield jaxspec.precompile, name, GENERATE
    for drafter, name in (("early-exit", "drafter_options"), ("model", "draft"), ("medusa", "heads"), ("none", "tree")):
        yield jaxspec.stream, name, GENERATE | {"drafter": drafter, "target": TINY}
    yield jaxspec.stream, "draft_params", GENERATE | {"drafter": PromptLookup()}
    for name in ("temperature", "top_k", "top_p", "min_p", "logit_bias"):
        yield Sampling, name, {}
        yield sampled, name, {}
    yield jaxspec.chain, "length", {}
    yield one_level, "count", {}
    yield jaxspec.from_paths, "paths", {}
    yield jaxspec.Topology, "parents", {}
    for name in ("beam", "depth", "nodes"):
        yield jaxspec.dynamic, name, {}
    for name in ("acceptance", "nodes", "depth"):
        yield jaxspec.best_tree, name, {"acceptance": TABLE, "nodes": 4}
    for name in ("acceptance", "target_cost", "draft_cost"):
        yield jaxspec.fastest_tree, name, {"acceptance": TABLE, "target_cost": {1: 1.0, 2: 1.1}, "draft_cost": 0.1}
    for name in ("topology", "acceptance"):
        yield jaxspec.expected_tokens, name, {"topology": jaxspec.chain(1), "acceptance": TABLE}
    for name in ("data", "model", "devices"):
        yield jaxspec.make_mesh, name, {}
    yield jaxspec.named_tree, "name", {}
    for name in ("source", "target", "dtype", "allow_pickle"):
        yield jaxspec.load_heads, name, {"source": "nowhere"}
    yield jaxspec.load, "dtype", {"source": "nowhere"}
    for name in ("heads", "directory"):
        yield jaxspec.save_heads, name, {"heads": heads(), "directory": "saved"}
    for name in ("heads", "directory", "layout", "target", "base"):
        yield jaxspec.export_heads, name, {"heads": heads(), "directory": "out", "layout": "legacy"}
    for name in ("model", "directory"):
        yield jaxspec.save, name, {"model": TOY, "directory": "saved"}
    yield jaxspec.Drafting.load, "path", {}
    for name in ("target", "prompts", "out", "settings", "watch", "data"):
        yield jaxspec.train_heads, name, {"target": TINY, "prompts": "nowhere.jsonl", "out": "run"}
    for name in ("heads", "inputs", "medusa2", "medusa2_rate", "steps", "loss", "distill", "learning_rate"):
        yield jaxspec.MedusaSettings, name, {}
    yield from of_the_core()
    yield from of_analysis()


LAW = jnp.full((2, 4), 0.25)
ROLLOUT: dict[str, Any] = {"target": TOY, "tokens": jnp.ones((1, 2), jnp.int32), "count": jnp.ones(1, jnp.int32)}
DECODER: dict[str, Any] = {"target": TOY.lm, "drafter": NoDraft(), "rule": Rejection()}


def of_the_core():
    """Functions and members of the functional core, and rollouts."""
    for name in (
        "target", "tokens", "count", "key", "sampling", "max_new_tokens", "samples", "drafting", "stop_ids",
        "ignore_eos", "width_matched", "mesh",
    ):  # fmt: skip
        yield rolled_out, name, {}
    for name in ("target", "rollout", "mesh"):
        yield jaxspec.log_probs, name, {"target": TOY, "rollout": None}
    for name in ("target", "drafter", "rule", "schedule", "chunk", "widths", "width_matched", "top_logprobs"):
        yield jaxspec.Decoder, name, DECODER
    for name in ("batch", "vocab"):
        yield Sampling().rows, name, {"batch": 2, "vocab": 4}
    yield seed_key, "seed", {}
    for name in ("layers", "batch", "heads", "capacity", "width", "dtype", "value_width"):
        sizes = {"layers": 0, "batch": 0, "heads": 1, "capacity": 0, "width": 1}
        yield empty_cache, name, {**sizes, "dtype": jnp.float32}
    for name in ("model", "mesh"):
        yield jaxspec.shard, name, {"model": TOY, "mesh": None}
    for function in (with_kernels, without_kernels):
        yield function, "model", {}
    for name in ("function", "vocab", "context"):
        yield jaxspec.FunctionLM, name, {"function": len, "vocab": 4}
    for name in ("module", "vocab", "variables", "context"):
        yield jaxspec.from_flax, name, {"module": None, "vocab": 4}
    for member, names in (
        (Constant, ("length", "widths")),
        (PlusMinus, ("first", "least", "widths")),
        (Confidence, ("threshold", "entropy", "widths")),
        (Adaptive, [field.name for field in dataclasses.fields(Adaptive)]),
        (Typical, ("epsilon", "delta")),
        (Lenient, ("lenience",)),
        (Tolerant, ("tolerance",)),
    ):
        for name in names:
            yield member, name, {}


def of_analysis():
    """Functions of laws, and of tests."""
    laws: dict[str, Any] = {"target": LAW, "draft": LAW}
    for function in (deterministic_acceptance, rejection_acceptance, optimal_acceptance):
        for name in ("target", "draft", "children"):
            yield function, name, {**laws, "children": 2}
    for name in ("target", "draft"):
        yield match_probability, name, laws
    for function in (coupled_acceptance, acceptance_by_rule):
        for name in ("target", "draft", "children", "key"):
            yield function, name, {**laws, "children": 2, "key": KEY, "draws": 2}
    yield chain_lengths, "log_ratio", {}
    for name in ("rule", "topology", "target", "draft"):
        some = random_laws(0, 3)
        yield expected_length, name, {"rule": Rejection(), "topology": jaxspec.chain(1), "target": some, "draft": some}
    yield check_rule, "rule", {}


def rolled_out(**given):
    return jaxspec.rollout(**{**ROLLOUT, "key": KEY, "max_new_tokens": 4, **given})


def empty_cache(**sizes):
    """A cache without memory: the largest sizes are those of no machine."""
    return jax.eval_shape(lambda: jaxspec.empty_cache(**sizes))


def sampled(**field):
    """A setting that only a call can judge, since it depends on the rows and the vocabulary."""
    return jaxspec.stream(**{**GENERATE, "sampling": Sampling(**field)})


def one_level(count):
    return jaxspec.branching(count)


@pytest.fixture
def unchecked_annotations():
    """Turns off the checks of shapes in annotations, which users do not run: values reach the functions as they are."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    ("function", "name", "others"),
    [pytest.param(*case, id=f"{i}-{case[0].__name__}-{case[1]}") for i, case in enumerate(cases())],
)
def test_an_odd_value_is_taken_or_refused_in_one_line(nowhere, unchecked_annotations, function, name, others):
    accepted = []
    for odd, value in ODD.items():
        try:
            function(**others | {name: value})
            accepted.append(odd)
        except Compiles:
            accepted.append(odd)
        except JaxspecError as error:
            message = str(error)
            assert message, odd
            assert "\n" not in message, odd
            assert len(message) < 2000, odd
        except BaseException as error:  # whatever else it is, it is no answer
            pytest.fail(f"{function.__name__}({name}={odd}): {type(error).__name__}: {str(error)[:300]}")
    assert len(accepted) < len(ODD)


@pytest.mark.parametrize("three", [3, np.int8(3), np.int64(3), jnp.int32(3), np.asarray(3)])
def test_whole_numbers_of_every_kind_are_taken(nowhere, three):
    assert jaxspec.chain(three) == jaxspec.chain(3)
    assert jaxspec.branching(three, three) == jaxspec.branching(3, 3)
    assert jaxspec.best_tree(TABLE, three) == jaxspec.best_tree(TABLE, 3)
    assert check_logprobs(three) == 3
    for name in ("max_new_tokens", "samples", "rounds", "batch", "tree"):
        with pytest.raises(Compiles):
            jaxspec.stream(**GENERATE | {name: three})
    with pytest.raises(Compiles):
        jaxspec.stream(**{**GENERATE, "stop_ids": [three]})


def test_trees_beyond_all_use_are_refused_at_once():
    assert jaxspec.chain(MAX_NODES).shape.nodes == MAX_NODES + 1
    for tree in (
        lambda: jaxspec.chain(MAX_NODES + 1),
        lambda: jaxspec.chain(10**30),
        lambda: jaxspec.branching(10**9),
        lambda: jaxspec.branching(*[2] * 200),
        lambda: jaxspec.Topology((-1, *[0] * 20_000)),
        lambda: jaxspec.from_paths([range(10**12)]),
        lambda: jaxspec.from_paths([i] for i in range(10**12)),
        lambda: jaxspec.dynamic(2, 1000, 1001),
    ):
        with pytest.raises(InvalidConfig, match=r"1024|1025"):
            tree()


def test_caches_larger_than_the_machine_are_refused(nowhere):
    with pytest.raises(jaxspec.errors.CapacityError, match=r"but the machine has [\d.]+ GB; lower max_new_tokens"):
        jaxspec.stream(**{**GENERATE, "samples": 4096, "capacity": 2**31 - 1024})


# --- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [jaxspec.generate, jaxspec.stream, jaxspec.precompile])
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_tokens", "max_new_tokens="),
        ("temperature", "sampling=jaxspec.Sampling(temperature=...)"),
        ("top_p", "sampling=jaxspec.Sampling(top_p=...)"),
        ("n", "samples="),
        ("seed", "key=jax.random.key(seed)"),
        ("stop_token_ids", "stop_ids="),
        ("draftr", "drafter="),
        ("chatt", "chat="),
    ],
)
def test_a_wrong_name_is_refused_with_the_one_that_was_meant(nowhere, function, name, meant):
    with pytest.raises(WrongArguments) as caught:
        function(TOY, "ab", **{name: 1})
    assert str(caught.value) == f"{function.__name__}() has no argument '{name}'; did you mean {meant}?"
    assert isinstance(caught.value, JaxspecError)
    assert isinstance(caught.value, TypeError)


def test_other_functions_name_their_arguments_too():
    wrong: list[dict[str, Any]] = [{"torch_dtype": "float32"}, {"zzz": 1}, {"target": TOY}]
    with pytest.raises(WrongArguments, match=r"^load\(\) has no argument 'torch_dtype'; did you mean dtype=\?$"):
        jaxspec.load("smollm2-135m-instruct", **wrong[0])
    with pytest.raises(WrongArguments, match=r"^make_mesh\(\) has no argument 'zzz'; it has data, model, devices$"):
        jaxspec.make_mesh(**wrong[1])
    with pytest.raises(WrongArguments, match=r"^generate\(\): missing a required argument: 'prompts'$"):
        jaxspec.generate(**wrong[2])


# --- members of one's own -----------------------------------------------------------------------------------


class Unfinished:
    """A drafter and a rule with some of their members only."""

    draws, calls, lossless = False, 0, True

    def check(self, shape):
        """Takes every tree."""

    def init(self, params, batch, capacity):
        return ()


class Loose(PromptLookup):
    __hash__ = None  # pyright: ignore[reportAssignmentType]  # as of a dataclass that is not frozen


class Silent(Unfinished):
    noise = Noise.SHARED


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("drafter", Unfinished(), "a drafter object; Unfinished has no needs, shape, absorb, propose, see"),
        ("drafter", Unfinished, "a drafter object, got the class Unfinished; pass an object of this class"),
        ("drafter", Loose(), "a drafter must be hashable, because it is a static argument, but Loose is not; make it"),
        ("rule", Unfinished(), "a rule object; Unfinished has no noise, see jaxspec.core.rule"),
        ("rule", Silent(), "a rule object; Silent cannot be called"),
        ("schedule", Unfinished(), "a schedule object; Unfinished has no widths, limit, count_nodes, update"),
        ("schedule", 3, "a schedule object, got 3"),
    ],
)
@pytest.mark.parametrize("function", [jaxspec.generate, jaxspec.stream, jaxspec.precompile])
def test_a_member_is_refused_with_what_it_lacks(nowhere, function, name, value, message):
    with pytest.raises(InvalidConfig, match=re.escape(message)):
        function(**GENERATE | {name: value})


@pytest.mark.parametrize("function", [jaxspec.generate, jaxspec.stream, jaxspec.precompile])
def test_members_are_taken_as_objects(nowhere, function):
    with pytest.raises(Compiles):
        function(**GENERATE, drafter=PromptLookup(), rule=Rejection(), schedule=PlusMinus())
    made = jaxspec.Drafting(PromptLookup(), rule=Rejection(), schedule=PlusMinus()).build(TOY)[0]
    assert made == jaxspec.Drafting("prompt-lookup", rule="rejection", schedule="plus-minus").build(TOY)[0]


@pytest.mark.parametrize("drafter", ["prompt-lookup", PromptLookup()])
def test_a_rule_that_needs_a_law_is_refused_for_drafts_without_one(nowhere, drafter):
    with pytest.raises(InvalidConfig, match="without a distribution; use a drafter that draws"):
        jaxspec.stream(**GENERATE, drafter=drafter, rule="lossy-cascade")
    for given in ({"rule": "rejection", "drafter": drafter}, {"rule": "lossy-cascade", "drafter": "none"}):
        with pytest.raises(Compiles):
            jaxspec.stream(**{**GENERATE, **given})


# --- settings of sampling -----------------------------------------------------------------------------------


def test_a_setting_out_of_range_is_refused_when_it_is_made():
    with pytest.raises(InvalidConfig, match="temperature must be finite and at least 0, got -1"):
        Sampling(temperature=-1)
    with pytest.raises(InvalidConfig, match="top_p must be above 0"):
        Sampling(top_p=[0.5, 0.0])


def test_what_jax_puts_into_a_pytree_of_settings_is_not_checked():
    settings = Sampling(0.5, 3, 0.9, 0.1, logit_bias=jnp.zeros(4))
    marked = jax.tree.map(lambda _: None, settings)
    assert (marked.temperature, marked.processors[0].bias) == (None, None)
    assert jax.tree.map(lambda _: -1, settings).top_p == -1
    assert jax.eval_shape(lambda: settings.rows(2, 4)).temperature.shape == (2,)
    made = jax.jit(lambda t: Sampling(temperature=t, top_k=jnp.int32(2)))(jnp.float32(-1))
    assert made.temperature == -1
    mapped = jax.vmap(lambda s: s.temperature * 2)(settings.rows(2, 4))
    np.testing.assert_array_equal(mapped, [1.0, 1.0])
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(settings)]
    assert names == [".temperature", ".top_k", ".top_p", ".min_p", ".processors[0].bias"]
    assert jax.tree.structure(settings) == jax.tree.structure(Sampling(logit_bias=jnp.ones(4)))


# --- dtypes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_hf(tmp_path_factory.mktemp("tiny"), tiny_config(), random_params(tiny_config()))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (jnp.bfloat16, "bfloat16"),
        (jnp.dtype("bfloat16"), "bfloat16"),
        (np.float32, "float32"),
        (np.dtype(np.float32), "float32"),
        (jnp.int8, "int8"),
    ],
)
def test_dtypes_are_taken_by_name_and_as_types(checkpoint, given, kept):
    by_type, by_name = (jaxspec.load(checkpoint, dtype=dtype, kernels=False) for dtype in (given, kept))
    assert by_type.lm == by_name.lm
    kinds = [[leaf.dtype for leaf in jax.tree.leaves(model.params)] for model in (by_type, by_name)]
    assert kinds[0] == kinds[1]
    assert np.dtype(kept) in kinds[0]


def test_a_dtype_is_refused_before_anything_is_fetched(monkeypatch):
    monkeypatch.setattr("jaxspec.checkpoints.load.open_source", lambda *_: pytest.fail("fetched"))
    refused: list[Any] = ["float16", np.float64, None, float]
    for given in refused:
        with pytest.raises(InvalidConfig, match="dtype must be one of float32, bfloat16, int8, file, got "):
            jaxspec.load("smollm2-135m-instruct", dtype=given)


def test_heads_take_dtypes_as_types(tmp_path):
    place = jaxspec.save_heads(heads(), tmp_path / "heads")
    loaded = jaxspec.load_heads(place, dtype=jnp.bfloat16)
    assert np.dtype(jnp.bfloat16) in {leaf.dtype for leaf in jax.tree.leaves(loaded.params)}


# --- repr ---------------------------------------------------------------------------------------------------


def test_everything_public_prints_in_a_few_short_lines(checkpoint):
    model = jaxspec.load(checkpoint)
    output = jaxspec.generate(TOY, ["ab"] * 5, max_new_tokens=300, ignore_eos=True, verbose=False)
    running = jaxspec.stream(TOY, ["ab"] * 5, max_new_tokens=300, ignore_eos=True, verbose=False)
    chunk = next(running)
    tuned = jaxspec.Drafting("none", tree=jaxspec.chain(8), schedule="constant", measured={"a": "x" * 10**5})
    bias = Sampling(temperature=np.ones(500), logit_bias=dict.fromkeys(range(16), 0.0))
    session = not_none(output.session)
    one_line = (
        model, TOY, output[0], output.stats, output.timing, session, session.weights, session.state, running, chunk,
        heads(), Sampling(), Sampling(0.5), bias, tuned, NoDraft(),
        jaxspec.checkpoints.source.open_source(checkpoint),
    )  # fmt: skip
    for thing in one_line:
        text = repr(thing)
        assert text.startswith(type(thing).__name__)
        assert "\n" not in text
        assert len(text) < 800, text
        assert "Array(" not in text
        assert "array(" not in text
    assert len(repr(output).splitlines()) <= 8
    assert len(repr(output)) < 1500
    shown = f"Output(5 rows, {output.stats.tokens_per_round:.2f} tokens per round,\n  Generation('"
    assert repr(output).startswith(shown)
    row = output[0]
    assert repr(row).startswith(f"Generation({row.text[:20]!r}"[:-1])
    assert f"finish_reason='length', 300 tokens, {row.stats.tokens_per_round:.2f} tokens per round" in repr(row)
    assert repr(chunk).startswith(f"Chunk({chunk.text!r}, finish_reason=None, {len(chunk.tokens)} tokens, ")
    assert repr(dataclasses.replace(row, text=None, tokens=[1, 2])).startswith(
        "Generation(tokens=[1, 2], finish_reason="
    )
    assert repr(TOY).startswith("Model('toy', TableLM, ")
    assert repr(Sampling(0.5)) == "Sampling(temperature=0.5)"
    assert os.path.basename(checkpoint) in repr(model)


def explained(function):
    """The explanation of each argument in the documentation of a function, on one line."""
    return parse_section(function.__doc__, "Args")


def test_every_argument_is_explained_alike():
    """`tune` writes its arguments out; those that it has in common with `generate` are the same."""
    whole, tuned = explained(jaxspec.generate), explained(jaxspec.tune)
    assert list(tuned) == list(inspect.signature(jaxspec.tune).parameters)
    assert {name for name in tuned if tuned[name] == whole[name]} == {
        "target", "draft", "drafter_options", "heads", "key", "chat",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["MedusaSettings", "Eagle3Settings", "Eagle1Settings", "DFlashSettings",
                                  "DSparkSettings", "JetSpecSettings", "PardSettings"])  # fmt: skip
def test_help_explains_every_setting(name):
    kind = getattr(jaxspec, name)
    described, fields = describe_fields(kind), dataclasses.fields(kind)
    assert described.keys() == {field.name for field in fields} == inspect.signature(kind).parameters.keys()
    assert parse_section(kind.__doc__) == described, "inherited fields are in the docstring as well"
    assert all(text.endswith(".") for text in described.values())


def test_settings_take_named_arguments_alone():
    kind: Any = jaxspec.MedusaSettings
    with pytest.raises(WrongArguments, match=r"MedusaSettings\(\) has no argument 'step'; did you mean steps="):
        kind(**{"step": 5})
    with pytest.raises(WrongArguments, match=r"MedusaSettings\(\) takes only keyword arguments, got 5"):
        kind(5)
