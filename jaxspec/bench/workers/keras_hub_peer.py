"""Decodes with KerasHub on its JAX backend: plain, greedy, float32.

`SpeculativeSampler` of version 0.32 supports Gemma 4 only. KerasHub compiles a program for every length of text, so
each length runs once before it is timed.
"""

import importlib.metadata
import os
import time

os.environ["KERAS_BACKEND"] = "jax"

import keras_hub
import numpy as np
from gguf_folder import folder_of


class Peer:
    def __init__(self, settings):
        folder, self._kept = folder_of(settings["target"])
        backbone = keras_hub.models.Llama3Backbone.from_preset(folder, dtype="float32")
        self.model = keras_hub.models.Llama3CausalLM(backbone, preprocessor=None)
        self.model.compile(sampler="greedy")
        self.stops, self._seen = tuple(settings["stop_ids"]), set()
        self.versions = {name: importlib.metadata.version(name) for name in ("keras-hub", "keras", "jax")}

    def decode(self, tokens, count, ignore_eos):
        stops = None if ignore_eos else self.stops
        first_s, _ = self._run(tokens, 1, stops)
        total_s, written = self._run(tokens, count, stops)
        end = next((i for i, token in enumerate(written) if token in (stops or ())), None)
        return {
            "tokens": written if end is None else written[: end + 1],
            "stopped": end is not None,
            "first": 1,
            "first_s": min(first_s, total_s),
            "total_s": total_s,
        }

    def _run(self, tokens, count, stops):
        size = len(tokens) + count
        inputs = {
            "token_ids": np.asarray([tokens + [0] * count], np.int32),
            "padding_mask": np.arange(size)[None] < len(tokens),
        }
        for _ in range(1 if size in self._seen else 2):
            begun = time.perf_counter()
            found = self.model.generate(dict(inputs), stop_token_ids=stops)
            took = time.perf_counter() - begun
        self._seen.add(size)
        return took, np.asarray(found["token_ids"])[0, len(tokens) :].tolist()
