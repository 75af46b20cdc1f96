"""Decodes with vLLM on a CPU: plain, with n-grams of the text, or with a draft model; greedy, bfloat16."""

import importlib.metadata
import os
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from gguf_folder import folder_of
from vllm import LLM, SamplingParams


class Peer:
    def __init__(self, settings):
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{settings['threads'] - 1}")
        self.stops, length = settings["stop_ids"], settings["draft_length"]
        folder, self._kept = folder_of(settings["target"])
        speculative = None
        if settings["method"] == "n-gram":
            speculative = {
                "method": "ngram", "num_speculative_tokens": length, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
            }  # fmt: skip
        elif settings["method"] == "draft":
            draft, self._kept_too = folder_of(settings["draft"])
            speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": length}
        self.model = LLM(
            model=folder, dtype="bfloat16", max_model_len=settings["capacity"], max_num_seqs=1, enforce_eager=True,
            enable_prefix_caching=False, skip_tokenizer_init=True, speculative_config=speculative,
        )  # fmt: skip
        self.versions = {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch")}

    def decode(self, tokens, count, ignore_eos):
        first_s, _ = self._run(tokens, 1, True)
        total_s, written = self._run(tokens, count, ignore_eos)
        return {
            "tokens": written,
            "stopped": len(written) < count,
            "first": 1,
            "first_s": min(first_s, total_s),
            "total_s": total_s,
        }

    def _run(self, tokens, count, ignore_eos):
        settings = SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=ignore_eos, detokenize=False,
            stop_token_ids=[] if ignore_eos else list(self.stops),
        )  # fmt: skip
        begun = time.perf_counter()
        (answer,) = self.model.generate([{"prompt_token_ids": tokens}], settings, use_tqdm=False)
        return time.perf_counter() - begun, list(answer.outputs[0].token_ids)
