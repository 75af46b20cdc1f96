"""Renders the blocks of figures in README.md and docs/ from records.

A block is the text between `<!-- figures: ID -->` and `<!-- /figures -->`: a table for every machine that has a record
of that id, with a line that says how it was measured. The block `headline` takes figures from several records.
"""

import pathlib
import re
from collections.abc import Callable, Iterator, Sequence

from jaxspec.bench.measurements import Measurement
from scripts.figures.tables import RENDERERS, Values, between, share, table, times

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)


def pages() -> list[pathlib.Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rendered(text: str, records: Sequence[Measurement]) -> str:
    """Returns a page with its blocks rendered."""
    return BLOCK.sub(lambda match: f"{match[1]}{block(match[2], records)}{match[3]}", text)


def block(name: str, records: Sequence[Measurement]) -> str:
    """Returns the Markdown of a block, one table per machine; without a record, a sentence that says so."""
    if name == "headline":
        return headline(records)
    own = [record for record in records if record.id == name]
    if not own:
        return f"Not measured on this version yet (`--record {name}`).\n"
    return "\n".join(f"{RENDERERS[record.kind](record.values)}\n{provenance(record)}" for record in own)


def machine(record: Measurement) -> str:
    """Returns the machine in a few words."""
    own = record.machine
    parts = (own["cpu"], f"{own['cores']} cores", record.instruction_set, f"{own['memory_gib']} GiB")
    cpu = ", ".join(filter(None, parts))
    return cpu if own["platform"] == "cpu" else f"{own['devices']} x {own['kind']} ({cpu})"


def provenance(record: Measurement) -> str:
    """Returns the line below a table: machine, versions, date, commit, command."""
    names = {"python": "Python", "jax": "JAX"}
    shown = [f"{names[name]} {record.versions[name]}" for name in names]
    shown += [f"{name} {version}" for name, version in record.versions.items()
              if name not in ("python", "jax", "jaxlib", "jaxspec")]  # fmt: skip
    commit = f", commit {record.commit[:7]}" + (" with changes" if record.dirty else "") if record.commit else ""
    return f"{machine(record)}; {', '.join(shown)}; {record.date}{commit}: `{record.command}`\n"


def method(values: Values, name: str) -> str:
    found = values["runs"][0]["methods"][name]
    return (
        f"{times(found['times_plain'])} (by task {', '.join(times(t['times_plain']) for t in found['tasks'].values())})"
    )


HEADLINE: tuple[tuple[str, str, Callable[[Values], str]], ...] = (
    ("plain decoding in float32, bfloat16, int8: ms per round", "widths", lambda v: ", ".join(
        f"{v[name]['rounds'][0]['ms'][1]:.1f}" for name in ("float32", "bfloat16", "int8"))),
    ("plain decoding in float32, times a bare read of the weights", "widths", lambda v: between(
        v["float32"]["width_1_times_read"], 2)),
    ("repeating code with one change, `prompt-lookup`, times plain decoding", "lookup", lambda v: between(
        v["float32"][0]["times_plain"], 2)),
    ("MT-bench, HumanEval and copying, `prompt-lookup`, times plain", "bench-float32", lambda v: method(
        v, "prompt-lookup")),
    ("the same, the target in int8 as its own draft", "bench-float32", lambda v: method(v, "model:3")),
    ("the same, `medusa` with the heads that are included", "bench-float32", lambda v: method(v, "medusa")),
    ("the default rule's arithmetic, as a share of a round", "rules", lambda v: share(
        v["chain 4"]["ms"]["T 1: coupled"][1] / (v["chain 4"]["ms"]["T 1: coupled"][1]
                                                 + v["chain 4"]["ms"]["target call"][1]))),
    ("compiling 30 layers: plain, `prompt-lookup`", "compile", lambda v: ", ".join(
        f"{v['compile_s'][name]:.0f} s" for name in ("none", "prompt-lookup"))),
    ("bugs of other systems that the tests find", "mutants", lambda v: f"{v['found']} of {v['bugs']}"),
)  # fmt: skip
"""What is said, the id of its record, and how it is read there."""


def headline(records: Sequence[Measurement]) -> str:
    """Returns a table of results, with the machine of each below; the newest record of an id."""
    newest = {record.id: record for record in sorted(records, key=lambda record: record.date)}
    rows = [[said, shown(newest[name].values), f"`{name}`"] for said, name, shown in HEADLINE if name in newest]
    if not rows:
        return "Not measured on this version yet.\n"
    used = [newest[name] for name in dict.fromkeys(name for _, name, _ in HEADLINE) if name in newest]
    return table(["SmolLM2-135M-Instruct", "", "record"], rows) + "\n" + "".join(
        f"{line}\n" for line in origins(used))  # fmt: skip


def origins(records: Sequence[Measurement]) -> Iterator[str]:
    """Yields a line for every machine, with versions and dates."""
    for name in dict.fromkeys(map(machine, records)):
        own = [record for record in records if machine(record) == name]
        versions = "; ".join(sorted({f"Python {r.versions['python']}, JAX {r.versions['jax']}" for r in own}))
        dates = sorted({record.date for record in own})
        dates = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        yield f"{name}; {versions}; {dates}. Medians, quartiles in brackets."
