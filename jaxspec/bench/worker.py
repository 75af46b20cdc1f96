"""Runs other systems: their own Python executes `workers/serve.py`, which does not import jaxspec.

Requests and answers are lines of JSON on the process's standard input and output.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from jaxspec.bench.peers import PEERS, PeerError, prepare_environment
from jaxspec.bench.records import BenchPrompt
from jaxspec.bench.setup import Decoded
from jaxspec.decode.session import Timing
from jaxspec.decode.stats import Stats
from jaxspec.generation.output import Generation
from jaxspec.storage.directories import cache_directory

WORKERS_FOLDER = pathlib.Path(__file__).parent / "workers"
DRAFT_LENGTH = 5
"""The draft length of other systems, where it can be set."""


@dataclasses.dataclass(frozen=True)
class Models:
    """Paths of the models by format, and settings of the run."""

    target: dict[str, str]
    draft: dict[str, str] | None
    capacity: int
    stop_ids: tuple[int, ...]


class Worker:
    """A running process that decodes with one method of another system.

    Attributes:
        label: the name in tables.
        versions: the versions of its packages.

    Raises:
        PeerError: the process does not start; the message holds the last line of its log.
    """

    def __init__(self, name: str, method: str, python: pathlib.Path, models: Models, log: pathlib.Path):
        self.label, self._log, self._stops = f"{name} {method}", log, models.stop_ids
        peer = PEERS[name]
        prepare_environment = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))}
        self._errors = log.open("w")
        self._process = subprocess.Popen(
            [str(python), str(WORKERS_FOLDER / "serve.py"), re.sub(r"\W", "_", name)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=prepare_environment,
        )  # fmt: skip
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)

        def place(of: dict[str, str] | None) -> str | None:
            return next((of[kind] for kind in peer.reads if kind in of), None) if of else None

        settings = {
            "method": method,
            "target": place(models.target),
            "draft": place(models.draft) if method in peer.drafts else None,
            "capacity": models.capacity,
            "stop_ids": models.stop_ids,
            "threads": len(usable),
            "draft_length": DRAFT_LENGTH,
        }
        self.versions: dict[str, str] = self._ask(settings)["versions"]

    def decode(self, prompt: BenchPrompt, count: int, ignore_eos: bool) -> Decoded:
        """Continues a prompt greedily.

        The time to the first tokens counts as prefill. The time of the remaining tokens, scaled to all tokens, counts
        as decoding.

        Raises:
            PeerError: the process failed.
        """
        answer = self._ask({"tokens": prompt.tokens, "count": count, "ignore_eos": ignore_eos})
        tokens, first, total = answer["tokens"], answer["first_s"], answer["total_s"]
        stops = () if ignore_eos else self._stops
        ended = next((i for i, token in enumerate(tokens) if token in stops), None)
        if ended is not None:
            tokens = tokens[: ended + 1]
        elif answer["stopped"] and stops:  # the system does not return its stop token
            tokens = [*tokens, stops[0]]
        stopped = bool(tokens) and tokens[-1] in stops
        later = max(len(tokens) - answer["first"], 1)
        decode = (total - first) * max(len(tokens), 1) / later
        text = Generation(0, 0, prompt.tokens, tokens, None, "stop" if stopped else "length", Stats())
        return Decoded(text, Timing(0.0, max(total - decode, 0.0), decode, len(tokens)))

    def close(self) -> None:
        """Ends the process."""
        for step in (self._process.stdin.close, lambda: self._process.wait(10)):  # type: ignore
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                step()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()  # type: ignore
        self._errors.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        answer = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            self.close()
            raise PeerError(f"{self.label}: {answer['error']} (log: {self._log})")
        return answer

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if (code := self._process.wait(10)) < 0:
                why = ", possibly because memory ran out" if -code == signal.SIGKILL else ""
                return f"ended by {signal.Signals(-code).name}{why}"
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it ended without printing a reason"


def start_workers(
    requested: Sequence[tuple[str, str]],
    models: Models,
    folder: pathlib.Path | None = None,
    report: Callable[[str], Any] = print,
) -> tuple[list[Worker], dict[str, str]]:
    """Starts every requested system that can be started.

    Returns:
        The started workers, and by label the reason why each of the other systems did not start.
    """
    workers, missing = [], {}
    logs = (folder or cache_directory() / "peers") / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for name, method in requested:
        label = f"{name} {method}"
        try:
            if not any(kind in models.target for kind in PEERS[name].reads):
                raise PeerError(f"{name} reads {' and '.join(PEERS[name].reads)}, but the target is in another format")
            python = prepare_environment(name, folder, report)
            report(f"starting {label}")
            log = logs / f"{re.sub(r'[^A-Za-z0-9]+', '-', label)}.log"
            workers.append(Worker(name, method, python, models, log))
        except (PeerError, OSError) as error:
            missing[label] = str(error)
            report(f"left out: {error}")
    return workers, missing
