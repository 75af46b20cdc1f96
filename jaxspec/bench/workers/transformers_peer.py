"""Decodes with Hugging Face's transformers: plain, with prompt lookup, or with a draft model; greedy, float32."""

import importlib.metadata
import os
import time

import torch
from transformers import AutoModelForCausalLM


class Clock:
    """A streamer that records times; it is called with the prompt, then with the tokens of every round."""

    def __init__(self):
        self.first_s, self.first, self._begun, self._prompt = None, 0, time.perf_counter(), False

    def put(self, value):
        if not self._prompt:
            self._prompt = True
        elif self.first_s is None:
            self.first_s, self.first = time.perf_counter() - self._begun, value.numel()

    def end(self):
        self.total_s = time.perf_counter() - self._begun


class Peer:
    def __init__(self, settings):
        torch.set_num_threads(settings["threads"])
        self.stops = settings["stop_ids"]
        self.target = load_torch_model(settings["target"])
        self.options = {}
        if settings["method"] == "prompt-lookup":
            self.options["prompt_lookup_num_tokens"] = settings["draft_length"]
        elif settings["method"] == "assisted":
            self.options["assistant_model"] = load_torch_model(settings["draft"])
        self.versions = {name: importlib.metadata.version(name) for name in ("transformers", "torch")}

    def decode(self, tokens, count, ignore_eos):
        stops = None if ignore_eos else self.stops
        self.target.generation_config.eos_token_id = stops
        ids, clock = torch.tensor([tokens]), Clock()
        with torch.inference_mode():
            out = self.target.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, eos_token_id=stops,
                pad_token_id=0, streamer=clock, **self.options,
            )  # fmt: skip
        written = out[0, len(tokens) :].tolist()
        return {
            "tokens": written,
            "stopped": len(written) < count,
            "first": clock.first,
            "first_s": clock.first_s,
            "total_s": clock.total_s,
        }


def load_torch_model(path):
    if path.endswith(".gguf"):
        folder, file = os.path.split(path)
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
