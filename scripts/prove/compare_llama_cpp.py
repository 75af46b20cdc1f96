"""Compares GGUF files read by jaxspec and by llama.cpp: tokenizers, greedy texts, and the reasons for differences.

    python scripts/prove/compare_llama_cpp.py FILE.gguf ... --peer-python P     # P: an interpreter that has xllamacpp

For every file: the ids of a multilingual corpus; then greedy texts from the same prompt ids, and how often
jaxspec's best token after llama.cpp's own text is llama.cpp's (teacher forcing, so that one early difference does
not count for the rest). llama.cpp multiplies quantised weights with activations rounded to 8 bits per block,
jaxspec decodes the weights and computes in float32: where the two best tokens stand close, they may part. Each
first difference is printed with jaxspec's gap between the two tokens, in logits.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec.bench.measurements import add_record, round_significant, write_record
from jaxspec.core.records import Window

GOLDEN = pathlib.Path(__file__).parents[2] / "tests" / "golden" / "smollm2_text.json"
TEXTS = [case["text"] for case in json.loads(GOLDEN.read_text())["encodings"]]
PROMPTS = [
    "What is gravity?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Once upon a time, there was a little girl who",
    "List three uses of a paper clip.",
    "Why is the sky blue?",
]
PEER = """
import importlib.metadata, sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.hostnames, params.port = sys.argv[1], ["127.0.0.1"], 0
params.n_ctx, params.n_parallel, params.warmup, params.ctx_shift = 1024, 1, False, False
server = xllamacpp.Server(params)
print(importlib.metadata.version("xllamacpp"), server.listening_address, flush=True)
sys.stdin.read()
"""


class Peer:
    """A llama.cpp server of one file, in a process of its own, on the loopback."""

    def __init__(self, python: str, path: pathlib.Path):
        self._process = subprocess.Popen(
            [python, "-c", PEER, str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.version, self._address = self._process.stdout.readline().split()

    def ask(self, what: str, **body):
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self._address}/{what}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare_tokenizers(model: jaxspec.Model, peer: Peer) -> dict:
    """Prints how many texts of the corpus have the same ids, and those that do not."""
    same, backward, tokenizer = 0, 0, model.tokenizer
    assert tokenizer is not None
    for text in TEXTS:
        ours = tokenizer.encode(text, special=False)
        theirs = peer.ask("tokenize", content=text, add_special=False, parse_special=True)["tokens"]
        same += ours == theirs
        if ours != theirs:
            print(f"    {text!r:.60}: jaxspec {ours[:12]}, llama.cpp {theirs[:12]}")
        decoded = peer.ask("detokenize", tokens=theirs)["content"]
        backward += tokenizer.decode(theirs, skip_special=False) == decoded.removeprefix(" ") or decoded == text
    print(f"  tokenizer: {same} of {len(TEXTS)} texts have the same ids, {backward} decode to the same text")
    return {"encoded": len(TEXTS), "same_ids": same}


SIZE = 384  # tokens of prompt and text, padded, so that one call is compiled


class Scorer:
    """The logits that a model gives along a text."""

    def __init__(self, model: jaxspec.Model):
        def read(params, tokens, cache):
            window = Window(tokens, jnp.arange(SIZE)[None], jnp.tri(SIZE, dtype=bool)[None])
            return model.lm.apply(params, window, cache)[0]

        self._cache = model.lm.init_cache(1, 1)
        self._params, self._read, self._head = model.params, jax.jit(read), jax.jit(model.lm.head)

    def __call__(self, ids: list[int], count: int) -> np.ndarray:
        """`[count, V]`: the logits at the places where the last `count` of the tokens were chosen."""
        features = self._read(self._params, jnp.asarray([ids + [0] * (SIZE - len(ids))]), self._cache)
        return np.asarray(self._head(self._params, features[:, len(ids) - 1 - count : len(ids) - 1])[0])


def compare_texts(model: jaxspec.Model, peer: Peer, tokens: int) -> dict:
    """Prints, for each prompt, how long the greedy texts agree, and the share of agreeing choices."""
    chosen, agreed, whole, largest = 0, 0, 0, 0.0
    scores = Scorer(model)
    for prompt in PROMPTS:
        chat = model.chat_template is not None
        ids = model.encode_chat([{"role": "user", "content": prompt}]) if chat else model.encode(prompt)
        theirs = peer.ask(
            "completion", prompt=ids, n_predict=tokens, temperature=0.0, top_k=1, cache_prompt=False, return_tokens=True
        )["tokens"]
        theirs = [token for token in theirs if token not in model.stop_ids]
        ours = jaxspec.generate(model, ids, drafter="none", max_new_tokens=len(theirs), ignore_eos=True, capacity=512)[
            0
        ].tokens
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), len(theirs))
        logits = scores(ids + theirs, len(theirs))
        best = logits.argmax(-1)
        chosen, agreed = chosen + len(theirs), agreed + int((best == theirs).sum())
        gaps = logits.max(-1) - logits[np.arange(len(theirs)), theirs]
        first = f"part at token {same}, gap {gaps[same]:.3f}" if same < len(theirs) else "the same text"
        others = gaps[gaps > 0]
        worst = f", largest gap {others.max():.3f}" if others.size else ""
        print(f"  {prompt[:40]!r}: {len(theirs)} tokens, {first}; {int((best == theirs).sum())} choices alike{worst}")
        whole += same == len(theirs)
        largest = max(largest, float(gaps.max()))
    print(f"  greedy choices alike: {agreed} of {chosen} ({agreed / chosen:.1%})")
    return {"choices": chosen, "same_choices": agreed, "texts": len(PROMPTS), "same_texts": whole,
            "largest_gap": round_significant(largest, 2)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--tokens", type=int, default=48)
    add_record(parser.add_argument)
    arguments = parser.parse_args()
    found, versions = {}, {}
    for path in arguments.files:
        model, peer = jaxspec.load(path), Peer(arguments.peer_python, path)
        print(f"{path.name}: llama.cpp of xllamacpp {peer.version}, jax {jax.__version__}", flush=True)
        found[path.name] = compare_tokenizers(model, peer) | compare_texts(model, peer, arguments.tokens)
        versions["xllamacpp"] = peer.version
        peer.close()
        sys.stdout.flush()
    if arguments.record:
        print(f"written: {write_record(arguments.record, 'llama-cpp', sys.argv, found, versions)}")


if __name__ == "__main__":
    main()
