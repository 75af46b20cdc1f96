"""Presents a benchmark as tables, as JSON and as the figures of a record."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxspec.amounts import plural
from jaxspec.bench.measurements import round_significant
from jaxspec.bench.records import PLAIN_METHOD, Row, Run
from jaxspec.bench.summary import compare_methods, list_groups, summarise
from jaxspec.bench.table import Table

REPORT_FORMAT = 1
"""Version of the JSON, incremented whenever a name changes its meaning."""
SAMPLING_SETTINGS = ("temperature", "top_k", "top_p", "min_p")


def format_speedup(ratio: float) -> str:
    """Formats a speedup; below 1 it says "slower"."""
    return f"{ratio:.2f}x slower" if round(ratio, 2) < 1 else f"{ratio:.2f}x"


def _settings(run: Run) -> dict[str, Any]:
    """Returns the sampling settings of a run, and the classes of its processors if there are any."""
    settings = {name: getattr(run.sampling, name) for name in SAMPLING_SETTINGS}
    processors = [type(one).__name__ for one in run.sampling.processors]
    return settings | ({"processors": processors} if processors else {})


def format_title(run: Run) -> str:
    """Returns the settings of a run in one line."""
    settings = _settings(run)
    processors = settings.pop("processors", [])
    shown = [f"temperature {settings.pop('temperature'):g}"]
    shown += [f"{name.replace('_', '-')} {value:g}" for name, value in settings.items() if value not in (0, 1)]
    shown += processors
    return ", ".join([*shown, f"rule {run.rule}" + ("" if run.lossless else " (lossy)")])


def overall_table(run: Run) -> Table:
    """Returns a table with a row per method, plain decoding first."""
    prompts = len(run.rows) // len(run.methods)
    headings = (
        "drafter",
        "speedup",
        "per prompt (quartiles)",
        "tokens/s",
        "tokens per round",
        "acceptance",
        "predicted",
    )
    rows = []
    for method in run.methods:
        summary = summarise(run, method)
        low, median, high = dataclasses.astuple(summary.ratios)
        predicted = summary.predicted_speedup
        rows.append((
            "none (plain decoding)" if method == PLAIN_METHOD else method,
            format_speedup(summary.speedup),
            f"{median:.2f}x ({low:.2f} to {high:.2f})",
            f"{summary.tokens_per_s:.1f}",
            f"{summary.mean_accepted_tokens:.2f}" if summary.stats.rounds else "-",
            f"{summary.stats.acceptance_rate:.0%}" if summary.stats.drafted else "-",
            "-" if predicted is None or method == PLAIN_METHOD else f"{predicted:.2f}x",
            f"{summary.same}/{summary.prompts}" + (f", {summary.certified} certified" if summary.certified else ""),
        ))  # fmt: skip
    return Table(f"{format_title(run)}, {plural(prompts, 'prompt')}", (*headings, "same text"), rows)


def format_other_times(run: Run) -> str:
    """Returns a line with the times that tokens/s excludes, and the time of a single call of each model."""
    compiled = ", ".join(f"{method} {run.compile_s[method]:.1f} s" for method in run.methods)
    read = ", ".join(f"{method} {summarise(run, method).prefill_s:.2f} s" for method in run.methods)
    calls = ", ".join(
        f"{'target' if method == PLAIN_METHOD else f'draft of {method}'} {seconds * 1e3:.2f} ms"
        for method, seconds in run.call_s.items()
    )
    return f"Not in tokens/s: compilation ({compiled}); prefill ({read}). One call: {calls}."


def group_table(run: Run) -> Table:
    """Returns a table of the speedup and tokens per round of every method, by task and category."""
    methods = [method for method in run.methods if method != PLAIN_METHOD]
    rows = []
    for task, category in list_groups(run):
        plain = summarise(run, PLAIN_METHOD, task, category)
        cells = [summarise(run, method, task, category) for method in methods]
        rows.append((
            task if category is None else f"  {category}",
            str(plain.prompts),
            f"{plain.tokens_per_s:.1f}",
            *(
                format_speedup(cell.speedup) + (f" ({cell.mean_accepted_tokens:.2f})" if cell.stats.rounds else "")
                for cell in cells
            ),
        ))  # fmt: skip
    return Table(
        f"{format_title(run)}: speedup (tokens per round)", ("task", "prompts", "plain tokens/s", *methods), rows
    )


def peer_table(run: Run) -> Table:
    """Returns a table that compares plain decoding and the fastest drafter with every method of other systems."""
    own = [method for method in run.methods if method not in run.peers]
    best = max(own, key=lambda method: summarise(run, method).tokens_per_s)
    shown, rows = dict.fromkeys((PLAIN_METHOD, best)), []
    for peer in run.peers:
        cells = []
        for method in shown:
            low, median, high = dataclasses.astuple(compare_methods(run, method, peer))
            ratio = summarise(run, method).tokens_per_s / summarise(run, peer).tokens_per_s
            cells += [f"{ratio:.2f}x", f"{median:.2f}x ({low:.2f} to {high:.2f})"]
        rows.append((peer, f"{summarise(run, peer).tokens_per_s:.1f}", *cells))
    names = ("plain decoding" if method == PLAIN_METHOD else method for method in shown)
    headings = [heading for name in names for heading in (name, f"{name}, per prompt (quartiles)")]
    return Table("tokens/s relative to other systems", ("peer", "its tokens/s", *headings), rows)


def format_versions(run: Run) -> str:
    """Returns the package versions of other systems in one line."""
    peers = (f"{peer}: {', '.join(map(' '.join, used.items()))}" for peer, used in run.peers.items())
    return f"Versions of other systems: {'; '.join(peers)}."


def describe_differences(run: Run) -> Iterator[str]:
    """Yields a line for every text that differs from the text of plain decoding."""
    for row in run.differing:
        first = row.difference
        assert first is not None
        gap = "" if first.gap is None else f", perturbed scores {first.gap:.1e} apart"
        yield (
            f"{row.method}, {row.task}, prompt {row.id}, turn {row.turn}: differs from plain decoding at token "
            f"{first.place} ({first.plain} there, {first.other} here{gap}): {explain_difference(run, row)}"
        )


def explain_difference(run: Run, row: Row) -> str:
    """Returns the reason for a difference."""
    certificate = row.difference.certificate if row.difference else None
    if certificate == "tie":
        return "a certified tie: calls of different widths round differently"
    if certificate == "width":
        return "rounding in lower precision: if all target calls have the same width, the texts are equal"
    if certificate == "peer":
        return "the text is another system's"
    return "NOT A TIE" if run.lossless else "the rule is lossy"


def as_record(runs: list[Run], arguments: dict[str, Any], environment: dict, memory: dict) -> dict:
    """Returns the whole benchmark for JSON.

    Args:
        runs: the runs, one per setting of sampling.
        arguments: the options of the command.
        environment: see `environment.describe_environment`.
        memory: sizes in bytes, by purpose.
    """
    return {
        "format": REPORT_FORMAT,
        "arguments": arguments,
        "environment": environment,
        "memory_bytes": memory,
        "runs": [_run(run) for run in runs],
    }


def summarise_runs(runs: list[Run]) -> dict[str, Any]:
    """Returns what a record keeps of a benchmark: medians and quartiles, per method and per task, without texts."""
    return {"runs": [_figures(run) for run in runs]}


def _figures(run: Run) -> dict:
    def of(method: str) -> dict[str, Any]:
        summary = summarise(run, method)
        stats, predicted = summary.stats, summary.predicted_speedup
        tasks = [task for task, category in list_groups(run) if category is None]
        return {
            "prompts": summary.prompts,
            "tokens_per_s": round_significant(summary.tokens_per_s),
            "times_plain": round_significant(summary.speedup),
            "per_prompt": [round_significant(ratio) for ratio in dataclasses.astuple(summary.ratios)],
            "least_prompt": round_significant(summary.least),
            "tokens_per_round": round_significant(summary.mean_accepted_tokens) if stats.rounds else None,
            "acceptance_rate": round_significant(stats.acceptance_rate) if stats.drafted else None,
            "conditional_acceptance": [round_significant(share, 3) for share in stats.conditional_acceptance],
            "predicted": None if predicted is None else round_significant(predicted),
            "same_texts": summary.same,
            "certified": summary.certified,
            "compile_s": round_significant(run.compile_s[method], 3),
            "call_ms": round_significant(run.call_s[method] * 1e3) if method in run.call_s else None,
            "tasks": {
                task: {
                    "times_plain": round_significant(part.speedup),
                    "median_prompt": round_significant(part.ratios.median),
                    "tokens_per_s": round_significant(part.tokens_per_s),
                }
                for task in tasks
                for part in (summarise(run, method, task),)
            },
        }

    return {
        "sampling": _settings(run),
        "rule": run.rule,
        "lossless": run.lossless,
        "methods": {method: of(method) for method in run.methods},
        "peers": list(run.peers),
    }


def _run(run: Run) -> dict:
    def of_all(**group: Any) -> list[dict]:
        return [summarise(run, method, **group).as_dict() for method in run.methods]

    return {
        "sampling": _settings(run),
        "rule": run.rule,
        "lossless": run.lossless,
        "methods": list(run.methods),
        "capacity": run.capacity,
        "compile_s": run.compile_s,
        "call_s": run.call_s,
        "peers": run.peers,
        "left_out": run.left_out,
        "overall": of_all(),
        "groups": [record for task, category in list_groups(run) for record in of_all(task=task, category=category)],
        "rows": [dataclasses.asdict(row) | {"stats": row.stats.as_dict()} for row in run.rows],
    }


def format_conclusion(runs: list[Run]) -> str:
    """Returns a sentence that says how many texts are equal to the texts of plain decoding."""
    compared = sum(row.method != PLAIN_METHOD and row.method not in run.peers for run in runs for row in run.rows)
    wrong = sum(len(run.wrong) for run in runs)
    if wrong:
        return f"{wrong} OF {compared} TEXTS DIFFER from those of plain decoding. This is an error: please report it."
    unequal = sum(row.method not in run.peers for run in runs for row in run.differing)
    if unequal:
        return f"{compared - unequal} of {compared} texts are those of plain decoding; the others are explained above."
    return f"All {compared} texts are those of plain decoding, token for token."
