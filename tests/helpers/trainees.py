"""A small target with a tokenizer, prompts, and settings that train in seconds."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np

import jaxspec
from helpers import toys
from jaxspec.text import ChatTemplate, Tokenizer
from jaxspec.train import losses
from jaxspec.train.medusa_settings import MedusaSettings
from jaxspec.train.run import Trained, train_heads
from jaxspec.train.settings import TrainSettings

END = 0
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
WORDS = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz", "Ġ", *"0123456789", *"ABCDEFGHIJKLMNOPQRST"]
TOKENIZER = Tokenizer.from_gguf(
    {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": WORDS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(WORDS) - len(SPECIAL)),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": END,
    }
)
SOURCE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LM = toys.transformer(vocab_size=len(WORDS), num_layers=2)
TINY: dict[str, Any] = {"row_tokens": 64, "answer_tokens": 24, "answer_batch": 8, "batch": 4, "steps": 12, "warmup": 2}
TINY |= {"held_out": 0.2, "log_every": 3, "eval_every": 6, "save_every": 3, "learning_rate": 3e-3}


def target(**changes) -> jaxspec.Model:
    """The target; `changes` are sizes."""
    sizes: dict[str, Any] = {"vocab_size": len(WORDS), "num_layers": 2} | changes
    lm = toys.transformer(**sizes) if changes else LM
    params = toys.lively(lm.init_params(jax.random.key(0)))
    return jaxspec.Model(lm, params, TOKENIZER, ChatTemplate(SOURCE), (END,), "tiny")


SIZES: dict[str, Any] = {"heads": 3}


def train(
    model: jaxspec.Model, prompts, out, watch=None, data=None, of: TrainSettings = MedusaSettings(**SIZES), **changes
) -> Trained:
    """Trains small heads: Medusa heads, or those of the settings `of`; `changes` are settings."""
    return train_heads(model, prompts, out, dataclasses.replace(of, **TINY | changes), watch=watch, data=data)


def write_prompts(path, count: int = 24) -> str:
    """A `.jsonl` file of questions of letters."""
    rng = np.random.default_rng(0)
    letters = np.array([*"abcdefgh"])
    lines = [json.dumps({"prompt": "".join(rng.choice(letters, rng.integers(2, 9)))}) for _ in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def weighted(settings, trainee, params, frozen, batch, weigh) -> tuple:
    """The weighted sum of all losses, and the sums by drafted token; `weigh` returns the weights for these sums."""
    sums = losses.sum_losses(settings, trainee, jax.lax.stop_gradient(params), frozen, batch)
    return losses.weigh_losses(settings, trainee, params, frozen, batch, weigh(sums))
