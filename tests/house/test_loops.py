"""Tests that every loop on the device ends, whatever the values of floats are.

The programs of all drafters and rules are traced, and each `while` of them must have one of three forms: a counter that
an integer bounds, a condition in which no float has a part, or a body that ends the loop in its first turn.
"""

import ast
import collections
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.interpreters import partial_eval

import cases
from helpers.bridges import OTHER_DRAFT
from helpers.paths import ROOT
from helpers.toy_text import TINY, TOY
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import chain
from jaxspec.decode.loop import Decoder
from jaxspec.decode.state import Request, Weights
from jaxspec.generation.drafting import Drafting
from jaxspec.registry import DRAFTERS, RULES
from jaxspec.tuning import mask_laws

PACKAGE = ROOT / "jaxspec"
RULE_OF = dict(zip(DRAFTERS, [*RULES, "coupled"]))
"""Every rule once, with a drafter each."""


def jaxprs(value):
    """Returns the programs among the parameters of an equation."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from jaxprs(item)


def loops(program: Jaxpr) -> list[JaxprEqn]:
    found = []
    for equation in program.eqns:
        if equation.primitive.name == "while":
            found.append(equation)
        for value in equation.params.values():
            for inner in jaxprs(value):
                found += loops(inner)
    return found


def is_float(variable) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


def sources(program: Jaxpr, output) -> tuple[set[int], bool]:
    """Returns the inputs that an output depends on, and whether a float has a part in it."""
    made = {variable: equation for equation in program.eqns for variable in equation.outvars}
    inputs, floats, seen, left = set(), False, set(), [output]
    while left:
        variable = left.pop()
        if isinstance(variable, Literal) or variable in seen:
            continue
        seen.add(variable)
        floats |= is_float(variable)
        if variable in made:
            left += made[variable].invars
        elif variable in program.invars:
            inputs.add(program.invars.index(variable))
    return inputs, floats


class Loop:
    """A loop; slots are the places of its carry."""

    def __init__(self, equation: JaxprEqn):
        self.cond, self.body = equation.params["cond_jaxpr"], equation.params["body_jaxpr"]
        self.before, self.consts = equation.params["cond_nconsts"], equation.params["body_nconsts"]

    def is_bounded(self) -> bool:
        return self.counts() or self.is_of_integers() or self.is_of_one_turn()

    def counts(self) -> bool:
        """Whether the condition has a term `counter < bound`, the body adds to the counter, and the bound is fixed; or
        a term `counter > 0`, and the body takes from the counter.
        """
        made = {variable: equation for equation in self.cond.jaxpr.eqns for variable in equation.outvars}
        left = [self.cond.jaxpr.outvars[0]]
        while left:
            equation = made.get(left.pop())
            if equation is None:
                continue
            if equation.primitive.name in ("and", "reduce_and", "reduce_or", "convert_element_type"):
                left += [variable for variable in equation.invars if not isinstance(variable, Literal)]
            if equation.primitive.name in ("lt", "gt"):
                counter, bound = equation.invars if equation.primitive.name == "lt" else equation.invars[::-1]
                slot = self._slot(counter)
                if slot is not None and self._grows(slot) and self._is_fixed(bound):
                    return True
                slot = self._slot(bound)
                if slot is not None and isinstance(counter, Literal) and self._falls(slot):
                    return True
        return False

    def _slot(self, variable) -> int | None:
        if isinstance(variable, Literal) or variable not in self.cond.jaxpr.invars:
            return None
        place = self.cond.jaxpr.invars.index(variable) - self.before
        return place if place >= 0 and not is_float(variable) else None

    def _is_fixed(self, variable) -> bool:
        if isinstance(variable, Literal):
            return True
        inputs, floats = sources(self.cond.jaxpr, variable)
        slots = [place - self.before for place in inputs if place >= self.before]
        body = self.body.jaxpr
        return not floats and all(body.outvars[slot] is body.invars[self.consts + slot] for slot in slots)

    def _grows(self, slot: int) -> bool:
        """Whether the body adds a positive number to a slot; under vmap, in the rows that have not ended."""
        made = {variable: equation for equation in self.body.jaxpr.eqns for variable in equation.outvars}
        start, equation = self.body.jaxpr.invars[self.consts + slot], made.get(self.body.jaxpr.outvars[slot])
        if equation is not None and equation.primitive.name == "select_n" and equation.invars[1] is start:
            equation = made.get(equation.invars[2])
        if equation is None or equation.primitive.name != "add":
            return False
        steps = [variable for variable in equation.invars if isinstance(variable, Literal)]
        others = [variable for variable in equation.invars if not isinstance(variable, Literal)]
        through = self._through_barriers(others[0], made) if others else None
        return bool(steps) and int(steps[0].val) > 0 and through is start

    def _falls(self, slot: int) -> bool:
        """Whether the body takes a positive number from a slot, and keeps at most the rest."""
        made = {variable: equation for equation in self.body.jaxpr.eqns for variable in equation.outvars}
        start, equation = self.body.jaxpr.invars[self.consts + slot], made.get(self.body.jaxpr.outvars[slot])
        if equation is None or equation.primitive.name != "min":
            return False
        taken = [made.get(variable) for variable in equation.invars if not isinstance(variable, Literal)]
        return any(
            less is not None
            and less.primitive.name == "sub"
            and isinstance(less.invars[1], Literal)
            and int(less.invars[1].val) > 0
            and self._through_barriers(less.invars[0], made) is start
            for less in taken
        )

    @staticmethod
    def _through_barriers(variable, made):
        while (equation := made.get(variable)) is not None and equation.primitive.name == "optimization_barrier":
            variable = equation.invars[equation.outvars.index(variable)]
        return variable

    def is_of_integers(self) -> bool:
        """Whether the condition follows from integers alone, turn by turn."""
        inputs, floats = sources(self.cond.jaxpr, self.cond.jaxpr.outvars[0])
        slots = {place - self.before for place in inputs if place >= self.before}
        while True:
            more = set()
            for slot in slots:
                inputs, inexact = sources(self.body.jaxpr, self.body.jaxpr.outvars[slot])
                floats |= inexact
                more |= {place - self.consts for place in inputs if place >= self.consts}
            if more <= slots:
                return not floats
            slots |= more

    def is_of_one_turn(self) -> bool:
        """Whether the body makes the condition false, by a constant."""
        inputs, _ = sources(self.cond.jaxpr, self.cond.jaxpr.outvars[0])
        slots = [place - self.before for place in inputs]
        if len(slots) != 1 or slots[0] < 0:
            return False
        small, _ = partial_eval.dce_jaxpr(
            self.body.jaxpr, [slot == slots[0] for slot in range(len(self.body.jaxpr.outvars))]
        )
        if small.invars:
            return False
        (value,) = jaxpr_as_fun(ClosedJaxpr(small, self.body.consts[: len(small.constvars)]))()
        carry = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in self.cond.jaxpr.invars]
        carry[self.before + slots[0]] = value
        return not jaxpr_as_fun(self.cond)(*carry)[0]


@pytest.fixture
def called(monkeypatch):
    """The places in jaxspec where a `while_loop` was called, by file and line."""
    found, real = collections.Counter(), lax.while_loop

    def record(*args, **options):
        frame = sys._getframe(1)
        found[frame.f_code.co_filename.rpartition("jaxspec/")[2], frame.f_lineno] += 1
        return real(*args, **options)

    monkeypatch.setattr(lax, "while_loop", record)
    return found


def program(decoder: Decoder, weights: Weights) -> Jaxpr:
    """Traces a whole decode of two rows, sampled with every limit."""
    vocab = decoder.target.vocab
    settings = Sampling(temperature=1.0, top_k=3, top_p=0.9, min_p=0.01).rows(2, vocab)
    keys = jax.random.split(jax.random.key(0), 2)
    two = jnp.full(2, 2, jnp.int32)
    request = Request(jnp.ones((2, 2), jnp.int32), two, two, keys, two[:, None], settings, jnp.ones(2, bool))
    capacity = decoder.slots(8)

    def decode(weights, request):
        return decoder.run(weights, decoder.prefill(weights, decoder.init(weights, request, capacity)))

    return jax.make_jaxpr(decode)(weights, request).jaxpr


def decoders():
    for name, rule in RULE_OF.items():
        tree = chain(2) if rule == "block" and cases.DRAFTERS[name].tree is not None else None
        given = cases.arguments(name, TINY)
        given |= {} if tree is None else {"tree": tree}
        if rule != "lossy-cascade" or name not in ("prompt-lookup", "recycling"):
            yield name, Drafting(rule=rule, schedule="adaptive", **given).build(TINY)
    yield "bridged", Drafting("model", tree=chain(2), draft=OTHER_DRAFT).build(TOY)


def test_every_loop_of_a_decode_ends_by_integers(called):
    """No `while_loop` of the package is left out, and none has a condition that only floats can end."""
    checked = 0
    for name, (decoder, weights) in decoders():
        for equation in loops(program(decoder, weights)):
            checked += 1
            assert Loop(equation).is_bounded(), f"{name}: {equation.params['cond_jaxpr']}"
    assert checked > 50
    pard, params = cases.drafting("pard", TINY).build_drafter(TINY)
    text, length = jnp.zeros((1, 64), jnp.int32), jnp.full(1, 9)
    for equation in loops(jax.make_jaxpr(mask_laws._unroll, (0, 1))(pard, 2, params, text, length, 1).jaxpr):
        assert Loop(equation).is_bounded()
    written = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "while_loop":
                written.add((str(path.relative_to(PACKAGE)), node.lineno))
    assert len(written) >= 9
    assert {place for place in written if place not in called} == set()


# Loops that the test must find, and loops that it must leave alone.


@pytest.mark.parametrize(
    ("cond", "body", "start", "ends"),
    [
        (lambda x: x < 1, lambda x: x * 2, 1e-40, False),
        (lambda x: x[0] > 1e-3, lambda x: (x[0] / 2, x[1] + 1), (1.0, 0), False),
        (lambda x: (x[0] > 1e-3) & (x[1] < 9), lambda x: (x[0] / 2, x[1] + 1), (1.0, 0), True),
        (lambda x: (x[0] > 1e-3) | (x[1] < 9), lambda x: (x[0] / 2, x[1] + 1), (1.0, 0), False),
        (lambda x: (x[0] > 1e-3) & (x[1] < 9), lambda x: (x[0] / 2, x[1] + 0), (1.0, 0), False),
        (lambda x: (x[0] > 1e-3) & (x[1] < x[2]), lambda x: (x[0] / 2, x[1] + 1, x[2] + 1), (1.0, 0, 9), False),
        (lambda x: x < 9, lambda x: x + 1, 0, True),
        (lambda x: x[0] > 0, lambda x: (lax.min(x[0] - 1, (x[1] > 0.5).astype(int) * 9), x[1]), (9, 1.0), True),
        (lambda x: x[0] > 0, lambda x: (lax.max(x[0] - 1, (x[1] > 0.5).astype(int) * 9), x[1]), (9, 1.0), False),
        (lambda x: x[0] > 0, lambda x: (lax.min(x[0] + 1, (x[1] > 0.5).astype(int) * 9), x[1]), (9, 1.0), False),
        (lambda x: x > 0, lambda x: x // 2, 99, True),
        (lambda x: x[0] > 0, lambda x: ((x[1] > 0.5).astype(int), x[1] / 2), (1, 1.0), False),
        (lambda x: x[0] == 3, lambda x: (jnp.full_like(x[0], -1), x[1] / 2), (3, 1.0), True),
        (lambda x: x[0] == 3, lambda x: (3 + (x[1] < 0).astype(int), x[1] / 2), (3, 1.0), False),
    ],
)
def test_a_loop_that_floats_can_keep_is_found(cond, body, start, ends):
    start = jax.tree.map(jnp.asarray, start)
    program = jax.make_jaxpr(lambda start: lax.while_loop(cond, body, start))(start).jaxpr
    assert [Loop(equation).is_bounded() for equation in loops(program)] == [ends]
