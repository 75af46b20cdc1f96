"""Renders the tables of drafters, rules, schedules and presets into README.md and docs/*.md.

    python -m scripts.docs.members

A block between `<!-- members: drafters -->` and `<!-- /members -->` is replaced by the table of the registry's members
(`rules` and `schedules` likewise). A row comes from the member's class: the first paragraph of its docstring, and what
it declares; a preset's row, from its entry. `<!-- members: drafters-reference -->` lists the classes for the reference
of the site. `tests/house/test_site.py` compares.
"""

import dataclasses
import inspect
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from jaxspec.checkpoints.presets import PRESETS
from jaxspec.core.draw import Noise
from jaxspec.core.rule import Rule
from jaxspec.core.topology import Dynamic, Topology, branching, chain, dynamic
from jaxspec.errors import InvalidConfig
from jaxspec.generation.drafting import Drafting
from jaxspec.heads.find import SHIPPED_FOLDER
from jaxspec.registry import DRAFTERS, PROCESSORS, RULES, SCHEDULES, Members, find

ROOT = pathlib.Path(__file__).parents[2]
BLOCK = re.compile(r"(<!-- members: ([\w-]+) -->\n).*?(<!-- /members -->)", re.DOTALL)
NOISE = {Noise.SHARED: "the target's noise", Noise.FRESH: "separate noise", Noise.NONE: "no noise"}
DEFAULTS = {"drafter": Drafting().drafter, "rule": Drafting().rule, "schedule": "constant"}


def pages() -> list[pathlib.Path]:
    """Returns the pages that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def summary(member: type) -> str:
    """Returns the first paragraph of a class's docstring, as a cell of a table."""
    paragraph = (inspect.getdoc(member) or "").split("\n\n")[0]
    return " ".join(paragraph.split()).rstrip(".").removesuffix("; see the module").replace("|", "\\|")


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def drafter_row(drafter: Any) -> list[str]:
    return [summary(drafter), listed(sorted(drafter.takes, key=lambda name: (name != "tree", name)))]


def accepts(rule: Rule, topology: Topology | Dynamic) -> bool:
    """Returns whether a rule verifies trees of this kind."""
    if topology.shape.pruned and rule.noise is Noise.FRESH:
        return False
    try:
        rule.check(topology.shape)
    except InvalidConfig:
        return False
    return True


def rule_row(rule: Any) -> list[str]:
    member = rule()
    kinds = {"chains": chain(2), "trees": branching(2, 2), "dynamic": dynamic()}
    takes = [kind for kind, topology in kinds.items() if accepts(member, topology)]
    return [summary(rule), NOISE[member.noise], ", ".join(takes), "yes" if member.lossless else "no"]


def schedule_row(schedule: Any) -> list[str]:
    return [summary(schedule), listed(field.name for field in dataclasses.fields(schedule))]


def processor_row(processor: Any) -> list[str]:
    return [f"`jaxspec.{processor.__name__}`", summary(processor)]


TABLES = {
    "drafters": ("drafter", DRAFTERS, ["what it proposes", "takes"], drafter_row),
    "rules": ("rule", RULES, ["what it does", "drafts are drawn with", "trees", "lossless"], rule_row),
    "schedules": ("schedule", SCHEDULES, ["what it does", "settings"], schedule_row),
    "processors": ("processor", PROCESSORS, ["class", "what it does"], processor_row),
}


def table(name: str) -> str:
    """Returns the table of one kind of member, of jaxspec's own."""
    kind, members, columns, row = TABLES[name]
    return render(kind, members, columns, row)


def render(kind: str, members: Members, columns: list[str], row: Any) -> str:
    lines = [[kind, *columns], ["---"] * (1 + len(columns))]
    for name in filter(members.own, members):
        first = f"`{name}`" + " (default)" * (name == DEFAULTS.get(kind))
        lines.append([first, *row(find(kind, name))])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def reference(name: str) -> str:
    """Returns the directives that document the classes of one kind of member."""
    members = TABLES[name][1]
    lines = [f".. autoclass:: {members[member].replace(':', '.')}" for member in filter(members.own, members)]
    return "\n".join(["```{eval-rst}", *lines, "```", ""])


def presets(name: str) -> str:
    """Returns the table of presets, with their drafts and the heads that come with jaxspec."""
    rows = [["preset", "parameters", "draft of `--drafter model`", "included heads", "license"], ["---"] * 5]
    for preset in PRESETS.values():
        size = preset.parameters / 1e6
        heads = sorted(folder.name for folder in (SHIPPED_FOLDER / preset.name).glob("*/"))
        rows.append([f"`{preset.name}`", f"{size:.0f} M" if size < 950 else f"{size / 1000:.1f} B",
                     f"`{preset.draft}`" if preset.draft else "", listed(heads), preset.license])  # fmt: skip
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


BLOCKS = dict.fromkeys(TABLES, table) | {"presets": presets} | {f"{name}-reference": reference for name in TABLES}
"""What renders each block."""


def rendered(page: str) -> str:
    """Returns a page's text with its blocks of members as they should be."""
    return BLOCK.sub(lambda match: match[1] + BLOCKS[match[2]](match[2].removesuffix("-reference")) + match[3], page)


def main() -> None:
    """Rewrites the tables of every page."""
    for path in pages():
        before = path.read_text()
        if (after := rendered(before)) != before:
            path.write_text(after)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
