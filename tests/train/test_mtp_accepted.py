"""Tests that a trained layer for multi-token prediction is accepted, by a small hybrid that has learned some words."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxspec
from helpers import hybrids
from helpers.trainees import SOURCE, TOKENIZER, WORDS, train
from jaxspec.core.records import Window
from jaxspec.heads.eagle_layouts import mtp_config
from jaxspec.heads.network import DraftHeads, init_params
from jaxspec.models.transformer import TransformerLM
from jaxspec.text import ChatTemplate
from jaxspec.train.eagle_settings import Eagle1Settings

pytestmark = pytest.mark.slow

LM = TransformerLM(dataclasses.replace(hybrids.CONFIG, vocab_size=len(WORDS)))
ROWS, SIZE, STEPS = 16, 64, 120
LETTERS = [*"abcdefghijklmnopqrstuvwxyz"]
KNOWN = ["".join(np.random.default_rng(i).choice(LETTERS, 3 + i % 4)) for i in range(24)]
"""The words of the language, of which texts are random sequences. Inside a word, each next letter is nearly certain."""


def spoken(rng: np.random.Generator) -> str:
    return "".join(rng.choice(KNOWN) for _ in range(20))


def texts(rng: np.random.Generator) -> jax.Array:
    """Conversations whose answer continues the question."""
    rows = []
    for _ in range(ROWS):
        text, cut = spoken(rng), rng.integers(2, 12)
        parts = ["<|user|>", *text[:cut], "<|end|>", "<|assistant|>", *text[cut:]]
        rows.append([WORDS.index(part) for part in parts][: SIZE + 1])
    return jnp.asarray(rows)


def taught() -> jaxspec.Model:
    """Trains a hybrid on the language."""
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 20, STEPS), weight_decay=0.0)
    mask = jnp.broadcast_to(jnp.tri(SIZE, dtype=bool), (ROWS, SIZE, SIZE))

    def loss(params, text):
        window = Window(text[:, :-1], jnp.broadcast_to(jnp.arange(SIZE), (ROWS, SIZE)), mask)
        features, _ = LM.apply(params, window, LM.init_cache(ROWS, 0))
        return optax.softmax_cross_entropy_with_integer_labels(LM.head(params, features), text[:, 1:])[:, 16:].mean()

    @jax.jit
    def step(params, state, text):
        value, gradient = jax.value_and_grad(loss)(params, text)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    rng, params, value = np.random.default_rng(1), LM.init_params(jax.random.key(0)), 0.0
    state = optimizer.init(params)
    for _ in range(STEPS):
        params, state, value = step(params, state, texts(rng))
    assert value < 1.0
    return jaxspec.Model(LM, params, TOKENIZER, ChatTemplate(SOURCE), (0,), "words")


def test_a_trained_layer_is_accepted_and_a_random_one_is_not(tmp_path):
    """Trees and chains, greedily and sampled; the text is that of plain decoding in every case."""
    model, config = taught(), mtp_config(LM.config)
    start = DraftHeads(config, init_params(config, key=jax.random.key(1)))
    jaxspec.save_heads(start, tmp_path / "start")
    rng = np.random.default_rng(2)
    questions = [spoken(rng)[:8] for _ in range(128)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in questions) + "\n")
    settings = Eagle1Settings(start=str(tmp_path / "start"), feature_loss=1.0)
    sizes = {"steps": 160, "answer_tokens": 48, "row_tokens": 128, "batch": 8, "eval_every": 160, "save_every": 160}
    trained = train(model, str(tmp_path / "prompts.jsonl"), tmp_path / "out", of=settings, **sizes)
    asked = [spoken(rng)[:8] for _ in range(12)]
    for temperature in (0.0, 1.0):
        options = {"key": jax.random.key(0), "sampling": jaxspec.Sampling(temperature=temperature)}
        options |= {"max_new_tokens": 32, "ignore_eos": True, "chat": True}
        plain = jaxspec.generate(model, asked, drafter="none", **options)
        for tree in (3, jaxspec.branching(2, 2, 1)):
            found = {}
            for name, heads in (("random", start), ("trained", trained.heads)):
                out = jaxspec.generate(model, asked, drafter="eagle", heads=heads, tree=tree, **options)
                assert [row.tokens for row in out] == [row.tokens for row in plain]
                found[name] = out.stats.tokens_per_round
            print(f"temperature {temperature:g}, {tree}: tokens per round {found}")
            assert found["random"] < 1.4
            assert found["trained"] > 1.4 * found["random"]
