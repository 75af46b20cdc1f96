"""Renders the blocks of figures in README.md and docs/ from records.

A block is the text between `<!-- figures: ID -->` and `<!-- /figures -->`: a table for every machine that has a record
of that id. What most readers skip is folded away: how the table was measured, and tables with many rows. The blocks
`results` and `headline` take figures from several records.
"""

import pathlib
import re
from collections.abc import Callable, Iterator, Sequence

from jaxspec.bench.measurements import Measurement
from scripts.figures.controlled import CONTROLLED
from scripts.figures.tables import RENDERERS, Values, between, share, table, times

ROOT = pathlib.Path(__file__).resolve().parents[2]
RENDERING = RENDERERS | CONTROLLED

MANY_ROWS = 24
"""Rows of a table from which on it is folded."""
BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)


def pages() -> list[pathlib.Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rendered(text: str, records: Sequence[Measurement]) -> str:
    """Returns a page with its blocks rendered."""
    return BLOCK.sub(lambda match: f"{match[1]}{block(match[2], records)}{match[3]}", text)


def block(name: str, records: Sequence[Measurement]) -> str:
    """Returns the Markdown of a block, one table per machine; without a record, a sentence that says so."""
    if name in COMPOSED:
        return COMPOSED[name](records)
    own = [record for record in records if record.id == name]
    if not own:
        return f"Not measured on this version yet (`--record {name}`).\n"
    return "\n".join(f"{tables(RENDERING[record.kind](record.values))}\n{provenance(record)}" for record in own)


def newest(records: Sequence[Measurement]) -> dict[str, Measurement]:
    """Returns the newest record of every id."""
    return {record.id: record for record in sorted(records, key=lambda record: record.date)}


def folded(summary: str, content: str) -> str:
    """Returns content that a reader opens with a click, on the site and where Markdown is shown."""
    return f"<details>\n<summary>{summary}</summary>\n\n{content}\n</details>\n"


def tables(markdown: str) -> str:
    """Returns what a renderer made, folded if it has many rows."""
    lines = markdown.splitlines()
    rows = sum(line.startswith("| ") for line in lines) - 2 * sum(line.startswith("| ---") for line in lines)
    return folded(f"Table of {rows} rows", markdown) if rows >= MANY_ROWS else markdown


def machine(record: Measurement) -> str:
    """Returns the machine in a few words."""
    own = record.machine
    parts = (own["cpu"], f"{own['cores']} cores", record.instruction_set, f"{own['memory_gib']} GiB")
    cpu = ", ".join(filter(None, parts))
    return cpu if own["platform"] == "cpu" else f"{own['devices']} x {own['kind']} ({cpu})"


def provenance(record: Measurement) -> str:
    """Returns how a table was measured, folded: machine, versions, date, commit, command."""
    names = {"python": "Python", "jax": "JAX"}
    shown = [f"{names[name]} {record.versions[name]}" for name in names]
    shown += [f"{name} {version}" for name, version in record.versions.items()
              if name not in ("python", "jax", "jaxlib", "jaxspec")]  # fmt: skip
    commit = f", commit {record.commit[:7]}" + (" with changes" if record.dirty else "") if record.commit else ""
    return folded(machine(record), f"{', '.join(shown)}; {record.date}{commit}: `{record.command}`\n")


def speedups(values: Values, name: str) -> str:
    """Returns a drafter's speed-up in a record of `jaxspec bench`, over all prompts and by task."""
    found = values["runs"][0]["methods"][name]
    by_task = ", ".join(times(task["times_plain"]) for task in found["tasks"].values())
    return f"{times(found['times_plain'])} ({by_task})"


def on_gpu(values: Values, drafter: str) -> str:
    """Returns a drafter's greedy speed-ups by task in a record of texts."""
    rows = [row for row in values["rows"] if row["drafter"] == drafter and row["temperature"] == 0]
    return ", ".join(times(row["times_plain"][1]) for row in rows)


def share_of_rule(values: Values) -> str:
    """Returns what the default rule's arithmetic takes of a round with a chain of four tokens."""
    ms = values["chain 4"]["ms"]
    rule, target = ms["T 1: coupled"][1], ms["target call"][1]
    return share(rule / (rule + target))


HEADLINE: tuple[tuple[str, str, Callable[[Values], str]], ...] = (
    ("speed-up of `prompt-lookup`, float32 (MT-bench, HumanEval, copying)", "bench-float32",
     lambda v: speedups(v, "prompt-lookup")),
    ("the same in int8", "bench-int8", lambda v: speedups(v, "prompt-lookup")),
    ("speed-up of `medusa`, with the heads that are included", "bench-float32", lambda v: speedups(v, "medusa")),
    ("speed-up with the target in int8 as its own draft", "bench-float32", lambda v: speedups(v, "model:3")),
    ("speed-up of `prompt-lookup` on repeating code with one change", "lookup",
     lambda v: between(v["float32"][0]["times_plain"], 2)),
    ("ms per round of plain decoding in float32, bfloat16, int8", "widths", lambda v: ", ".join(
        f"{v[name]['rounds'][0]['ms'][1]:.1f}" for name in ("float32", "bfloat16", "int8"))),
    ("a plain round in float32, relative to reading the weights once", "widths",
     lambda v: between(v["float32"]["width_1_times_read"], 2)),
    ("the default rule's share of a round", "rules", share_of_rule),
    ("compiling 30 layers: plain, `prompt-lookup`", "compile", lambda v: ", ".join(
        f"{v['compile_s'][name]:.0f} s" for name in ("none", "prompt-lookup"))),
    ("on an H200, bfloat16: speed-up of `prompt-lookup` (MT-bench, HumanEval, copying)", "texts",
     lambda v: on_gpu(v, "prompt-lookup")),
    ("on an H200, bfloat16: speed-up of `medusa`", "texts", lambda v: on_gpu(v, "medusa")),
    ("bugs of other systems that the tests find", "mutants", lambda v: f"{v['found']} of {v['bugs']}"),
)  # fmt: skip
"""What is said, the id of its record, and how it is read there."""


def cpu_result(values: Values) -> str:
    found = values["runs"][0]["methods"]["prompt-lookup"]
    chat, code, copying = (f"{found['tasks'][task]['times_plain']:.1f}" for task in ("mt-bench", "humaneval", "copy"))
    return (
        f"**{found['times_plain']:.1f} times as fast on two CPU cores**, without training and without a second model: "
        f"chat {chat}, code {code}, copying edits {copying} (SmolLM2-135M-Instruct, float32). "
        f"{found['same_texts']} of {found['prompts']} texts equal those of plain decoding."
    )


def gpu_result(values: Values) -> str:
    row = next(row for row in values["parts"]["options"] if row["name"] == "prompt-lookup, chain 8")
    return (
        f"**A round with 8 drafted tokens takes {row['times_plain'][1]:.2f} times as long as a plain round** of an 8B "
        "target on an H200 (bfloat16, the shapes of Llama 3 8B): accepted tokens are almost free."
    )


def text_result(values: Values) -> str:
    at = {
        row["task"]: f"{row['times_plain'][1]:.1f}"
        for row in values["rows"]
        if row["drafter"] == "prompt-lookup" and row["temperature"] == 0
    }
    drafted = [row for row in values["rows"] if row["drafter"] != "none"]
    same, texts = (sum(row[key] for row in drafted) for key in ("same_texts", "prompts"))
    return (
        f"**On the same H200, the 135M model is {at['mt-bench']} (chat) to {at['copy']} (copying edits) times as fast**"
        " in bfloat16. In bfloat16, a GPU rounds a call of several tokens differently from a call of one token: "
        f"{texts - same} of {texts} drafted texts differ from plain decoding."
    )


RESULTS: tuple[tuple[str, Callable[[Values], str]], ...] = (
    ("bench-float32", cpu_result),
    ("rounds", gpu_result),
    ("texts", text_result),
)
"""The results of the first page: the id of a record, and the sentence that is made of it."""


def headline(records: Sequence[Measurement]) -> str:
    """Returns a table of results, with the machine of each below."""
    found = newest(records)
    rows = [[said, shown(found[name].values), f"`{name}`"] for said, name, shown in HEADLINE if name in found]
    if not rows:
        return "Not measured on this version yet.\n"
    used = [found[name] for name in dict.fromkeys(name for _, name, _ in HEADLINE) if name in found]
    measured = "".join(f"- {line} {MEDIANS}\n" for line in origins(used))
    return table(["SmolLM2-135M-Instruct", "result", "record"], rows) + "\n" + folded("How it was measured", measured)


def results(records: Sequence[Measurement]) -> str:
    """Returns the results of the first page, one in a line."""
    found = newest(records)
    lines = [f"- {sentence(found[name].values)}\n" for name, sentence in RESULTS if name in found]
    return "".join(lines) or "Not measured on this version yet.\n"


def alternatives(records: Sequence[Measurement]) -> str:
    """Returns a table with a row for every record that compares jaxspec with other systems, in tokens per second."""
    columns = {"none": "jaxspec, plain", "prompt-lookup": "jaxspec, `prompt-lookup`",
               "transformers plain": "transformers, plain", "transformers prompt-lookup": "transformers, prompt lookup",
               "llama.cpp plain": "llama.cpp, plain"}  # fmt: skip
    used = [record for record in records if record.id in COMPARED]
    if not used:
        return "Not measured on this version yet.\n"
    rows = []
    for record in sorted(used, key=lambda record: tuple(COMPARED).index(record.id)):
        methods = record.values["runs"][0]["methods"]
        cells = [f"{methods[name]['tokens_per_s']:.0f}" if name in methods else "" for name in columns]
        rows.append([COMPARED[record.id], record.instruction_set, *cells])
    measured = "".join(f"- {line} {MEDIANS}\n" for line in origins(used))
    return table(["tokens/s", "processor", *columns.values()], rows) + "\n" + folded("How it was measured", measured)


def fastest(records: Sequence[Measurement]) -> str:
    """Returns a table of the fastest drafter for each kind of text, by processor and dtype, beside `auto`."""
    used = [record for record in records if record.id.startswith(AUTO)]
    if not used:
        return "Not measured on this version yet.\n"
    tasks = list(dict.fromkeys(task for r in used for task in r.values["runs"][0]["methods"]["none"]["tasks"]))
    rows = []
    for record in sorted(used, key=lambda record: (record.id, machine(record))):
        methods = dict(record.values["runs"][0]["methods"])
        auto = methods.pop("auto")

        def cell(speedups: Values) -> str:
            best = max(speedups, key=speedups.__getitem__)
            return "plain decoding" if best == "none" else f"`{best}` {speedups[best]:.2f}"

        cells = [cell({name: entry["tasks"][task]["times_plain"] for name, entry in methods.items()}) for task in tasks]
        everything = cell({name: entry["times_plain"] for name, entry in methods.items()})
        processor = f"{record.machine['cpu']}, {record.instruction_set}"
        rows.append([processor, record.id.removeprefix(AUTO), *cells, everything, f"{auto['times_plain']:.2f}"])
    measured = "".join(f"- {line}\n" for line in origins(used))
    headings = ["processor", "dtype", *tasks, "all prompts", "`auto`"]
    return table(headings, rows) + "\n" + folded("How it was measured", measured)


MEDIANS = "Medians, quartiles in brackets."
AUTO = "auto-"
"""What the ids of the records begin with that compare all drafters of SmolLM2-135M in a dtype."""

COMPARED = {
    "peers": "SmolLM2-135M, float32",
    "peers-int8": "SmolLM2-135M, int8 (llama.cpp: Q4_1)",
    "peers-file": "SmolLM2-135M, Q4_1 in both",
    "peers-qwen": "Qwen2.5-Coder-1.5B, Q4_K_M in both",
}
"""The records that compare jaxspec with other systems, and what their row is called."""


def origins(records: Sequence[Measurement]) -> Iterator[str]:
    """Yields a line for every machine, with versions and dates."""
    for name in dict.fromkeys(map(machine, records)):
        own = [record for record in records if machine(record) == name]
        versions = "; ".join(sorted({f"Python {r.versions['python']}, JAX {r.versions['jax']}" for r in own}))
        dates = sorted({record.date for record in own})
        dates = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        yield f"{name}; {versions}; {dates}."


COMPOSED: dict[str, Callable[[Sequence[Measurement]], str]] = {
    "headline": headline,
    "results": results,
    "alternatives": alternatives,
    "fastest": fastest,
}
"""The blocks that take figures from several records."""
