"""The file that a long job writes its texts to as they end, and goes on from."""

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core import noise
from jaxspec.core.draw import Noise
from jaxspec.decode.stats import Stats
from jaxspec.errors import InvalidConfig
from jaxspec.models.by_output import ByOutput
from jaxspec.output import Generation
from jaxspec.plan import Plan

VERSION = 1


class Journal:
    """A JSON line that says what the texts are of, then one per text, in the order in which they ended.

    What a kill left of a last line is dropped. A file is for one job: the same prompts, keys and settings. With the
    coupled rule the drafter is no part of them, since the text does not depend on it.

    Attributes:
        done: the texts that are there, by row.

    Raises:
        InvalidConfig: the file is another job's, or none of this kind.
        OSError: it cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike, plan: Plan, stops: tuple[str, ...]):
        self._path, self.done = pathlib.Path(path), dict[int, Generation]()
        about = _about(plan, stops)
        if self._path.exists() and self._path.stat().st_size:
            self._read(plan, about)
        else:
            self._write(about)

    def append(self, row: int, text: Generation) -> None:
        """Writes one text down."""
        record = {name: getattr(text, name) for name in ("prompt", "sample", "text", "tokens", "finish_reason")}
        if text.logprobs is not None:
            record["logprobs"] = text.logprobs
        self._write({"row": row, **record, "stats": dataclasses.asdict(text.stats)})

    def _write(self, record: dict) -> None:
        with self._path.open("ab") as file:
            file.write((json.dumps(record) + "\n").encode())

    def _read(self, plan: Plan, about: dict) -> None:
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        try:
            first, *records = map(json.loads, whole.splitlines())
            if not isinstance(first, dict) or first.get("texts") != VERSION:
                raise ValueError("its first line does not say that it holds jaxspec's texts")
            odd = [name for name in about if first.get(name) != about[name]]
            for record in [] if odd else records:
                self._take(plan, record)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise InvalidConfig(f"{self._path} is no file of texts to go on from ({error}); name a new file") from None
        if odd:
            name = odd[0].replace("_", " ")
            raise InvalidConfig(f"{self._path} holds texts of another {name}; name a new file, or remove it")
        if len(whole) < len(data):
            os.truncate(self._path, len(whole))

    def _take(self, plan: Plan, record: dict) -> None:
        fields = {name: record[name] for name in ("prompt", "sample", "text", "tokens", "finish_reason")}
        stats: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record["stats"].items()}
        row, logprobs = record["row"], record.get("logprobs")
        self.done[row] = Generation(prompt_tokens=plan.prompt(row), stats=Stats(**stats), logprobs=logprobs, **fields)


def _about(plan: Plan, stops: tuple[str, ...]) -> dict[str, Any]:
    def digest(value: Any) -> str:
        return hashlib.sha256(repr(value).encode()).hexdigest()[:16]

    decoder, sampling = plan.decoder, dataclasses.asdict(plan.sampling)
    free = decoder.rule.noise is Noise.SHARED and decoder.widths
    return {
        "texts": VERSION,
        "noise": noise.VERSION,
        "model": digest(_looks(plan.target.params)),
        "prompts": digest(plan.ids),
        "key": digest(np.asarray(jax.random.key_data(plan.keys)).tolist()),
        "sampling": digest({name: np.asarray(v).tolist() for name, v in sampling.items()}),
        "max_new_tokens": plan.max_new_tokens,
        "samples": plan.samples,
        "stops": digest((stops, plan.stop_ids.tolist())),
        "rule": repr(decoder.rule),
        "logprobs": decoder.logprobs,
        "drafter": "any" if free else digest((decoder.drafter, decoder.schedule, decoder.widths)),
    }


def _looks(params: Any) -> list[tuple]:
    """What tells models apart without reading all of them: the first numbers of every array, shapes and types.

    A float matrix looks the same whichever way round it stands.
    """

    def turned(leaf: Any) -> bool:
        return isinstance(leaf, ByOutput) and leaf.scale is None

    def of(leaf: Any) -> tuple:
        held = jnp.asarray(leaf.values if turned(leaf) else leaf)
        first = held[:8, 0] if turned(leaf) else held[(0,) * (held.ndim - 1)][:8] if held.ndim else []
        some = np.asarray(first, np.float64).tolist() if held.is_fully_addressable else []
        return held.shape[:: -1 if turned(leaf) else 1], str(held.dtype), some

    return [of(leaf) for leaf in jax.tree.leaves(params, is_leaf=turned)]
