"""Decodes with llama.cpp (xllamacpp): plain, with n-grams of the text, or with a draft model; greedy, from a GGUF file.

It runs as a server on the loopback device in this process. The server reports the times.
"""

import importlib.metadata
import json
import urllib.request

import xllamacpp

SPECULATION_TYPES = {"n-gram": "NGRAM_SIMPLE", "draft": "DRAFT_SIMPLE"}


class Peer:
    def __init__(self, settings):
        params = xllamacpp.CommonParams()
        params.model.path, params.hostnames, params.port = settings["target"], ["127.0.0.1"], 0
        params.n_ctx, params.n_parallel, params.warmup, params.ctx_shift = settings["capacity"], 1, True, False
        for one in (params.cpuparams, params.cpuparams_batch):
            one.n_threads = settings["threads"]
        if settings["method"] in SPECULATION_TYPES:
            kinds = xllamacpp.common_speculative_type
            params.speculative.types = [
                getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{SPECULATION_TYPES[settings['method']]}")
            ]
            params.speculative.draft.n_max = settings["draft_length"]
            params.speculative.ngram_simple.size_m = settings["draft_length"]
        if settings["draft"]:
            params.speculative.draft.mparams.path = settings["draft"]
            for one in (params.speculative.draft.cpuparams, params.speculative.draft.cpuparams_batch):
                one.n_threads = settings["threads"]
        self.server = xllamacpp.Server(params)
        self.versions = {"xllamacpp": importlib.metadata.version("xllamacpp")}

    def decode(self, tokens, count, ignore_eos):
        body = {
            "prompt": tokens, "n_predict": count, "temperature": 0.0, "top_k": 1, "cache_prompt": False,
            "return_tokens": True, "ignore_eos": ignore_eos,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self.server.listening_address}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)
        times = found["timings"]  # the prompt's last call gives the first token
        return {
            "tokens": found["tokens"],
            "stopped": found["stop_type"] == "eos",
            "first": 1,
            "first_s": times["prompt_ms"] / 1e3,
            "total_s": (times["prompt_ms"] + times["predicted_ms"]) / 1e3,
        }
