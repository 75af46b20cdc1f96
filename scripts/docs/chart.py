"""Draws `docs/speedup.svg`, the chart of speed-ups by task, from the records in `measurements/`."""

from collections.abc import Iterator, Mapping, Sequence

from jaxspec.bench.measurements import RECORDS_FOLDER, Measurement
from scripts.docs.pictures import ROOT, box, picture, text
from scripts.figures.pages import newest
from scripts.figures.records import read_records

TASKS = {"mt-bench": "chat", "humaneval": "code", "copy": "copying edits"}
"""The tasks of the chart, and what they are called there."""
DRAFTERS = ("prompt-lookup", "recycling", "medusa", "eagle")
Speedups = Mapping[str, Mapping[str, float]]
"""By task and drafter."""

BAR, GAP, GROUP_GAP = 17, 3, 16
LEFT, RIGHT = 126, 50
"""Room in a panel for the names of tasks and for the last bar's value."""


def on_cpu(records: Mapping[str, Measurement]) -> Speedups:
    """Returns the speed-ups in the record of `jaxspec bench`."""
    methods = records["bench-float32"].values["runs"][0]["methods"]
    return {
        task: {name: methods[name]["tasks"][task]["times_plain"] for name in DRAFTERS if name in methods}
        for task in TASKS
    }


def on_gpu(records: Mapping[str, Measurement]) -> Speedups:
    """Returns the medians of greedy decoding in the record of texts on a GPU."""
    found: dict[str, dict[str, float]] = {task: {} for task in TASKS}
    for row in records["texts"].values["rows"]:
        if row["temperature"] == 0 and row["drafter"] in DRAFTERS:
            found[row["task"]][row["drafter"]] = row["times_plain"][1]
    return found


def bars(speedups: Speedups, left: float, top: float, width: float, most: float) -> Iterator[str]:
    """Yields a group of bars for each task, with the value behind each bar, and the line of plain decoding."""
    scale, y = (width - LEFT - RIGHT) / most, top
    for task, by_drafter in speedups.items():
        height = len(by_drafter) * (BAR + GAP) - GAP
        yield text(left + LEFT - 12, y + height / 2 + 5, TASKS[task], "end")
        for name, speedup in by_drafter.items():
            yield box(left + LEFT, y, speedup * scale, BAR, f"bar{DRAFTERS.index(name)}", 2)
            yield text(left + LEFT + speedup * scale + 6, y + 13, f"{speedup:.2f}", "value")
            y += BAR + GAP
        y += GROUP_GAP - GAP
    plain = left + LEFT + scale
    yield f'<path class="plain" d="M{plain:g} {top - 8:g} V{y - GROUP_GAP + 8:g}"/>'
    yield text(plain, y + 10, "1 = plain decoding", "small mid")


def draw(panels: Sequence[tuple[str, str, Speedups]]) -> str:
    """Returns the chart: a panel with a title, a line below it and its bars for each machine; one scale for all."""
    most = max(value for *_, speedups in panels for by_drafter in speedups.values() for value in by_drafter.values())
    width, top, parts = 460, 106, []
    rows = max(sum(map(len, speedups.values())) for *_, speedups in panels)
    height = top + rows * (BAR + GAP) + (len(TASKS) - 1) * GROUP_GAP + 34
    parts.append(text(24, 36, "Tokens per second, relative to plain decoding (SmolLM2-135M-Instruct, greedy)", "head"))
    for number, (title, below, speedups) in enumerate(panels):
        left = 16 + number * (width + 8)
        parts += [box(left, 52, width, height - 64, "panel"), text(left + 16, 77, title, "head"),
                  text(left + 444, 77, below, "small end"), *bars(speedups, left, top, width, most)]  # fmt: skip
    used = [name for name in DRAFTERS if any(name in by for *_, speedups in panels for by in speedups.values())]
    x = 24
    for name in used:
        parts.append(box(x, height, 14, 14, f"bar{DRAFTERS.index(name)}", 2))
        parts.append(text(x + 20, height + 12, name))
        x += 40 + 8 * len(name)
    return picture(960, height + 30, "Speed-up by task and drafter, on a CPU and on a GPU", parts)


def speedups() -> str:
    """Draws the chart from the newest records."""
    records = newest(read_records(ROOT / RECORDS_FOLDER))
    return draw(
        [
            ("2 CPU cores", "float32, AVX-512", on_cpu(records)),
            ("1 NVIDIA H200", "bfloat16", on_gpu(records)),
        ]
    )
