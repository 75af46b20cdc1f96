"""Records what each test file costs, and runs the costliest files first.

`.durations/` has a record for each selection of tests by marker. It holds for each file the seconds of the wall clock,
of the processor (child processes included) and of compiling (reads of a compilation cache included), and the numbers
of programs and of tests. Only runs of whole files are recorded: none with `-k`, `-x` or names of tests.
"""

import json
import re
import resource
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import jax
import pytest

_LONG = ("smollm2", "mesh")
"""Markers of files that run first where nothing is recorded."""


class Cost(NamedTuple):
    """What this process has spent so far."""

    seconds: float
    cpu_seconds: float
    compile_seconds: float
    programs: int


_compiled = {"seconds": 0.0, "programs": 0}


def _on_duration(event: str, duration_secs: float, **_) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled["seconds"] += duration_secs
        _compiled["programs"] += 1


jax.monitoring.register_event_duration_secs_listener(_on_duration)


def _spent() -> Cost:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = time.process_time() + children.ru_utime + children.ru_stime
    return Cost(time.perf_counter(), cpu_seconds, _compiled["seconds"], _compiled["programs"])


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class Durations:
    """A plugin. Of several processes each measures its tests; the one that starts them collects and writes."""

    def __init__(self, config: pytest.Config):
        selection = re.sub(r"\W+", "-", config.option.markexpr) or "all"
        self.config, self.path = config, config.rootpath / ".durations" / f"{selection}.json"
        self.recorded = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.costs: dict[str, Counter] = {}
        self.before = _spent()

    def pytest_runtest_logstart(self) -> None:
        self.before = _spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator:
        report = yield
        now = _spent()
        report.cost = [after - before for after, before in zip(now, self.before)]
        self.before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "cost"):  # of a process that crashed
            return
        cost = dict(zip(Cost._fields, report.cost)) | {"tests": int(report.when == "call")}
        self.costs.setdefault(_file(report.nodeid), Counter()).update(cost)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sorts files by their time, so that no process is left alone with a long one at the end."""
        long = {_file(item.nodeid) for item in items if any(map(item.get_closest_marker, _LONG))}

        def seconds(item: pytest.Item) -> float:
            file = _file(item.nodeid)
            unknown = float("inf") if file in long else 0.0
            return self.recorded[file]["seconds"] if file in self.recorded else unknown

        items.sort(key=seconds, reverse=True)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        option = self.config.option
        part = option.keyword or option.maxfail or option.collectonly or any("::" in arg for arg in self.config.args)
        if self.costs and not part and not hasattr(self.config, "workerinput"):
            self.path.parent.mkdir(exist_ok=True)
            kept = {file: cost for file, cost in self.recorded.items() if (self.config.rootpath / file).exists()}
            costs = sorted((kept | self.costs).items(), key=lambda item: -item[1]["seconds"])
            rounded = {file: {name: round(value, 2) for name, value in cost.items()} for file, cost in costs}
            self.path.write_text(json.dumps(rounded, indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter) -> None:
        """Prints as many of the slowest files as `--durations` asks for tests."""
        shown = sorted(self.costs.items(), key=lambda item: -item[1]["seconds"])[: self.config.option.durations or 0]
        if shown:
            terminalreporter.section(f"slowest {len(shown)} files")
            terminalreporter.line("  wall s     cpu s  compile s  programs  tests")
        for file, cost in shown:
            seconds = f"{cost['seconds']:8.1f}  {cost['cpu_seconds']:8.1f}  {cost['compile_seconds']:9.1f}"
            terminalreporter.line(f"{seconds}  {cost['programs']:8.0f}  {cost['tests']:5}  {file}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(config), "durations of files")
