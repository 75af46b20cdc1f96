# ruff: noqa: E501  (templates are read more easily in lines of their own)
"""Chat templates that take unbounded time or memory, or reach for what is outside: a typed error or a text.

They render in a process of their own, whose children are the confined processes, so that the largest memory of either
can be read from the kernel.
"""

import json
import random
import subprocess
import sys

import jinja2.filters
import jinja2.tests
import pytest

from helpers.paths import ROOT

pytestmark = pytest.mark.quick

BEGIN = "{% set ns = namespace(a=[1], b=[1], s='ab', t=(1,), d={'k': 1}, u=none) %}"
SHARED = (
    "{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% set ns.t = (ns.t, ns.t) %}"
    "{% set ns.d = {'k': ns.d, 'l': ns.d} %}{% endfor %}"
)
LONG = "{% for i in range(21) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
CHAIN = "{% for i in range(60000) %}{% set ns.u = BODY %}{% endfor %}"

BOMBS = [
    *(
        BEGIN + SHARED + "{{ " + use + " }}"
        for use in """ns.a == ns.b;ns.a < ns.b;ns.a in [ns.b];ns.a;ns.d | string;ns.a | tojson;ns.a | pprint;{ns.t: 1}
        ns.d.get(ns.t);messages[ns.t];dict([(ns.t, 1)]);[ns.t] | unique | list;[ns.a, ns.b] | sort;ns.a | join;ns.a ~ ''
        ns.a | upper;'1' | replace('1', ns.a);[ns.a] | select('equalto', ns.b) | list;ns.d.items() == ns.d.items()
        ns.a | map('string') | list;raise_exception(ns.a);'%s' % ns.a;ns.a.index(ns.b);ns.a | sum(start=[])""".replace(
            "\n", ";"
        ).split(";")
    ),
    *(
        BEGIN + LONG + "{{ " + use + " }}"
        for use in """ns.s.translate({});ns.s.expandtabs(10 ** 9);ns.s.split() | length;ns.s | list | length
        ns.s.rfind('b' + ns.s[2:]);ns.s.strip(ns.s[::-1]);ns.s.replace('a', ns.s);ns.s.join(ns.s);[ns.s] | string
        ns.s | indent(16);(ns.s | safe) + ns.s;messages | map(attribute=ns.s) | list;strftime_now(ns.s)""".replace(
            "\n", ";"
        ).split(";")
    ),
    *(
        BEGIN + CHAIN.replace("BODY", body) + "{{ ns.u | length if ns.u is sequence }}"
        for body in """[ns.u];(ns.u,);{'k': ns.u};{'k': ns.u}.values();{'k': ns.u}.get;namespace(u=ns.u);[ns.u] | map('list')
        {'k': ns.u}.missing;[ns.u] | reverse""".replace("\n", ";").split(";")
    ),
    BEGIN + CHAIN.replace("BODY", "[ns.u]") + "{{ ns.u == [ns.u] }}",
    BEGIN + "{% set ns.u = ns %}{{ ns.u == [ns] }}{{ [ns] }}",
    BEGIN
    + "{% for i in range(9999) %}{% set p = ns.u %}{% macro m() %}{{ p() }}{% endmacro %}{% set ns.u = m %}{% endfor %}",
    BEGIN + "{% for i in range(9999) %}{% for x in [ns.u] %}{% set ns.u = [loop] %}{% endfor %}{% endfor %}",
    *(  # messages of exceptions that are long texts, or take long to write
        f"{BEGIN}{{% set ns.a = ['a' * {size}] %}}{{% for i in range({turns}) %}}{{% set ns.a = {more} %}}{{% endfor %}}{use}"
        for size, turns in ((4_000_000, 5), (4_000_000, 8), (1, 24))
        for more in ("[ns.a, ns.a]", "(ns.a, ns.a)")
        for use in ("{{ raise_exception(ns.a) }}", "{{ {}[ns.a].k }}", "{{ messages[ns.a].k }}", "{{ {ns.a: 1} }}")
    ),
    "{{ 'a' * 10 ** 9 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ '%999999999d' is odd }}",
    "{{ strftime_now('%999999999d') }}",
    "{% for i in range(99999) %}{% set x = [" + "[]," * 3000 + "] %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}" + "x" * 60_000 + "{% endfor %}{% endset %}{{ x | length }}",
    "{% macro m() %}" + "x" * 9999 + "{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for i in range(99999) %}{{ ('a' * 2500).rfind('b' + 'a' * 1250) }}{% endfor %}",
    "{% for i in range(99999) %}{{ [0 - 10 ** 15] | map('_step') | list }}{{ 'a' * 60000 }}{% endfor %}",
    "{{ " + "(" * 30_000 + ")" * 30_000 + " }}",
    "{{ " + "not " * 15_000 + "1 }}",
    "{{ a" + ".b" * 30_000 + " }}",
    "{{ " + "+".join("1" * 30_000) + " }}",
    "{{ a" + "|trim" * 10_000 + " }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "{% for i in x %}" * 1500 + "{% endfor %}" * 1500,
    "{% macro m() %}" * 1500 + "{% endmacro %}" * 1500,
    "{% if 1 %}" + "{% elif 1 %}" * 5000 + "{% endif %}",
    "".join(f"{{%if a%}}{{%set x{i}=1%}}{{%endif%}}" for i in range(1800)),
    "{{ " + "0x" + "f" * 60_000 + " }}",
    "{%" + " " * 65_000,
    "{{" * 32_000,
    "{% raw %}" + "{% endra" * 8000,
]

