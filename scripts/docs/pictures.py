"""Draws the pictures of the documentation: `docs/round.svg`, one round, `docs/house.svg`, the packages, and the logo.

    python -m scripts.docs

A picture has a background of its own, light or dark by what the reader's system prefers, so it shows on any page.
"""

import pathlib
import re
from html import escape

ROOT = pathlib.Path(__file__).parents[2]
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de; } .panel { fill: #f3f5f8; }
  text { fill: #1f2328; font: 15px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
  .head { font-weight: 600; font-size: 16px; } .small { font-size: 13px; fill: #59636e; } .mid { text-anchor: middle; }
  .end { text-anchor: end; } .value { font-size: 13px; }
  .bar0 { fill: #2b8a4b; } .bar1 { fill: #3b76c4; } .bar2 { fill: #b7791f; } .bar3 { fill: #8b5fbf; }
  .plain { stroke: #1f2328; stroke-width: 1.5; stroke-dasharray: 4 3; }
  .edge { stroke: #8c959f; fill: none; stroke-width: 1.5; } .node { fill: #ffffff; stroke: #8c959f; stroke-width: 1.5; }
  .root { fill: #dbe9fb; stroke: #3b76c4; } .kept { fill: #d5f0dc; stroke: #2b8a4b; stroke-width: 2; }
  .path { stroke: #2b8a4b; stroke-width: 3; } .own { fill: #2b6cb8; font-weight: 600; font-size: 13px; }
  .gone { opacity: .4; } .next { fill: #fdecc8; stroke: #b7791f; stroke-width: 2; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #16191e; stroke: #3d444d; } .panel { fill: #1f242b; }
    text { fill: #e6edf3; } .small { fill: #a3adb8; }
    .edge { stroke: #7d8794; } .node { fill: #16191e; stroke: #7d8794; }
    .root { fill: #17304f; stroke: #5b9be6; } .kept { fill: #143d24; stroke: #4cc27a; } .path { stroke: #4cc27a; }
    .bar0 { fill: #4cc27a; } .bar1 { fill: #5b9be6; } .bar2 { fill: #e0a840; } .bar3 { fill: #b894e6; }
    .plain { stroke: #e6edf3; } .own { fill: #7fb4f0; } .next { fill: #46350f; stroke: #e0a840; }
  }"""


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    """Returns an SVG file with a card as its background."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img">\n<title>{escape(title)}</title>\n<style>{STYLE}\n</style>\n'
        f'<rect class="card" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="12"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, style: str, radius: float = 8) -> str:
    return f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'


# A draft tree: name, parent, place in its panel, the word, the target's own token after it.
NODES = {
    "root": (None, (45, 100), "the", "mat"),
    "mat": ("root", (140, 60), "mat", "and"),
    "sofa": ("root", (140, 165), "sofa", "."),
    "and": ("mat", (235, 30), "and", "slept"),
    "dot": ("mat", (235, 92), ".", "It"),
    "to": ("sofa", (235, 165), "to", "nap"),
}
KEPT = ("root", "mat", "and")
NODE = (66, 34)


def tree(left: float, top: float, verified: bool = False, kept: bool = False) -> list[str]:
    """Draws the draft tree: with the target's own token after each node, or with what is kept of it."""
    parts, (width, height) = [], NODE
    for name, (parent, (x, y), _, _) in NODES.items():
        if parent is not None:
            px, py = NODES[parent][1]
            style = ("edge path" if name in KEPT else "edge gone") if kept else "edge"
            ends = (left + px + width / 2, top + py, left + x - width / 2, top + y)
            parts.append('<path class="{}" d="M{:g} {:g} L{:g} {:g}"/>'.format(style, *ends))
    for name, (_, (x, y), word, own) in NODES.items():
        style = "node root" if name == "root" else "node"
        gone = ""
        if kept:
            style, gone = ("node kept", "") if name in KEPT[1:] else (style, "" if name == "root" else " gone")
        parts.append(box(left + x - width / 2, top + y - height / 2, width, height, style + gone))
        parts.append(text(left + x, top + y + 5, word, "mid" + gone))
        if verified:
            parts.append(text(left + x, top + y + height / 2 + 14, f"→ {own}", "own mid"))
    return parts


def a_round() -> str:
    """Draws one round: the draft, the target's tokens, and the walk."""
    parts, panel, top = [text(24, 38, "The text so far: “The cat sat on the”", "")], 300, 56
    heads = (
        ("1  The drafter proposes a tree", "guesses below the last token"),
        ("2  The target reads all of it", "one call: its own token after every node"),
        ("3  The rule keeps a path", "down, while the target's token is a child"),
    )
    for number, (head, below) in enumerate(heads):
        left = 20 + number * (panel + 10)
        parts += [box(left, top, panel, 306, "panel"), text(left + 16, top + 28, head, "head")]
        parts.append(text(left + 16, top + 48, below, "small"))
        parts += tree(left + 14, top + 62, verified=number == 1, kept=number == 2)
    left = 20 + 2 * (panel + 10)
    parts.append(box(left + 222, top + 258, 62, 32, "node next"))
    parts.append(text(left + 253, top + 279, "slept", "mid"))
    parts.append(text(left + 16, top + 279, "and the target's own token:", "small"))
    parts.append(text(24, 390, "Three tokens, “mat and slept”, for one call of the target; then the next round."))
    words = "One round of speculative decoding: a tree is drafted, verified in one call, and a path of it is kept"
    return picture(960, 410, words, parts)


def floors() -> list[list[str]]:
    """Reads the packages of each level, the lowest first, from the table in docs/architecture.md."""
    page = (ROOT / "docs/architecture.md").read_text()
    table = re.search(r"^\| level \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert table, "docs/architecture.md has the table of levels"
    rows = [line.split("|")[1:3] for line in table[1].splitlines()]
    found: dict[str, list[str]] = {}
    for number, names in rows:
        found.setdefault(number.strip(), []).extend(re.findall(r"`(\w+)`", names))
    return list(found.values())


def house() -> str:
    """Draws the packages by level; imports go down only."""
    parts, rows, height = [], floors(), 40
    top = 30 + (len(rows) - 1) * (height + 6)
    styles = {"decode": "node next"} | dict.fromkeys(("rules", "schedules", "drafters"), "node root")
    for number, names in enumerate(rows):
        y, width = top - number * (height + 6), 800 / len(names) - 8
        for place, name in enumerate(names):
            x = 120 + place * (width + 8)
            parts.append(box(x, y, width, height, styles.get(name, "node")))
            parts.append(text(x + width / 2, y + 25, name, "mid"))
    y, bottom = 34, top + height
    parts.append(f'<path class="edge" d="M60 {y} L60 {bottom - 8} m-6 -10 l6 10 l6 -10"/>')
    turned = f"translate(48 {(y + bottom) / 2:g}) rotate(-90)"
    parts.append(f'<text class="small mid" transform="{turned}">imports go down</text>')
    legend = "blue: members, which do not import one another; yellow: the loop, which does not import members"
    parts.append(text(120, bottom + 28, legend, "small"))
    return picture(960, bottom + 48, "The packages of jaxspec by level: imports go down only", parts)


LOGO_STYLE = """
  .edge { stroke: #8c959f; stroke-width: 5; } .path { stroke: #2d9d5c; stroke-width: 8; }
  .node { fill: #8c959f; } .kept { fill: #2d9d5c; }"""


def logo() -> str:
    """Draws the logo: a tree of tokens with the path that is accepted, in colours for light and dark pages."""
    at = {"root": (22, 64), "a": (62, 30), "b": (62, 98), "aa": (106, 14), "ab": (106, 52), "ba": (106, 98)}
    below = {"a": "root", "b": "root", "aa": "a", "ab": "a", "ba": "b"}
    kept = ("root", "a", "ab")
    parts = []
    for node, parent in sorted(below.items(), key=lambda edge: edge[0] in kept):  # the path lies on top
        (x, y), (px, py) = at[node], at[parent]
        parts.append(f'<path class="{"path" if node in kept else "edge"}" d="M{px} {py} L{x} {y}"/>')
    for node, (x, y) in at.items():
        style, radius = ("kept", 14) if node in kept else ("node", 10)
        parts.append(f'<circle class="{style}" cx="{x}" cy="{y}" r="{radius}"/>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 128 128" width="128" height="128" role="img">\n'
        f"<title>jaxspec</title>\n<style>{LOGO_STYLE}\n</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


PICTURES = {"docs/round.svg": a_round, "docs/house.svg": house, "docs/static/logo.svg": logo}
"""The pictures that need no record; `scripts/docs/chart.py` draws the chart."""
