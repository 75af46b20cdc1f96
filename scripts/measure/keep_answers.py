"""Keeps a target's greedy answers, and the likeliest tokens of its logits along them, for `replay.py`.

    python scripts/measure/keep_answers.py OUT.npz [--target T] [--dtype bfloat16] [--limit 32] [--tokens 128]

The answers are those to the first turns of MT-bench and HumanEval, and to requests for copies. The file holds, for
every text, its tokens, the length of its prompt, and after every token the 16 likeliest next ones with their
log-probabilities; and for every token of these texts the 8 likeliest ones after a chat's beginning and that token
alone, the model's own bigrams.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec.bench import tasks
from jaxspec.core.laws import highest
from jaxspec.core.records import Window

TOP = 16
BIGRAMS = 8


def likeliest(model: jaxspec.Model, width: int):
    """Returns a function of a window on a cache: the likeliest tokens after every node, and the window's entries."""

    @jax.jit
    def call(params, window, cache):
        features, entries = model.lm.apply(params, window, cache)
        law = jax.nn.log_softmax(model.lm.head(params, features).astype(jnp.float32), -1)
        return *highest(law, width), entries

    return call


def along(model: jaxspec.Model, text: list[int], size: int, call) -> tuple[np.ndarray, np.ndarray]:
    """Returns the likeliest tokens after every token of a text, and their log-probabilities."""
    tokens = jnp.zeros((1, size), jnp.int32).at[0, : len(text)].set(jnp.asarray(text))
    window = Window(tokens, jnp.arange(size)[None], jnp.tri(size, dtype=bool)[None])
    logp, ids, _ = call(model.params, window, model.lm.init_cache(1, 256))
    return np.asarray(ids[0, : len(text)], np.int32), np.asarray(logp[0, : len(text)], np.float32)


def own_bigrams(
    model: jaxspec.Model, prefix: list[int], tokens: np.ndarray, size: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the likeliest tokens after `prefix` and each token; the tokens of a window do not see each other."""
    call, count = likeliest(model, BIGRAMS), len(prefix)
    start = Window(jnp.asarray([prefix]), jnp.arange(count)[None], jnp.tri(count, dtype=bool)[None])
    empty = model.lm.init_cache(1, 256)
    *_, entries = call(model.params, start, empty)
    cache, found = model.lm.commit(empty, entries, None, jnp.full((1,), count)), []
    for first in range(0, len(tokens), size):
        part = jnp.asarray(np.resize(tokens[first : first + size], size))[None]
        window = Window(part, jnp.full((1, size), count), jnp.eye(size, dtype=bool)[None])
        logp, ids, _ = call(model.params, window, cache)
        found.append((np.asarray(ids[0], np.int32), np.asarray(logp[0], np.float32)))
    ids, logp = (np.concatenate(a)[: len(tokens)] for a in zip(*found))
    return ids, logp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    arguments = parser.parse_args()
    model = jaxspec.load(arguments.target, dtype=arguments.dtype)
    kept: dict[str, Any] = {}
    for task in ("mt-bench", "humaneval", "copy"):
        questions = tasks.load_task(task, limit=arguments.limit).questions
        prompts = [model.encode_chat([{"role": "user", "content": str(q.turns[0])}]) for q in questions]
        output = jaxspec.generate(
            model, prompts, drafter="none", max_new_tokens=arguments.tokens, batch=arguments.batch
        )
        texts = [[*prompt, *row.tokens] for prompt, row in zip(prompts, output)]
        size = -(-max(map(len, texts)) // 64) * 64
        call = likeliest(model, TOP)
        for question, prompt, text in zip(questions, prompts, texts):
            ids, logp = along(model, text, size, call)
            name = f"{task}/{question.id}"
            kept |= {f"{name}/text": np.asarray(text), f"{name}/start": np.asarray(len(prompt))}
            kept |= {f"{name}/ids": ids, f"{name}/logp": logp.astype(np.float16)}
        agreed = np.mean([a[0] == t for n in kept if n.endswith("/ids") and task in n
                          for a, t in zip(kept[n][kept[n[:-3] + "start"] - 1 : -1],
                                          kept[n[:-3] + "text"][kept[n[:-3] + "start"] :])])  # fmt: skip
        size = sum(map(len, texts))
        print(f"{task}: {len(texts)} texts, {size} tokens, {agreed:.4f} of them the likeliest", flush=True)
        np.savez_compressed(arguments.out, **kept)
    prefix = model.encode_chat([{"role": "user", "content": "Hello"}])
    tokens = np.unique(np.concatenate([a for name, a in kept.items() if name.endswith("/text")]))
    ids, logp = own_bigrams(model, prefix, tokens)
    kept |= {"bigrams/tokens": tokens, "bigrams/ids": ids, "bigrams/logp": logp.astype(np.float16)}
    np.savez_compressed(arguments.out, **kept)


if __name__ == "__main__":
    main()