SORTED = "{{ [{'a': 'A' * 1000000}] | sort(attribute='a,' * 9000 ~ 'a') | length }}"
DEFAULTS = "{% macro m(a=[" + "1," * 4700 + "]) %}{% endmacro %}"
CALLED = "{% macro m() %}{{ caller() }}{% endmacro %}{% for i in range(30000) %}{% call(a=[" + "1," * 4700 + "]) m() %}"
KNOWN = [  # they passed an earlier sandbox, which charged every step of the language
    SORTED,
    "{{ [[{'a': 'A' * 1000000}]] | map('sort', attribute='a,' * 9000 ~ 'a') | list | length }}",
    DEFAULTS.replace("1,", "x,") + "{% for i in range(30000) %}{{ m() }}{% endfor %}",
    CALLED.replace("1,", "x,") + "{% endcall %}{% endfor %}",
    DEFAULTS.replace("%}{% endmacro", "%}{% set ns.a = [ns.a, a] %}{% endmacro").join(
        ["{% set ns = namespace(a=0) %}", ""]
    )
    + "{% for i in range(30000) %}{{ m() }}{% endfor %}",
    "{% set ns = namespace(a=[]) %}{% for i in range(30000) %}{% set ns.a = [ns.a, strftime_now('%500d' * 40)] %}{% endfor %}",
]

ATTRIBUTE = "'a,' * 9000 ~ 'a'"
SORTS = [f"{name}(attribute={ATTRIBUTE})" for name in ("sort", "groupby", "unique", "max", "min", "sum", "map", "join")]
SORTS += [f"{name}({ATTRIBUTE})" for name in ("selectattr", "rejectattr", "groupby", "map")]
ITEMS = "x," * 4700
VALUES = [f"[{ITEMS}]", f"({ITEMS})", f"{{'k': [{ITEMS}]}}", f"[{ITEMS}] | list", "'ab' * 9999", f"'' ~ [{ITEMS}]"]
CALLS = [
    "{% macro m(a=VALUE) %}{% endmacro %}{% for i in range(30000) %}{{ m() }}{% endfor %}",
    "{% macro m(a=VALUE) %}{% set ns.v = [ns.v, a] %}{% endmacro %}{% for i in range(30000) %}{{ m() }}{% endfor %}",
    "{% macro m() %}{{ caller() }}{% endmacro %}{% for i in range(30000) %}{% call(a=VALUE) m() %}{% endcall %}{% endfor %}",
    "{% macro m(n, a=VALUE) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(15) }}",
    "{% macro m(a=VALUE, b=VALUE) %}{% endmacro %}{% for i in range(30000) %}{{ m() }}{% endfor %}",
]
VARIANTS = [  # of those known ones
    *(
        f"{{{{ [{{'a': {value}}}] | {use} | {end} }}}}"
        for use in SORTS
        for value in ("'A' * 1000000", "['A' * 9999]")
        for end in ("list | length", "string | length")
    ),
    *("{% set ns = namespace(v=0) %}" + call.replace("VALUE", value) for call in CALLS for value in VALUES),
]

