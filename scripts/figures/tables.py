"""Renders the figures of a record as a Markdown table, with one function for every kind of record."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxspec.registry import DRAFTERS

Values = Mapping[str, Any]

DEPTHS = 4
"""Depths of a draft, counted from the first token, whose acceptance is shown."""


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def times(ratio: float) -> str:
    """Returns a speed relative to plain decoding; below 1 it says so."""
    return f"{ratio:.2f}" + (", slower" if round(ratio, 2) < 1 else "")


def between(quartiles: Sequence[float], digits: int = 1) -> str:
    low, median, high = (f"{value:.{digits}f}" for value in quartiles)
    return f"{median} ({low} to {high})"


def share(value: float) -> str:
    return f"{value:.0%}"


def named(drafter: str) -> str:
    """Returns a name whose first word, if it is a drafter's, is set as code."""
    first = re.split(r"[^\w-]", drafter, maxsplit=1)[0]
    return f"`{first}`{drafter[len(first) :]}" if first in DRAFTERS else drafter


def widths(values: Values) -> str:
    first = next(iter(values.values()))["rounds"]
    counts = sorted({row["width"] for row in first if row["capacity"] == 512})
    rows = []
    for dtype, entry in values.items():
        at = {(row["width"], row["capacity"], row["temperature"]): row for row in entry["rounds"]}
        for temperature in sorted({key[2] for key in at}):
            few = [at.get((width, 512, temperature)) for width in counts]
            cells = [f"{row['ms'][1]:.1f} ({row['times_width_1']:.2f})" if row else "" for row in few]
            rest = ["", ""]
            if temperature == 0:
                rest = [between(entry["width_1_times_read"], 2), f"{at[1, 8192, 0]['times_width_1']:.2f}"]
            rows.append([f"{dtype}, temperature {temperature:g}", *cells, *rest])
    headings = ["ms per round (times width 1)", *(f"width {n}" for n in counts),
                "width 1, relative to a read of the weights", "width 1 at capacity 8192, relative to 512"]  # fmt: skip
    return table(headings, rows)


def hybrids(values: Values) -> str:
    rows = []
    for name, entry in values.items():
        cells = [f"{row['ms'][1]:.0f} ({row['times_one'][1]:.2f}; on cores {row['core_times_one'][1]:.2f}; "
                 f"assumed {row['assumed']:.2f})" for row in entry["rounds"]]  # fmt: skip
        rows.append([name, f"{entry['weights_gb']:.2f}", *cells])
    counts = (row["nodes"] for row in next(iter(values.values()))["rounds"])
    headings = [f"{n} nodes" if n > 1 else "1 node, ms per round (times 1 node)" for n in counts]
    return table(["shapes of", "weights, GB", *headings], rows)


