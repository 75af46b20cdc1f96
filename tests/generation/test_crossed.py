"""Tests settings together: any drafter with any rule, tree and schedule either decodes or is refused in one line.

Every case goes through the options of the command line, as a user's call does. All pairs are built, which checks a rule
with the drafts of a drafter; some are traced to the end of a round, which needs no compilation; some are decoded.
"""

import dataclasses
import functools
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jaxspec
from helpers.covering import pairwise
from helpers.tiers import with_slow
from helpers.toy_text import KEY, TINY
from jaxspec import Sampling, registry
from jaxspec.cli import generate as command
from jaxspec.cli.drafting import read_drafting
from jaxspec.cli.options import Parser, UsageError, read_options
from jaxspec.core.draw import Noise
from jaxspec.core.schedule import Constant
from jaxspec.decode.loop import Decoder
from jaxspec.decode.session import Session
from jaxspec.drafters.none import NoDraft
from jaxspec.errors import InvalidConfig, JaxspecError
from jaxspec.rules.coupled import Coupled
from jaxspec.rules.rejection import Rejection

TREES: dict[str, list[str]] = {
    "default": [],
    "chain": ["--draft-length", "2"],
    "branching": ["--tree", "2x1"],
    "dynamic": ["--tree", "dynamic-2x2-5"],
}
FACTORS = {
    "rule": list(registry.RULES),
    "drafter": list(registry.DRAFTERS),
    "tree": list(TREES),
    "schedule": ["default", *registry.SCHEDULES],
}
COVERING = pairwise(FACTORS)
FIRST = {"coupled", "block", "traversal", "lossy-cascade"}
"""Rules that are not left to the slow tests; the others are made as these."""
PROMPT = [1, 2, 3, 1, 2]
BUDGET = 12


def label(case: dict[str, str]) -> str:
    return "-".join(case.values())


def first(count: int) -> list:
    """The covering cases; all but the first ones are slow."""
    slow = pytest.mark.slow
    return [pytest.param(case, marks=[slow] * (i >= count), id=label(case)) for i, case in enumerate(COVERING)]


class Traced(BaseException):
    """All of a round was traced: what is next would compile."""


@pytest.fixture
def traced(monkeypatch):
    """Sessions trace their programs in place of compiling them, up to the rounds."""

    def trace(self, function, static, arguments, donate=()):
        shapes = jax.eval_shape(functools.partial(function, *static), *arguments)
        if function is Decoder.run:
            raise Traced
        return lambda *_: jax.tree.map(_filled, shapes), arguments

    monkeypatch.setattr(Session, "_compiled", trace)


def _filled(shape: jax.ShapeDtypeStruct) -> Any:
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.random.split(KEY, shape.shape)
    return jnp.zeros(shape.shape, shape.dtype)


@functools.cache
def given(drafter: str) -> dict[str, Any]:
    return cases.arguments(drafter, TINY)


def words(case: dict[str, str]) -> list[str]:
    """The options of the command line."""
    found = ["--drafter", case["drafter"], "--rule", case["rule"], *TREES[case["tree"]]]
    if case["schedule"] != "default":
        found += ["--schedule", case["schedule"]]
    own = given(case["drafter"])
    found += ["--draft-model", "draft"] * ("draft" in own) + ["--heads", "heads"] * ("heads" in own)
    for name, value in own["drafter_options"].items():
        found += ["--drafter-option", f"{name}={value}"]
    return [*found, "--temperature", "1", "--max-new-tokens", str(BUDGET), "--ignore-eos", "--quiet"]


def options(case: dict[str, str]) -> dict[str, Any]:
    """Returns the arguments of `jaxspec.generate` that the command line selects, but for files of models and heads."""
    parser = Parser(prog="jaxspec generate")
    parser.add_argument("--quiet", action="store_true")
    command.add_options(parser)
    args = parser.parse_options(words(case))
    models = {name: value for name, value in given(case["drafter"]).items() if name in ("draft", "heads")}
    return vars(read_options(args, dataclasses.replace(read_drafting(args)[0], **models))) | {"chat": False}


def one_line(error: Exception) -> str:
    """Returns the message of an error that a user can correct."""
    assert isinstance(error, (JaxspecError, UsageError)), repr(error)
    assert 20 < len(str(error)) < 500, str(error)
    assert len(str(error).splitlines()) == 1
    return str(error)


def refusal(case: dict[str, str]) -> str | None:
    """Returns the line that refuses a case; None if it is taken."""
    try:
        options(case)["drafting"].build(TINY)
    except (JaxspecError, UsageError) as error:
        return one_line(error)
    return None


@pytest.mark.parametrize(
    "rule", with_slow(registry.RULES, {"rejection", "deterministic", "lossy-typical", "lossy-lenient"})
)
def test_every_rule_is_built_with_every_drafter_and_tree_or_refused(rule):
    """36 cases for each rule, with the schedules in turn; a case is refused for its tree, or for want of a law."""
    crossed = itertools.product(registry.DRAFTERS, TREES)
    schedules = itertools.cycle(FACTORS["schedule"])
    some = [{"rule": rule, "drafter": d, "tree": t, "schedule": s} for (d, t), s in zip(crossed, schedules)]
    lines = {label(case): refusal(case) for case in some}
    assert len(lines) == 36
    for case in some:
        dynamic, line = case["tree"] == "dynamic", lines[label(case)]
        known = ("mixes the distributions", "supports only chains", "drafts a chain of at least one token")
        assert line is None or dynamic or any(reason in line for reason in known), line
        copies = case["drafter"] == "prompt-lookup"  # point masses, of which a rule may weigh any
        assert line is not None or not dynamic or copies or cases.RULES[rule].noise is not Noise.FRESH
    taken = [case for case in some if lines[label(case)] is None]
    assert len(taken) >= 15
    assert {case["drafter"] for case in taken} >= set(registry.DRAFTERS) - (
        {"prompt-lookup", "recycling"} if rule == "lossy-cascade" else set()
    )
    assert {case["schedule"] for case in taken} == set(FACTORS["schedule"])