LARGE = {"text": "'ab ' * 99999", "list": "range(99999) | list", "dicts": "[{'k': 'ab' * 999, 'l': [1]}] * 9999"}
USES = """x | sort | length;x | sort(attribute='k.l.m') | list;x | map('upper') | list;x | groupby('k') | list
x | batch(3, 'ab' * 9999) | list;x | slice(99999) | list;x | wordwrap(1) | length;x | center(10 ** 9);x | indent(10 ** 9)
'%s' * 999 | format(x);x | replace('a', 'b' * 9999);x | tojson(indent=10 ** 9);x | unique | list;x ~ x ~ x ~ x
x | join(x);x | string | wordcount;x | pprint;x | urlize;x | xmlattr;x | striptags;x | truncate(10 ** 9)
x | select('in', x) | list;x | reverse | list;x | string * 10 ** 9;[x] * 10 ** 9;x | sum(start=[]);x | max;x | escape
x | filesizeformat;x | random;x == x;x in x;(x, x) | tojson;x[::-1] ~ x[::2];x | first | string;x | title
'{:>999999999}'.format(x);'{0!r:999999999}'.format(x);x.join(x);x.zfill(10 ** 9);x.ljust(10 ** 9);x.expandtabs(10 ** 9)
x.translate({97: 'ab' * 9999});x.encode('utf-32');x | urlencode;x | dictsort;x | items | list;x | map(attribute='k') | join"""
LOOPS = [
    "{% for i in range(99999) %}{% set x = BODY %}{% endfor %}",
    "{% macro m(x=BODY) %}{% endmacro %}{% for i in range(99999) %}{{ m() }}{% endfor %}",
    "{% macro m(x) %}{{ m(BODY) }}{% endmacro %}{{ m(1) }}",
    "{% macro m() %}{{ caller(BODY) }}{% endmacro %}{% for i in range(99999) %}{% call(x) m() %}{{ x }}{% endcall %}{% endfor %}",
    "{% set j = joiner(BODY | string) %}{% for i in range(99999) %}{{ j() }}{% endfor %}",
    "{% set c = cycler(BODY, 1) %}{% for i in range(99999) %}{{ c.next() }}{% endfor %}",
    "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x, BODY] %}{% endfor %}",
    "{% for a in [BODY] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "{% filter replace('a', 'aa' * 999) %}{% for i in range(99999) %}{{ BODY }}{% endfor %}{% endfilter %}",
    "{% set x %}{% for i in range(99999) %}{{ BODY }}{% endfor %}{% endset %}{{ x }}",
]
BODIES = ["'ab' * 9999", "range(9999) | list", "9 ** 9999", "{'k': 'ab' * 9999} | tojson", "'%9999d' % 1"]
COSTLY = [
    *(
        f"{{% set x = {value} %}}{{{{ {use} }}}}"
        for value in LARGE.values()
        for use in USES.replace("\n", ";").split(";")
    ),
    *(loop.replace("BODY", body) for loop in LOOPS for body in BODIES),
]
REACHING = [
    "{{ (" + start + ")." + rest + " }}"
    for start in ("''", "messages", "messages[0].get", "cycler", "joiner", "namespace", "raise_exception", "strftime_now",
        "range", "self", "self._TemplateReference__context", "messages | map('upper')", "namespace(a=1)")
    for rest in ("__class__.__mro__", "__init__.__globals__.os.popen('id').read()", "__globals__.sys.modules", "gi_frame.f_back",
        "__self__.__class__.__base__.__subclasses__()")
]  # fmt: skip


def generated(rng: random.Random) -> str:
    """A template that makes large values in one of many ways, and does one of many things with them."""
    names = ["a", "b", "s", "t", "d", "u"]
    one, other = (f"ns.{rng.choice(names)}" for _ in range(2))
    grow = [
        f"[{one}, {other}]",
        f"({one}, {other})",
        f"{{'k': {one}, 'l': {other}}}",
        f"{one} ~ {other}",
        f"{one} + {other}",
        f"{one} * {rng.choice([2, 3, 999, 10**9])}",
        f"[{one}] * 99",
        f"{one} | map('{rng.choice(['string', 'list', 'upper', 'tojson'])}')",
        f"{one} | {rng.choice(['string', 'tojson', 'list', 'upper', 'escape', 'safe', 'indent(9)', 'join(ns.s)'])}",
        f"{one}.replace('a', {other})",
        f"{one}.{rng.choice(['split', 'join', 'strip', 'items', 'values', 'get'])}({rng.choice(['', other])})",
        f"{one}[::-1]",
        f"f({other})",
    ]
    filters, tests = sorted(jinja2.filters.FILTERS), sorted(jinja2.tests.TESTS)
    methods = sorted({name for kind in (str, list, dict, tuple) for name in dir(kind)})
    number = rng.choice(["2", "99", "10 ** 9", "'a'", one, "", "2.5, 'ceil'", "indent=9"])
    use = [
        f"{one} | {rng.choice(filters)}",
        f"{one} | {rng.choice(filters)}({number})",
        f"{one} | {rng.choice(filters)} | {rng.choice(filters)}",
        f"{one} | map('{rng.choice(filters)}') | list",
        f"[{one}, {other}] | {rng.choice(['select', 'reject'])}('{rng.choice(tests)}', {other}) | list",
        f"{one} is {rng.choice(tests)}({other})",
        f"{one}.{rng.choice(methods)}({number})",
        f"{one} {rng.choice(['==', '!=', '<', '>=', 'in', '+', '-', '*', '/', '//', '%', '**', '~'])} {other}",
        f"{{{one}: {other}}}",
        f"messages[{one}]",
        f"{one}[{other}]",
    ]
    turns = rng.choice([3, 20, 45, 3000])
    loops = "".join(f"{{% set ns.{rng.choice(names)} = {rng.choice(grow)} %}}" for _ in range(rng.randint(1, 3)))
    uses = "".join(f"{{{{ {rng.choice(use)} }}}}" for _ in range(rng.randint(1, 2)))
    macro = "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}"
    return f"{BEGIN}{macro}{{% for i in range({turns}) %}}{loops}{{% endfor %}}{uses}"