def lookup(values: Values) -> str:
    rows = []
    for dtype, (copying, *ordinary) in values.items():
        ratios = sorted(row["times_plain"][1] for row in ordinary)
        middle = (ratios[len(ratios) // 2] + ratios[(len(ratios) - 1) // 2]) / 2
        same = sum(row["same_text"] for row in (copying, *ordinary))
        rows.append([dtype, f"{copying['plain_tokens_per_s'][1]:.1f}", between(copying["times_plain"], 2),
                     between([ratios[0], middle, ratios[-1]], 2), f"{same} of {1 + len(ordinary)}"])  # fmt: skip
    headings = ["weights", "plain, tokens/s", "copying with one change, speed-up (quartiles)",
                "ordinary prompts, speed-up (median, range)", "same text as plain"]  # fmt: skip
    return table(headings, rows)


def compile_times(values: Values) -> str:
    rows = [[name, f"{entry[1]:.2f}"] for name, entry in values["import_s"].items()]
    rows += [
        [f"compile SmolLM2-135M, 30 layers: {name}", f"{entry:.0f}"] for name, entry in values["compile_s"].items()
    ]
    rows += [[f"compile {row['layers']} narrow layers: plain, prompt-lookup",
              f"{row['plain_s']:.0f}, {row['lookup_s']:.0f}"] for row in values["by_layers"]]  # fmt: skip
    return table(["", "seconds"], rows)


def memory(values: Values) -> str:
    rows = [[entry["source"], dtype, str(entry["parameters_mib"]), str(entry["loading_mib"]),
             f"{entry['loading_mib'] / entry['parameters_mib']:.2f}"] for dtype, entry in values.items()]  # fmt: skip
    return table(["model", "weights", "parameters, MiB", "peak of loading, MiB", "times the parameters"], rows)


def rules(values: Values) -> str:
    trees = list(values)
    columns = [(tree, setting) for tree in trees for setting in ("T 1", "top-p 0.9")]
    names = dict.fromkeys(label.partition(": ")[2] for entry in values.values() for label in entry["ms"])
    names = [name for name in names if name and " " not in name]

    def cell(tree: str, label: str) -> str:
        entry = values[tree]["ms"]
        if label not in entry:
            return ""
        own, target = entry[label][1], entry["target call"][1]
        return f"{own:.1f}" + ("" if label == "target call" else f" ({own / (own + target):.0%})")

    rows = [["target's call", *(cell(tree, "target call") for tree, _ in columns)]]
    rows += [[f"`{name}`", *(cell(tree, f"{setting}: {name}") for tree, setting in columns)] for name in names]
    rows += [["for scale: a sort of the logits",
              *(f"{values[tree]['ms']['a sort of the logits'][1]:.1f}" for tree, _ in columns)]]  # fmt: skip
    vocab = values[trees[0]]["vocab"]
    return table([f"ms, V = {vocab}", *(f"{tree}, {setting}" for tree, setting in columns)], rows)


def overhead(values: Values) -> str:
    rows = [[row["drafter"], row["sampling"], between(row["round_ms"]), between(row["target_ms"]),
             between([100 * value for value in row["share"]]) + " %"] for row in values["rows"]]  # fmt: skip
    return table([f"V = {values['vocab']}", "sampling", "round, ms", "target's call, ms", "everything else"], rows)


def first_token(values: Values) -> str:
    lengths = list(next(iter(values.values())))
    rows = [[way, *(between(entry[length], 0) for length in lengths)] for way, entry in values.items()]
    return table(["ms to the first token (quartiles)", *(f"{length} tokens" for length in lengths)], rows)


def batches(values: Values) -> str:
    rows, drafters = [], []
    for dtype, entry in values.items():
        at = {(row["rows"], row["drafter"]): row for row in entry}
        drafters = [name for name in dict.fromkeys(row["drafter"] for row in entry) if name != "none"]
        for count in dict.fromkeys(row["rows"] for row in entry):
            cells = [f"{at[count, 'none']['tokens_per_s'][1]:.1f}"]
            for name in drafters:
                own = at[count, name]
                cells += [times(own["times_plain"]), f"{own['tokens_per_round']:.2f}", f"{own['target_cost']:.2f}"]
            rows.append([dtype, str(count), *cells])
    headings = ["weights", "rows", "plain, tokens/s"]
    for name in drafters:
        headings += [f"`{name}`, speed-up", "its tokens per round", "cost of its target call, relative to width 1"]
    return table(headings, rows)


def of_task(entry: Values, plain: bool) -> str:
    """Returns a method's cell for a task, with the median of its prompts where the record has it."""
    if plain:
        return f"{entry['tokens_per_s']:.1f} tokens/s"
    return times(entry["times_plain"]) + (f" ({times(entry['median_prompt'])})" if "median_prompt" in entry else "")


def accepted(entry: Values) -> str:
    """Returns the cell of the accepted share, with that at each of the first depths where the record has it."""
    by_depth = ", ".join(f"{100 * part:.0f}" for part in entry.get("conditional_acceptance", ())[:DEPTHS])
    return share(entry["acceptance_rate"] or 0) + (f" ({by_depth})" if by_depth else "")


def bench(values: Values) -> str:
    parts = []
    for run in values["runs"]:
        rows, several = [], len(values["runs"]) > 1
        tasks = list(run["methods"]["none"]["tasks"])
        by_prompt = "least_prompt" in run["methods"]["none"]
        for name, entry in run["methods"].items():
            if name in run["peers"]:
                continue
            plain = name == "none"
            cells = [of_task(entry["tasks"][task], plain) for task in tasks]
            least = ["" if plain else times(entry["least_prompt"])] if by_prompt else []
            rows.append([
                "none: plain decoding" if plain else f"`{name}`",
                f"{entry['tokens_per_s']:.1f}", times(entry["times_plain"]), *least, *cells,
                f"{entry['tokens_per_round']:.2f}", "" if plain else accepted(entry),
                "" if plain else f"{entry['same_texts']} of {entry['prompts']}"
                + (f", {entry['certified']} certified" if entry["certified"] else ""),
            ])  # fmt: skip
        for name in run["peers"]:
            entry = run["methods"][name]
            rows.append([name, f"{entry['tokens_per_s']:.1f}", times(entry["times_plain"]), *[""] * by_prompt,
                         *(of_task(entry["tasks"][task], plain=True) for task in tasks), "", "",
                         f"{entry['same_texts']} of {entry['prompts']}"])  # fmt: skip
        if by_prompt:
            tasks = [f"{task} (median prompt)" for task in tasks]
        by_depth = f" (at depths 1 to {DEPTHS})" * ("conditional_acceptance" in run["methods"]["none"])
        headings = ["drafter", "tokens/s", "speed-up", *["slowest prompt"] * by_prompt, *tasks,
                    "tokens per round", "accepted" + by_depth, "same text as plain"]  # fmt: skip
        title = f"Temperature {run['sampling']['temperature']:g}, rule `{run['rule']}`:\n\n" if several else ""
        parts.append(title + table(headings, rows))
    return "\n".join(parts)


def acceptance(values: Values) -> str:
    rows, several = [], any(row.get("token", 1) > 1 for run in values["runs"] for row in run["figures"])
    for run in values["runs"]:
        for row in run["figures"]:
            interval = "" if row["low"] is None else f" ({row['low']:.3f} to {row['high']:.3f})"
            where = [f"{run['sampling'][name]:g}" for name in ("temperature", "top_p")]
            shares = f"{row['acceptance']:.3f}{interval}", f"{row['optimum']:.3f}"
            token = [str(row["token"])] if several else []
            rows.append([*where, *token, str(row["children"]), f"`{row['rule']}`", *shares])
    headings = [
        "temperature",
        "top-p",
        *["drafted token"] * several,
        "children",
        "rule",
        "acceptance (95 %)",
        "optimum",
    ]
    return table(headings, rows)


def tune(values: Values) -> str:
    if "round_s" not in values:  # the fastest drafter, with its default tree
        fastest = sorted(values["drafters"].items(), key=lambda item: -item[1])
        rows = [[f"`{name}`", times(mean), times(values["slowest"][name])] for name, mean in fastest]
        return table(["drafter", "speed-up", "slowest prompt"], rows)
    took, accepted = values["round_s"], [None, *values["acceptance_by_depth"]]
    rows = [[str(depth), f"{took[str(depth)] * 1e3:.1f}" if str(depth) in took else "",
             share(accepted[depth]) if depth else "", times(speedup)]
            for depth, speedup in enumerate(values["speedup_by_depth"])]  # fmt: skip
    return table(["depth", "ms per round", "accepted", "predicted speed-up"], rows)


def compare_rules(values: Values) -> str:
    rows = []
    for row in (*values["steps"], *values["rounds"]):
        digits, value = (3, row["acceptance"]) if "acceptance" in row else (2, row["tokens_per_round"])
        gap = row["difference"]
        rows.append([f"{row['temperature']:g}, {row['top_p']:g}", str(row.get("tree", row.get("children"))),
                     f"`{row['rule']}`", f"{value:.{digits}f} ({row['low']:.{digits}f} to {row['high']:.{digits}f})",
                     "" if not gap or row["rule"] == "coupled" else
                     f"{gap[0]:+.{digits}f} ({gap[1]:+.{digits}f} to {gap[2]:+.{digits}f})"])  # fmt: skip
    headings = [
        "T, top-p",
        "children or tree",
        "rule",
        "acceptance or tokens per round (95 %)",
        "less `coupled` (95 %)",
    ]
    return table(headings, rows)


def pair(values: Values) -> str:
    rows = [[f"{row['temperature']:g}", f"{row['top_p']:g}", row["tree"], f"`{row['rule']}`",
             between([row["tokens_per_round_95"][0], row["tokens_per_round"], row["tokens_per_round_95"][1]], 2),
             share(row["acceptance_rate"]), times(row["speedup_from_calls"])] for row in values["rows"]]  # fmt: skip
    calls = ", ".join(f"{ms:.0f} at width {width}" for width, ms in values["target_ms"].items())
    headings = [
        "temperature",
        "top-p",
        "tree",
        "rule",
        "tokens per round (95 %)",
        "accepted",
        "speed-up, from the times of calls",
    ]
    return table(headings, rows) + (
        f"\nThe target's call takes {calls}, the draft's {values['draft_ms']:.0f} (milliseconds). "
        f"{values['same_texts']} of {values['texts']} texts equal plain decoding's. "
        f"Peak memory: {values['peak_gib']:.1f} GiB.\n"
    )


def bridges(values: Values) -> str:
    rows = [[row["draft"], *(share(row[f"share_{of}"]) for of in ("target", "draft", "sample")),
             f"{row['temperature']:g}", str(row["length"]), share(row["acceptance"]), f"{row['tokens_per_round']:.2f}",
             between(row["round_cost"], 2), between(row["times_plain"], 2), f"{row['same_text']} of {row['prompts']}"]
            for row in values["rows"]]  # fmt: skip
    headings = [f"draft for {values['target']}", "shared, of the target's tokens", "shared, of the draft's",
                "shared, of a sample text",
                "temperature", "draft length", "accepted", "tokens per round",
                "cost of a round, in plain rounds", "speed-up, by prompt",
                "same text as plain"]  # fmt: skip
    return table(headings, rows)


def schedules(values: Values) -> str:
    rows = [[way, times(entry["times_plain"]), f"{entry['least']:.2f} to {entry['most']:.2f}"]
            for way, entry in values["ways"].items()]  # fmt: skip
    return table([f"`{values['drafter']}`, {values['prompts']} prompts", "speed-up", "by prompt"], rows)


def compiled(row: Values) -> list[str]:
    """Returns what both tiers of accelerators show first: what was compiled, and the bytes that a round moves."""
    case = [row["chip"], row["mesh"], str(row["batch"]), row["dtype"], str(row["layers"]), named(row["drafter"])]
    if "moved_gb" not in row:
        return [*case, "does not fit", ""]
    return [*case, f"{row['moved_gb']:.2f} ({row['weights_gb']:.2f})", f"{row['temporary_mb']:.0f}"]


COMPILED = (
    "chip",
    "devices",
    "rows",
    "matrices",
    "layers",
    "drafter",
    "GB per round (matrices alone)",
    "temporaries, MB",
)


def tpu(values: Values) -> str:
    rows = [[*compiled(row), *([f"{row['ms_by_bytes']:.2f} ({row['ms_weights_alone']:.2f})", f"{row['gflop']:.0f}"]
                               if "moved_gb" in row else ["", ""])] for row in values["rows"]]  # fmt: skip
    return table([*COMPILED, "ms by bytes (matrices alone)", "GFLOP"], rows)


def gpu(values: Values) -> str:
    rows = [
        [*compiled(row),
         *([""] * 3 if "moved_gb" not in row else [
             f"{row['launches_200']}, {row['launches_2000']}", f"{row['waits_200']}, {row['waits_2000']}",
             "0" if row["captured"] else f"{row['waits_200']}, {row['waits_2000']}"])]
        for row in values["rows"]
    ]  # fmt: skip
    headings = ["launches per round at 200 and 2000 tokens", "waits per round by XLA's default", "waits per round"]
    return table([*COMPILED, *headings], rows)


def rounds(values: Values) -> str:
    shown: dict[tuple, list[str]] = {}
    for part in values["parts"].values():
        for row in part:
            calls = row.get("driver_calls")
            shown.setdefault((row["name"], row["dtype"], row["rows"], row["temperature"]), [
                named(row["name"]),
                row["dtype"], str(row["rows"]), f"{row['temperature']:g}", between(row["ms"], 2),
                f"{row['times_plain'][1]:.2f}", "" if calls is None else str(calls.get("cuGraphLaunch", 0)),
                f"{row['compile_s']:.0f}",
            ])  # fmt: skip
    headings = [f"{values['layers']} layers, {values['weights_gb']:.1f} GB", "matrices", "rows", "temperature",
                "ms per round (quartiles)", "cost, in plain rounds", "graphs launched in 16 rounds",
                "compile time, s (several at once)"]  # fmt: skip
    failed = [
        [named(name), "", "", "", f"not measured: {why}", "", "", ""]
        for name, why in values.get("not_measured", {}).items()
    ]
    return table(headings, [*shown.values(), *failed])


def products(values: Values) -> str:
    rows = []
    for line in values["lines"]:
        us = ", ".join(f"{line['us'][count][1]:.1f}" for count in line.get("us", {}))
        gb = ", ".join(f"{speed:.0f}" for speed in line.get("gb_per_s", {}).values())
        cells = [", ".join(map(str, line[kind])) or "none" for kind in ("same", "other")]
        if "failed" in line:
            cells = [f"not measured: {line['failed']}", ""]
        rows.append([f"`{line['product']}`", line["form"], *cells, "; ".join(line["bits_of"]), us, gb])
    timed = next((", ".join(line["us"]) for line in values["lines"] if line.get("us")), "")
    headings = ["product", "form", f"rows with the bits of a product of {values['rows'][-1]} rows", "other bits",
                "equal bits", f"microseconds at {timed} rows", "GB/s"]  # fmt: skip
    return table(headings, rows)


def text_bits(values: Values) -> str:
    rows = []
    for line in values["lines"]:
        start = [line["dtype"], "`exact=True`" if line["exact"] else "default"]
        if why := line.get("unavailable"):
            rows.append([*start, f"not measured: {why}", "", "", "", ""])
            continue
        start += [named(line["drafter"]), f"{line['batch']}{', in a session' if line['session'] else ''}"]
        if why := line.get("failed"):
            rows.append([*start, f"not measured: {why}", "", ""])
            continue
        shares = [f"{line[kind]} of {line['texts']}" for kind in ("same_tokens", "same_bits")]
        rows.append([*start, *shares, f"{line['largest_gap']:.2g}"])
    layers = "" if values["layers"] is None else f", first {values['layers']} layers"
    headings = [f"matrices{layers}", "kernels", "drafter", "rows", "same tokens as plain, alone", "same bits",
                "largest difference of a log-probability"]  # fmt: skip
    return table(headings, rows)


def training_steps(values: Values) -> str:
    rows = []
    for line in values["lines"]:
        if why := line.get("failed"):
            rows.append([line["kind"], f"not measured: {why}", "", "", "", "", ""])
        elif "rows" not in line:
            rows.append([line["kind"], "no batch fits", "", "", "", "", ""])
        else:
            speeds = [f"{line['steps_per_s']:.2f}", f"{line['tokens_per_s']:.0f}"]
            speeds.append("" if line["mfu"] is None else share(line["mfu"]))
            times_ms = [between(line["features_ms"]), between(line["step_ms"])]
            rows.append([line["kind"], f"{line['rows']} x {line['row_tokens']}", *times_ms, *speeds])
    first = f"heads of {values['target']}, {values['layers']} layers, {values['drafted']} drafted tokens"
    headings = [first, "rows x tokens", "features, ms", "step, ms", "steps/s", "tokens/s", "MFU"]
    return table(headings, rows)


def training_memory(values: Values) -> str:
    rows = []
    for line in values["lines"]:
        before, now = (line[name]["temporaries_mb"] for name in ("before", "now"))
        shape = f"{line['rows']} x {line['row_tokens']}"
        rows.append([line["size"], line["kind"], shape, f"{before:.0f}", f"{now:.0f}", f"{now / before:.2f}"])
    headings = ["shapes of", "program", "rows x tokens", "temporary before, MB", "now, MB", "times as much"]
    return table(headings, rows)


def training_scale(values: Values) -> str:
    rows = []
    for line in values["lines"]:
        held, own = line["held"], line["temporaries"]
        needed = "does not fit" if line["share"] is None else share(line["share"])
        largest = [own[name] for name in ("features", "step")]
        temporary = "refused" if None in largest else f"{max(largest) / 1e9:.2f}"
        rows.append([f"{line['target']}, {line['kind']}", line["on"], f"{held['target'] / 1e9:.2f}",
                     f"{(held['heads and trained target'] + held['moments']) / 1e9:.2f}",
                     f"{(held['tables'] + held['batches']) / 1e9:.2f}", temporary,
                     f"{needed} of {line['memory'] / 1e9:.0f}", f"{line['unsplit'] / 1e9:.1f}",
                     f"{line['tflop']:.0f}", f"{line['ideal_ms']:.0f}"])  # fmt: skip
    headings = ["target, heads", "devices", "target, GB of each device", "heads and moments, GB",
                "tables and batches, GB", "temporary, GB", "needed, GB", "unsplit, GB", "TFLOP of each device",
                "ideal time, ms"]  # fmt: skip
    said = table(headings, rows)
    for line in values["lines"]:
        if (compiled := line["temporaries"].get("features, all layers compiled")) is not None:
            said += (
                f"\nThe temporary arrays of the features are extrapolated from few layers. For {line['target']} on "
                f"{line['on']}, all layers were compiled as well: {compiled / 1e9:.2f} GB, extrapolated "
                f"{line['temporaries']['features'] / 1e9:.2f} GB.\n"
            )
    return said


def train_minutes(values: Values) -> str:
    mfu = "" if values["mfu"] is None else share(values["mfu"])
    speeds = [f"{values['tokens_per_s']:.0f}", f"{values['step_ms']:.1f}", mfu]
    first = [f"{values['minutes']:.1f}", str(values["questions"]), str(values["steps"]), *speeds]
    headings = ["minutes", "questions", "steps", "tokens/s of the steps", "step and features, ms", "MFU"]
    rows = [[f"{one['s']:.0f}", str(one["step"]), f"{one['accepted_length']:.2f}"] for one in values["held_out"]]
    return table(headings, [first]) + "\n" + table(["s since the start", "step", "accepted length"], rows)


def watermark(values: Values) -> str:
    lengths = sorted({row["tokens"] for row in values["rows"]})
    rows = []
    for kind in dict.fromkeys(row["kind"] for row in values["rows"]):
        own = {row["tokens"]: row for row in values["rows"] if row["kind"] == kind}
        cells = [f"{own[n]['p_value']:.1g}; {share(own[n]['found'])} of {own[n]['texts']}" if n in own else ""
                 for n in lengths]  # fmt: skip
        rows.append([kind, *cells])
    other = values["unmarked"]
    said = (
        f"\nOf {other['p_values']} p-values of texts without a watermark, {share(other['below_level'])} are below "
        f"{values['level']:g}. A Kolmogorov-Smirnov test of their uniformity has a p-value of "
        f"{other['uniform_p']:.2g}. Texts with and without drafts were "
        f"{'equal' if values['equal_texts'] else 'NOT equal'}.\n"
    )
    headings = [f"texts at temperature {values['temperature']:g}", *(f"{n} tokens" for n in lengths)]
    return table(headings, rows) + said


def expert_forms(values: Values) -> str:
    rows = []
    for line in values["lines"]:
        first = [line["dtype"], str(line["rows"]), line["form"]]
        if why := line.get("failed"):
            rows.append([*first, f"not measured: {why}", "", "", ""])
        else:
            faster = times(line["times_as_fast"][1]) if "times_as_fast" in line else ""
            same = "yes" if line["same_first_row"] else "no"
            rows.append([*first, between(line["us"]), faster, same, f"{line.get('difference', 0):.1g}"])
    headings = ["matrices", "rows", "form", "µs", "as fast as the loop", "same bits as in the largest call",
                "largest difference to the loop"]  # fmt: skip
    return table(headings, rows)


def texts(values: Values) -> str:
    rows = [
        [row["dtype"], f"{row['temperature']:g}", row["task"], f"`{row['drafter']}`", f"{row['tokens_per_round']:.2f}",
         between(row["tokens_per_s"], 0), times(row["times_plain"][1]), f"{row['same_texts']} of {row['prompts']}"]
        for row in values["rows"]
    ]  # fmt: skip
    headings = ["matrices", "temperature", "task", "drafter", "tokens per round", "tokens/s", "speed-up",
                "same text as plain"]  # fmt: skip
    return table(headings, rows)


def gtest(values: Values) -> str:
    return table(
        ["cells", "texts per cell", "smallest p-value (Holm)", "texts of probability 0", "bias that would be found"],
        [[str(values["cells"]), str(values["texts"]), f"{values['least_p']:.2g}", str(values["impossible"]),
          f"{values['detectable_bias']:.2g}"]],
    )  # fmt: skip


def product_shapes(values: Values) -> str:
    what = {
        "plain": "product", "table": "product with a table", "gated": "gated product", "add": "product and residual",
        "norm": "norm",
    }  # fmt: skip
    rows = [
        [what[call], str(line["shapes"]), f"{line['largest']:.2f}", f"{line['mean']:.2f}",
         f"{line['same_bits']} of {line['shapes']}"]
        for call, line in values["calls"].items()
    ]  # fmt: skip
    headings = ["kernel", "random shapes", "largest difference from XLA's form, of what rounding explains",
                "largest mean difference", "last row has the bits of the same row alone"]  # fmt: skip
    return table(headings, rows)


def gpu_layers(values: Values) -> str:
    rows = []
    for line in values["lines"]:
        rows.append([
            line["chip"], line["call"], str(line["rows"]), str(line.get("registers", "")),
            str(line.get("spilled_bytes", "")), str(line.get("launches_of_a_layer", "")),
            str(line.get("launches_of_32_layers", "")),
            f"{line['bytes_of_the_matrices']:.3f}" if "bytes_of_the_matrices" in line else "",
        ])  # fmt: skip
    headings = ["chip", "call", "rows", "registers", "spilled bytes", "launches of a layer",
                "launches of a plain round at 32 layers", "bytes moved, of the matrices"]  # fmt: skip
    return table(headings, rows)


def compile_exact(values: Values) -> str:
    rows = []
    for line in values["lines"]:
        seconds = line["seconds"]
        ratio = seconds["fixed order"] / seconds["XLA"]
        rows.append([line["chip"], f"{seconds['XLA']:g}", f"{seconds['fixed order']:g}", f"{ratio:.2f}"])
    return table(["chip", f"{values['layers']} layers in XLA's form, s", "fixed-order kernels, s", "quotient"], rows)


def tpu_layers(values: Values) -> str:
    rows = [
        [line["chip"], line["dtype"], str(line["rows"]), str(line["kernels_of_a_layer"]),
         f"{line['bytes_moved']:.3f}", f"{line['temporary_mb']:.1f}"]
        for line in values["lines"]
    ]  # fmt: skip
    headings = ["chip", "matrices", "rows", "kernels of a layer", "bytes moved, of matrices and caches",
                "temporaries, MB"]  # fmt: skip
    return table(headings, rows)


def mesh_layers(values: Values) -> str:
    rows = []
    for line in values["lines"]:
        figures = [line.get(key, "") for key in ("kernels_of_a_layer", "received_by_a_layer", "received_by_the_rest")]
        deep = f"{line['received_with_32_layers'] / 1e6:.1f}" if "received_with_32_layers" in line else ""
        rows.append([line["chip"], line["what"], *map(str, figures), deep])
    headings = ["chip", "what", "kernels of a layer", "bytes that a device receives in a layer", "outside the layers",
                "MB in a round with 32 layers"]  # fmt: skip
    return table(headings, rows)


def mutants(values: Values) -> str:
    return table(
        ["bugs of other systems, reintroduced", "found by the tests"], [[str(values["bugs"]), str(values["found"])]]
    )


def llama_cpp(values: Values) -> str:
    rows = [[name, f"{entry['same_ids']} of {entry['encoded']}", f"{entry['same_choices']} of {entry['choices']}",
             f"{entry['same_texts']} of {entry['texts']}", f"{entry['largest_gap']:.2g}"]
            for name, entry in values.items()]  # fmt: skip
    return table(
        ["GGUF file", "texts with equal ids", "equal greedy choices", "equal texts", "largest gap, logits"], rows
    )


def heads(values: Values) -> str:
    longest = max(len(entry["top1"]) for entry in values["accuracy"].values())
    rows = []
    for label, entry in values["accuracy"].items():
        for name, key in (("top-1", "top1"), ("top-5", "top5"), ("accepted", "accepted")):
            shares = [f"{value:.3f}" for value in entry[key]]
            rows.append([f"{label}, {name}", *shares, *[""] * (longest - len(shares))])
    parts = table(["", *(f"token {i + 1}" for i in range(longest))], rows)
    columns = list(dict.fromkeys((row["tokens"], row["temperature"], row["rule"]) for row in values["rounds"]))
    cells: dict[tuple, dict[tuple, str]] = {}
    for row in values["rounds"]:
        low, high = row["interval"]
        of = cells.setdefault((row["heads"], row["tree"], row["nodes"]), {})
        of[row["tokens"], row["temperature"], row["rule"]] = between([low, row["tokens_per_round"], high], 2)
    headings = [f"{tokens} tokens, T {temperature:g}, `{rule}`" for tokens, temperature, rule in columns]
    rows = [[label, tree_name(tree), str(nodes), *(of.get(column, "") for column in columns)]
            for (label, tree, nodes), of in cells.items()]  # fmt: skip
    parts += "\n" + table(["tokens per round (95 %)", "tree", "nodes", *headings], rows)
    rows = [[label, str(entry["steps"]), f"{entry['minutes']:.0f}"]
            for label, entry in values.get("training", {}).items()]  # fmt: skip
    return parts + ("\n" + table(["training", "steps", "minutes"], rows) if rows else "")


def torch_step(values: Values) -> str:
    kind = {"medusa": "Medusa heads", "eagle3": "EAGLE-3 head", "jetspec": "JetSpec head"}[values["kind"]]
    (peer,) = values["ms"].keys() - {"jaxspec"}
    row = [f"{kind}, {values['heads']} tokens deep, {values['drafted']} of {values['vocab']} tokens",
           f"{values['rows']} x {values['tokens']}", *(f"{values['ms'][name]:.0f}" for name in ("jaxspec", peer)),
           f"{values['ratio']:.2f}"]  # fmt: skip
    headings = ["a training step, float32", "rows x tokens", "jaxspec, ms", f"{peer}, ms", f"{peer} / jaxspec"]
    return table(headings, [row])


def tree_name(spec: str) -> str:
    """Returns what a tree is called in a table: a chain, the best static one, the heads' own, or as it was written."""
    kinds = {"own": "fitted with the heads", "best": "best static"}
    return f"chain of {spec}" if spec.isdecimal() else kinds.get(spec.partition("-")[0], f"`{spec}`")


def rollout(values: Values) -> str:
    rows = []
    for run in values["runs"]:
        for way, entry in run["ways"].items():
            where = [f"{'CPU kernels' if run['kernels'] else 'XLA'}, {run['prompts']} prompts", f"`{way}`"]
            rows.append([*where, between(entry["tokens_per_s"]), times(entry["times_plain"]),
                         f"{entry['tokens_per_round']:.2f}", f"{entry['same_texts']} of {run['texts']}"])  # fmt: skip
    first = f"{values['rows']} rows, temperature {values['temperature']:g}"
    return table([first, "drafter", "tokens/s", "speed-up", "tokens per round", "same text as plain"], rows)


def history(values: Values) -> str:
    rows = []
    for number, epoch in enumerate(values["epochs"]):
        for way, entry in epoch.items():
            rows.append([str(number + 1), f"`{way}`".replace(" with history`", "` with a history"),
                         f"{entry['tokens_per_round']:.2f}", between(entry["times_plain"]),
                         f"{entry['same_texts']} of {values['prompts'] * values['samples']}"])  # fmt: skip
    first = f"{values['samples']} samples of {values['prompts']} prompts of {values['task']}"
    headings = ["epoch", f"{first}, temperature {values['temperature']:g}", "tokens per round", "speed-up"]
    return table([*headings, "same text as plain"], rows)


def refresh(values: Values) -> str:
    rows = []
    for way, entry in values["ways"].items():
        cost = f"{entry['refreshes']}, {entry['refresh_of_a_draw']:.2f} draws each" if entry["refreshes"] else "none"
        rows.append([way, *(f"{rate:.2f}" for rate in entry["tokens_per_round"]), between(entry["times_plain"]), cost,
                     f"{entry['same_texts']} of {values['steps'] * values['samples']}"])  # fmt: skip
    rows[0][0] = "no heads"
    size = values["steps"] // len(values["rewards"])
    parts = [f"steps {i * size + 1} to {(i + 1) * size}" for i in range(len(values["rewards"]))]
    parts[0] = f"tokens per round, {parts[0]}"
    rewards = ["share of tokens with a digit", *(share(reward) for reward in values["rewards"]), "", "", ""]
    headings = ["heads are refreshed", *parts, "speed-up of a draw", "refreshes", "same text as plain"]
    return table(headings, [*rows, rewards])


def siblings(values: Values) -> str:
    last = values["parents"]
    parents = [*map(str, range(1, last)), f"{last} or more"]
    rows, trees = [], []
    for name, entry in values["heads"].items():
        for parent, first, four in zip(parents, entry["first"], entry["any_of_4"]):
            rows.append([f"`{name}`", parent, share(first), share(four)])
        for row in entry["trees"]:
            pairs = [row["rank"], row["parent"]]
            trees.append([f"`{name}`", str(row["nodes"]), *(f"{one['expected']:.2f}" for one in pairs),
                          *(f"{one['tokens_per_round']:.2f}" for one in pairs)])  # fmt: skip
    first = table(["heads", "rank of the parent", "its first child is right", "one of its first four is right"], rows)
    headings = ["heads", "nodes", "expected, by rank", "expected, by rank and parent"]
    headings += ["tokens per round, by rank", "tokens per round, by rank and parent"]
    return f"{first}\n\n{table(headings, trees)}"


def harness(values: Values) -> str:
    changed = ", ".join(f"`{name}`: {count}" for name, count in values["texts that a drafter changed"].items())
    rows = [
        ["answers that a drafter changed", f"{changed}, of {values['samples']}"],
        ["log-likelihoods compared with the transformers backend", str(values["log-likelihoods"])],
        ["largest difference from it in float32", f"{values['largest difference from transformers']:.2g}"],
        ["largest difference from it in float64",
         ", ".join(f"{name}: {error:.2g}" for name, error in values["largest difference from float64"].items())],
        ["answers equal to those of the transformers backend",
         f"{values['texts equal to those of transformers']} of {values['samples']}"],
    ]  # fmt: skip
    for task, scores in values["scores"].items():
        for metric, score in scores.items():
            other = values["scores of transformers"][task][metric]
            rows.append([f"{task}, {metric.partition(',')[0]}", f"{score:.4g} (transformers: {other:.4g})"])
    return table(["", ""], rows)


def quantized_cache(values: Values) -> str:
    shapes = [name for name in values["rows"][0] if ", " in name and name != "draft"]
    rows = []
    for row in values["rows"]:
        gains = [f"{best:.2f} (draft of {drafted}, cost {cost:.2f})" for cost, best, drafted in map(row.get, shapes)]
        rows.append([str(row["length"]), f"{row['temperature']:g}", row["draft"], f"{row['acceptance']:.3f}", *gains])
    return table(["tokens", "temperature", "draft", "accepted", *(f"{name} rows" for name in shapes)], rows)


def vllm(values: Values) -> str:
    rows = [[row["engine"], str(row["rounds"]), ", ".join(map(str, row["accepted"])),
             f"{row['same_texts']} of {values['texts']}"] for row in values["rows"]]  # fmt: skip
    return table(["engine", "rounds", "accepted, by depth", "texts equal to jaxspec's"], rows)


def replay(values: Values) -> str:
    parts, kinds = [], list(values["costs"])
    for model, tasks in values["models"].items():
        first, rows = next(iter(tasks.values())), []
        for i, row in enumerate(first["shares"]):
            cells = ["; ".join(" ".join(f"{share:.2f}" for share in entry["shares"][i][key]) for key in ("one", "two"))
                     for entry in tasks.values()]  # fmt: skip
            rows.append([row["fill"], "warm" if row["warm"] else "cold", *cells])
        headings = [f"{task}: the next token among the first 1, 2, 4, 8; the next two" for task in tasks]
        parts.append(table([f"{model}: a table filled from", "", *headings], rows))
        rows = []
        for i, row in enumerate(first["trees"]):
            cells = [f"{own['tokens_per_round']:.2f}: " + ", ".join(f"{own[kind][0]:.2f}" for kind in kinds)
                     for own in (entry["trees"][i] for entry in tasks.values())]  # fmt: skip
            rows.append([row["drafter"], str(row["nodes"]), "warm" if row["warm"] else "cold", *cells])
        headings = [f"{task}: tokens per round: speed-up, widths {', '.join(kinds)}" for task in tasks]
        parts.append(table([f"{model}: drafter", "nodes", "", *headings], rows))
    return "\n".join(parts)


RENDERERS: dict[str, Callable[[Values], str]] = {
    "widths": widths, "hybrids": hybrids, "experts": hybrids,
    "lookup": lookup, "compile": compile_times, "memory": memory, "rules": rules,
    "overhead": overhead, "batches": batches, "bench": bench, "acceptance": acceptance, "tune": tune,
    "siblings": siblings,
    "compare-rules": compare_rules, "pair": pair, "schedules": schedules, "tpu": tpu, "gpu": gpu, "gtest": gtest,
    "mutants": mutants, "llama-cpp": llama_cpp, "heads": heads, "first-token": first_token, "rollout": rollout,
    "history": history, "refresh": refresh, "quantized-cache": quantized_cache, "harness": harness,
    "bridges": bridges, "torch-step": torch_step, "replay": replay, "vllm": vllm, "rounds": rounds, "texts": texts,
    "products": products, "text-bits": text_bits, "training-steps": training_steps,
    "training-scale": training_scale, "training-memory": training_memory,
    "train-minutes": train_minutes, "expert-forms": expert_forms, "watermark": watermark,
    "product-shapes": product_shapes, "gpu-layers": gpu_layers, "tpu-layers": tpu_layers,
    "compile-exact": compile_exact, "gpu-mesh-layers": mesh_layers, "tpu-mesh-layers": mesh_layers,
}  # fmt: skip