@pytest.mark.parametrize("case", first(8))
def test_what_is_built_can_be_traced(traced, case):
    with pytest.raises(Traced if refusal(case) is None else (JaxspecError, UsageError)):
        jaxspec.generate(TINY, [PROMPT], **options(case))


@functools.cache
def plain(temperature: float) -> list[int]:
    output = jaxspec.generate(
        TINY, [PROMPT], chat=False, drafter="none", key=jax.random.key(0), sampling=Sampling(temperature),
        max_new_tokens=BUDGET, ignore_eos=True, verbose=False,
    )  # fmt: skip
    return output[0].tokens


@pytest.mark.parametrize("case", first(3))
def test_what_is_built_decodes(case):
    """With a lossless rule the greedy text is the plain one, and with the coupled rule the sampled text is, too."""
    if refusal(case) is not None:
        case = case | {"tree": "default"}
    if refusal(case) is not None:
        pytest.skip(refusal(case) or "")
    for temperature in (1.0, 0.0):
        given: dict[str, Any] = options(case) | {"sampling": Sampling(temperature)}
        row = jaxspec.generate(TINY, [PROMPT], **given)[0]
        assert row.finish_reason == "length"
        assert len(row.tokens) == BUDGET
        rule = cases.RULES[case["rule"]]
        if rule.noise is Noise.SHARED or (rule.lossless and temperature == 0):
            assert row.tokens == plain(temperature)


# Members of other packages, by their entry points and as objects.


@dataclasses.dataclass(frozen=True)
class Numpy(Coupled):
    """Reads traced tokens with NumPy."""

    def __call__(self, scores, noise, sampling, proposal):
        np.asarray(proposal.tokens)
        return super().__call__(scores, noise, sampling, proposal)


@dataclasses.dataclass(frozen=True)
class Branches(Rejection):
    """Decides in Python by a traced value."""

    def __call__(self, law, proposal):
        if law.max() > 0:
            return super().__call__(law, proposal)
        return super().__call__(law, proposal)


@dataclasses.dataclass(frozen=True)
class Mistyped(NoDraft):
    """Returns a proposal of another type."""

    def propose(self, params, state, context, draw):
        wrong: Any = None
        return wrong, state


@dataclasses.dataclass(frozen=True)
class Forgetful(NoDraft):
    """Returns another state than it was given."""

    def absorb(self, params, state, advance):
        return (jnp.zeros(3),)


@dataclasses.dataclass(frozen=True)
class Undecided(Constant):
    """Returns a limit of another shape."""

    def limit(self, state):
        return jnp.zeros((7, 7), jnp.int32)


@dataclasses.dataclass(frozen=True)
class Whole(Coupled):
    """A rule that is right, and not jaxspec's."""


OTHERS = {"drafter": (Mistyped, Forgetful), "rule": (Numpy, Branches), "schedule": (Undecided,)}


def of_others():
    for kind, members in OTHERS.items():
        for member in members:
            for registered in (False, True):
                for drafter in ("none", "prompt-lookup", "model") if kind != "drafter" else (None,):
                    name = f"{member.__name__}-{drafter}-{'name' if registered else 'object'}"
                    yield pytest.param(kind, member, registered, drafter, id=name)


@pytest.mark.parametrize(("kind", "member", "registered", "drafter"), of_others())
def test_a_wrong_member_of_another_package_is_named_before_anything_compiles(
    monkeypatch, kind, member, registered, drafter
):
    def compiles(*_, **__):
        raise AssertionError("compiles")

    monkeypatch.setattr(Session, "_compiled", compiles)
    passed: Any = member()
    if registered:
        passed = "other"
        group = {"drafter": registry.DRAFTERS, "rule": registry.RULES, "schedule": registry.SCHEDULES}[kind]
        monkeypatch.setitem(group._own, "other", f"{__name__}:{member.__name__}")
        monkeypatch.setitem(sys.modules, __name__, sys.modules[member.__module__])
    chosen = {kind: passed} | ({} if drafter is None else cases.arguments(drafter, TINY) | {kind: passed})
    with pytest.raises(InvalidConfig) as caught:
        jaxspec.generate(TINY, [PROMPT], chat=False, key=KEY, sampling=Sampling(1.0), verbose=False, **chosen)
    assert member.__name__ in one_line(caught.value)
    assert caught.value.__cause__ is not None


def test_a_right_member_of_another_package_decodes():
    output = jaxspec.generate(
        TINY, [PROMPT], chat=False, key=jax.random.key(0), rule=Whole(), sampling=Sampling(1.0),
        max_new_tokens=BUDGET, ignore_eos=True, verbose=False,
    )  # fmt: skip
    assert output[0].tokens == plain(1.0)
