"""Draws the results of a benchmark."""

import pathlib

from jaxspec.bench.extra import import_extra
from jaxspec.bench.records import PLAIN_METHOD, Run
from jaxspec.bench.report import format_title
from jaxspec.bench.summary import list_groups, summarise


def save_plots(runs: list[Run], folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws speedup by task and acceptance by depth for every run, and returns the files' paths.

    Raises:
        MissingPackage: matplotlib is not installed.
    """
    import_extra("matplotlib", "--plots").use("Agg")  # draws to files, with or without a display
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, run in enumerate(runs, start=1):
        for name, draw in (("speedup", _speedup), ("acceptance", _acceptance)):
            paths.append(folder / f"{name}-{number}.png")
            _draw(draw, run, paths[-1])
    return paths


def _draw(draw, run: Run, path: pathlib.Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.set_title(format_title(run))
    draw(axes, run)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _speedup(axes, run: Run) -> None:
    """Draws a group of bars per task, with one bar per method; the line is plain decoding."""
    tasks = [task for task, category in list_groups(run) if category is None]
    methods = [method for method in run.methods if method != PLAIN_METHOD]
    width = 0.8 / max(len(methods), 1)
    for i, method in enumerate(methods):
        summaries = [summarise(run, method, task) for task in tasks]
        places = [j + (i - (len(methods) - 1) / 2) * width for j in range(len(tasks))]
        axes.bar(places, [summary.speedup for summary in summaries], width, label=method)
    axes.axhline(1.0, color="black", linewidth=1, label="plain decoding")
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_ylabel("tokens/s, times plain decoding")


def _acceptance(axes, run: Run) -> None:
    """Draws the share of drafts that are accepted to each depth.

    A dashed line shows the share of the drafts that were compared at this depth.
    """
    for method in run.methods:
        stats = summarise(run, method).stats
        if not stats.drafted:
            continue
        depths = range(1, len(stats.accepted_at) + 1)
        (line,) = axes.plot(depths, stats.acceptance_by_position, marker="o", label=method)
        tested = [(d, a) for d, a, n in zip(depths, stats.conditional_acceptance, stats.tested_at) if n]
        axes.plot(*zip(*tested), linestyle="--", color=line.get_color())
    axes.plot([], [], "k--", label="if all tokens before are accepted")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("depth in the draft")
    axes.set_ylabel("acceptance")