CHILD = """
import json, resource, signal, sys, time
from jaxspec.confined.process import CONFINED
from jaxspec.errors import JaxspecError
from jaxspec.text import ChatTemplate, chat

sources, chat.SECONDS, interrupt = json.load(sys.stdin)
signal.signal(signal.SIGALRM, signal.default_int_handler)


def used():  # processor time of this process and of those that ended
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


for source in sources:
    start = used()
    try:
        if interrupt:
            signal.setitimer(signal.ITIMER_REAL, interrupt)
        template = ChatTemplate(source)
        template.render([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}])
        result = "text"
    except JaxspecError as error:
        result = f"{type(error).__name__}: {error}"
    except BaseException as error:
        result = f"raw {error!r:.200}"
    print(json.dumps([used() - start, result]), flush=True)
CONFINED.close()
own = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))  # in KiB, as below
print(json.dumps([own << 10, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10]))
"""


def run(sources: list[str], seconds: float, interrupt: float = 0) -> list[tuple[float, str]]:
    """Renders every template with a limit of seconds; returns the processor time and the result of each.

    The processor time of a child is counted where it ends, which is where it exceeds a limit.
    """
    given = json.dumps([sources, seconds, interrupt])
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=given, capture_output=True, text=True, timeout=900, cwd=ROOT
    )
    *results, memory = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(sources), f"the process ended ({done.returncode}): {done.stderr[-2000:]}"
    assert max(memory) < MEMORY, memory
    return [tuple(result) for result in results]


def ended_well(sources: list[str], seconds: float) -> list[str]:
    """Renders every template; returns the results, each of which is a text or a typed error, in time."""
    results = run(sources, seconds)
    for source, (took, result) in zip(sources, results):
        assert took < SECONDS, (source[:300], result)
        assert result == "text" or result.startswith(
            ("CheckpointError: chat", "LimitError: chat", "InvalidConfig: the chat")
        ), (
            source[:300],
            result,
        )
        assert "\n" not in result
    return [result for _, result in results]


SECONDS, MEMORY = 5.0, 256 << 20  # of processor time, and bytes
QUICK = 0.1  # a limit of processor time for templates in the default tier of tests
REAL = 0.75


def test_templates_that_passed_an_earlier_sandbox():
    assert all("needs more than" in result for result in ended_well(KNOWN, REAL))


def test_variants_of_them_end_in_time_and_memory():
    assert len(VARIANTS) > 70
    ended_well(VARIANTS, QUICK)


def test_bombs_end_in_time_and_memory():
    ended_well(BOMBS, QUICK)


def test_templates_of_costly_operations_end_in_time_and_memory():
    rng = random.Random(5)
    results = ended_well(rng.sample(COSTLY, 60), QUICK)
    assert sum("needs more than" in result for result in results) > 15
    assert "text" in results


@pytest.mark.slow
def test_all_of_them_end_within_the_real_limits():
    ended_well(BOMBS + VARIANTS + COSTLY, REAL)


def test_attributes_lead_nowhere():
    assert len(REACHING) > 60
    results = ended_well(REACHING, REAL)
    assert all("unsafe" in result or "has no attribute" in result or "undefined" in result for result in results), (
        results
    )


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_generated_templates_end_in_time_and_memory(count, seed):
    rng = random.Random(seed)
    ended_well([generated(rng) for _ in range(count)], QUICK)


def test_an_interrupt_ends_a_rendering():
    """With a limit of minutes, so that nothing else ends it. The next template gets another process."""
    sources = [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        "{{ 9 ** 9999999 }}",
    ]
    for seconds, result in run(sources, seconds=1000, interrupt=0.5):
        assert result.startswith("raw KeyboardInterrupt")
        assert seconds < SECONDS
